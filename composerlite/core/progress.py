"""Progress through a length of training, for schedules, averages, estimates and intervals."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, Protocol

from composerlite.core.time import Time, Timestamp, TimeUnit
from composerlite.errors import ConfigError

__all__ = ["Progress", "Span", "read_time", "span"]


class Progress(Protocol):
    """Position and end of a run: the part of a :class:`State` that schedules and intervals read."""

    @property
    def timestamp(self) -> Timestamp: ...

    @property
    def previous_timestamp(self) -> Timestamp | None: ...

    @property
    def max_duration(self) -> Time | None: ...

    @property
    def iteration_length(self) -> Time: ...

    @property
    def dataloader_len(self) -> Time | None: ...

    @property
    def training_is_over(self) -> bool: ...


class Span(NamedTuple):
    """A length of ``value`` ticks, with ``now`` ticks since the start of training. ``tick`` is the unit of both."""

    value: int | Fraction
    now: int | float
    tick: TimeUnit

    @property
    def is_over(self) -> bool:
        """True if the length has passed."""
        return self.now >= self.value

    @property
    def fraction(self) -> float:
        """Fraction that has passed, from 0 to 1. An empty length has passed."""
        return 1.0 if self.is_over else float(self.now / self.value)

    @property
    def periods(self) -> Fraction:
        """Exact number of lengths since the start of training. 0 for an empty length."""
        return Fraction(self.now) / self.value if self.value else Fraction(0)


def read_time(name: str, value: Time | str, *, empty: bool = True) -> Time:
    """Return the argument ``name`` of a schedule or an algorithm as a :class:`Time`.

    Args:
        name: name of the argument, for errors.
        value: a time, or a time string.
        empty: a time of zero is allowed.

    Returns:
        The time.

    Raises:
        ConfigError: the value is not a time, is negative, or is zero without ``empty``.
    """
    time = Time.from_input(value)
    if time.value < 0 or (time.value == 0 and not empty):
        least = "zero or more" if empty else "more than zero"
        raise ConfigError(f"{name}={str(value)!r}: expected a time of {least}, such as '0.1dur'.")
    return time


def span(time: Time, state: Progress, ssr: float = 1.0, *, at: Timestamp | None = None) -> Span:
    """Return the length ``time`` from the start of training, and the ticks that have passed.

    Epochs are counted in batches if the loader has a length, so that the progress changes at every batch.

    Args:
        time: length; may be a fraction of training.
        state: progress of training.
        ssr: scale schedule ratio, for all units except ``dur``: ``max_duration`` is already scaled.
        at: timestamp to use instead of the current timestamp.

    Returns:
        The span.

    Raises:
        ConfigError: ``time`` is in ``dur`` and there is no ``max_duration``.
    """
    unit, stamp = time.unit, state.timestamp if at is None else at
    if unit is TimeUnit.DURATION:
        end = state.max_duration
        if end is None:
            raise ConfigError(f"{time} is a fraction of training and needs a max_duration.")
        unit, value = end.unit, _product(time.value, end.value)
    else:
        value = _product(ssr, time.value)
    if unit is TimeUnit.ITERATION and state.iteration_length.unit is TimeUnit.EPOCH:
        unit, value = TimeUnit.EPOCH, value * int(state.iteration_length)
    now, length = stamp.count(unit), state.dataloader_len
    if unit is TimeUnit.EPOCH and length is not None:
        batches = int(length)
        return Span(value * batches, now * batches + int(stamp.batch_in_epoch), TimeUnit.BATCH)
    return Span(value, now, unit)


@lru_cache(maxsize=256)
def _product(fraction: int | float, whole: int | float) -> int | Fraction:
    """Multiply exactly: 0.07 of 100 batches is 7. Floats give 7.000000000000001, and no batch count matches."""
    product = Fraction(str(fraction)) * Fraction(str(whole))
    return int(product) if product.denominator == 1 else product
