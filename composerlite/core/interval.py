"""Intervals: at which events something that happens "every 10 batches" happens, or as often as a budget allows."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, final

from composerlite.core.event import Event
from composerlite.core.progress import Progress, span
from composerlite.core.time import Time, TimeInput, Timestamp, TimeUnit
from composerlite.errors import ConfigError, check_takes

__all__ = [
    "AutoInterval",
    "IntervalScheduler",
    "SchedulePredicate",
    "create_interval_scheduler",
    "ends_with_this_batch",
    "interval_of",
    "is_never",
    "is_of_one_rank",
    "time_of",
]

SchedulePredicate: TypeAlias = Callable[[Any, Event], bool]
"""Says of a :class:`State` whether to act at an event. May be called at any event, also at those it never acts at."""

_TEXT = re.compile(r"\s*auto\s*:\s*([0-9.]+)\s*%\s*", re.IGNORECASE)
_FINAL = frozenset({Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT})
_MARGIN = 0.9
"""The part of the budget that is planned with. The rest takes up what saves cost more than the typical one."""
_SAVES = 5
"""How many of the last saves say what one costs."""


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
    """True at the batches where one more save keeps the time that saves block training within ``budget`` of it.

    The first save comes after ``shortest_seconds`` of training: what it costs sets the interval. From then on the
    interval is as short as the budget allows for the typical cost of the last saves, their median, so that a slow one
    among them does not change it; while all of them together are over the budget, it is twice as long. There is
    never more than one save in flight, and one is in flight for at most half of the time. Time is that of training, as
    in ``Timestamp.total_wct``: evaluation does not count.

    The saver calls :meth:`save_began` for every save, also one that was not asked for here, and when it is over
    :meth:`record_save` or :meth:`record_failure`.

    Args:
        budget: seconds blocked per second of training, more than 0 and less than 1.
        shortest_seconds: of training between two saves.
        include_end_of_training: also true at the checkpoint events of a training that is over.

    Raises:
        ConfigError: a budget or a time outside of these bounds.
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
        # Seconds of training: when measuring began, and when the last save did. Infinite: it has not begun.
        self._began = self._last = math.inf
        self._interval = shortest_seconds

    @classmethod
    def from_string(cls, text: str, *, include_end_of_training: bool = True) -> AutoInterval:
        """``'auto:1%'``: a budget of one second blocked in a hundred seconds of training.

        Args:
            text: ``'auto:<percent>%'``.
            include_end_of_training: save at the end of training, too.

        Returns:
            The interval.

        Raises:
            ConfigError: it says no percentage, or none that can be kept.
        """
        match = _TEXT.fullmatch(text)
        try:
            percent = float(match[1]) if match is not None else None
        except ValueError:  # '1.2.3'
            percent = None
        if percent is None:
            raise ConfigError(
                f"invalid interval {text!r}: expected auto:<percent>% of the training time that saves may block, such "
                "as 'auto:1%' or 'auto:0.5%'."
            )
        return cls(percent / 100, include_end_of_training=include_end_of_training)

    def __call__(self, state: Progress, event: Event) -> bool:
        if event is Event.BATCH_CHECKPOINT and self._is_due(state):
            return True
        return event in self._final_events and state.training_is_over

    @property
    def interval_seconds(self) -> float:
        """Seconds of training from one save to the next, as things stand. Twice that while over the budget."""
        return self._interval

    def save_began(self, state: Progress) -> None:
        """A save begins now. Until it is over no other is due."""
        self._look_at_the_clock(state)
        self._last = _seconds(state.timestamp)
        self._saving += 1

    def record_save(self, blocked_seconds: float, in_flight_seconds: float = 0.0) -> None:
        """A save is over and the checkpoint committed.

        Args:
            blocked_seconds: how long it kept the training thread.
            in_flight_seconds: from its beginning until now.
        """
        self._saving = max(0, self._saving - 1)
        self._blocked.append(blocked_seconds)
        self._in_flight.append(in_flight_seconds)
        self._all_blocked += blocked_seconds
        self._find_interval()

    def record_failure(self) -> None:
        """A save is over and failed: that measures nothing. The next one is due an interval after it began."""
        self._saving = max(0, self._saving - 1)

    def _is_due(self, state: Progress) -> bool:
        now = self._look_at_the_clock(state)
        interval = self._interval * (2 if self._is_over_budget(now) else 1)
        return self._saving == 0 and now - self._last >= interval

    def _is_over_budget(self, now: float) -> bool:
        return self._all_blocked > self.budget * (now - self._began)

    def _look_at_the_clock(self, state: Progress) -> float:
        """Seconds of training now. Measuring begins when this is first asked, and anew where time was set back."""
        now = _seconds(state.timestamp)
        if now < self._last:
            before = state.previous_timestamp
            self._began = self._last = now if before is None else min(now, _seconds(before))
            self._all_blocked = 0.0
        return now

    def _find_interval(self) -> None:
        # median_low: of two saves the cheaper one. The first of a run is often slow, since its memory is new.
        blocked, in_flight = statistics.median_low(self._blocked), statistics.median_low(self._in_flight)
        self._interval = max(self.shortest_seconds, blocked / (_MARGIN * self.budget), 2 * in_flight)

    def state_dict(self) -> dict[str, Any]:
        """The measurements, so that a resumed run need not measure again."""
        return {
            "blocked": list(self._blocked),
            "in_flight": list(self._in_flight),
            "all_blocked": self._all_blocked,
            "began": self._began,
            "last": self._last,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with what :meth:`state_dict` had measured. A save that was in flight then is not."""
        self._blocked.clear()
        self._blocked.extend(state_dict["blocked"])
        self._in_flight.clear()
        self._in_flight.extend(state_dict["in_flight"])
        self._all_blocked = state_dict["all_blocked"]
        self._began = state_dict["began"]
        self._last = state_dict["last"]
        self._interval = self.shortest_seconds
        if self._blocked:
            self._find_interval()

    def __repr__(self) -> str:
        return f"AutoInterval({self.budget:.3%}, {self._interval:.1f} s at present)"


def _seconds(timestamp: Timestamp) -> float:
    return timestamp.count(TimeUnit.SECOND)


def create_interval_scheduler(
    interval: TimeInput | SchedulePredicate,
    include_end_of_training: bool = True,
    checkpoint_events: bool = True,
    *,
    allow_auto: bool = False,
) -> SchedulePredicate:
    """``interval`` as a function ``(state, event) -> bool``; a function is returned as it is.

    With ``allow_auto``, ``'auto:1%'`` gives an :class:`AutoInterval`; its caller reports each save to it.

    Args:
        interval: a number of epochs, a time string, a ``Time``, or a function ``(state, event) -> bool``.
        include_end_of_training: true at the end of training, too.
        checkpoint_events: true at the ``*_CHECKPOINT`` events instead of the ``*_END`` events.
        allow_auto: accept ``'auto:1%'``.

    Returns:
        A function ``(state, event) -> bool``.

    Raises:
        ConfigError: the interval cannot be read, or the function cannot be called so.
    """
    if callable(interval):
        check_takes(interval, "state", "event")
        return interval
    if isinstance(interval, str) and interval.strip().lower().startswith("auto"):
        if not allow_auto:
            raise ConfigError(
                f"interval {interval!r}: only the interval of checkpoints (save_interval) can be found by what they "
                "cost. Pass a number and a unit here, such as '100ba' or '1ep'."
            )
        return AutoInterval.from_string(interval, include_end_of_training=include_end_of_training)
    return IntervalScheduler(
        interval, include_end_of_training=include_end_of_training, checkpoint_events=checkpoint_events
    )


def interval_of(value: Any, *, argument: str, allow_auto: bool = False) -> SchedulePredicate:
    """Call :func:`create_interval_scheduler` such that its ConfigError names ``argument``.

    Args:
        value: as :func:`create_interval_scheduler` takes it.
        argument: name of the argument, for errors.
        allow_auto: accept ``'auto:1%'``.

    Returns:
        A function ``(state, event) -> bool``.
    """
    try:
        return create_interval_scheduler(value, allow_auto=allow_auto)
    except ConfigError as e:
        raise ConfigError(f"{argument}={value!r}: {e}") from e


def is_never(interval: SchedulePredicate | None) -> bool:
    """Return true if ``interval`` never comes."""
    return interval is None or (isinstance(interval, IntervalScheduler) and interval.never)


def is_once(interval: SchedulePredicate, state: Progress) -> bool:
    """Return true if ``interval``, as far as is known, comes at the end of training alone.

    Args:
        interval: the interval.
        state: progress of training.

    Returns:
        True if it is as long as all of training, or longer.
    """
    if not isinstance(interval, IntervalScheduler):
        return False
    length, end = interval.interval, state.max_duration
    if length.unit is TimeUnit.DURATION:
        return length.value >= 1
    return end is not None and end.unit is length.unit and length >= end


def ends_with_this_batch(interval: SchedulePredicate, state: Progress) -> bool:
    """Return true if ``interval``, if it is one of batches, is over when the batch that is being trained on is done.

    Args:
        interval: the interval.
        state: progress of training, during a batch.

    Returns:
        True if the interval ends with the current batch.
    """
    if not isinstance(interval, IntervalScheduler) or interval.interval.unit is not TimeUnit.BATCH or interval.never:
        return False
    return (int(state.timestamp.batch) + 1) % int(interval.interval) == 0


def time_of(value: TimeInput, *, argument: str) -> Time:
    """Return an amount of training, in epochs if no unit is given; ConfigError, which names ``argument``.

    Args:
        value: a time, or a number of epochs.
        argument: name of the argument, for errors.

    Returns:
        The time.
    """
    try:
        return Time.from_input(value, TimeUnit.EPOCH)
    except ConfigError as e:
        raise ConfigError(f"{argument}={value!r}: {e}") from e


def is_of_one_rank(interval: SchedulePredicate | None, state: Progress) -> bool:
    """Return true if ranks may differ in what ``interval`` says: it looks at a clock, or is a function of the user.

    Args:
        interval: the interval; ``None``: there is none.
        state: progress of training.

    Returns:
        True if one rank has to decide for all.
    """
    if interval is None:
        return False
    by_clock = state.max_duration is not None and state.max_duration.unit is TimeUnit.SECOND
    return by_clock or not isinstance(interval, IntervalScheduler) or interval.interval.unit is TimeUnit.SECOND
