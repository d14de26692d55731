"""A small training run with everything in it that makes an exact resume hard.

60 batches in 3 shuffled epochs; each sample is distorted with python's, numpy's and torch's random numbers where it is
loaded; run as a program it trains, says each batch, and goes on from its newest checkpoint when started again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from composerlite import Callback, ComposerModel, Event, Logger, State, Trainer
from composerlite.algorithms import EMA
from composerlite.optim import CosineAnnealingScheduler, DecoupledAdamW

SAMPLES, BATCH_SIZE, EPOCHS = 8 * 20 - 2, 8, 3  # 20 batches per epoch, the last one short
BATCHES = 60


class Noisy(Dataset[Any]):
    """Points with noise from three generators, and the number of each point."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return x + 0.1 * noise, torch.tensor(index % 3), torch.tensor(index)


class Net(ComposerModel):
    """A small classifier, with batch norm and, if asked for, dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3)
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class Trace(Callback):
    """What training saw and computed: (batch count, numbers of the samples, loss in full)."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, tuple[int, ...], str]] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        loss = float(state.total_loss_dict["loss/train/total"])
        self.steps.append((int(state.timestamp.batch), tuple(state.batch[2].tolist()), loss.hex()))


class Say(Callback):
    """Prints each step of the trace at once, so that a killed process has told what it did."""

    def batch_end(self, state: State, logger: Logger) -> None:
        loss = float(state.total_loss_dict["loss/train/total"])
        samples = ",".join(map(str, state.batch[2].tolist()))
        print(int(state.timestamp.batch), samples, loss.hex(), flush=True)


@dataclass(frozen=True)
class Cell:
    """One combination of what is varied."""

    workers: int = 0
    accumulation: int = 1
    extra: str = "plain"  # or dropout, ema, scheduler

    def __str__(self) -> str:
        return f"workers{self.workers}-accumulation{self.accumulation}-{self.extra}"


CELLS = [
    Cell(workers, accumulation, extra)
    for workers in (0, 2)
    for accumulation in (1, 4)
    for extra in ("dropout", "ema", "scheduler")
]


def build(cell: Cell, callbacks: Sequence[Callback] = (), **arguments: Any) -> Trainer:
    """A trainer of ``cell`` from scratch, as a new process would build it."""
    torch.manual_seed(7)
    model = Net(dropout=0.5 if cell.extra == "dropout" else 0.0)
    data = DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, num_workers=cell.workers)
    return Trainer(
        model=model,
        train_dataloader=arguments.pop("train_dataloader", data),
        optimizers=DecoupledAdamW(model.parameters(), lr=0.01, weight_decay=0.01),
        algorithms=[EMA(half_life="5ba")] if cell.extra == "ema" else [],
        schedulers=[CosineAnnealingScheduler()] if cell.extra == "scheduler" else [],
        device_train_microbatch_size=BATCH_SIZE // cell.accumulation,
        max_duration=EPOCHS,
        callbacks=list(callbacks),
        seed=11,
        progress_bar=False,
        **arguments,
    )


def final_state(trainer: Trainer) -> dict[str, Any]:
    """Everything that must be equal at the end, less wall-clock times."""
    state = trainer.state.state_dict()
    timestamp = {k: v for k, v in state["timestamp"]["Timestamp"].items() if not k.endswith("_wct")}
    return {"timestamp": timestamp, **{k: state[k] for k in ("model", "optimizers", "schedulers", "algorithms")}}


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Paths at which two nested states are not bit for bit equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted({*a, *b}, key=str)
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{path}/{k}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [path]


class DieAt(Callback):
    """Kills the process, as the kernel would, at a given event of a given batch."""

    def __init__(self, batch: int, event: Event) -> None:
        self.batch = batch
        self.event = event

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is self.event and int(state.timestamp.batch) == self.batch:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, workers: str, accumulation: str, extra: str, interval: str, die: str = "") -> None:
    """Train as a relaunched job does; ``die`` is ``<event>:<batch>`` or empty."""
    torch.set_num_threads(1)
    callbacks: list[Callback] = [Say()]
    if die:
        event, batch = die.split(":")
        callbacks.append(DieAt(int(batch), Event(event)))
    cell = Cell(int(workers), int(accumulation), extra)
    trainer = build(
        cell,
        callbacks,
        run_name="killed",
        save_folder=folder,
        save_interval=interval,
        save_num_checkpoints_to_keep=3,
        autoresume=True,
    )
    trainer.fit()
    trainer.close()
    torch.save(final_state(trainer), Path(folder) / "final.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
