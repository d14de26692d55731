"""What it costs to keep the newest state in memory at every batch: two runs in turn, with and without.

The model is a stack of square layers, one batch takes about half a second; the first batches are not counted. Reported
is the time per batch, and what a save moves. Run as ``memory_generation.py [--layers N] [--rounds N]``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Logger, State, Trainer

WIDTH, WARM_UP = 1024, 5
OUT = Path(__file__).parent / "out"


class Stack(ComposerModel):
    """Square layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)])

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.square().mean()


class Clock(Callback):
    """The time of each batch."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.at.append(time.perf_counter())


def run(layers: int, samples: int, batches: int, interval: str | None, memory: str) -> tuple[list[float], int]:
    """Seconds per batch, and bytes in a checkpoint."""
    torch.manual_seed(1)
    model, clock = Stack(layers), Clock()
    data = TensorDataset(torch.randn(samples * (batches + WARM_UP + 1), WIDTH))
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(
            model=model,
            train_dataloader=DataLoader(data, batch_size=samples),
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
            max_duration=f"{batches + WARM_UP + 1}ba",
            callbacks=[clock],
            save_folder=folder,
            save_interval="100000ba",
            save_memory_interval=interval,
            save_memory_folder=memory,
            autoresume=True,
            run_name="memory",
            progress_bar=False,
        ) as trainer,
    ):
        trainer.fit()
        seconds = [after - before for before, after in zip(clock.at, clock.at[1:], strict=False)][WARM_UP:]
    return seconds, sum(p.numel() * 12 for p in model.parameters())


def main() -> None:
    """Print a line for each round and the medians; write them as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", default="/dev/shm")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rounds: list[dict[str, float]] = []
    size = 0
    for number in range(given.rounds):
        medians: dict[str, float] = {}
        for name, interval in (("without", None), ("with", "1ba")):
            seconds, size = run(given.layers, given.samples, given.batches, interval, given.memory)
            medians[name] = statistics.median(seconds)
        overhead = medians["with"] / medians["without"] - 1
        rounds.append({**medians, "overhead": overhead})
        print(f"round {number}: {medians['without']:.3f} s, {medians['with']:.3f} s with: {overhead:+.1%}", flush=True)
    overheads = [one["overhead"] for one in rounds]
    print(
        f"{size / 1e6:.0f} MB kept at every batch of {statistics.median(o['without'] for o in rounds):.2f} s: "
        f"{statistics.median(overheads):+.1%} ({min(overheads):+.1%} to {max(overheads):+.1%})"
    )
    OUT.mkdir(exist_ok=True)
    (OUT / "memory_generation.json").write_text(json.dumps({"size_bytes": size, "rounds": rounds}, indent=1))
    shutil.rmtree(Path(given.memory) / f"composerlite-{os.getuid()}" / "memory", ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
