"""Generate: what a language model writes while it is trained."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from typing import Any, final

import torch
from torch import nn

from composerlite.checkpoint import rng
from composerlite.core import (
    Callback,
    Event,
    Logger,
    State,
    TimeInput,
    create_interval_scheduler,
    get_precision_context,
)
from composerlite.errors import ConfigError, naming

log = logging.getLogger(__name__)


@final
class Generate(Callback):
    """Logs texts generated from ``prompts``, as a table ``generations``, every ``interval`` and at the end.

    Training is the same with and without it: the model is in evaluation mode meanwhile, and random generators stand
    afterwards where they stood. Rank 0 does it. The model is a :class:`HuggingFaceModel` with a tokenizer, or has
    ``tokenizer`` and ``generate(input_ids, attention_mask=…, …)`` as that has.

    Args:
        prompts: texts.
        interval: as of checkpoints: ``'100ba'``, ``'1ep'``; a number counts epochs.
        batch_size: prompts that are continued at once; all of them by default.
        kwargs: arguments of ``generate``, such as ``max_new_tokens=50``, ``do_sample=True``.

    Raises:
        ConfigError: there is no prompt; at ``INIT`` the model cannot generate, or is sharded over ranks.
    """

    def __init__(
        self, prompts: Sequence[str], interval: TimeInput, batch_size: int | None = None, **kwargs: Any
    ) -> None:
        if isinstance(prompts, str) or not prompts:
            raise ConfigError(f"Generate(prompts={prompts!r}): expected a list of texts.")
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"Generate(batch_size={batch_size}): expected a number of prompts, 1 or more.")
        self.prompts = list(prompts)
        self.generate_kwargs = kwargs
        self.batch_size = batch_size or len(self.prompts)
        with naming("Generate(interval)", interval):
            self._is_due = create_interval_scheduler(interval)
        self._done_at = -1

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.INIT:
            _check(state)
        batch = int(state.timestamp.batch)
        if self._is_due(state, event) and batch != self._done_at:
            self._done_at = batch
            if state.rank == 0:
                self.generate(state, logger)

    def generate(self, state: State, logger: Logger) -> None:
        """Continue the prompts now, and log the table."""
        model: Any = state.model
        with rng.preserved(), _evaluating(model), _padding_left(model.tokenizer) as tokenizer, torch.no_grad():
            texts: list[str] = []
            for start in range(0, len(self.prompts), self.batch_size):
                tokens = tokenizer(self.prompts[start : start + self.batch_size], return_tensors="pt", padding=True)
                given = tokens["input_ids"].to(state.device)
                with get_precision_context(state.precision, state.device):
                    made = model.generate(
                        given, attention_mask=tokens["attention_mask"].to(state.device), **self.generate_kwargs
                    )
                texts += tokenizer.batch_decode(made[:, given.shape[1] :], skip_special_tokens=True)
        rows = [[prompt, text] for prompt, text in zip(self.prompts, texts, strict=True)]
        logger.log_table(["prompt", "generation"], rows, name="generations")


def _check(state: State) -> None:
    model: Any = state.model
    if not callable(getattr(model, "generate", None)) or getattr(model, "tokenizer", None) is None:
        raise ConfigError(
            f"Generate: {type(model).__name__} has no tokenizer, or no generate: it is for a HuggingFaceModel(model, "
            "tokenizer=…) that writes text."
        )
    if state.parallelism is not None or state.deepspeed_enabled:
        raise ConfigError(
            "Generate: the model is sharded over ranks, and none can generate alone. Leave out Generate, or "
            "parallelism_config and deepspeed_config."
        )


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _padding_left(tokenizer: Any) -> Generator[Any]:
    """Pad on the left within the block, so that a generated text follows its prompt."""
    side, pad = tokenizer.padding_side, tokenizer.pad_token
    tokenizer.padding_side = "left"
    if pad is None:
        tokenizer.pad_token = tokenizer.eos_token
    try:
        yield tokenizer
    finally:
        tokenizer.padding_side = side
        if pad is None:
            tokenizer.pad_token = None
