"""Time: an amount of training (``'10ba'``, ``'2ep'``, ``'90m'``). Timestamp: progress of a run in all units."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from fractions import Fraction
from functools import total_ordering
from typing import Any, NamedTuple, TypeAlias, final

from composerlite.errors import ConfigError

__all__ = ["Time", "TimeUnit", "Timestamp", "ensure_time"]


class TimeUnit(StrEnum):
    """Unit of a :class:`Time`."""

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"

    @classmethod
    def _missing_(cls, value: object) -> TimeUnit:
        name = str(value)
        found = next((unit for unit in cls if name.lower() in (unit.value, unit.name.lower())), None)
        if found is None:
            raise ConfigError(f"time unit {value!r} does not exist. Known: {', '.join(cls)}, and h, m, s for seconds.")
        return found


_COUNT = re.compile(r"\s*([-+]?[0-9_.]+(?:e[-+]?\d+)?)\s*(iter|ep|ba|sp|tok|dur|sec)\s*", re.IGNORECASE)
_CLOCK = re.compile(r"\s*(?=\d)(?:(\d+)\s*h)?\s*(?:(\d+)\s*m)?\s*(?:(\d+)\s*s)?\s*", re.IGNORECASE)
_RULE = (
    "expected <number><unit>, such as '10ba', '2ep', '1e9tok', '100sp', '0.25dur', '2iter', '90m', '1h30m' or '100s'"
)


@final
@total_ordering
class Time:
    """An amount of training: a value and a :class:`TimeUnit`. Immutable and hashable.

    Both sides of an operation must have the same unit; a number takes the unit of the other side. Time strings can be
    compared, too.
    ``time / time`` is a fraction (unit ``dur``) and ``'0.25dur' * time`` an amount in the unit of ``time``.

    Args:
        value: the amount; an integer for all units but ``dur``.
        unit: a :class:`TimeUnit` or its value, such as ``'ba'``.

    Raises:
        ConfigError: the unit is unknown, or the value is a fraction in another unit than ``dur``.
    """

    __slots__ = ("_unit", "_value")

    def __init__(self, value: int | float, unit: str | TimeUnit) -> None:
        unit = TimeUnit(unit)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"Time({value!r}, {unit.value!r}): expected a finite number.")
        if unit is TimeUnit.DURATION:
            value = float(value)
        elif isinstance(value, float):
            if not value.is_integer():
                raise ConfigError(f"Time({value!r}, {unit.value!r}): only 'dur' has fractions; give a whole number.")
            value = int(value)
        self._value = value
        self._unit = unit

    @classmethod
    def from_iteration(cls, value: int) -> Time:
        """Return ``value`` iterations."""
        return cls(value, TimeUnit.ITERATION)

    @classmethod
    def from_epoch(cls, value: int) -> Time:
        """Return ``value`` epochs."""
        return cls(value, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, value: int) -> Time:
        """Return ``value`` batches."""
        return cls(value, TimeUnit.BATCH)

    @classmethod
    def from_sample(cls, value: int) -> Time:
        """Return ``value`` samples."""
        return cls(value, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, value: int) -> Time:
        """Return ``value`` tokens."""
        return cls(value, TimeUnit.TOKEN)

    @classmethod
    def from_duration(cls, value: float) -> Time:
        """Return the fraction ``value`` of the whole training."""
        return cls(value, TimeUnit.DURATION)

    @classmethod
    def from_timedelta(cls, value: timedelta) -> Time:
        """Return ``value`` in whole seconds."""
        return cls(int(value.total_seconds()), TimeUnit.SECOND)

    @classmethod
    def from_timestring(cls, timestring: str) -> Time:
        """Parse ``'10ba'``, ``'2ep'``, ``'1e9tok'``, ``'0.25dur'``, ``'90m'``, ``'1h30m'``, ``'100s'``."""
        if match := _COUNT.fullmatch(timestring):
            try:
                return cls(float(match[1]) if not match[1].lstrip("+-").isdigit() else int(match[1]), match[2])
            except ConfigError:
                raise
            except ValueError as e:
                raise ConfigError(f"invalid time {timestring!r}: {match[1]!r} is not a number; {_RULE}.") from e
        if match := _CLOCK.fullmatch(timestring):
            hours, minutes, seconds = (int(group) if group is not None else 0 for group in match.groups())
            if any(group is not None for group in match.groups()):
                return cls(3600 * hours + 60 * minutes + seconds, TimeUnit.SECOND)
        raise ConfigError(f"invalid time {timestring!r}: {_RULE}.")

    @classmethod
    def from_input(cls, value: TimeInput, int_unit: str | TimeUnit | None = None) -> Time:
        """Return ``value`` as a Time.

        Args:
            value: a Time, a time string, a ``timedelta``, or a number.
            int_unit: unit of a number; ``None``: a number is an error.

        Returns:
            The time.
        """
        if isinstance(value, Time):
            return value
        if isinstance(value, str):
            return cls.from_timestring(value)
        if isinstance(value, timedelta):
            return cls.from_timedelta(value)
        if int_unit is not None and isinstance(value, int | float) and not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            return cls(value, int_unit)
        raise ConfigError(f"invalid time {value!r} of type {type(value).__name__}: {_RULE}.")

    @property
    def value(self) -> int | float:
        """The count: an int, or a float for ``dur``."""
        return self._value

    @property
    def unit(self) -> TimeUnit:
        """The unit of the count."""
        return self._unit

    def to_timestring(self) -> str:
        """Return the string that :meth:`from_timestring` parses."""
        return f"{self._value}{self._unit.value}"

    def _same_unit(self, other: object) -> int | float | None:
        """Return the value of ``other`` in this unit; ``None`` if ``other`` is not a time."""
        if isinstance(other, int | float) and not isinstance(other, bool):
            return other
        if isinstance(other, str):
            other = Time.from_timestring(other)
        elif isinstance(other, timedelta) and self._unit is TimeUnit.SECOND:
            return other.total_seconds()
        if not isinstance(other, Time):
            return None
        if other._unit is not self._unit:
            raise ConfigError(f"{self} and {other} have different units and cannot be compared or added.")
        return other._value

    def __repr__(self) -> str:
        return f"Time({self._value!r}, TimeUnit.{self._unit.name})"

    def __str__(self) -> str:
        return self.to_timestring()

    def __int__(self) -> int:
        return int(self._value)

    def __float__(self) -> float:
        return float(self._value)

    def __hash__(self) -> int:
        return hash((self._value, self._unit))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Time):
            return self._unit is other._unit and self._value == other._value
        value = self._same_unit(other)
        return NotImplemented if value is None else self._value == value

    def __lt__(self, other: Time | str | int | float | timedelta) -> bool:
        value = self._same_unit(other)
        return NotImplemented if value is None else self._value < value

    def __add__(self, other: TimeInput) -> Time:
        value = self._same_unit(other)
        return NotImplemented if value is None else Time(self._value + value, self._unit)

    __radd__ = __add__

    def __sub__(self, other: TimeInput) -> Time:
        value = self._same_unit(other)
        return NotImplemented if value is None else Time(self._value - value, self._unit)

    def __rsub__(self, other: TimeInput) -> Time:
        value = self._same_unit(other)
        return NotImplemented if value is None else Time(value - self._value, self._unit)

    def __neg__(self) -> Time:
        return Time(-self._value, self._unit)

    def __mul__(self, other: TimeInput) -> Time:
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if isinstance(other, Time):
            if TimeUnit.DURATION not in (self._unit, other._unit):
                raise ConfigError(f"{self} × {other}: one side must be a number or a fraction in 'dur'.")
            unit = other._unit if self._unit is TimeUnit.DURATION else self._unit
            return _scaled(self._value, other._value, unit)
        if isinstance(other, int | float) and not isinstance(other, bool):
            return _scaled(self._value, other, self._unit)
        return NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: TimeInput) -> Time:
        if isinstance(other, int | float) and not isinstance(other, bool):
            return _scaled(self._value, Fraction(1) / Fraction(str(other)), self._unit)
        value = self._same_unit(other)
        return NotImplemented if value is None else Time(self._value / value, TimeUnit.DURATION)

    def __mod__(self, other: TimeInput) -> Time:
        value = self._same_unit(other)
        return NotImplemented if value is None else Time(self._value % value, self._unit)


TimeInput: TypeAlias = "Time | str | int | float | timedelta"
"""Time argument: text such as ``'10ep'``, or a number in the default unit of the argument."""


def _scaled(value: int | float, factor: int | float | Fraction, unit: TimeUnit) -> Time:
    """Return ``value × factor``, exact in decimal, rounded down: 0.29 of 100 batches is 29. Floats give 28.999…"""
    exact = Fraction(str(value)) * Fraction(str(factor))
    return Time(float(exact) if unit is TimeUnit.DURATION else math.trunc(exact), unit)


def ensure_time(maybe_time: TimeInput, int_unit: str | TimeUnit) -> Time:
    """Return ``maybe_time`` as a :class:`Time`.

    Args:
        maybe_time: a time, a time string, or a number.
        int_unit: unit of a number.

    Returns:
        The time.
    """
    return Time.from_input(maybe_time, int_unit)


MICROSECONDS = 1_000_000
"""Microseconds in a second: the resolution of a timestamp's clocks."""
_MICROSECOND = timedelta(microseconds=1)


