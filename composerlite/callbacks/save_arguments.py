"""Arguments of a saver that can be wrong, and what its intervals depend on."""

from __future__ import annotations

from typing import Any

from composerlite.core import (
    IntervalScheduler,
    SchedulePredicate,
    State,
    Time,
    TimeInput,
    TimeUnit,
    create_interval_scheduler,
)
from composerlite.errors import ConfigError

__all__ = ["ends_with_this_batch", "interval_of", "is_never", "is_of_one_rank", "time_of", "whole_number"]


def interval_of(value: Any, *, argument: str, allow_auto: bool = False) -> SchedulePredicate:
    """When to save; ConfigError, which names ``argument``, if ``value`` does not say that."""
    try:
        return create_interval_scheduler(value, allow_auto=allow_auto)
    except ConfigError as e:
        raise ConfigError(f"{argument}={value!r}: {e}") from e


def is_never(interval: SchedulePredicate | None) -> bool:
    """Whether nothing is ever saved by ``interval``."""
    return interval is None or (isinstance(interval, IntervalScheduler) and interval.never)


def ends_with_this_batch(interval: SchedulePredicate, state: State) -> bool:
    """Whether ``interval``, if it is one of batches, is over when the batch that is being trained on is done."""
    if not isinstance(interval, IntervalScheduler) or interval.interval.unit is not TimeUnit.BATCH or interval.never:
        return False
    return (int(state.timestamp.batch) + 1) % int(interval.interval) == 0


def time_of(value: TimeInput, *, argument: str) -> Time:
    """An amount of training, in epochs if no unit is given; ConfigError, which names ``argument``."""
    try:
        return Time.from_input(value, TimeUnit.EPOCH)
    except ConfigError as e:
        raise ConfigError(f"{argument}={value!r}: {e}") from e


def whole_number(value: Any, *, argument: str, least: int) -> int:
    """``value``, if it is ``least`` or more; ConfigError, which names ``argument``, otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{argument}={value!r}: want a whole number, {least} or more.")
    return value


def is_of_one_rank(interval: SchedulePredicate | None, state: State) -> bool:
    """Whether ranks may differ in what ``interval`` says: those that look at a clock, and functions of the user."""
    if interval is None:
        return False
    by_clock = state.max_duration is not None and state.max_duration.unit is TimeUnit.SECOND
    return by_clock or not isinstance(interval, IntervalScheduler) or interval.interval.unit is TimeUnit.SECOND
