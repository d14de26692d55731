"""A short run with a profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Trainer
from composerlite.models import ComposerClassifier

__all__ = ["names_in", "profiled_trainer", "train"]


def profiled_trainer(profiler: Any, *, batches: int = 6, **arguments: Any) -> Trainer:
    """A trainer of ``batches`` batches an epoch."""
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(4 * batches, 5), torch.randint(3, (4 * batches,)))
    given: dict[str, Any] = {
        "model": ComposerClassifier(nn.Linear(5, 3), num_classes=3),
        "train_dataloader": DataLoader(samples, batch_size=4),
        "eval_dataloader": DataLoader(samples, batch_size=8),
        "max_duration": "1ep",
        "run_name": "profiled",
        "seed": 1,
        "progress_bar": False,
        "profiler": profiler,
        **arguments,
    }
    model = given["model"]
    return Trainer(optimizers=torch.optim.SGD(model.parameters(), lr=0.1), **given)


def train(profiler: Any, **arguments: Any) -> Trainer:
    """The trainer after its end."""
    with profiled_trainer(profiler, **arguments) as trainer:
        trainer.fit()
    return trainer


def names_in(path: Path) -> list[str]:
    """The names of what a trace holds, in any order."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [event.get("name", "") for event in json.loads(data)["traceEvents"]]
