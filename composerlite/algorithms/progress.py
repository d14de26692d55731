"""Whether training has passed a time, to the batch also where that is given in epochs."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from composerlite.core import Time, TimeUnit
from composerlite.errors import ConfigError

if TYPE_CHECKING:
    from composerlite.core import State

__all__ = ["has_passed", "read_time", "read_update_interval"]


def has_passed(state: State, time: Time) -> bool:
    """Whether ``time`` since the start of training has passed. Epochs count in part where the loader has a length.

    Raises:
        ConfigError: a time in ``dur`` while there is no ``max_duration``.
    """
    unit, target = time.unit, Fraction(str(time.value))
    if unit is TimeUnit.DURATION:
        end = state.max_duration
        if end is None:
            raise ConfigError(f"{time} is a fraction of training and needs a max_duration.")
        unit, target = end.unit, target * Fraction(end.value)
    now, length = Fraction(state.timestamp.count(unit)), state.dataloader_len
    if unit is TimeUnit.EPOCH and length is not None:
        now += Fraction(int(state.timestamp.batch_in_epoch), int(length))
    return now >= target


def read_time(name: str, value: Time | str) -> Time:
    """The argument ``name`` as a :class:`Time` of zero or more.

    Raises:
        ConfigError: it cannot be read, or is negative.
    """
    time = Time.from_input(value)
    if time.value < 0:
        raise ConfigError(f"{name}={str(value)!r}: want a time of zero or more, e.g. '0.1dur'.")
    return time


def read_update_interval(name: str, value: Time | str) -> Time:
    """The argument ``name`` as a positive number of batches or epochs.

    Raises:
        ConfigError: it is something else.
    """
    time = Time.from_input(value)
    if time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or time.value <= 0:
        raise ConfigError(f"{name}={str(value)!r}: want batches or epochs, e.g. '10ba' or '1ep'.")
    return time