class _Fields(NamedTuple):
    """Plain numbers of a :class:`Timestamp`: ten counts, and four clocks in microseconds."""

    iteration: int = 0
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    token: int = 0
    epoch_in_iteration: int = 0
    token_in_iteration: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    total_wct: int = 0
    iteration_wct: int = 0
    epoch_wct: int = 0
    batch_wct: int = 0


_CLOCKS = tuple(name for name in _Fields._fields if name.endswith("_wct"))
_TOTALS = {
    TimeUnit.ITERATION: "iteration",
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.SECOND: "total_wct",
}
_INDEX = {unit: _Fields._fields.index(name) for unit, name in _TOTALS.items()}
_UNITS = {name: unit for unit, name in _TOTALS.items()}


def _field(name: str, convert: Callable[[int], object]) -> Any:
    """Make a read-only attribute of :class:`Timestamp`: the converted number ``name`` in ``fields``."""
    index = _Fields._fields.index(name)
    return property(lambda stamp: convert(stamp.fields[index]))


def _microseconds(value: timedelta | int | float | Time) -> int:
    clock = value if isinstance(value, timedelta) else timedelta(seconds=float(value))
    return round(clock / _MICROSECOND)


def _bare(name: str, value: int | float | Time | timedelta) -> int:
    """Return ``value`` as the plain number of the field ``name``.

    Raises:
        ConfigError: a count is not a whole number, is negative or has another unit.
    """
    if name in _CLOCKS:
        return _microseconds(value)
    unit = _UNITS[name.split("_")[0]]
    if isinstance(value, Time) and value.unit is not unit:
        raise ConfigError(f"Timestamp({name}={value}): expected a count in {unit.value!r}.")
    if isinstance(value, str | timedelta) or int(value) != value or int(value) < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"Timestamp({name}={value!r}): expected a whole number that is not negative.")
    return int(value)


