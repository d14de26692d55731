"""'auto:1%': checkpoints as often as the time they cost allows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composerlite.core import Event, State, Timestamp, create_interval_scheduler
from composerlite.core.interval import AutoInterval, IntervalScheduler
from composerlite.errors import ConfigError


class Run:
    """A training whose batches take ``step_seconds`` each and which saves when the interval says so.

    Its clock is that of the timestamp, which counts the time that saves block as the trainer does: in the next batch.
    """

    def __init__(self, interval: AutoInterval, *, step_seconds: float = 1.0) -> None:
        self.interval = interval
        self.step_seconds = step_seconds
        self.state = new_state()
        self.saves: list[float] = []
        self.blocked = 0.0
        self._owed = 0.0

    @property
    def seconds(self) -> float:
        return self.state.timestamp.total_wct.total_seconds()

    def batch(self) -> bool:
        """One batch; whether a save is due after it."""
        state = self.state
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(1, 0, timedelta(seconds=self.step_seconds + self._owed))
        self._owed = 0.0
        return self.interval(state, Event.BATCH_CHECKPOINT)

    def save(self, blocked_seconds: float, in_flight_seconds: float = 0.0) -> None:
        """A save that is over at once."""
        self.saves.append(self.seconds)
        self.blocked += blocked_seconds
        self._owed = blocked_seconds
        self.interval.save_began(self.state)
        self.interval.record_save(blocked_seconds, in_flight_seconds)

    def train(self, seconds: float, cost: Callable[[int], float], in_flight_seconds: float = 0.0) -> Run:
        """Train for so long; the nth save costs ``cost(n)`` seconds."""
        end = self.seconds + seconds
        while self.seconds < end:
            if self.batch():
                self.save(cost(len(self.saves)), in_flight_seconds)
        return self

    @property
    def gaps(self) -> list[float]:
        return [now - before for before, now in zip(self.saves, self.saves[1:], strict=False)]


def new_state() -> State:
    return State(nn.Identity(), rank_zero_seed=0, run_name="run", device=torch.device("cpu"), max_duration="1000000ep")


def test_the_first_save_comes_soon() -> None:
    """After ten seconds of training, whatever the budget: before there is a save nobody knows what it costs."""
    assert Run(AutoInterval(0.0001)).train(100, lambda n: 1.0).saves == [10.0]


@given(
    st.floats(0.001, 0.2),
    st.floats(0.01, 20.0),
    st.floats(0.01, 5.0),
)
def test_saves_stay_within_the_budget(budget: float, cost: float, step_seconds: float) -> None:
    """Once the first save is paid off, saves of one cost never take more than the budget; nor do they wait idly."""
    run = Run(AutoInterval(budget, shortest_seconds=0.0), step_seconds=step_seconds)
    ideal = cost / budget
    for _ in range(12):
        while not run.batch():
            run.state.timestamp = run.state.timestamp.copy(total_wct=run.seconds + ideal / 50)
        run.save(cost)
    assert run.blocked <= budget * run.seconds
    assert max(run.gaps) <= 1.2 * ideal + 2 * (step_seconds + cost)


@given(st.integers(1, 20), st.floats(1.0, 100.0))
def test_one_slow_save_does_not_stop_saving(which: int, slow: float) -> None:
    """A disk that hangs once: the interval doubles until that is paid for, and no more."""
    run = Run(AutoInterval(0.01), step_seconds=0.5).train(400, lambda n: slow if n == which else 0.1)
    assert max(run.gaps) <= 2 * 0.1 / 0.009 + slow + 1.0


def test_saves_that_become_dearer_come_less_often() -> None:
    """When the cost rises for good, so does the interval, within a few saves."""
    run = Run(AutoInterval(0.01), step_seconds=1.0).train(20_000, lambda n: 0.1 if n < 20 else 1.0)
    assert run.gaps[28:] == pytest.approx([1.0 / 0.009] * len(run.gaps[28:]), abs=3.0)
    assert run.blocked / run.seconds < 0.01


def test_saves_that_cost_nothing_have_a_shortest_interval() -> None:
    """Hidden behind training altogether, saves still leave ten seconds, or as much as is given, between them."""
    assert set(Run(AutoInterval(0.01)).train(100, lambda n: 0.0).gaps) == {10.0}
    assert set(Run(AutoInterval(0.01, shortest_seconds=3.0)).train(100, lambda n: 0.0).gaps) == {3.0}


def test_a_save_is_in_flight_for_half_of_the_time_at_most() -> None:
    """Saves that block for a moment and then write for a minute come every two minutes."""
    run = Run(AutoInterval(0.01), step_seconds=1.0).train(1000, lambda n: 0.01, in_flight_seconds=60.0)
    assert run.gaps == pytest.approx([120.0] * len(run.gaps), abs=0.1)


def test_nothing_is_due_while_a_save_is_in_flight() -> None:
    """However long it takes; once it is over the next one is due."""
    run = Run(AutoInterval(0.01))
    while not run.batch():
        pass
    run.interval.save_began(run.state)
    assert not any(run.batch() for _ in range(500))
    run.interval.record_save(0.1)
    assert run.batch()


def test_a_save_that_failed_costs_nothing() -> None:
    """It is no measurement, and the next one is due an interval after it."""
    run = Run(AutoInterval(0.01)).train(100, lambda n: 0.5)
    interval = run.interval.interval_seconds
    for _ in range(5):
        run.interval.save_began(run.state)
        run.interval.record_failure()
        began = run.seconds
        while not run.batch():
            pass
        assert interval <= run.seconds - began <= interval + 1.0
    assert run.interval.interval_seconds == interval


def test_it_fires_at_batches_and_at_the_end() -> None:
    """Within training at BATCH_CHECKPOINT alone; when training is over at each checkpoint event, as other intervals."""
    run = Run(AutoInterval(0.01))
    while not run.batch():
        pass
    assert [event for event in Event if run.interval(run.state, event)] == [Event.BATCH_CHECKPOINT]

    run.interval.save_began(run.state)
    run.state.stop_training()
    ends = [Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT]
    assert [event for event in Event if run.interval(run.state, event)] == ends
    assert not AutoInterval(0.01, include_end_of_training=False)(run.state, Event.EPOCH_CHECKPOINT)


@given(st.integers(1, 300), st.sampled_from([0.1, 0.5, 4.0]))
def test_a_resumed_run_saves_when_the_interrupted_one_would_have(batches: int, slow: float) -> None:
    """What was measured is in the checkpoint: the resumed run does not measure again and saves at the same batches."""
    whole = Run(AutoInterval(0.01))
    for _ in range(batches):
        if whole.batch():
            whole.save(slow if len(whole.saves) % 3 == 1 else 0.1)
    resumed = Run(AutoInterval(0.01))
    resumed.interval.load_state_dict(json.loads(json.dumps(whole.interval.state_dict())))
    resumed.state.timestamp = whole.state.timestamp
    for run in (whole, resumed):
        run._owed, run.saves = 0.0, []
        run.train(200, lambda n: 0.1)
    assert resumed.saves == whole.saves
    assert repr(resumed.interval) == repr(whole.interval)


def test_time_that_was_set_back() -> None:
    """After ``reset_time`` the interval goes on from zero with the cost it knows."""
    run = Run(AutoInterval(0.01)).train(300, lambda n: 0.5)
    run.state.timestamp, run.state.previous_timestamp, run.saves = Timestamp(), None, []
    run.train(300, lambda n: 0.5)
    assert run.saves[0] == pytest.approx(0.5 / 0.009, abs=2.0)
    assert max(run.gaps) < 0.5 / 0.009 + 2.0


@pytest.mark.parametrize(("text", "budget"), [("auto:1%", 0.01), ("auto:0.5%", 0.005), (" AUTO : 20 % ", 0.2)])
def test_it_is_written_as_a_percentage(text: str, budget: float) -> None:
    """The way to write it in YAML."""
    interval = create_interval_scheduler(text, allow_auto=True)
    assert isinstance(interval, AutoInterval)
    assert math.isclose(interval.budget, budget)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("auto", "invalid interval 'auto': .* such as 'auto:1%'"),
        ("auto:", "invalid interval"),
        ("auto:1", "invalid interval"),
        ("auto:-1%", "invalid interval"),
        ("auto:1.2.3%", "invalid interval"),
        ("auto:often%", "invalid interval"),
        ("auto:0%", "0% of the training time: expected more than 0% and less than 100%"),
        ("auto:100%", "100% of the training time: expected more than 0% and less than 100%"),
        ("auto:200%", "200% of the training time: expected more than 0% and less than 100%"),
    ],
)
def test_what_cannot_be_kept_is_refused(text: str, says: str) -> None:
    """At construction, with the rule."""
    with pytest.raises(ConfigError, match=says):
        create_interval_scheduler(text, allow_auto=True)


def test_it_is_for_checkpoints_only() -> None:
    """Evaluation and logs have no cost that is measured: there it is refused with what to give instead."""
    with pytest.raises(ConfigError, match=r"'auto:1%': only save_interval can adapt .* such as '100ba'"):
        create_interval_scheduler("auto:1%")
    assert isinstance(create_interval_scheduler("2ep", allow_auto=True), IntervalScheduler)
    with pytest.raises(ConfigError, match="shortest_seconds=-1"):
        AutoInterval(0.01, shortest_seconds=-1)
