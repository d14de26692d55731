"""A training that is over in a moment: four batches in an epoch, three epochs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Event, Logger, State, Trainer
from composerlite.checkpoint import Catalog


class Classifier(ComposerModel):
    """A body and a head; ``width`` is the size of the body."""

    def __init__(self, width: int = 3, classes: int = 2) -> None:
        super().__init__()
        self.body = nn.Linear(4, width)
        self.head = nn.Linear(width, classes)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.head(self.body(batch[0]).relu())

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class StopAt(Callback):
    """Raises when a batch is done, as a run does that crashes."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            raise CrashError


class CrashError(Exception):
    """The crash."""


class Record(Callback):
    """The batch counts at which batches ended."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BATCH_END:
            self.batches.append(int(state.timestamp.batch))


def data(samples: int = 16) -> DataLoader[Any]:
    """Four samples in a batch."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=4, shuffle=True)


def trainer(*, model: Classifier | None = None, callbacks: Sequence[Callback] = (), **arguments: Any) -> Trainer:
    """A trainer of the run ``run`` with Adam."""
    model = Classifier() if model is None else model
    how: dict[str, Any] = {
        "train_dataloader": data(),
        "max_duration": "3ep",
        "run_name": "run",
        "optimizers": torch.optim.Adam(model.parameters(), lr=0.01),
        "progress_bar": False,
        "seed": 3,
    }
    return Trainer(model=model, callbacks=list(callbacks), **{**how, **arguments})


def train(**arguments: Any) -> Trainer:
    """A trainer that has trained and is closed."""
    with trainer(**arguments) as run:
        run.fit()
    return run


def saved_batches(folder: Path) -> list[int]:
    """The batch counts of the checkpoints in ``folder``; fails if one is not sound."""
    manifests = Catalog(folder).manifests()
    for manifest in manifests:
        Catalog(folder).verify(manifest)
    return [manifest.batch for manifest in manifests]
