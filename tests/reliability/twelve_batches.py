"""A small real run to be killed: 12 batches in 3 shuffled epochs with dropout and Adam, resumed when started again.

As a program: ``twelve_batches.py <folder> [way to save] [checkpoints to keep] [interval] [spread]``. It says where it
resumes, trains, and writes the digest of all that it ended with to ``<folder>/final``. It refuses to train from an
older checkpoint than the newest that has its name: whoever runs it sees lost work as a failure. With several ranks it
is started once for each, with the environment that torchrun sets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Logger, State, Trainer, dist
from composerlite.callbacks import CheckpointSaver

BATCHES, BATCHES_PER_EPOCH, BATCH_SIZE = 12, 4, 4
RUN = "twelve"
WIDE = 150_000
"""So wide that a checkpoint takes 18 MB: written past the page cache, in several pieces."""

SAVING: dict[str, dict[str, Any]] = {
    "sync": {"asynchronous": False},
    "async": {"asynchronous": True},
    "ring": {"asynchronous": True, "staging_bytes": 0},
}
"""The ways to save: training waits; training continues after a copy; there is no memory for a copy."""

SPREAD: dict[str, dict[str, Any]] = {
    "alone": {},
    "copies": {"dist_timeout": 10},
    "shards": {"dist_timeout": 10, "parallelism_config": {"fsdp": {}}},
}
"""How many ranks share the work: one has it; each has the whole model; each has a part of it."""


class Net(ComposerModel):
    """Two layers with dropout, so that every batch draws random numbers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


def build(
    folder: Path | None,
    mode: str = "sync",
    *,
    width: int = 8,
    callbacks: Sequence[Callback] = (),
    max_duration: str = f"{BATCHES}ba",
    spread: str = "alone",
    **saver: Any,
) -> Trainer:
    """A trainer as a new process would build it: a save after every batch, resumed if there is what to resume from.

    Without a ``folder`` nothing is saved. ``mode`` is one of ``SAVING``, ``spread`` one of ``SPREAD``; ``saver`` are
    arguments of CheckpointSaver.
    """
    torch.manual_seed(5)
    model = Net(width)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCHES_PER_EPOCH * BATCH_SIZE, 6, generator=generator)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    savers: list[Callback] = []
    if folder is not None:
        how = {"filename": "ba{batch}.pt", "latest_filename": "latest.pt", "save_interval": "1ba", **SAVING[mode]}
        savers = [CheckpointSaver(folder, **{**how, **saver})]
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=BATCH_SIZE, shuffle=True),
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        max_duration=max_duration,
        callbacks=[*savers, *callbacks],
        run_name=RUN,
        autoresume=folder is not None,
        progress_bar=False,
        seed=11,
        **SPREAD[spread],
    )


def digest(state_dict: dict[str, Any]) -> str:
    """Of weights and optimizer, bit for bit. Where ranks have parts of them, all call it."""
    digest = xxhash.xxh3_128()

    def add(path: str, value: Any) -> None:
        digest.update(path.encode())
        if isinstance(value, torch.Tensor):
            digest.update(dist.shards.full_tensor(value).detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{path}/{key}", value[key])
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                add(f"{path}/{index}", item)
        else:
            digest.update(repr(value).encode())

    for part in ("model", "optimizers"):
        add(part, state_dict[part])
    return digest.hexdigest()


class Digests(Callback):
    """What the run was at the end of each batch."""

    def __init__(self) -> None:
        self.at: dict[int, str] = {}

    def batch_end(self, state: State, logger: Logger) -> None:
        self.at[int(state.timestamp.batch)] = digest(state.state_dict())


def batch_in(name: str) -> int:
    """The batch count in the name of a checkpoint."""
    return int(Path(name).stem.removeprefix("ba"))


def main(folder: str, mode: str = "sync", keep: str = "-1", interval: str = "3ba", spread: str = "alone") -> None:
    """Train as a relaunched job does."""
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))  # ckpt-chaos leaves it out
    checkpoints = Path(folder) / "checkpoints"
    committed = [path for path in checkpoints.glob("ba*") if path.is_file() or (path / ".metadata").exists()]
    newest = max((batch_in(path.name) for path in committed), default=0)
    trainer = build(checkpoints, mode, save_interval=interval, num_checkpoints_to_keep=int(keep), spread=spread)
    resumed = int(trainer.state.timestamp.batch)
    sys.stdout.write(f"resumed from step {resumed}\n")
    sys.stdout.flush()
    if resumed < newest:
        raise SystemExit(f"lost work: there was ba{newest}.pt")
    trainer.fit()
    trainer.close()
    ended = digest(trainer.state.state_dict())
    if trainer.state.rank == 0:
        Path(folder, "final").write_text(ended)


if __name__ == "__main__":
    main(*sys.argv[1:])
