"""RuntimeEstimator."""

from __future__ import annotations

import time

import pytest

from composerlite.callbacks import RuntimeEstimator
from composerlite.errors import ConfigError


def test_what_is_left_at_the_speed_so_far(training):
    """Four epochs of five half-second batches: after the first epoch three are left, 7.5 seconds."""
    run = training(RuntimeEstimator(time_unit="seconds")).start()
    run.epoch()

    assert run.last("wall_clock/remaining_estimate") == pytest.approx(7.5)


@pytest.mark.parametrize("max_duration", ["20ba", "160sp", "10s", "4ep"])
def test_any_unit_of_max_duration(training, max_duration):
    """Whatever max_duration counts, after 8 of 20 batches twelve half seconds are left."""
    run = training(RuntimeEstimator(time_unit="seconds"), max_duration=max_duration).start()
    for _ in range(5):
        run.batch()
    run.epoch()
    for _ in range(3):
        run.batch()

    assert run.last("wall_clock/remaining_estimate") == pytest.approx(6.0)


def test_slow_start_is_left_out(training):
    """The first batch takes a minute and the estimate is that of the others."""
    run = training(RuntimeEstimator(time_unit="seconds"), max_duration="10ba").start()
    run.batch(seconds=60.0)
    assert "wall_clock/remaining_estimate" not in run.logged.data

    run.batch()
    assert run.last("wall_clock/remaining_estimate") == pytest.approx(4.0)


def test_evaluation_to_come_is_counted(training):
    """One evaluation in half of training means one more in the other half."""
    run = training(RuntimeEstimator(skip_batches=0, time_unit="seconds"), max_duration="10ba").start()
    for _ in range(5):
        run.batch()
    began = time.monotonic()
    run.evaluate(during=lambda: time.sleep(0.2))
    took = time.monotonic() - began
    run.batch()

    # Four batches of half a second are left, and four fifths of an evaluation every five batches.
    assert 2.0 + 0.8 * 0.2 <= run.last("wall_clock/remaining_estimate") <= 2.0 + 0.8 * took + 1e-6


def test_a_resumed_run_is_measured_from_where_it_resumes(training):
    """What the interrupted run took does not count: it may have been another machine."""
    run = training(RuntimeEstimator(time_unit="seconds"), max_duration="20ba")
    run.state.timestamp = run.state.timestamp.copy(batch=10, sample=80, total_wct=1000)
    run.start()
    for _ in range(5):
        run.batch()

    assert run.last("wall_clock/remaining_estimate") == pytest.approx(2.5)


def test_epochs_of_unknown_length(training):
    """Where the loader has no length, there is an estimate once a whole epoch is over."""
    run = training(RuntimeEstimator(time_unit="seconds"), max_duration="4ep").start()
    for _ in range(5):
        run.state.set_dataloader(iter([]), "train")
        run.batch()
    assert "wall_clock/remaining_estimate" not in run.logged.data

    run.epoch()
    run.state.set_dataloader(iter([]), "train")
    run.batch()
    assert run.last("wall_clock/remaining_estimate") > 0


def test_bad_arguments():
    """Bad arguments are errors at construction that say what is allowed."""
    with pytest.raises(ConfigError, match="skip_batches=-1"):
        RuntimeEstimator(skip_batches=-1)
    with pytest.raises(ConfigError, match="Known: days, hours, minutes, seconds"):
        RuntimeEstimator(time_unit="weeks")
