"""OptimizerMonitor."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from composerlite.callbacks import OptimizerMonitor
from composerlite.errors import ConfigError


def test_norms_are_those_of_the_step(training):
    """Norms of gradients, parameters and Adam's moments are those that torch computes right after the step."""
    run = training(OptimizerMonitor(batch_log_interval=1), optimizer=torch.optim.Adam).start()
    run.batch()
    run.batch()

    weight = run.model.weight
    moments = run.state.optimizers[0].state[weight]
    gradients = torch.cat([parameter.grad.flatten() for parameter in run.model.parameters()])
    assert run.last("l2_norm/grad/weight") == pytest.approx(weight.grad.norm().item())
    assert run.last("l2_norm/grad/global") == pytest.approx(gradients.norm().item())
    assert run.last("l2_norm/param/weight") == pytest.approx(weight.norm().item())
    assert run.last("l2_norm/moment/weight") == pytest.approx(moments["exp_avg"].norm().item())
    assert run.last("l2_norm/second_moment_sqrt/weight") == pytest.approx(moments["exp_avg_sq"].sqrt().norm().item())


def test_momentum_of_sgd(training):
    """SGD's momentum buffer counts as the moment; there is no second moment, and none is logged."""
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    run = training(OptimizerMonitor(batch_log_interval=1), optimizer=sgd).start()
    run.batch()

    buffer = run.state.optimizers[0].state[run.model.weight]["momentum_buffer"]
    assert run.last("l2_norm/moment/weight") == pytest.approx(buffer.norm().item())
    assert "l2_norm/second_moment_sqrt/weight" not in run.logged.data


def test_gradients_only(training):
    """With log_optimizer_metrics=False there are gradients and nothing else."""
    run = training(OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=1)).start()
    run.batch()

    assert sorted(run.logged.data) == ["l2_norm/grad/bias", "l2_norm/grad/global", "l2_norm/grad/weight"]


def test_every_so_many_batches(training):
    """Norms are logged at each multiple of the interval and never between."""
    run = training(OptimizerMonitor(batch_log_interval=2)).start()
    for _ in range(5):
        run.batch()

    assert run.logged.get_timeseries("l2_norm/grad/global")["batch"].tolist() == [2, 4]


def test_sparse_gradients(training):
    """A sparse gradient has the norm of its values."""
    model = nn.Sequential(nn.EmbeddingBag(10, 2, sparse=True))
    run = training(OptimizerMonitor(batch_log_interval=1), model=model)
    run.state.batch = torch.ones(8, 4, dtype=torch.long)
    model(run.state.batch).sum().backward()
    run.start()
    run.engine.run_event("after_train_batch")
    run.state.timestamp = run.state.timestamp.to_next_batch()
    run.engine.run_event("batch_end")

    assert run.last("l2_norm/grad/0.weight") == pytest.approx(model[0].weight.grad.to_dense().norm().item())


def test_frozen_model(training):
    """A model without gradients gives parameter norms and no gradient norms."""
    run = training(OptimizerMonitor(batch_log_interval=1)).start()
    run.engine.run_event("after_train_batch")
    run.state.timestamp = run.state.timestamp.to_next_batch()
    run.engine.run_event("batch_end")

    assert sorted(run.logged.data) == ["l2_norm/param/bias", "l2_norm/param/weight"]


def test_bad_interval():
    """An interval below one batch is an error at construction."""
    with pytest.raises(ConfigError, match="batch_log_interval=0"):
        OptimizerMonitor(batch_log_interval=0)
