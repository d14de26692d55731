"""Timestamp: where a run stands."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composerlite.core import Time, Timestamp, TimeUnit
from composerlite.errors import ConfigError

COUNTS = {
    "iteration": "iter",
    "epoch": "ep",
    "batch": "ba",
    "sample": "sp",
    "token": "tok",
    "epoch_in_iteration": "ep",
    "token_in_iteration": "tok",
    "batch_in_epoch": "ba",
    "sample_in_epoch": "sp",
    "token_in_epoch": "tok",
}
CLOCKS = ["total_wct", "iteration_wct", "epoch_wct", "batch_wct"]

counts = st.integers(0, 10**12)
clocks = st.builds(timedelta, seconds=st.integers(0, 10**8).map(lambda n: n / 8))  # sums of these are exact
timestamps = st.builds(
    lambda fields: Timestamp(**fields),  # pyright: ignore[reportUnknownLambdaType]
    st.fixed_dictionaries({**dict.fromkeys(COUNTS, counts), **dict.fromkeys(CLOCKS, clocks)}),
)
steps = st.tuples(st.integers(0, 100), st.integers(0, 10_000), clocks)


def test_a_timestamp_has_fourteen_fields() -> None:
    """A new run stands at zero in ten counts and four clocks, in the documented order."""
    start = Timestamp()
    assert list(start.state_dict()) == [*COUNTS, *CLOCKS]
    for name, unit in COUNTS.items():
        assert getattr(start, name) == Time(0, unit)
    for name in CLOCKS:
        assert getattr(start, name) == timedelta()


def test_fields_are_given_by_name() -> None:
    """Numbers, times and timedeltas are taken; an unknown field is an error that lists the fields."""
    stamp = Timestamp(epoch=Time.from_epoch(2), batch=20, total_wct=timedelta(seconds=5))
    assert (stamp.epoch, stamp.batch, stamp.total_wct) == ("2ep", "20ba", timedelta(seconds=5))
    with pytest.raises(ConfigError, match=r"no field epochs\. Fields: iteration, epoch, "):
        Timestamp(epochs=2)


@pytest.mark.parametrize("value", [-3, 3.7, "3ba", "3", Time.from_epoch(3)])
def test_a_count_is_a_whole_number_in_its_own_unit(value: Any) -> None:
    """Negative, broken and foreign counts are refused with the name of the field."""
    with pytest.raises(ConfigError, match=r"Timestamp\(batch="):
        Timestamp(batch=value)


def test_a_timestamp_cannot_be_changed() -> None:
    """Moving on gives a new timestamp; the old one stays."""
    stamp = Timestamp(batch=3)
    with pytest.raises(AttributeError):
        stamp.batch = 4  # type: ignore[misc, assignment]
    assert stamp.to_next_batch(8).batch == 4
    assert stamp == Timestamp(batch=3)


@given(timestamps, steps)
def test_the_next_batch_counts_everywhere(stamp: Timestamp, step: tuple[int, int, timedelta]) -> None:
    """A batch adds its samples, tokens and time to the run, the iteration and the epoch."""
    samples, tokens, duration = step
    after = stamp.to_next_batch(samples, tokens, duration)
    assert after == stamp.copy(
        batch=stamp.batch + 1,
        batch_in_epoch=stamp.batch_in_epoch + 1,
        sample=stamp.sample + samples,
        sample_in_epoch=stamp.sample_in_epoch + samples,
        token=stamp.token + tokens,
        token_in_iteration=stamp.token_in_iteration + tokens,
        token_in_epoch=stamp.token_in_epoch + tokens,
        total_wct=stamp.total_wct + duration,
        iteration_wct=stamp.iteration_wct + duration,
        epoch_wct=stamp.epoch_wct + duration,
        batch_wct=duration,
    )


@given(timestamps, clocks)
def test_the_next_epoch_starts_its_counts_at_zero(stamp: Timestamp, duration: timedelta) -> None:
    """An epoch is counted, and what is counted in an epoch starts again; totals stay."""
    assert stamp.to_next_epoch(duration) == stamp.copy(
        epoch=stamp.epoch + 1,
        epoch_in_iteration=stamp.epoch_in_iteration + 1,
        batch_in_epoch=0,
        sample_in_epoch=0,
        token_in_epoch=0,
        total_wct=stamp.total_wct + duration,
        iteration_wct=stamp.iteration_wct + duration,
        epoch_wct=timedelta(),
        batch_wct=timedelta(),
    )


@given(timestamps, clocks)
def test_the_next_iteration_starts_its_counts_at_zero(stamp: Timestamp, duration: timedelta) -> None:
    """An iteration is counted, and what is counted in an iteration starts again; totals stay."""
    assert stamp.to_next_iteration(duration) == stamp.copy(
        iteration=stamp.iteration + 1,
        epoch_in_iteration=0,
        token_in_iteration=0,
        total_wct=stamp.total_wct + duration,
        iteration_wct=timedelta(),
        epoch_wct=timedelta(),
        batch_wct=timedelta(),
    )


@given(timestamps)
def test_a_timestamp_survives_being_saved(stamp: Timestamp) -> None:
    """``state_dict`` gives all fields back, as ``timedelta`` or, as files hold them, in seconds."""
    saved = stamp.state_dict()
    assert Timestamp.from_state_dict(saved) == stamp
    plain = {k: v.total_seconds() if isinstance(v, timedelta) else v for k, v in saved.items()}
    assert Timestamp.from_state_dict(plain) == stamp


def test_a_timestamp_of_an_older_version_is_read() -> None:
    """Fields that a file lacks are zero, and fields that it has too many are left."""
    assert Timestamp.from_state_dict({"batch": 3, "of_the_future": 1}) == Timestamp(batch=3)


def test_a_timestamp_compares_with_times_in_their_unit() -> None:
    """``timestamp >= '10ba'`` asks for batches, ``< '2ep'`` for epochs, ``< '90m'`` for the wall clock."""
    stamp = Timestamp(epoch=1, batch=10, total_wct=timedelta(hours=1))
    assert stamp == "10ba"
    assert stamp >= Time.from_batch(10)
    assert stamp < "2ep"
    assert stamp > "9ba"
    assert stamp <= "90m"
    assert not stamp >= "11ba"
    with pytest.raises(ConfigError, match="has no end"):
        assert stamp < "0.5dur"


def test_get_gives_the_total_of_a_unit() -> None:
    """``get`` answers in the unit that was asked for; seconds are whole."""
    stamp = Timestamp(iteration=1, epoch=2, batch=3, sample=4, token=5, total_wct=timedelta(seconds=6.7))
    assert [str(stamp.get(unit)) for unit in ("iter", "ep", "ba", "sp", "tok", "sec")] == [
        "1iter",
        "2ep",
        "3ba",
        "4sp",
        "5tok",
        "6sec",
    ]
    assert stamp.count(TimeUnit.SECOND) == 6.7
