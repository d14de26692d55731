"""Monitors: norms, learning rates, NaN, memory, speed and remaining time."""

from __future__ import annotations

import functools
import time

import pytest
import torch
from torch import nn

from composerlite.callbacks import (
    LRMonitor,
    MemoryMonitor,
    NaNMonitor,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
)
from composerlite.callbacks.speed_monitor import peak_flops
from composerlite.core import Precision
from composerlite.errors import ConfigError, TrainingError

LEFT = "wall_clock/remaining_estimate"


# ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_norms_are_those_of_the_step(training):
    """Norms of gradients, parameters and Adam's moments are the norms that torch computes after the step."""
    run = training(OptimizerMonitor(batch_log_interval=1), optimizer=torch.optim.Adam).start()
    run.batch()
    run.batch()
    weight = run.model.weight
    moments = run.state.optimizers[0].state[weight]
    gradients = torch.cat([parameter.grad.flatten() for parameter in run.model.parameters()])
    for name, tensor in (
        ("grad/weight", weight.grad),
        ("grad/global", gradients),
        ("param/weight", weight),
        ("moment/weight", moments["exp_avg"]),
        ("second_moment_sqrt/weight", moments["exp_avg_sq"].sqrt()),
    ):
        assert run.last(f"l2_norm/{name}") == pytest.approx(tensor.norm().item()), name


def test_norms_of_sgd(training):
    """SGD's momentum buffer is the moment; there is no second moment. Norms are logged at multiples of the interval."""
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    run = training(OptimizerMonitor(batch_log_interval=2), optimizer=sgd).start()
    for _ in range(5):
        run.batch()
        if int(run.state.timestamp.batch) == 4:
            moment = run.state.optimizers[0].state[run.model.weight]["momentum_buffer"].norm().item()
    assert run.last("l2_norm/moment/weight") == pytest.approx(moment)
    assert "l2_norm/second_moment_sqrt/weight" not in run.logged.data
    assert run.logged.get_timeseries("l2_norm/grad/global")["batch"].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("all_norms", "has_gradients", "expected"),
    [(False, True, ["grad/bias", "grad/global", "grad/weight"]), (True, False, ["param/bias", "param/weight"])],
)
def test_which_norms_are_logged(training, all_norms, has_gradients, expected):
    """Gradients only with ``log_optimizer_metrics=False``; parameters only if nothing has gradients."""
    run = training(OptimizerMonitor(log_optimizer_metrics=all_norms, batch_log_interval=1)).start()
    if has_gradients:
        run.batch()
    else:
        run.engine.run_event("after_train_batch")
        run.state.timestamp = run.state.timestamp.to_next_batch()
        run.engine.run_event("batch_end")
    assert sorted(run.logged.data) == [f"l2_norm/{name}" for name in expected]


def test_sparse_gradients(training):
    """A sparse gradient has the norm of its values."""
    model = nn.Sequential(nn.EmbeddingBag(10, 2, sparse=True))
    run = training(OptimizerMonitor(batch_log_interval=1), model=model)
    model(torch.ones(8, 4, dtype=torch.long)).sum().backward()
    run.start()
    run.engine.run_event("after_train_batch")
    run.state.timestamp = run.state.timestamp.to_next_batch()
    run.engine.run_event("batch_end")
    assert run.last("l2_norm/grad/0.weight") == pytest.approx(model[0].weight.grad.to_dense().norm().item())


# ── learning rates ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_learning_rates(training):
    """Batch n has the rate of batch n, also if a scheduler steps; each group and optimizer has its own name."""
    run = training(LRMonitor())
    first = run.state.optimizers[0]
    run.state.schedulers = [torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)]
    first.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.3})
    run.state.optimizers = (first, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.7))
    run.start()
    run.batch()
    assert run.logged.most_recent_values == {"lr-SGD/group0": 0.1, "lr-SGD/group1": 0.3, "lr-SGD:1/group0": 0.7}
    run.state.schedulers = []
    run.batch()
    assert run.logged.get_timeseries("lr-SGD/group0")["lr-SGD/group0"].tolist() == [0.1, 0.05]


