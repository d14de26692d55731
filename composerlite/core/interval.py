"""Intervals: at which events something that happens "every 10 batches" happens."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias, final

from composerlite.core.auto_interval import AutoInterval
from composerlite.core.event import Event
from composerlite.core.time import Time, TimeInput, Timestamp, TimeUnit
from composerlite.errors import ConfigError

if TYPE_CHECKING:
    from composerlite.core.state import State

__all__ = ["IntervalScheduler", "SchedulePredicate", "create_interval_scheduler"]

SchedulePredicate: TypeAlias = "Callable[[State, Event], bool]"
"""Says whether to act at an event. May be called at any event, also at those it never acts at."""


@final
class IntervalScheduler:
    """True at the events where training crosses a multiple of ``interval``, and at its end.

    Crossing, not equality, decides: with uneven batches ``'65tok'`` is true at the first batch that reaches or passes a
    multiple of 65 tokens. The interval is looked at when batches end (``ba tok sp dur sec``), epochs end (``ep``) or
    iterations end (``iter``). An interval of zero or less never fires, not even at the end.

    Args:
        interval: the interval; an int counts epochs.
        include_end_of_training: also true at the last of ``events`` in a training that is over.
        checkpoint_events: act at ``…_CHECKPOINT`` events (true) or at ``…_END`` events (false).

    Attributes:
        never: whether it never fires.
    """

    def __init__(
        self, interval: TimeInput, *, include_end_of_training: bool = True, checkpoint_events: bool = True
    ) -> None:
        self.interval = Time.from_input(interval, TimeUnit.EPOCH)
        self.include_end_of_training = include_end_of_training
        if checkpoint_events:
            batch, epoch, iteration = Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT
        else:
            batch, epoch, iteration = Event.BATCH_END, Event.EPOCH_END, Event.ITERATION_END
        by_unit = {TimeUnit.EPOCH: epoch, TimeUnit.ITERATION: iteration}
        self.event = by_unit.get(self.interval.unit, batch)
        self._final_events = frozenset({batch, epoch, iteration} if include_end_of_training else ())
        self.never = self.interval.value <= 0

    def __call__(self, state: State, event: Event) -> bool:
        if self.never:
            return False
        if event == self.event and self._crossed(state):
            return True
        return event in self._final_events and state.training_is_over

    def _crossed(self, state: State) -> bool:
        previous = state.previous_timestamp
        if previous is None:
            return False
        unit = self.interval.unit
        if unit is not TimeUnit.DURATION:
            step = self.interval.value
            return previous.count(unit) // step != state.timestamp.count(unit) // step
        fraction, count = self._fraction_of_training(state)
        return math.floor(count(previous) / fraction) != math.floor(count(state.timestamp) / fraction)

    def _fraction_of_training(self, state: State) -> tuple[Fraction, Callable[[Timestamp], int | float]]:
        """The interval in counts of ``max_duration``'s unit, and how to count. Exact: 0.1dur of 30 batches is 3."""
        end = state.max_duration
        if end is None:
            raise ConfigError(f"interval {self.interval}: a fraction of training needs max_duration.")
        fraction = Fraction(str(self.interval.value))
        if end.unit is not TimeUnit.EPOCH:
            return fraction * Fraction(end.value), lambda timestamp: timestamp.count(end.unit)
        length = state.dataloader_len
        if length is None:
            raise ConfigError(
                f"interval {self.interval} with max_duration={end}: a fraction of epochs needs a data loader with a "
                "length. Give max_duration in batches, or train_subset_num_batches."
            )
        batches = int(length)
        in_batches = lambda timestamp: int(timestamp.epoch) * batches + int(timestamp.batch_in_epoch)  # noqa: E731
        return fraction * int(end) * batches, in_batches

    def __repr__(self) -> str:
        return f"IntervalScheduler({str(self.interval)!r} at {self.event.value})"


def create_interval_scheduler(
    interval: TimeInput | SchedulePredicate,
    include_end_of_training: bool = True,
    checkpoint_events: bool = True,
    *,
    allow_auto: bool = False,
) -> SchedulePredicate:
    """``interval`` as a function ``(state, event) -> bool``; a function is returned as it is.

    With ``allow_auto``, ``'auto:1%'`` gives an :class:`AutoInterval`; whoever asks it must tell it of each save.

    Raises:
        ConfigError: the interval cannot be read.
    """
    if callable(interval):
        return interval
    if isinstance(interval, str) and interval.strip().lower().startswith("auto"):
        if not allow_auto:
            raise ConfigError(
                f"interval {interval!r}: only the interval of checkpoints (save_interval) can be found by what they "
                "cost. Give a count and a unit here, as in '100ba' or '1ep'."
            )
        return AutoInterval.from_string(interval, include_end_of_training=include_end_of_training)
    return IntervalScheduler(
        interval, include_end_of_training=include_end_of_training, checkpoint_events=checkpoint_events
    )
