"""RuntimeEstimator: how long training will still take."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

from composerlite.callbacks.units import seconds_per
from composerlite.core import Callback, TimeUnit
from composerlite.errors import ConfigError, checked_arguments

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["RuntimeEstimator"]


@final
class RuntimeEstimator(Callback):
    """Logs ``wall_clock/remaining_estimate`` after each batch: the time that training and evaluation will still take.

    It is what training has taken in this process for a part of ``max_duration``, and what evaluation has taken up to
    the last one, drawn out to the end. Nothing is logged while less than a batch was measured, or without a
    ``max_duration``; where that counts epochs and the loader has no length, only whole epochs are measured.

    Args:
        skip_batches: batches at the start of ``fit`` that are not measured, since starting up takes long.
        time_unit: ``'seconds'``, ``'minutes'``, ``'hours'`` or ``'days'``.
    """

    @checked_arguments
    def __init__(self, skip_batches: int = 1, time_unit: str = "hours") -> None:
        if skip_batches < 0:
            raise ConfigError(f"RuntimeEstimator(skip_batches={skip_batches}): want a number of batches, 0 or more.")
        self._skip_batches = skip_batches
        self._unit_seconds = seconds_per(time_unit, owner="RuntimeEstimator")
        self._begin(0.0, 0.0)
        self._batches_to_skip = skip_batches

    def fit_start(self, state: State, logger: Logger) -> None:
        self._batches_to_skip = self._skip_batches
        self._begin(_fraction_done(state), state.timestamp.total_wct.total_seconds())

    def batch_end(self, state: State, logger: Logger) -> None:
        self._done = _fraction_done(state)
        if self._batches_to_skip > 0:
            self._batches_to_skip -= 1
            self._begin(self._done, state.timestamp.total_wct.total_seconds())
        if self._done <= self._first_done:
            return
        per_training = (state.timestamp.total_wct.total_seconds() - self._first_seconds) / (
            self._done - self._first_done
        )
        if self._eval_done > self._first_done:
            per_training += self._eval_seconds / (self._eval_done - self._first_done)
        remaining_seconds = max(0.0, 1.0 - self._done) * per_training
        logger.log_metrics({"wall_clock/remaining_estimate": remaining_seconds / self._unit_seconds})

    def eval_start(self, state: State, logger: Logger) -> None:
        self._eval_began = time.monotonic()

    def eval_end(self, state: State, logger: Logger) -> None:
        self._eval_seconds += time.monotonic() - self._eval_began
        self._eval_done = self._done

    def _begin(self, done: float, seconds: float) -> None:
        """Measure from here: ``done`` of the training done after ``seconds`` of it."""
        self._first_done = self._done = self._eval_done = done
        self._first_seconds = seconds
        self._eval_seconds = 0.0
        self._eval_began = 0.0


def _fraction_done(state: State) -> float:
    """How much of training is done, 0 to 1, to the batch where that can be told. Ask while training, not evaluating."""
    end, now = state.max_duration, state.timestamp
    if end is None or end.value == 0:
        return 0.0
    length = state.dataloader_len
    if end.unit is TimeUnit.EPOCH and length is not None and length.value > 0:
        return (int(now.epoch) + int(now.batch_in_epoch) / int(length)) / end.value
    return now.count(end.unit) / end.value
