"""Intervals such as "every 10 batches": functions that are true at the events where an action is due."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, final

from composerlite.core.event import Event
from composerlite.core.progress import Progress, span
from composerlite.core.time import Time, TimeInput, TimeUnit
from composerlite.errors import ConfigError, check_takes

__all__ = [
    "AutoInterval",
    "IntervalScheduler",
    "SchedulePredicate",
    "create_interval_scheduler",
    "ends_with_this_batch",
    "is_never",
    "is_once",
    "may_differ_by_rank",
]

SchedulePredicate: TypeAlias = Callable[[Any, Event], bool]
"""Function of a :class:`State` and an event: true if the action is due. May be called at any event."""

_FINAL = frozenset({Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT})
_MARGIN = 0.9
"""Fraction of the budget to plan with. The rest covers saves that cost more than the median."""
_SAVES = 5
"""Number of recent saves in the median."""


@final
class IntervalScheduler:
    """True at events where training crosses a multiple of ``interval``, and at the end of training.

    With uneven batches, ``'65tok'`` is true at the first batch that reaches or passes a multiple of 65 tokens. The
    units ``ba tok sp dur sec`` are checked at the end of batches, ``ep`` at the end of epochs, ``iter`` at the end of
    iterations. An interval of zero or less is never true, not even at the end of training.

    Args:
        interval: the interval; an int counts epochs.
        include_end_of_training: also true at the last of ``events`` of a finished training.
        checkpoint_events: true at ``…_CHECKPOINT`` events; if false, at ``…_END`` events.

    Attributes:
        never: the scheduler is never true.
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

    def __call__(self, state: Progress, event: Event) -> bool:
        if self.never:
            return False
        if event == self.event and self._crossed(state):
            return True
        return event in self._final_events and state.training_is_over

    def _crossed(self, state: Progress) -> bool:
        previous, now = state.previous_timestamp, state.timestamp
        if previous is None:
            return False
        unit, step = self.interval.unit, self.interval.value
        if unit is not TimeUnit.DURATION:
            return previous.count(unit) // step != now.count(unit) // step
        end = state.max_duration
        if end is None:
            raise ConfigError(f"interval {self.interval}: a fraction of training needs max_duration.")
        if end.unit is TimeUnit.EPOCH and state.dataloader_len is None:
            raise ConfigError(
                f"interval {self.interval} with max_duration={end}: a fraction of epochs needs a data loader with a "
                "length. Give max_duration in batches, or train_subset_num_batches."
            )
        before, after = (span(self.interval, state, at=stamp).periods for stamp in (previous, now))
        return math.floor(before) != math.floor(after)

    def __repr__(self) -> str:
        return f"IntervalScheduler({str(self.interval)!r} at {self.event.value})"


