"""AutoInterval: as often as a budget of blocked time allows."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any, final

from composerlite.core.event import Event
from composerlite.core.time import MICROSECONDS, Timestamp, TimeUnit
from composerlite.errors import ConfigError

if TYPE_CHECKING:
    from composerlite.core.state import State

__all__ = ["AutoInterval"]

_TEXT = re.compile(r"\s*auto\s*:\s*([0-9.]+)\s*%\s*", re.IGNORECASE)
_SECONDS = Timestamp.field_of(TimeUnit.SECOND)
_FINAL = frozenset({Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT})
_MARGIN = 0.9
"""The part of the budget that is planned with. The rest takes up what saves cost more than the typical one."""
_SAVES = 5
"""How many of the last saves say what one costs."""


@final
class AutoInterval:
    """True at the batches where one more save keeps the time that saves block training within ``budget`` of it.

    The first save comes after ``shortest_seconds`` of training: what it costs sets the interval. From then on the
    interval is as short as the budget allows for the typical cost of the last saves, their median, so that a slow one
    among them does not change it; while all of them together are over the budget, it is twice as long. There is
    never more than one save in flight, and one is in flight for at most half of the time. Time is that of training, as
    in ``Timestamp.total_wct``: evaluation does not count.

    Whoever saves calls :meth:`save_began` for every save, also one that was not asked for here, and when it is over
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
                f"a budget of {budget * 100:g}% of the training time: want more than 0% and less than 100%, as in "
                "'auto:1%'."
            )
        if shortest_seconds < 0:
            raise ConfigError(f"AutoInterval(shortest_seconds={shortest_seconds}): want 0 or more.")
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
                f"interval {text!r} cannot be read: want the part of the training time that saves may block, as in "
                "'auto:1%' or 'auto:0.5%'."
            )
        return cls(percent / 100, include_end_of_training=include_end_of_training)

    def __call__(self, state: State, event: Event) -> bool:
        if event is Event.BATCH_CHECKPOINT and self._is_due(state):
            return True
        return event in self._final_events and state.training_is_over

    @property
    def interval_seconds(self) -> float:
        """Seconds of training from one save to the next, as things stand. Twice that while over the budget."""
        return self._interval

    def save_began(self, state: State) -> None:
        """A save begins now. Until it is over no other is due."""
        self._look_at_the_clock(state)
        self._last = _seconds(state)
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

    def _is_due(self, state: State) -> bool:
        now = self._look_at_the_clock(state)
        interval = self._interval * (2 if self._is_over_budget(now) else 1)
        return self._saving == 0 and now - self._last >= interval

    def _is_over_budget(self, now: float) -> bool:
        return self._all_blocked > self.budget * (now - self._began)

    def _look_at_the_clock(self, state: State) -> float:
        """Seconds of training now. Measuring begins when this is first asked, and anew where time was set back."""
        now = _seconds(state)
        if now < self._last:
            before = state.previous_timestamp
            self._began = self._last = now if before is None else min(now, before.fields[_SECONDS] / MICROSECONDS)
            self._all_blocked = 0.0
        return now

    def _find_interval(self) -> None:
        # median_low: of two saves the cheaper one. The first of a run is often slow, since its memory is new.
        blocked, in_flight = statistics.median_low(self._blocked), statistics.median_low(self._in_flight)
        self._interval = max(self.shortest_seconds, blocked / (_MARGIN * self.budget), 2 * in_flight)

    def state_dict(self) -> dict[str, Any]:
        """What was measured, so that a resumed run need not measure again."""
        return {
            "blocked": list(self._blocked),
            "in_flight": list(self._in_flight),
            "all_blocked": self._all_blocked,
            "began": self._began,
            "last": self._last,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` had measured. A save that was in flight then is not."""
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


def _seconds(state: State) -> float:
    return state.timestamp.fields[_SECONDS] / MICROSECONDS
