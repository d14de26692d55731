"""Intervals: "every 10 batches" and its like fire exactly when they should, whatever the batches are."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composerlite.core import Event, State, Time, Timestamp, TimeUnit, create_interval_scheduler
from composerlite.core.interval import IntervalScheduler
from composerlite.errors import ConfigError

Epochs = list[list[tuple[int, float]]]
"""For each epoch its batches: how many samples (and tokens) each has and how many seconds it took."""

# Seconds in quarters: sums of these are exact.
batches = st.tuples(st.integers(1, 40), st.integers(1, 40).map(lambda quarters: quarters / 4))
epochs = st.lists(st.lists(batches, min_size=1, max_size=12), min_size=1, max_size=6)


def firings(state: State, data: Epochs, scheduler: IntervalScheduler) -> list[Timestamp]:
    """Walk through training as the loop does and ask at every event: where the interval fired."""
    fired: list[Timestamp] = []

    def ask(*events: Event) -> None:
        for event in events:
            if scheduler(state, event):
                fired.append(state.timestamp)

    def move(to: Timestamp) -> None:
        state.previous_timestamp, state.timestamp = state.timestamp, to

    for epoch in data:
        for count, seconds in epoch:
            ask(Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH)
            move(state.timestamp.to_next_batch(count, 3 * count, timedelta(seconds=seconds)))
            ask(Event.BATCH_END, Event.BATCH_CHECKPOINT)
        move(state.timestamp.to_next_epoch())
        ask(Event.EPOCH_END, Event.EPOCH_CHECKPOINT)
        move(state.timestamp.to_next_iteration())
        ask(Event.ITERATION_END, Event.ITERATION_CHECKPOINT)
    return fired


TOTALS: dict[str, Callable[[Epochs], float]] = {
    "ba": lambda data: sum(len(epoch) for epoch in data),
    "sp": lambda data: sum(count for epoch in data for count, _ in epoch),
    "tok": lambda data: 3 * sum(count for epoch in data for count, _ in epoch),
    "sec": lambda data: sum(seconds for epoch in data for _, seconds in epoch),
    "ep": len,
    "iter": len,
}


def steps_of(data: Epochs, unit: str) -> list[float]:
    """The total in ``unit`` after each event at which an interval in that unit is looked at."""
    if unit in ("ep", "iter"):
        return [float(i + 1) for i in range(len(data))]
    flat = [batch for epoch in data for batch in epoch]
    return [TOTALS[unit]([flat[: i + 1]]) for i in range(len(flat))]


@pytest.mark.parametrize("unit", TOTALS)
@given(data=epochs, step=st.integers(1, 50))
def test_an_interval_fires_where_a_multiple_is_crossed(unit: str, data: Epochs, step: int) -> None:
    """Over uneven batches it fires at each event at which the count reaches or passes a multiple, and at no other."""
    state = new_state("1000000ep")
    fired = firings(state, data, IntervalScheduler(f"{step}{unit}"))
    totals = steps_of(data, unit)
    crossed = [
        now for before, now in zip([0.0, *totals], totals, strict=False) if math.floor(before / step) < now // step
    ]
    assert [stamp.count(TimeUnit(unit)) for stamp in fired] == crossed


@pytest.mark.parametrize("unit", TOTALS)
@given(data=epochs, step=st.integers(1, 50))
def test_an_interval_also_fires_at_the_end(unit: str, data: Epochs, step: int) -> None:
    """Where training ends, it fires as well; with ``include_end_of_training=False`` it does not."""
    end = sum(len(epoch) for epoch in data)
    with_end = firings(new_state(f"{end}ba"), data, IntervalScheduler(f"{step}{unit}"))
    without = firings(new_state(f"{end}ba"), data, IntervalScheduler(f"{step}{unit}", include_end_of_training=False))
    assert {int(s.batch) for s in with_end} == {int(s.batch) for s in without} | {end}


@given(step=st.integers(-3, 0), unit=st.sampled_from([*TOTALS, "dur"]), data=epochs)
def test_an_interval_of_nothing_never_fires(step: int, unit: str, data: Epochs) -> None:
    """Zero and negative intervals mean never, at the end of training as well."""
    end = sum(len(epoch) for epoch in data)
    assert firings(new_state(f"{end}ba"), data, IntervalScheduler(f"{step}{unit}")) == []


@given(batches=st.integers(1, 300), percent=st.integers(1, 100))
def test_a_fraction_of_training_is_exact(batches: int, percent: int) -> None:
    """``'0.1dur'`` of 30 batches is at 3, 6, 9, …: no multiple is lost or moved by rounding."""
    state = new_state(f"{batches}ba")
    fired = firings(state, [[(1, 0.25)] * batches], IntervalScheduler(f"{percent / 100}dur"))
    step = Fraction(percent, 100) * batches
    expected = {batches} | {n for n in range(1, batches + 1) if math.floor((n - 1) / step) < math.floor(n / step)}
    assert {int(stamp.batch) for stamp in fired} == expected


@pytest.mark.parametrize("end", ["30ba", "3ep", "3iter"])
def test_a_tenth_of_thirty_batches_is_three(end: str) -> None:
    """With epochs or iterations of 10 batches, ``'0.1dur'`` is every 3 batches, also within epochs."""
    state = new_state(end)
    state.set_dataloader([0] * 10)
    fired = firings(state, [[(8, 0.25)] * 10] * 3, IntervalScheduler("0.1dur"))
    assert sorted({int(stamp.batch) for stamp in fired}) == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]


@pytest.mark.parametrize(("unit", "per_batch"), [("sp", 8), ("tok", 24), ("sec", 0.25)])
def test_a_fraction_of_samples_tokens_or_seconds(unit: str, per_batch: float) -> None:
    """A fraction of training is counted in the unit in which training ends."""
    state = new_state(str(Time(int(20 * per_batch), unit)))
    fired = firings(state, [[(8, 0.25)] * 20], IntervalScheduler("0.25dur"))
    assert sorted({int(stamp.batch) for stamp in fired}) == [5, 10, 15, 20]


def test_a_fraction_of_training_needs_to_know_training() -> None:
    """Without an end, or with epochs of unknown length, a fraction is an error that says what to give."""
    scheduler = IntervalScheduler("0.5dur")
    for max_duration, message in ((None, "needs max_duration"), ("2ep", "data loader with a length")):
        with pytest.raises(ConfigError, match=message):
            firings(new_state(max_duration), [[(1, 0.25)]], scheduler)


def test_nothing_is_due_right_after_a_resume() -> None:
    """A loaded run that stands on a multiple does not fire before it has trained."""
    state = new_state("100ba")
    state.timestamp = Timestamp(batch=10)
    assert not IntervalScheduler("5ba")(state, Event.BATCH_CHECKPOINT)


def test_intervals_are_numbers_strings_times_or_functions() -> None:
    """An int counts epochs; a function is asked as it is; nonsense is an error at construction."""
    every_epoch = create_interval_scheduler(2)
    assert isinstance(every_epoch, IntervalScheduler)
    assert every_epoch.interval == Time.from_epoch(2)
    assert "2ep" in repr(every_epoch)

    def never(state: State, event: Event) -> bool:
        return False

    assert create_interval_scheduler(never) is never
    for nonsense in ("often", "1.5ep", 0.5, True):
        with pytest.raises(ConfigError):
            create_interval_scheduler(nonsense)


def new_state(max_duration: str | None) -> State:
    """The state of a run that has not begun."""
    return State(
        nn.Identity(), rank_zero_seed=0, run_name="a-run", device=torch.device("cpu"), max_duration=max_duration
    )
