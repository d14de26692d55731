"""Time: amounts of training as people write them, and arithmetic on them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composerlite.core import Time, TimeUnit, ensure_time
from composerlite.errors import ConfigError

WHOLE_UNITS = [unit for unit in TimeUnit if unit is not TimeUnit.DURATION]
whole_units = st.sampled_from(WHOLE_UNITS)
counts = st.integers(-(10**15), 10**15)
fractions = st.floats(allow_nan=False, allow_infinity=False)
times = st.builds(Time, counts, whole_units) | st.builds(Time.from_duration, fractions)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("1ep", 1, TimeUnit.EPOCH),
        ("10ba", 10, TimeUnit.BATCH),
        ("65tok", 65, TimeUnit.TOKEN),
        ("100sp", 100, TimeUnit.SAMPLE),
        ("0.25dur", 0.25, TimeUnit.DURATION),
        ("2iter", 2, TimeUnit.ITERATION),
        ("30sec", 30, TimeUnit.SECOND),
        ("1e9tok", 1_000_000_000, TimeUnit.TOKEN),
        ("4_000tok", 4000, TimeUnit.TOKEN),
        ("2.0ep", 2, TimeUnit.EPOCH),
        ("-3ba", -3, TimeUnit.BATCH),
        (" 10 BA ", 10, TimeUnit.BATCH),
        ("30m", 1800, TimeUnit.SECOND),
        ("90m", 5400, TimeUnit.SECOND),
        ("36h", 129_600, TimeUnit.SECOND),
        ("100s", 100, TimeUnit.SECOND),
        ("1h30m", 5400, TimeUnit.SECOND),
        ("2h30m15s", 9015, TimeUnit.SECOND),
        ("9007199254740993tok", 9007199254740993, TimeUnit.TOKEN),
    ],
)
def test_every_spelling_is_read(text: str, value: float, unit: TimeUnit) -> None:
    """Counts with a unit, exponents, underscores and clock times of any length are valid times."""
    time = Time.from_timestring(text)
    assert (time.value, time.unit) == (value, unit)


@pytest.mark.parametrize("text", ["10xx", "", "m", "ba", "10", "1h2", "30m1h", "1.2.3ba", "ten ba", "1.5ep", "1e-3tok"])
def test_what_is_no_time_is_an_error_that_shows_how(text: str) -> None:
    """A string that is no time is refused by name, with examples of what is."""
    with pytest.raises(ConfigError, match=r"such as '10ba', '2ep'|only 'dur' has fractions"):
        Time.from_timestring(text)


@given(times)
def test_a_time_prints_as_a_string_that_reads_back(time: Time) -> None:
    """``str(time)`` is a valid time and means the same."""
    again = Time.from_timestring(str(time))
    assert (again.value, again.unit) == (time.value, time.unit)


@given(counts, counts, counts, whole_units)
def test_addition_obeys_the_laws_of_numbers(a: int, b: int, c: int, unit: TimeUnit) -> None:
    """Sums of times commute, associate and are undone by subtraction."""
    x, y, z = Time(a, unit), Time(b, unit), Time(c, unit)
    assert x + y == y + x == Time(a + b, unit)
    assert (x + y) + z == x + (y + z)
    assert (x + y) - y == x
    assert x + -x == Time(0, unit)
    assert x + b == b + x == Time(a + b, unit)
    assert (x - b, b - x) == (Time(a - b, unit), Time(b - a, unit))
    assert sum([x, x]) == x * 2 == 2 * x


@given(counts, counts, whole_units)
def test_comparison_with_times_strings_and_numbers_is_that_of_their_values(a: int, b: int, unit: TimeUnit) -> None:
    """A time compares with a time, a time string and a number in the same way."""
    time = Time(a, unit)
    for other in (Time(b, unit), f"{b}{unit}", b):
        assert (time < other) == (a < b)
        assert (time <= other) == (a <= b)
        assert (time > other) == (a > b)
        assert (time >= other) == (a >= b)
        assert (time == other) == (a == b)
        assert (time != other) == (a != b)


@given(counts, st.integers(1, 10**6), whole_units)
def test_division_and_remainder_of_times(a: int, b: int, unit: TimeUnit) -> None:
    """Time by time is a fraction in ``dur``; the remainder keeps the unit."""
    quotient = Time(a, unit) / Time(b, unit)
    assert (quotient.unit, quotient.value) == (TimeUnit.DURATION, a / b)
    assert Time(a, unit) % Time(b, unit) == Time(a % b, unit)


def test_a_fraction_of_an_amount_is_an_amount() -> None:
    """``'0.25dur'`` of 100 batches is 25 batches, from either side."""
    assert Time.from_timestring("0.25dur") * Time.from_batch(100) == Time.from_batch(25)
    assert Time.from_batch(100) * "0.25dur" == "25ba"
    assert Time.from_batch(100) / 4 == "25ba"
    assert Time.from_duration(0.5) * 0.5 == Time.from_duration(0.25)


@given(st.integers(0, 100), st.integers(0, 10**12), whole_units)
def test_a_fraction_of_an_amount_is_exact(percent: int, count: int, unit: TimeUnit) -> None:
    """``'0.29dur'`` of 100 batches is 29 batches, not 28 by a rounding error; what is left over is dropped."""
    assert Time.from_timestring(f"{percent / 100}dur") * Time(count, unit) == Time(percent * count // 100, unit)


@pytest.mark.parametrize("value", ["10", None, True, [1], float("nan"), float("inf")])
def test_the_value_is_a_finite_number(value: Any) -> None:
    """Anything else is refused at construction, whatever the unit."""
    for unit in TimeUnit:
        with pytest.raises(ConfigError, match="expected a finite number"):
            Time(value, unit)


def test_different_units_do_not_mix() -> None:
    """Adding or ordering epochs and batches is an error; they are never equal."""
    epoch, batch = Time.from_epoch(1), Time.from_batch(1)
    assert epoch != batch
    for operation in (
        lambda: epoch + batch,
        lambda: epoch - "1ba",
        lambda: epoch < batch,
        lambda: epoch >= "1ba",
        lambda: epoch % batch,
        lambda: epoch * batch,
    ):
        with pytest.raises(ConfigError, match=r"1ep"):
            operation()


def test_numbers_need_a_unit_from_somewhere() -> None:
    """An int counts what the argument counts by default, and nothing where there is no default."""
    assert ensure_time(3, "ep") == Time.from_epoch(3)
    assert ensure_time("3ba", "ep") == Time.from_batch(3)
    assert ensure_time(timedelta(minutes=2), "ep") == Time(120, TimeUnit.SECOND)
    with pytest.raises(ConfigError, match="3 of type int"):
        Time.from_input(3)


def test_units_are_found_by_value_and_by_name() -> None:
    """``'ba'``, ``'BA'`` and ``'batch'`` are one unit; a wrong one lists those that exist."""
    assert TimeUnit("BA") is TimeUnit("batch") is TimeUnit.BATCH
    with pytest.raises(ConfigError, match=r"'fortnight'.*iter, ep, ba, sp, tok, dur, sec"):
        TimeUnit("fortnight")


def test_conversions_to_plain_numbers() -> None:
    """``int`` and ``float`` give the count."""
    assert (int(Time.from_batch(7)), float(Time.from_duration(0.5))) == (7, 0.5)
    assert repr(Time.from_batch(7)) == "Time(7, TimeUnit.BATCH)"
