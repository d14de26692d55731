"""A run whose checkpoints have many chunks, on one rank or several: how it resumes, and what it reads to do so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from resume.small_run import Trace, final_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import ComposerModel, Trainer, dist
from composerlite.algorithms import EMA
from composerlite.optim import CosineAnnealingScheduler

BATCHES, SAVED = 8, (2, 4)
WIDTH = 100_000


class Wide(ComposerModel):
    """A model of 4 MB with what makes a mixture of two checkpoints show: buffers, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.5), nn.ReLU(), nn.Linear(width, 3))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(self.norm(batch[0]))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class Convolution(Wide):
    """A model whose first layer BlurPool replaces."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.first = nn.Conv2d(1, 3, 1, stride=2)

    def forward(self, batch: Any) -> torch.Tensor:
        found = self.first(batch[0].view(-1, 1, 2, 3)).flatten(1)
        return super().forward((found, *batch[1:]))


def build(
    folder: Path | str, trace: Trace, *, width: int = WIDTH, model: Wide | None = None, **arguments: Any
) -> Trainer:
    """A trainer of the run, which saves after batches 2 and 4, and resumes."""
    torch.manual_seed(5)
    model = Wide(width) if model is None else model
    samples = 4 * dist.get_world_size() * BATCHES // 2
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(samples))
    how: dict[str, Any] = {
        "max_duration": f"{BATCHES}ba",
        "save_folder": folder,
        "save_filename": "ba{batch}.pt",
        "save_interval": "2ba",
        "autoresume": True,
        "algorithms": [EMA(half_life="3ba")],
        **arguments,
    }
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, shuffle=dist.get_world_size() == 1),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        schedulers=[CosineAnnealingScheduler()],
        callbacks=[trace],
        run_name="run",
        seed=3,
        progress_bar=False,
        **how,
    )


def save(folder: Path | str, **arguments: Any) -> None:
    """The first half of the run, whose checkpoints are kept."""
    with build(folder, Trace(), **arguments) as run:
        run.fit(duration=f"{SAVED[-1]}ba")


def bytes_read() -> int:
    """What this process has read so far by system calls, in whatever way."""
    return int(Path("/proc/self/io").read_text().split()[1])


def resume(folder: Path | str, **arguments: Any) -> dict[str, Any]:
    """Resume and train to the end: from which batch, what was read for it, the batches, and the state at the end."""
    trace, before = Trace(), bytes_read()
    with build(folder, trace, **arguments) as run:
        read, batch = bytes_read() - before, int(run.state.timestamp.batch)
        run.fit()
        return {"batch": batch, "read": read, "steps": trace.steps, "state": _local(final_state(run))}


def _local(value: Any) -> Any:
    """``value`` with this rank's part of distributed tensors."""
    if isinstance(value, torch.Tensor):
        return dist.local_shard(value).local if dist.is_distributed_tensor(value) else value
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    return [_local(item) for item in value] if isinstance(value, list | tuple) else value


# ── on several ranks ─────────────────────────────────────────────────────────────────────────────────────────────────
def save_shards(folder: Path) -> None:
    """Save directories, of which each rank writes a part."""
    save(folder, parallelism_config={"fsdp": {}}, save_filename="ba{batch}", algorithms=[])


def resume_shards(folder: Path) -> dict[str, Any]:
    """Resume from one of them."""
    return resume(folder, parallelism_config={"fsdp": {}}, save_filename="ba{batch}", algorithms=[])