@final
class AutoInterval:
    """True at batches where a further save keeps the time blocked by saves within ``budget``.

    The first save is due after ``shortest_seconds`` of training. The cost of this save sets the interval. Later, the
    median cost of recent saves gives the shortest interval within the budget. While all saves together exceed the
    budget, the interval is doubled. There is at most one save in flight, and for at most half of the time. Time is
    training time as in ``Timestamp.total_wct``, without evaluation.

    The saver must call :meth:`save_began` for every save, and :meth:`record_save` or :meth:`record_failure` at its end.

    Args:
        budget: seconds blocked by saves per second of training; more than 0 and less than 1.
        shortest_seconds: shortest training time between two saves.
        include_end_of_training: also true at checkpoint events of a finished training.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, budget: float, *, shortest_seconds: float = 10.0, include_end_of_training: bool = True) -> None:
        if not 0 < budget < 1:
            raise ConfigError(
                f"a budget of {budget * 100:g}% of the training time: expected more than 0% and less than 100%, such "
                "as 'auto:1%'."
            )
        if shortest_seconds < 0:
            raise ConfigError(f"AutoInterval(shortest_seconds={shortest_seconds}): expected 0 or more.")
        self.budget = budget
        self.shortest_seconds = shortest_seconds
        self._final_events = _FINAL if include_end_of_training else frozenset[Event]()
        self._blocked: deque[float] = deque(maxlen=_SAVES)
        self._in_flight: deque[float] = deque(maxlen=_SAVES)
        self._all_blocked = 0.0
        self._saving = 0
        # Training seconds at the start of the measurement, and of the last save. Infinite before the first call.
        self._began = self._last = math.inf

    @classmethod
    def from_string(cls, text: str, *, include_end_of_training: bool = True) -> AutoInterval:
        """Parse ``'auto:1%'``: a budget of one blocked second per hundred seconds of training.

        Args:
            text: ``'auto:<percent>%'``.
            include_end_of_training: also save at the end of training.

        Returns:
            The interval.

        Raises:
            ConfigError: the text has no percentage, or a percentage out of range.
        """
        match = re.fullmatch(r"\s*auto\s*:\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*%\s*", text, re.IGNORECASE)
        if match is None:
            raise ConfigError(
                f"invalid interval {text!r}: expected auto:<percent>% of the training time that saves may block, such "
                "as 'auto:1%' or 'auto:0.5%'."
            )
        return cls(float(match[1]) / 100, include_end_of_training=include_end_of_training)

    def __call__(self, state: Progress, event: Event) -> bool:
        if event is Event.BATCH_CHECKPOINT:
            now = self._training_seconds(state)
            elapsed = now - self._last
            if self._saving == 0 and elapsed >= self.shortest_seconds:
                is_over_budget = self._all_blocked > self.budget * (now - self._began)
                if elapsed >= self.interval_seconds * (2 if is_over_budget else 1):
                    return True
        return event in self._final_events and state.training_is_over

    @property
    def interval_seconds(self) -> float:
        """Current training seconds from a save to the next save. Doubled while saves exceed the budget."""
        if not self._blocked:
            return self.shortest_seconds
        # median_low: of two saves the cheaper save. The first save of a run is often slow, since its memory is new.
        blocked, in_flight = statistics.median_low(self._blocked), statistics.median_low(self._in_flight)
        return max(self.shortest_seconds, blocked / (_MARGIN * self.budget), 2 * in_flight)

    def save_began(self, state: Progress) -> None:
        """Record the start of a save. No other save is due before its end."""
        self._last = self._training_seconds(state)
        self._saving += 1

    def record_save(self, blocked_seconds: float, in_flight_seconds: float = 0.0) -> None:
        """Record the commit of a save.

        Args:
            blocked_seconds: time for which the save blocked the training thread.
            in_flight_seconds: time from the start of the save to the commit.
        """
        self._saving = max(0, self._saving - 1)
        self._blocked.append(blocked_seconds)
        self._in_flight.append(in_flight_seconds)
        self._all_blocked += blocked_seconds

    def record_failure(self) -> None:
        """Record the failure of a save. The next save is due an interval after the start of the failed save."""
        self._saving = max(0, self._saving - 1)

    def _training_seconds(self, state: Progress) -> float:
        """Return the training time. Start the measurement on the first call, and again if time was set back."""
        now = state.timestamp.count(TimeUnit.SECOND)
        if now < self._last:
            before = state.previous_timestamp
            self._began = self._last = now if before is None else min(now, before.count(TimeUnit.SECOND))
            self._all_blocked = 0.0
        return now

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements, so that a resumed run continues with them."""
        return {
            "blocked": list(self._blocked),
            "in_flight": list(self._in_flight),
            "all_blocked": self._all_blocked,
            "began": self._began,
            "last": self._last,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""
        self._blocked = deque(state_dict["blocked"], _SAVES)
        self._in_flight = deque(state_dict["in_flight"], _SAVES)
        self._all_blocked = state_dict["all_blocked"]
        self._began, self._last = state_dict["began"], state_dict["last"]

    def __repr__(self) -> str:
        return f"AutoInterval({self.budget:.3%}, {self.interval_seconds:.1f} s at present)"


def create_interval_scheduler(
    interval: TimeInput | SchedulePredicate,
    include_end_of_training: bool = True,
    checkpoint_events: bool = True,
    *,
    allow_auto: bool = False,
) -> SchedulePredicate:
    """Return ``interval`` as a function ``(state, event) -> bool``. A function is returned unchanged.

    Args:
        interval: a number of epochs, a time string, a ``Time``, or a function ``(state, event) -> bool``.
        include_end_of_training: also true at the end of training.
        checkpoint_events: true at the ``*_CHECKPOINT`` events instead of the ``*_END`` events.
        allow_auto: accept ``'auto:1%'`` and return an :class:`AutoInterval`. The caller must report each save.

    Returns:
        A function ``(state, event) -> bool``.

    Raises:
        ConfigError: the interval is invalid, or the function does not accept two arguments.
    """
    if callable(interval):
        check_takes(interval, "state", "event")
        return interval
    if isinstance(interval, str) and interval.strip().lower().startswith("auto"):
        if not allow_auto:
            raise ConfigError(
                f"interval {interval!r}: only save_interval can adapt to the cost of checkpoints. Pass a number and a "
                "unit here, such as '100ba' or '1ep'."
            )
        return AutoInterval.from_string(interval, include_end_of_training=include_end_of_training)
    return IntervalScheduler(
        interval, include_end_of_training=include_end_of_training, checkpoint_events=checkpoint_events
    )


def is_never(interval: SchedulePredicate | None) -> bool:
    """Return true if ``interval`` is never true, or ``None``."""
    return interval is None or (isinstance(interval, IntervalScheduler) and interval.never)


def is_once(interval: SchedulePredicate, state: Progress) -> bool:
    """Return true if ``interval`` is known to be true at the end of training only.

    Args:
        interval: the interval.
        state: progress of training.

    Returns:
        True if the interval is as long as the training, or longer.
    """
    if not isinstance(interval, IntervalScheduler):
        return False
    length, end = interval.interval, state.max_duration
    if length.unit is TimeUnit.DURATION:
        return length.value >= 1
    return end is not None and end.unit is length.unit and length >= end


def ends_with_this_batch(interval: SchedulePredicate, state: Progress) -> bool:
    """Return true if ``interval`` counts batches and the current batch completes a multiple.

    Args:
        interval: the interval.
        state: progress of training, during a batch.

    Returns:
        True if the interval ends with the current batch.
    """
    if not isinstance(interval, IntervalScheduler) or interval.interval.unit is not TimeUnit.BATCH or interval.never:
        return False
    return (int(state.timestamp.batch) + 1) % int(interval.interval) == 0


def may_differ_by_rank(interval: SchedulePredicate | None, state: Progress) -> bool:
    """Return true if ranks may disagree about ``interval``, because a clock or a function of the user decides.

    Args:
        interval: the interval; ``None`` for no interval.
        state: progress of training.

    Returns:
        True if rank 0 must decide for all ranks.
    """
    if interval is None:
        return False
    by_clock = state.max_duration is not None and state.max_duration.unit is TimeUnit.SECOND
    return by_clock or not isinstance(interval, IntervalScheduler) or interval.interval.unit is TimeUnit.SECOND
