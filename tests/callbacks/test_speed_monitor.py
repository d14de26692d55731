"""SpeedMonitor."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from composerlite.callbacks import SpeedMonitor
from composerlite.callbacks.speed_monitor import peak_flops
from composerlite.core import Precision
from composerlite.errors import ConfigError


class CountsFlops(nn.Linear):
    """A model that says what a batch costs: 100 operations per sample."""

    def flops_per_batch(self, batch: torch.Tensor) -> float:
        return 100.0 * len(batch)


def test_throughput_is_the_mean_over_the_window(training):
    """Throughput tells the speed of the last `window_size` batches and forgets older ones."""
    run = training(SpeedMonitor(window_size=2), tokens=80).start()
    for seconds in (100.0, 1.0, 0.5, 0.5):
        run.batch(seconds=seconds)

    assert run.last("throughput/batches_per_sec") == pytest.approx(2.0)
    assert run.last("throughput/samples_per_sec") == pytest.approx(16.0)
    assert run.last("throughput/tokens_per_sec") == pytest.approx(160.0)


def test_throughput_starts_with_the_second_batch(training):
    """The first batch, which starts everything up, does not count; from the second on there is a value."""
    run = training(SpeedMonitor()).start()
    run.batch(seconds=30.0)
    assert "throughput/batches_per_sec" not in run.logged.data

    run.batch(seconds=0.5)
    assert run.last("throughput/batches_per_sec") == pytest.approx(2.0)


def test_no_tokens_no_token_throughput(training):
    """Batches without tokens give no tokens per second rather than zero."""
    run = training(SpeedMonitor()).start()
    run.epoch()

    assert "throughput/tokens_per_sec" not in run.logged.data


def test_wall_clock_in_the_unit_asked_for(training):
    """Training time is logged in `time_unit`, and total is training plus evaluation."""
    run = training(SpeedMonitor(time_unit="minutes")).start()
    run.evaluate(during=lambda: time.sleep(0.01))
    for _ in range(3):
        run.batch(seconds=60.0)

    assert run.last("wall_clock/train") == pytest.approx(3.0)
    assert run.last("wall_clock/val") >= 0.01 / 60
    assert run.last("wall_clock/total") == pytest.approx(run.last("wall_clock/train") + run.last("wall_clock/val"))


def test_evaluation_time_goes_on_after_a_resume(training):
    """The evaluation time of before the interruption still counts after it."""
    before = training(SpeedMonitor()).start()
    before.evaluate(during=lambda: time.sleep(0.01))
    before.batch()

    resumed = SpeedMonitor()
    resumed.load_state_dict(before.state.callbacks[1].state_dict())
    after = training(resumed).start()
    after.batch()

    assert after.last("wall_clock/val") == before.last("wall_clock/val") > 0


def test_a_second_fit_measures_anew(training):
    """After the clock was set back (`reset_time`), speeds are those of the new training."""
    run = training(SpeedMonitor()).start()
    run.epoch()
    run.state.timestamp = run.state.timestamp.copy(batch=0, sample=0, total_wct=0)
    run.start()
    run.batch(seconds=3.0)
    run.batch(seconds=0.25)

    assert run.last("throughput/batches_per_sec") == pytest.approx(4.0)


def test_flops_of_a_model_that_counts_them(training):
    """A model with `flops_per_batch` gets operations per second and their share of what the device can do."""
    run = training(SpeedMonitor(gpu_flops_available=3200.0), model=CountsFlops(4, 2)).start()
    run.state.world_size = 3
    run.batch()
    run.batch()

    assert run.last("throughput/device/flops_per_sec") == pytest.approx(1600.0)
    assert run.last("throughput/flops_per_sec") == pytest.approx(4800.0)
    assert run.last("throughput/device/mfu") == pytest.approx(0.5)


def test_flops_of_a_model_that_does_not_count_them(training, caplog):
    """Asking for utilisation with a model that cannot tell its operations is said, not skipped in silence."""
    run = training(SpeedMonitor(gpu_flops_available=3200.0)).start()
    run.epoch()

    assert "flops_per_batch" in caplog.text
    assert "throughput/device/mfu" not in run.logged.data


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"window_size": 0}, "window_size=0"),
        ({"time_unit": "hour"}, "Did you mean 'hours'"),
        ({"gpu_flops_available": 0}, "gpu_flops_available=0"),
        ({"windowsize": 3}, "Did you mean 'window_size'"),
    ],
)
def test_bad_arguments(arguments, says):
    """A bad argument is an error at construction that names it."""
    with pytest.raises(ConfigError, match=says):
        SpeedMonitor(**arguments)


@pytest.mark.parametrize(
    ("name", "bf16", "fp16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12, 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12, 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12, 835.5e12),
        ("NVIDIA H200", 989.5e12, 989.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 312e12),
        ("NVIDIA L40S", 362e12, 362e12),
        ("NVIDIA L40", None, None),
        ("NVIDIA A10G", None, None),
        ("Tesla V100-SXM2-16GB", None, 125e12),
        ("Tesla T4", None, 65e12),
        ("NVIDIA GeForce RTX 4090", None, None),
    ],
)
def test_what_a_gpu_can_do_is_known_by_its_name(name: str, bf16: float | None, fp16: float | None) -> None:
    """For the share of it that is used; of a GPU that only resembles one, or in float32, nothing is claimed."""
    assert peak_flops(name, Precision.AMP_BF16) == bf16
    assert peak_flops(name, Precision.AMP_FP16) == fp16
    assert peak_flops(name, Precision.FP32) is None