# ── NaN ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_nan_ends_training_with_good_weights(training):
    """The error names the loss and the batch. Finite and infinite losses are no error."""
    run = training(NaNMonitor()).start()
    run.batch()
    weights = run.model.weight.clone()
    run.state.loss = {"total": torch.tensor(float("inf"))}
    run.engine.run_event("after_loss")
    with pytest.raises(TrainingError, match=r"loss/train/total is NaN in batch 2 \(epoch 1"):
        run.batch(scale=float("nan"))
    assert torch.equal(run.model.weight, weights)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        ({"total": torch.tensor(1.0), "z": torch.tensor(float("nan"))}, "loss/train/z"),
        ([torch.tensor(1.0), torch.tensor(float("nan"))], "loss/train/loss1"),
    ],
)
def test_nan_in_one_of_several_losses(training, loss, name):
    """The error names the loss."""
    run = training(NaNMonitor()).start()
    run.state.loss = loss
    with pytest.raises(TrainingError, match=name):
        run.engine.run_event("after_loss")


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_memory_of_the_process(training):
    """Half a gigabyte more in use is half a gigabyte more in the log."""
    run = training(MemoryMonitor()).start()
    run.batch()
    before = run.last("memory/rss")
    held = torch.ones(125_000_000)
    run.batch()
    assert run.last("memory/rss") - before == pytest.approx(held.nbytes / 1e9, abs=0.1)
    assert before < run.last("memory/peak_rss") < 1000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_memory_of_a_gpu(training):
    """Byte counts of the allocator are logged in GB under the given names; an unknown key is an error."""
    run = training(MemoryMonitor({"allocated_bytes.all.current": "now", "num_alloc_retries": "retries"})).start()
    run.state.device = torch.device("cuda", 0)
    held = torch.ones(125_000_000, device="cuda")
    run.batch()
    assert run.last("memory/now") == pytest.approx(held.nbytes / 1e9, abs=0.1)
    assert run.last("memory/retries") == 0
    run = training(MemoryMonitor({"allocated_bytes.all.curent": "now"})).start()
    run.state.device = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"Did you mean 'allocated_bytes\.all\.current'"):
        run.batch()


# ── speed ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class CountsFlops(nn.Linear):
    """A model with 100 operations per sample."""

    def flops_per_batch(self, batch: torch.Tensor) -> float:
        return 100.0 * len(batch)


@pytest.mark.parametrize("tokens", [0, 80])
def test_throughput_is_the_mean_over_the_window(training, tokens):
    """From the second batch on; older batches do not count, and batches without tokens have no token throughput."""
    run = training(SpeedMonitor(window_size=2), tokens=tokens).start()
    run.batch(seconds=100.0)
    assert "throughput/batches_per_sec" not in run.logged.data
    for seconds in (1.0, 0.5, 0.5):
        run.batch(seconds=seconds)
    assert run.last("throughput/batches_per_sec") == pytest.approx(2.0)
    assert run.last("throughput/samples_per_sec") == pytest.approx(16.0)
    assert ("throughput/tokens_per_sec" in run.logged.data) is (tokens > 0)
    if tokens:
        assert run.last("throughput/tokens_per_sec") == pytest.approx(160.0)


def test_wall_clock(training):
    """Times are in ``time_unit``, and a resumed run continues the time of evaluation."""
    run = training(SpeedMonitor(time_unit="minutes")).start()
    run.evaluate(during=lambda: time.sleep(0.01))
    for _ in range(3):
        run.batch(seconds=60.0)
    assert run.last("wall_clock/train") == pytest.approx(3.0)
    assert run.last("wall_clock/val") >= 0.01 / 60
    assert run.last("wall_clock/total") == pytest.approx(run.last("wall_clock/train") + run.last("wall_clock/val"))
    resumed = SpeedMonitor(time_unit="minutes")
    resumed.load_state_dict(run.state.callbacks[1].state_dict())
    after = training(resumed).start()
    after.batch()
    assert after.last("wall_clock/val") == run.last("wall_clock/val")


def test_a_second_fit_measures_anew(training):
    """After ``reset_time`` speeds are those of the new training."""
    run = training(SpeedMonitor()).start()
    run.epoch()
    run.state.timestamp = run.state.timestamp.copy(batch=0, sample=0, total_wct=0)
    run.start()
    run.batch(seconds=3.0)
    run.batch(seconds=0.25)
    assert run.last("throughput/batches_per_sec") == pytest.approx(4.0)


