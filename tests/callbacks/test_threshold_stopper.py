"""ThresholdStopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Trainer
from composerlite.callbacks import ThresholdStopper
from composerlite.errors import ConfigError
from composerlite.models import ComposerClassifier


def trainer_with(stopper: ThresholdStopper, **arguments: Any) -> Trainer:
    """A trainer of four batches an epoch, whose model learns quickly."""
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model = ComposerClassifier(nn.Linear(4, 2), num_classes=2)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8),
        eval_dataloader=DataLoader(data, batch_size=32),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
        callbacks=[stopper],
        run_name="run",
        seed=1,
        progress_bar=False,
        **{"max_duration": "50ep", **arguments},
    )


@pytest.mark.parametrize(
    ("monitor", "threshold", "comp"),
    [
        ("MulticlassAccuracy", 0.9, None),
        ("MulticlassAccuracy", 0.9, "gt"),
        ("CrossEntropy", 0.3, "less"),
        ("MulticlassAccuracy", 0.9, lambda value, than: value > than),
    ],
)
def test_training_ends_when_the_metric_is_better(monitor: str, threshold: float, comp: Any) -> None:
    """After the evaluation that shows it, and not before."""
    with trainer_with(ThresholdStopper(monitor, "eval", threshold, comp=comp)) as trainer:
        trainer.fit()
        value = trainer.state.eval_metric_values[monitor]
        assert (value < threshold) if monitor == "CrossEntropy" else (value > threshold)
        assert 0 < int(trainer.state.timestamp.epoch) < 50


def test_training_data_can_be_watched_at_each_batch() -> None:
    """Else at the end of an epoch only."""
    ends = []
    for stop_on_batch in (True, False):
        stopper = ThresholdStopper("MulticlassAccuracy", "train", 0.7, stop_on_batch=stop_on_batch)
        with trainer_with(stopper) as trainer:
            trainer.fit()
            ends.append(int(trainer.state.timestamp.batch))
    assert ends[0] < ends[1]
    assert ends[1] % 4 == 0


def test_a_run_that_was_stopped_stays_stopped(tmp_path: Any) -> None:
    """When it is started again."""
    for _ in range(2):
        stopper = ThresholdStopper("MulticlassAccuracy", "eval", 0.9)
        with trainer_with(stopper, save_folder=tmp_path, autoresume=True) as trainer:
            trainer.fit()
            ended = int(trainer.state.timestamp.batch)
    assert ended < 200


def test_what_is_not_measured_is_refused() -> None:
    """Before training; a comparison that does not exist, at once."""
    with trainer_with(ThresholdStopper("Accuracy", "eval", 0.9)) as trainer, pytest.raises(ConfigError) as error:
        trainer.fit()
    assert str(error.value) == (
        "ThresholdStopper(monitor='Accuracy'): 'eval' has no such metric. Did you mean 'MulticlassAccuracy'? Known: "
        "CrossEntropy, MulticlassAccuracy, loss."
    )
    with (
        trainer_with(ThresholdStopper("MulticlassAccuracy", "evaluation", 0.9)) as trainer,
        pytest.raises(ConfigError) as error,
    ):
        trainer.fit()
    said = "ThresholdStopper(dataloader_label='evaluation'): there is no such data. Known: eval, train."
    assert str(error.value) == said
    with pytest.raises(ConfigError) as error:
        ThresholdStopper("a", "b", 1.0, comp="more")
    assert str(error.value) == "ThresholdStopper(comp='more') does not exist. Known: greater, gt, less, lt."
