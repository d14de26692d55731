"""All algorithms at once, with our optimizer and schedule, in the real trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Trainer
from composerlite.algorithms import EMA, SWA, BlurPool, GradientClipping, LabelSmoothing
from composerlite.models import ComposerClassifier
from composerlite.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW


def new_trainer(folder: Path, load_path: Path | None = None) -> Trainer:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )
    model = ComposerClassifier(net, num_classes=4)
    data = TensorDataset(torch.randn(40, 1, 8, 8), torch.randint(4, (40,)))
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8, shuffle=True),
        eval_dataloader=DataLoader(data, batch_size=20),
        eval_interval="2ba",
        max_duration="3ep",
        optimizers=DecoupledAdamW(model.parameters(), lr=1e-2),
        schedulers=CosineAnnealingWithWarmupScheduler("2ba"),
        algorithms=[
            BlurPool(),
            GradientClipping("norm", 1.0),
            LabelSmoothing(0.1),
            EMA(half_life="3ba"),
            SWA("1ep", "2ep", update_interval="2ba", schedule_swa_lr=True, swa_lr=1e-3, anneal_steps=2),
        ],
        save_folder=str(folder),
        save_filename="ba{batch}.pt",
        save_interval="1ba",
        save_metrics=True,
        load_path=None if load_path is None else str(load_path),
        progress_bar=False,
        seed=3,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    with trainer:
        trainer.fit()
        return {name: tensor.clone() for name, tensor in trainer.state.model.state_dict().items()}


@pytest.mark.parametrize("at", [3, 7, 11])
def test_all_algorithms_together_resume_bit_for_bit(at: int, tmp_path: Path) -> None:
    """A run with surgery, clipping, smoothing, both averages and a warm-up resumes to the same last bit."""
    expected = weights(new_trainer(tmp_path / "whole"))
    resumed = weights(new_trainer(tmp_path / "resumed", load_path=tmp_path / "whole" / f"ba{at}.pt"))
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