@pytest.mark.parametrize("counts", [True, False])
def test_operations_per_second(training, caplog, counts):
    """A model with ``flops_per_batch`` has operations per second and their share; without, a warning explains."""
    model = CountsFlops(4, 2) if counts else None
    run = training(SpeedMonitor(gpu_flops_available=3200.0), model=model).start()
    run.state.world_size = 3
    run.batch()
    run.batch()
    assert ("flops_per_batch" in caplog.text) is not counts
    assert ("throughput/device/mfu" in run.logged.data) is counts
    if counts:
        assert run.last("throughput/device/flops_per_sec") == pytest.approx(1600.0)
        assert run.last("throughput/flops_per_sec") == pytest.approx(4800.0)
        assert run.last("throughput/device/mfu") == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "bf16", "fp16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12, 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12, 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12, 835.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 312e12),
        ("NVIDIA L40S", 362e12, 362e12),
        ("NVIDIA L40", None, None),
        ("NVIDIA A10G", None, None),
        ("Tesla V100-SXM2-16GB", None, 125e12),
        ("NVIDIA GeForce RTX 4090", None, None),
    ],
)
def test_peak_operations_of_a_gpu(name, bf16, fp16):
    """Known by the name of the GPU, for 16-bit precisions only."""
    assert peak_flops(name, Precision.AMP_BF16) == bf16
    assert peak_flops(name, Precision.AMP_FP16) == fp16
    assert peak_flops(name, Precision.FP32) is None


# ── remaining time ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("max_duration", ["20ba", "160sp", "10s", "4ep"])
def test_remaining_time_in_any_unit(training, max_duration):
    """After 8 of 20 batches of half a second, six seconds are left."""
    run = training(RuntimeEstimator(time_unit="seconds"), max_duration=max_duration).start()
    run.epoch()
    assert run.last(LEFT) == pytest.approx(7.5)
    for _ in range(3):
        run.batch()
    assert run.last(LEFT) == pytest.approx(6.0)


def test_a_slow_start_does_not_count(training):
    """The first batch takes a minute; the estimate is that of the other batches."""
    run = training(RuntimeEstimator(time_unit="seconds"), max_duration="10ba").start()
    run.batch(seconds=60.0)
    assert LEFT not in run.logged.data
    run.batch()
    assert run.last(LEFT) == pytest.approx(4.0)


def test_future_evaluations_count(training):
    """One evaluation in half of training means one more in the other half."""
    run = training(RuntimeEstimator(skip_batches=0, time_unit="seconds"), max_duration="10ba").start()
    for _ in range(5):
        run.batch()
    began = time.monotonic()
    run.evaluate(during=lambda: time.sleep(0.05))
    took = time.monotonic() - began
    run.batch()
    # Four batches of half a second are left, and four fifths of an evaluation every five batches.
    assert 2.0 + 0.8 * 0.05 <= run.last(LEFT) <= 2.0 + 0.8 * took + 1e-6


def test_a_resumed_run_is_measured_from_the_resume(training):
    """The time of the interrupted run does not count: it may have been on another machine."""
    run = training(RuntimeEstimator(time_unit="seconds"), max_duration="20ba")
    run.state.timestamp = run.state.timestamp.copy(batch=10, sample=80, total_wct=1000)
    run.start()
    for _ in range(5):
        run.batch()
    assert run.last(LEFT) == pytest.approx(2.5)


def test_epochs_of_unknown_length(training):
    """If the loader has no length, the first estimate comes after a whole epoch."""
    run = training(RuntimeEstimator(time_unit="seconds"), max_duration="4ep").start()
    for _ in range(5):
        run.state.set_dataloader(iter([]), "train")
        run.batch()
    assert LEFT not in run.logged.data
    run.epoch()
    run.state.set_dataloader(iter([]), "train")
    run.batch()
    assert run.last(LEFT) > 0


@pytest.mark.parametrize(
    ("monitor", "arguments", "message"),
    [
        (OptimizerMonitor, {"batch_log_interval": 0}, "batch_log_interval=0"),
        (SpeedMonitor, {"window_size": 0}, "window_size=0"),
        (SpeedMonitor, {"time_unit": "hour"}, "Did you mean 'hours'"),
        (SpeedMonitor, {"gpu_flops_available": 0}, "gpu_flops_available=0"),
        (SpeedMonitor, {"windowsize": 3}, "Did you mean 'window_size'"),
        (RuntimeEstimator, {"skip_batches": -1}, "skip_batches=-1"),
        (RuntimeEstimator, {"time_unit": "weeks"}, "Known: days, hours, minutes, seconds"),
        (MemoryMonitor, {"dist_aggregate_batch_interval": 0}, "dist_aggregate_batch_interval=0"),
    ],
)
def test_bad_arguments(monitor, arguments, message):
    """An invalid argument is an error at construction with the rule."""
    with pytest.raises(ConfigError, match=message):
        monitor(**arguments)