@final
@total_ordering
class Timestamp:
    """Position of a run: ten counts and four wall-clock times, fourteen fields in all. Immutable.

    ``epoch``, ``batch``, ``sample``, … are :class:`Time`; ``total_wct`` and the other clocks are ``timedelta`` and
    do not include evaluation. A timestamp compares with a :class:`Time` or a time string in that unit.
    """

    __slots__ = ("fields",)
    fields: _Fields
    """Plain numbers: ten counts, and four clocks in microseconds."""

    iteration: Time = _field("iteration", Time.from_iteration)
    """Iterations completed."""
    epoch: Time = _field("epoch", Time.from_epoch)
    """Epochs completed."""
    batch: Time = _field("batch", Time.from_batch)
    """Batches completed: the number of optimizer steps."""
    sample: Time = _field("sample", Time.from_sample)
    """Samples seen by all ranks."""
    token: Time = _field("token", Time.from_token)
    """Tokens seen by all ranks."""
    epoch_in_iteration: Time = _field("epoch_in_iteration", Time.from_epoch)
    """Epochs completed in this iteration."""
    token_in_iteration: Time = _field("token_in_iteration", Time.from_token)
    """Tokens seen in this iteration."""
    batch_in_epoch: Time = _field("batch_in_epoch", Time.from_batch)
    """Batches completed in this epoch."""
    sample_in_epoch: Time = _field("sample_in_epoch", Time.from_sample)
    """Samples seen in this epoch."""
    token_in_epoch: Time = _field("token_in_epoch", Time.from_token)
    """Tokens seen in this epoch."""
    total_wct: timedelta = _field("total_wct", _MICROSECOND.__mul__)
    """Wall-clock time of training so far."""
    iteration_wct: timedelta = _field("iteration_wct", _MICROSECOND.__mul__)
    """Wall-clock time of this iteration."""
    epoch_wct: timedelta = _field("epoch_wct", _MICROSECOND.__mul__)
    """Wall-clock time of this epoch."""
    batch_wct: timedelta = _field("batch_wct", _MICROSECOND.__mul__)
    """Wall-clock time of the last batch."""

    def __init__(self, **fields: int | float | Time | timedelta) -> None:
        unknown = sorted(fields.keys() - set(_Fields._fields))
        if unknown:
            raise ConfigError(f"Timestamp has no field {', '.join(unknown)}. Fields: {', '.join(_Fields._fields)}.")
        self.fields = _Fields(**{name: _bare(name, value) for name, value in fields.items()})

    def get(self, unit: str | TimeUnit) -> Time:
        """Return the total of ``unit`` so far. For ``dur`` use ``State.get_elapsed_duration``."""
        unit = TimeUnit(unit)
        return Time(int(self.count(unit)), unit)

    def count(self, unit: TimeUnit) -> int | float:
        """Return the total of ``unit`` so far, as a plain number (seconds with a fraction)."""
        if unit is TimeUnit.DURATION:
            raise ConfigError("a Timestamp has no end, so 'dur' is unknown. Use State.get_elapsed_duration().")
        value = self.fields[_INDEX[unit]]
        return value / MICROSECONDS if unit is TimeUnit.SECOND else value

    @staticmethod
    def field_of(unit: TimeUnit) -> int:
        """Return the index of the total of ``unit`` in :attr:`fields`."""
        return _INDEX[unit]

    @classmethod
    def _of(cls, fields: _Fields) -> Timestamp:
        """Make a timestamp of ``fields`` without a check."""
        new = object.__new__(cls)
        new.fields = fields
        return new

    def copy(self, **changes: int | float | Time | timedelta) -> Timestamp:
        """Return a copy with some fields changed."""
        return Timestamp(**{**self.state_dict(), **changes})

    def to_next_batch(
        self, samples: int | Time = 0, tokens: int | Time = 0, duration: timedelta | float = 0.0
    ) -> Timestamp:
        """Return the timestamp after a further batch.

        Args:
            samples: number of samples in the batch.
            tokens: number of tokens in the batch.
            duration: wall time of the batch, as ``timedelta`` or in seconds.

        Returns:
            The timestamp after the batch.
        """
        return self.after_batch(int(samples), int(tokens), _microseconds(duration))

    def after_batch(self, samples: int, tokens: int, microseconds: int) -> Timestamp:
        """Return the timestamp after a further batch. Takes plain numbers: called once per step, so must be fast.

        Args:
            samples: number of samples in the batch.
            tokens: number of tokens in the batch.
            microseconds: wall time of the batch.

        Returns:
            The timestamp after the batch.
        """
        i, e, b, s, t, ei, ti, be, se, te, wct, iwct, ewct, _ = self.fields
        return self._of(_Fields(
            i, e, b + 1, s + samples, t + tokens, ei, ti + tokens, be + 1, se + samples, te + tokens,
            wct + microseconds, iwct + microseconds, ewct + microseconds, microseconds,
        ))  # fmt: skip

    def to_next_epoch(self, duration: timedelta | float = 0.0) -> Timestamp:
        """Return the timestamp at the start of the next epoch. ``duration``: training time since the last batch."""
        now, passed = self.at_start_of_epoch().fields, _microseconds(duration)
        epochs = {"epoch": now.epoch + 1, "epoch_in_iteration": now.epoch_in_iteration + 1}
        clocks = {"total_wct": now.total_wct + passed, "iteration_wct": now.iteration_wct + passed}
        return self._of(now._replace(**epochs, **clocks))

    def at_start_of_epoch(self) -> Timestamp:
        """Return the timestamp at the start of the current epoch."""
        return self._of(
            self.fields._replace(batch_in_epoch=0, sample_in_epoch=0, token_in_epoch=0, epoch_wct=0, batch_wct=0)
        )

    def to_next_iteration(self, duration: timedelta | float = 0.0) -> Timestamp:
        """Return the timestamp at the start of the next iteration."""
        now = self.fields
        zero = dict.fromkeys(["epoch_in_iteration", "token_in_iteration", "iteration_wct", "epoch_wct", "batch_wct"], 0)
        total = now.total_wct + _microseconds(duration)
        return self._of(now._replace(iteration=now.iteration + 1, total_wct=total, **zero))

    def state_dict(self) -> dict[str, Any]:
        """Return the fourteen fields: ints, and ``timedelta`` for the clocks."""
        return {**self.fields._asdict(), **{name: getattr(self, name) for name in _CLOCKS}}

    def plain(self) -> dict[str, int | float]:
        """Return the fields as numbers, clocks in seconds. :meth:`from_state_dict` restores the exact values."""
        fields = self.fields._asdict()
        return {**fields, **{name: fields[name] / MICROSECONDS for name in _CLOCKS}}

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any]) -> Timestamp:
        """Restore a result of :meth:`state_dict` or :meth:`plain`. Unknown fields are ignored, missing fields are 0."""
        return cls(**{name: value for name, value in state_dict.items() if name in _Fields._fields})

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Timestamp):
            return self.fields == other.fields
        if isinstance(other, Time | str | timedelta):
            time = Time.from_input(other)
            return self.count(time.unit) == time.value
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.fields)

    def __lt__(self, other: TimeInput) -> bool:
        time = Time.from_input(other)
        return self.count(time.unit) < time.value

    def __repr__(self) -> str:
        return f"Timestamp({', '.join(f'{k}={v!r}' for k, v in self.state_dict().items())})"
