"""SeqLengthWarmup: start training with short sequences."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast, final

import torch
from torch import Tensor

from composerlite.core import Algorithm, Event, Logger, State, Time, TimeUnit, span
from composerlite.errors import ConfigError, TrainingError, checked_arguments
from composerlite.types import Batch


def set_batch_sequence_length(
    batch: Mapping[str, Tensor],
    curr_seq_len: int,
    truncate: bool = True,
    preserve_end_of_sequence: bool = False,
) -> Batch:
    """Shorten the sequences of a batch (curriculum of `Li et al. 2022 <https://arxiv.org/abs/2108.06084>`_).

    Args:
        batch: tensors of shape (N, S, …) by name.
        curr_seq_len: maximum length of the sequences.
        truncate: truncate sequences. Otherwise tensors of shape (N, S) are split into more sequences, and the remainder
            is dropped.
        preserve_end_of_sequence: copy the last token of each sequence, by ``attention_mask``, to the end of the
            truncated sequence. Only with ``truncate``.

    Returns:
        A batch of the same type; ``batch`` without a change if the sequences are short enough.

    Raises:
        TrainingError: the batch is not a mapping of such tensors, or a needed ``attention_mask`` is missing.
    """
    if not isinstance(batch, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - a loader may return any type
        raise TrainingError(
            f"sequence length: the batch is a {type(batch).__name__}, expected a mapping of tensors, such as "
            "{'input_ids': …}."
        )
    length = next((value.shape[1] for value in batch.values() if _dimensions(value) > 1), 0)
    if curr_seq_len >= length:
        return batch
    for name, value in batch.items():
        dimensions = _dimensions(value)
        if dimensions < 2 or value.shape[1] != length or not (truncate or dimensions == 2):
            found = f"has the shape {tuple(value.shape)}" if dimensions else f"is a {type(value).__name__}"
            raise TrainingError(
                f"sequence length: batch[{name!r}] {found}, expected (N, {length}{', …' if truncate else ''}) for "
                "every tensor in the batch."
            )
    if truncate:
        new = {name: value[:, :curr_seq_len].contiguous() for name, value in batch.items()}
        if preserve_end_of_sequence:
            _move_ends(batch, new)
    else:
        new = {name: _in_more_rows(value, curr_seq_len) for name, value in batch.items()}
    shortened: Any = copy.copy(batch)
    shortened.update(new)
    return shortened


def _dimensions(value: Any) -> int:
    return value.ndim if isinstance(value, Tensor) else 0


def _move_ends(batch: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    if "attention_mask" not in batch:
        raise TrainingError(
            f"preserve_end_of_sequence=True needs attention_mask in the batch, found {', '.join(batch)}."
        )
    last = batch["attention_mask"].sum(dim=1).long().clamp(min=1) - 1
    rows = torch.arange(len(last), device=last.device)
    for name, value in new.items():
        value[rows, last.clamp(max=value.shape[1] - 1)] = batch[name][rows, last]


def _in_more_rows(value: Tensor, length: int) -> Tensor:
    flat = value.reshape(-1)
    return flat[: len(flat) // length * length].view(-1, length)


@final
class SeqLengthWarmup(Algorithm):
    """Starts training with short sequences (`Li et al. 2022 <https://arxiv.org/abs/2108.06084>`_).

    The length grows linearly in steps of ``step_size`` from ``min_seq_length``, up to ``max_seq_length`` at
    ``duration``. Token counts of the run include the removed tokens.

    Args:
        duration: fraction of training in which the length grows.
        min_seq_length: first length.
        max_seq_length: final length.
        step_size: step of the length; a multiple of 8 is best.
        truncate: truncate sequences. Otherwise sequences are split into more sequences.
        preserve_end_of_sequence: keep the last token of each sequence; needs ``attention_mask`` and ``truncate``.

    Raises:
        ConfigError: a value is out of range.
    """

    @checked_arguments
    def __init__(
        self,
        duration: float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        preserve_end_of_sequence: bool = False,
    ) -> None:
        if not 0 <= duration <= 1:
            raise ConfigError(f"SeqLengthWarmup(duration={duration}): expected a fraction of training, from 0 to 1.")
        if not 1 <= min_seq_length <= max_seq_length:
            raise ConfigError(
                f"SeqLengthWarmup(min_seq_length={min_seq_length}, max_seq_length={max_seq_length}): expected 1 or "
                "more, and a maximum of at least the minimum."
            )
        if step_size < 1:
            raise ConfigError(f"SeqLengthWarmup(step_size={step_size}): expected a number of tokens, 1 or more.")
        self.duration = duration
        self.min_seq_length = min_seq_length
        self.max_seq_length = max_seq_length
        self.step_size = step_size
        self.truncate = truncate
        self.preserve_end_of_sequence = preserve_end_of_sequence
        self._growing = Time(duration, TimeUnit.DURATION)

    def match(self, event: Event, state: State) -> bool:
        """Run at ``AFTER_DATALOADER``."""
        return event is Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Shorten the sequences of the batch.

        Raises:
            TrainingError: the batch is not a mapping of sequences.
        """
        length = self.length(span(self._growing, state).fraction)
        batch = cast("Mapping[str, Tensor]", state.batch)
        state.batch = set_batch_sequence_length(batch, length, self.truncate, self.preserve_end_of_sequence)
        logger.log_metrics({"seq_length_warmup/curr_seq_len": length, "seq_length_warmup/curr_bs": _rows(state.batch)})

    def length(self, grown: float) -> int:
        """Return the length after the fraction ``grown`` of the warmup."""
        if grown >= 1:
            return self.max_seq_length
        more = int((self.max_seq_length - self.min_seq_length) * grown)
        return min(self.min_seq_length + more // self.step_size * self.step_size, self.max_seq_length)


def _rows(batch: Batch) -> int:
    return int(next(iter(batch.values())).shape[0])
