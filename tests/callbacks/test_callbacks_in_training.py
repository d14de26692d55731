"""The callbacks together in a real training, interrupted and resumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite.callbacks import (
    EarlyStopper,
    LRMonitor,
    MemoryMonitor,
    NaNMonitor,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
)
from composerlite.core import Callback
from composerlite.errors import TrainingError
from composerlite.loggers import InMemoryLogger
from composerlite.models import ComposerClassifier
from composerlite.trainer import Trainer


class InterruptedRunError(Exception):
    """What ends a run in these tests."""


class InterruptAt(Callback):
    """Fails at the end of a batch, as a machine does."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state, logger):
        if state.timestamp.batch == self.batch:
            raise InterruptedRunError


def data(seed, samples=40):
    """Random samples of four classes: there is nothing to learn, so evaluation soon stops improving."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(4, (samples,), generator=generator))


def build(callbacks, **arguments):
    """A trainer of 30 epochs of five batches that evaluates after each."""
    torch.manual_seed(1)
    model = ComposerClassifier(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 4)), num_classes=4)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data(1), batch_size=8, shuffle=True),
        eval_dataloader=DataLoader(data(2), batch_size=20),
        optimizers=torch.optim.Adam(model.parameters(), lr=0.1),
        max_duration="30ep",
        callbacks=callbacks,
        progress_bar=False,
        seed=3,
        device="cpu",
        **arguments,
    )


def stopper():
    return EarlyStopper("CrossEntropy", "eval", patience="2ep")


@pytest.fixture(scope="module")
def uninterrupted():
    """Where a run stops, its best loss and its weights."""
    with build([stopper()]) as trainer:
        trainer.fit()
        weights = {name: value.clone() for name, value in trainer.state.model.state_dict().items()}
        return int(trainer.state.timestamp.batch), trainer.state.callbacks[0].best, weights


def test_early_stopping_ends_a_real_training(uninterrupted):
    """A run that no longer improves ends at the end of an epoch, long before max_duration."""
    batches, _, _ = uninterrupted

    assert batches % 5 == 0
    assert 20 <= batches < 100


@pytest.mark.parametrize("batches_before_the_end", [12, 7, 2])
def test_patience_survives_interruption_and_resume(uninterrupted, tmp_path, batches_before_the_end):
    """Interrupted in the middle of an epoch and resumed, a run stops at the same batch with the same weights."""
    batches, best, weights = uninterrupted
    settings = {"save_folder": tmp_path, "save_interval": "1ba", "autoresume": True, "run_name": "fox"}
    with (
        build([stopper(), InterruptAt(batches - batches_before_the_end)], **settings) as first,
        pytest.raises(InterruptedRunError),
    ):
        first.fit()
    with build([stopper()], **settings) as second:
        assert 0 < second.state.timestamp.batch < batches
        second.fit()

        assert second.state.timestamp.batch == batches
        assert second.state.callbacks[0].best == best
        for name, value in second.state.model.state_dict().items():
            assert torch.equal(value, weights[name]), name


def test_a_stopped_run_that_is_launched_again_stays_stopped(uninterrupted, tmp_path):
    """Relaunching a run that was stopped early trains nothing more."""
    batches, _, weights = uninterrupted
    settings = {"save_folder": tmp_path, "autoresume": True, "run_name": "fox"}
    for _ in range(2):
        with build([stopper()], **settings) as trainer:
            trainer.fit()
            assert trainer.state.timestamp.batch == batches

    assert torch.equal(trainer.state.model.state_dict()["module.0.weight"], weights["module.0.weight"])


def test_all_monitors_log_in_a_real_training():
    """Every monitor logs what it promises, side by side, at each batch."""
    memory = InMemoryLogger()
    monitors = [
        SpeedMonitor(window_size=3),
        LRMonitor(),
        NaNMonitor(),
        MemoryMonitor(),
        OptimizerMonitor(batch_log_interval=1),
        RuntimeEstimator(),
    ]
    with build(monitors, loggers=memory) as trainer:
        trainer.fit(duration="2ep")

    promised = (
        "throughput/samples_per_sec",
        "wall_clock/train",
        "wall_clock/val",
        "lr-Adam/group0",
        "memory/rss",
        "l2_norm/grad/global",
        "l2_norm/moment/module.0.weight",
        "wall_clock/remaining_estimate",
    )
    assert [name for name in promised if name not in memory.data] == []
    assert memory.get_timeseries("wall_clock/train")["batch"].tolist() == list(range(1, 11))
    assert memory.most_recent_values["wall_clock/val"] > 0
    assert memory.most_recent_values["wall_clock/remaining_estimate"] == pytest.approx(0.0, abs=1e-9)


def test_nan_ends_a_real_training_before_the_step():
    """With a learning rate that explodes, training ends with an error and the weights are still numbers."""
    with build([NaNMonitor()]) as trainer:
        trainer.state.optimizers[0].param_groups[0]["lr"] = 1e30
        with pytest.raises(TrainingError, match="loss/train/total is NaN"):
            trainer.fit()

    assert all(not value.isnan().any() for value in trainer.state.model.parameters())
