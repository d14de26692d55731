"""LRMonitor, NaNMonitor and MemoryMonitor."""

from __future__ import annotations

import pytest
import torch

from composerlite.callbacks import LRMonitor, MemoryMonitor, NaNMonitor
from composerlite.errors import ConfigError, TrainingError


def test_learning_rate_is_the_one_trained_with(training):
    """With a scheduler that steps every batch, batch n shows the rate of batch n, not of the next."""
    run = training(LRMonitor())
    run.state.schedulers = [torch.optim.lr_scheduler.StepLR(run.state.optimizers[0], 1, gamma=0.5)]
    run.start()
    run.batch()
    run.batch()

    series = run.logged.get_timeseries("lr-SGD/group0")
    assert series["batch"].tolist() == [1, 2]
    assert series["lr-SGD/group0"].tolist() == [0.1, 0.05]


def test_learning_rates_of_all_groups_and_optimizers(training):
    """Each parameter group has a curve of its own; two optimizers of one class do not share one."""
    run = training(LRMonitor())
    first = run.state.optimizers[0]
    first.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.3})
    run.state.optimizers = (first, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.7))
    run.start()
    run.batch()

    assert run.logged.most_recent_values == {"lr-SGD/group0": 0.1, "lr-SGD/group1": 0.3, "lr-SGD:1/group0": 0.7}


def test_nan_loss_ends_training_with_good_weights(training):
    """The first NaN in the loss is an error that names loss and batch; the weights are still good."""
    run = training(NaNMonitor()).start()
    run.batch()
    weights = run.model.weight.clone()

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
def test_nan_among_several_losses(training, loss, name):
    """Of several losses the error names the one that is NaN."""
    run = training(NaNMonitor()).start()
    run.state.loss = loss

    with pytest.raises(TrainingError, match=name):
        run.engine.run_event("after_loss")


def test_numbers_are_let_through(training):
    """Finite and infinite losses do not end training."""
    run = training(NaNMonitor()).start()
    run.batch()
    run.state.loss = {"total": torch.tensor(float("inf"))}
    run.engine.run_event("after_loss")

    assert int(run.state.timestamp.batch) == 1


def test_memory_of_the_process(training):
    """On a CPU the resident memory is logged in GB, and its peak."""
    run = training(MemoryMonitor()).start()
    run.batch()

    assert 0.01 < run.last("memory/rss") < 1000
    assert 0.01 < run.last("memory/peak_rss") < 1000


def test_memory_grows_by_what_is_allocated(training):
    """Half a gigabyte more in use is half a gigabyte more in the log."""
    run = training(MemoryMonitor()).start()
    run.batch()
    before = run.last("memory/rss")
    held = torch.ones(125_000_000)
    run.batch()

    assert run.last("memory/rss") - before == pytest.approx(held.nbytes / 1e9, abs=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_memory_of_a_gpu(training):
    """On a GPU the allocator's counts are logged in GB under the names asked for; an unknown key is an error."""
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
