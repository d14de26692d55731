"""What each of several ranks does of which one stops training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Event, Logger, State, Trainer, dist

__all__ = ["train"]


class _Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class _Stops(Callback):
    """One rank stops training at an event of a batch."""

    def __init__(self, event: str) -> None:
        self.event = event
        self.batches: list[int] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BATCH_END:
            self.batches.append(int(state.timestamp.batch))
        if event.value == self.event and int(state.timestamp.batch) == 4 and dist.get_global_rank() == 1:
            state.stop_training()


def train(folder: Path, event: str, max_duration: str) -> list[int]:
    """The batches of this launch, of four to an epoch."""
    points = TensorDataset(torch.randn(32, 3), torch.arange(32) % 2)
    loader = DataLoader(points, batch_size=4)
    torch.manual_seed(1)
    model, stops = _Model(), _Stops(event)
    with Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration=max_duration,
        callbacks=stops,
        save_folder=folder,
        save_interval="1ba",
        autoresume=True,
        run_name="run",
        seed=2,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return stops.batches
