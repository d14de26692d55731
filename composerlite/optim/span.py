"""How much of a time has passed: what every schedule is a function of."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from composerlite.core import Time, TimeUnit
from composerlite.errors import ConfigError

if TYPE_CHECKING:
    from composerlite.core import State

__all__ = ["Span", "read_time", "span"]


class Span(NamedTuple):
    """A time of ``value`` ticks, of which ``now`` have passed since training began; ``tick`` is what both count."""

    value: int | Fraction
    now: int | float
    tick: TimeUnit

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return self.now >= self.value

    @property
    def fraction(self) -> float:
        """The part of the time that has passed, from 0 to 1. An empty time has passed."""
        return 1.0 if self.is_over else float(self.now / self.value)

    @property
    def periods(self) -> Fraction:
        """How often the time fits into what has passed: exact, so that its whole part is. 0 for an empty time."""
        return Fraction(self.now) / self.value if self.value else Fraction(0)


def read_time(name: str, value: Time | str, *, empty: bool = True) -> Time:
    """The argument ``name`` of a scheduler as a :class:`Time`.

    Raises:
        ConfigError: it cannot be read, is negative, or is empty where it must not be.
    """
    time = Time.from_input(value)
    if time.value < 0 or (time.value == 0 and not empty):
        raise ConfigError(f"{name}={str(value)!r}: want a time of {'zero or more' if empty else 'more than zero'}.")
    return time


def span(time: Time, state: State, ssr: float = 1.0) -> Span:
    """``time`` since the start of training, and how much of it has passed.

    Epochs are counted in batches where the loader has a length, so that a schedule in epochs moves at every batch.
    ``ssr`` scales every unit but ``dur``: ``max_duration``, of which that is a fraction, is scaled already.

    Raises:
        ConfigError: a time in ``dur`` while there is no ``max_duration``.
    """
    unit = time.unit
    if unit is TimeUnit.DURATION:
        end = state.max_duration
        if end is None:
            raise ConfigError(f"the schedule's {time} is a fraction of training and needs a max_duration.")
        unit, value = end.unit, _product(time.value, end.value)
    else:
        value = _product(ssr, time.value)
    if unit is TimeUnit.ITERATION and state.iteration_length.unit is TimeUnit.EPOCH:
        unit, value = TimeUnit.EPOCH, value * int(state.iteration_length)
    now, length = state.timestamp.count(unit), state.dataloader_len
    if unit is TimeUnit.EPOCH and length is not None:
        batches = int(length)
        return Span(value * batches, now * batches + int(state.timestamp.batch_in_epoch), TimeUnit.BATCH)
    return Span(value, now, unit)


@lru_cache(maxsize=256)
def _product(fraction: int | float, whole: int | float) -> int | Fraction:
    """Exact: 0.07 of 100 batches is 7, not 7.000000000000001, which no batch count would hit."""
    product = Fraction(str(fraction)) * Fraction(str(whole))
    return int(product) if product.denominator == 1 else product
