"""Generate: text of a language model during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

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


@final
class Generate(Callback):
    """Logs texts that the model generates from ``prompts``, as the table ``generations``, every ``interval``.

    Generation does not change training: the model is in evaluation mode meanwhile, and the random generators are
    restored. Rank 0 generates. The model is a :class:`HuggingFaceModel` with a tokenizer, or another model with
    ``tokenizer`` and ``generate(input_ids, attention_mask=…, …)``.

    Args:
        prompts: texts to continue.
        interval: time between two tables, such as ``'100ba'`` or ``'1ep'``; a number counts epochs. The end of training
            always logs a table.
        batch_size: number of prompts in a batch; by default all prompts.
        kwargs: arguments of ``generate``, such as ``max_new_tokens=50``, ``do_sample=True``.

    Raises:
        ConfigError: there is no prompt; at ``INIT`` the model cannot generate, or is sharded over ranks.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=Generate(["Once upon a time"], "1ep", max_new_tokens=50))
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
            self._check(state)
        batch = int(state.timestamp.batch)
        if self._is_due(state, event) and batch != self._done_at:
            self._done_at = batch
            if state.rank == 0:
                self.generate(state, logger)

    def _check(self, state: State) -> None:
        model: Any = state.model
        if not callable(getattr(model, "generate", None)) or getattr(model, "tokenizer", None) is None:
            raise ConfigError(
                f"Generate: {type(model).__name__} has no tokenizer, or no generate(). Give a "
                "HuggingFaceModel(model, tokenizer=…) that generates text."
            )
        if state.parallelism is not None or state.deepspeed_enabled:
            raise ConfigError(
                "Generate: the model is sharded over ranks, and a rank cannot generate alone. Leave out Generate, or "
                "parallelism_config and deepspeed_config."
            )

    def generate(self, state: State, logger: Logger) -> None:
        """Continue the prompts now, and log the table.

        Args:
            state: state of the run.
            logger: gets the table.
        """
        model: Any = state.model
        tokenizer = model.tokenizer
        modes = [(module, module.training) for module in model.modules()]
        side, pad = tokenizer.padding_side, tokenizer.pad_token
        texts: list[str] = []
        with rng.preserved(), torch.no_grad():
            try:
                model.eval()
                tokenizer.padding_side = "left"  # so that a text follows its prompt
                tokenizer.pad_token = tokenizer.eos_token if pad is None else pad
                for start in range(0, len(self.prompts), self.batch_size):
                    tokens = tokenizer(self.prompts[start : start + self.batch_size], return_tensors="pt", padding=True)
                    given, mask = (tokens[name].to(state.device) for name in ("input_ids", "attention_mask"))
                    with get_precision_context(state.precision, state.device):
                        made = model.generate(given, attention_mask=mask, **self.generate_kwargs)
                    texts += tokenizer.batch_decode(made[:, given.shape[1] :], skip_special_tokens=True)
            finally:
                tokenizer.padding_side, tokenizer.pad_token = side, pad
                for module, is_training in modes:
                    module.training = is_training
        rows = [[prompt, text] for prompt, text in zip(self.prompts, texts, strict=True)]
        logger.log_table(["prompt", "generation"], rows, name="generations")
