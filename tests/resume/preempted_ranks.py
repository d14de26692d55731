"""What each of several ranks does that train together while one of them is asked to end, or killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Evaluator, Event, Logger, State, Trainer, dist
from composerlite.callbacks import CheckpointSaver, PreemptionHandler
from composerlite.errors import Preempted

LAST = 8


class _Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.3), nn.LayerNorm(6), nn.Linear(6, 2))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class _Asked(Callback):
    """Has this rank's process get a signal at an event, and notes what it saw."""

    def __init__(self, at: tuple[int, str, int, int] | None, what: signal.Signals) -> None:
        self.at, self.times, self.what = at, 0, what
        self.seen: list[list[int]] = []
        self.evaluated: list[tuple[str | None, int]] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BATCH_END:
            self.seen.append(state.batch[2].tolist())
        elif event is Event.EVAL_END:
            self.evaluated.append((state.dataloader_label, int(state.timestamp.batch)))
        if self.at is not None and (dist.get_global_rank(), event.value, int(state.timestamp.batch)) == self.at[:3]:
            self.times += 1
            if self.times == self.at[3]:
                os.kill(os.getpid(), self.what)


def on_node(nodes: Path) -> None:
    """Make this rank the only one of its node, which has a folder of its own below ``nodes``."""
    rank = dist.get_global_rank()
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)})
    here = nodes / f"node{rank}"
    (here / "memory").mkdir(parents=True, exist_ok=True)
    os.chdir(here)


class Replicated(Callback):
    """Begins no batch before what is being saved and replicated is there, or, if not ``waits``, counts such batches."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits
        self.meanwhile = 0

    def before_dataloader(self, state: State, logger: Logger) -> None:
        for saver in self._savers(state):
            if self.waits:  # before ranks tell each other in this batch what is replicated: it begins the next one
                if saver.pending is not None:
                    saver.pending.join()
                while saver.replication.is_busy:
                    time.sleep(0.05)

    def batch_start(self, state: State, logger: Logger) -> None:
        self.meanwhile += sum(saver.replication.is_busy for saver in self._savers(state))

    @staticmethod
    def _savers(state: State) -> list[Any]:
        savers = [one.manager for one in state.callbacks if isinstance(one, CheckpointSaver)]
        return [saver for saver in savers if saver.replication is not None]


def train(
    folder: Path,
    at: tuple[int, str, int, int] | None,
    *,
    fsdp: bool = False,
    memory: str = "",
    signalled: signal.Signals = signal.SIGTERM,
    nodes: Path | None = None,
    replication: float | None = None,
    waits: bool = True,
    last: int = LAST,
    evaluators: int = 1,
) -> dict[str, Any]:
    """Train, go on from what is in ``folder``; one rank gets a signal ``at`` (rank, event, batch, so many-th time).

    With ``memory``, a folder, what each batch has reached is kept there. With ``nodes``, a folder, each rank is a node
    of its own, and relative paths are below ``nodes/node<rank>``. With ``replication``, so many GB/s, a batch ``waits``
    for the save of the one before and for that of the one before it.
    """
    if nodes is not None:
        on_node(nodes)
    numbers = torch.Generator().manual_seed(4)
    inputs = torch.randn(32, 3, generator=numbers)
    points = TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(32))
    torch.manual_seed(5)
    model, asked, replicated = _Model(), _Asked(at, signalled), Replicated(waits=waits)
    loader: Any = DataLoader(points, batch_size=4, shuffle=True)
    code = 0
    with Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=[
            Evaluator(label=f"eval{number}", dataloader=DataLoader(points, batch_size=4))
            for number in range(evaluators)
        ],
        eval_interval="4ba",
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        max_duration=f"{last}ba",
        device_train_microbatch_size=4,
        callbacks=[asked, replicated, PreemptionHandler("20s")],
        save_folder=folder,
        save_interval="3ba",
        save_memory_interval="1ba" if memory else None,
        save_memory_folder=memory or "/dev/shm",
        save_memory_replication=replication,
        autoresume=True,
        run_name="run",
        seed=2,
        device="cpu",
        progress_bar=False,
        parallelism_config={"fsdp": {}} if fsdp else None,
    ) as trainer:
        first = int(trainer.state.timestamp.batch)
        try:
            trainer.fit()
        except Preempted as e:
            code = int(e.code or 0)
        weights = {name: dist.shards.full_tensor(tensor).clone() for name, tensor in model.state_dict().items()}
        return {
            "code": code,
            "first": first,
            "last": int(trainer.state.timestamp.batch),
            "seen": asked.seen,
            "evaluated": asked.evaluated,
            "weights": weights,
            "meanwhile": replicated.meanwhile,
        }
