"""What an interruption costs: work that is lost, time to go on, and what it costs to lose less.

``interruptions.py lost`` kills runs at random instants, for several intervals between saves, and counts the batches
that have to be done again. ``resume`` times the parts of a resume: finding the checkpoint and verifying it, and all of
it. ``memory`` compares the time of a batch with and without keeping the state of every batch in memory. Without an
argument it does all three. Every run is a process of its own, forked from this one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import OUT, SHORT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Logger, State, Trainer
from composerlite.checkpoint import Catalog
from composerlite.checkpoint.load.candidates import RunPlace, list_checkpoints, newest_first

MEMORY = "/dev/shm"
INTERVALS = (5,) if SHORT else (1, 2, 5, 10, 20, 50)
BATCH_SECONDS = 0.01
WARM_UP = 5


class Stack(ComposerModel):
    """Square layers."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)])

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.square().mean()


class Clock(Callback):
    """The time at which each batch begins; and how many are done, in memory that is shared with who asks."""

    def __init__(self, done: Any = None, pause: float = 0.0) -> None:
        self.at: list[float] = []
        self.done, self.pause = done, pause

    def batch_start(self, state: State, logger: Logger) -> None:
        self.at.append(time.perf_counter())
        time.sleep(self.pause)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.done is not None:
            self.done.value = int(state.timestamp.batch)


@contextmanager
def trainer(folder: str, *, layers: int, width: int, samples: int, batches: int, **arguments: Any) -> Iterator[Trainer]:
    """A run of so many batches in ``folder``."""
    torch.manual_seed(1)
    model = Stack(layers, width)
    with Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(torch.randn(samples * batches, width)), batch_size=samples),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        max_duration=f"{batches}ba",
        save_folder=folder,
        autoresume=True,
        run_name="benchmark",
        progress_bar=False,
        **arguments,
    ) as run:
        yield run


def apart(function: Callable[..., Any], *arguments: Any, kill_after: Any = None, number: int = signal.SIGKILL) -> Any:
    """What ``function`` puts into its queue in a process of its own, which may get a signal after so many seconds of
    training; ``None`` then."""
    context = multiprocessing.get_context("fork")
    queue, done = context.Queue(), context.Value("i", -1)
    process = context.Process(target=function, args=(queue, done, *arguments))
    process.start()
    if kill_after is None:
        answer = queue.get(timeout=600)
        process.join()
        return answer
    while done.value < 1 and process.is_alive():
        time.sleep(0.001)
    time.sleep(kill_after)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    return done.value


# ── lost work ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _train(queue: Any, done: Any, folder: str, interval: int, memory: str | None) -> None:
    torch.set_num_threads(1)
    clock = Clock(done, BATCH_SECONDS)
    with trainer(
        folder,
        layers=2,
        width=64,
        samples=4,
        batches=100_000,
        callbacks=[clock],
        save_interval=f"{interval}ba",
        save_num_checkpoints_to_keep=2,
        save_memory_interval="1ba" if memory else None,
        save_memory_folder=memory or MEMORY,
    ) as run:
        run.fit()


def lost_work(times: int) -> list[dict[str, Any]]:
    """Batches that were done and are not in a checkpoint when a run is interrupted at a random instant."""
    rows: list[dict[str, Any]] = []
    chooser = random.Random(0)
    ways = [("SIGKILL", signal.SIGKILL, False), ("SIGKILL, memory", signal.SIGKILL, True)]
    ways.append(("SIGTERM", signal.SIGTERM, False))
    for interval in INTERVALS:
        for name, number, with_memory in ways:
            lost: list[int] = []
            for _ in range(times):
                with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=MEMORY) as memory:
                    # Between one and two intervals: the first save has been made.
                    after = chooser.uniform(1, 2) * interval * (BATCH_SECONDS + 0.002) + 0.05
                    done = apart(
                        _train, folder, interval, memory if with_memory else None, kill_after=after, number=number
                    )
                    catalogs = [Catalog(folder), Catalog(f"{memory}/composerlite-{os.getuid()}/benchmark")]
                    kept = [manifest.batch for catalog in catalogs for manifest in catalog.manifests()]
                    lost.append(done - max(kept, default=0))
            rows.append({"interval": interval, "how": name, "lost": lost})
            print(
                f"save every {interval:3} batches, {name:16} {statistics.mean(lost):5.1f} batches lost "
                f"({min(lost)} to {max(lost)})",
                flush=True,
            )
    return rows


# ── time to resume ───────────────────────────────────────────────────────────────────────────────────────────────────
def _save(queue: Any, done: Any, folder: str, layers: int) -> None:
    with trainer(folder, layers=layers, width=1024, samples=2, batches=4, save_interval="1ba") as run:
        run.fit()
    queue.put(0)


def _resume(queue: Any, done: Any, folder: str, layers: int) -> None:
    started = time.perf_counter()
    places = [RunPlace(Catalog(folder), "ep{epoch}-ba{batch}-rank{rank}.pt")]
    assert newest_first(list_checkpoints(places, "benchmark", {}).known)
    discovery = time.perf_counter() - started
    started = time.perf_counter()
    with trainer(folder, layers=layers, width=1024, samples=2, batches=4) as run:
        whole = time.perf_counter() - started
        assert int(run.state.timestamp.batch) == 4
    started = time.perf_counter()
    torch.manual_seed(1)
    Stack(layers, 1024)
    queue.put({"discovery": discovery, "whole": whole, "model": time.perf_counter() - started})


def time_to_resume(times: int) -> list[dict[str, Any]]:
    """Seconds until a run may train on, from the moment at which its process has imported everything."""
    rows: list[dict[str, Any]] = []
    for layers in (1,) if SHORT else (1, 8, 80):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            apart(_save, folder, layers)
            size = Catalog(folder).manifests()[-1].size_bytes
            found = [apart(_resume, folder, layers) for _ in range(times)]
        row = {"size_bytes": size, **{key: statistics.median(one[key] for one in found) for key in found[0]}}
        rows.append(row)
        print(
            f"{size / 1e6:6.0f} MB, warm: found in {row['discovery']:.3f} s; a Trainer that goes on "
            f"is built in {row['whole']:.3f} s, of which {row['model']:.3f} s are the model",
            flush=True,
        )
    return rows


# ── what it costs to keep each batch in memory ───────────────────────────────────────────────────────────────────────
def _timed(queue: Any, done: Any, interval: str | None, batches: int, samples: int) -> None:
    torch.set_num_threads(1)
    clock = Clock()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=MEMORY) as memory,
        trainer(
            folder,
            layers=8,
            width=1024,
            samples=samples,
            batches=batches + WARM_UP + 1,
            callbacks=[clock],
            save_interval="100000ba",
            save_memory_interval=interval,
            save_memory_folder=memory,
        ) as run,
    ):
        run.fit()
    seconds = [after - before for before, after in zip(clock.at, clock.at[1:], strict=False)][WARM_UP:]
    queue.put(statistics.median(seconds))


def memory_overhead(rounds: int) -> list[dict[str, float]]:
    """The median time of a batch, with and without, in turn."""
    rows: list[dict[str, float]] = []
    for number in range(rounds):
        row: dict[str, float] = {}
        for name, interval in (("without", None), ("with", "1ba"))[:: 1 if number % 2 else -1]:
            row[name] = apart(_timed, interval, *((2, 16) if SHORT else (12, 1024)))
        rows.append(row)
        print(
            f"round {number}: {row['without']:.3f} s a batch, {row['with']:.3f} s with 101 MB kept of each: "
            f"{row['with'] / row['without'] - 1:+.1%}",
            flush=True,
        )
    overheads = [row["with"] / row["without"] - 1 for row in rows]
    print(f"median {statistics.median(overheads):+.1%} ({min(overheads):+.1%} to {max(overheads):+.1%})")
    return rows


MEASUREMENTS = {"lost": lost_work, "resume": time_to_resume, "memory": memory_overhead}


def main() -> None:
    """Do what is asked for and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", nargs="*", choices=[*MEASUREMENTS, []], help="one or several; all by default")
    parser.add_argument("--times", type=int, default=1 if SHORT else 5)
    given = parser.parse_args()
    path = OUT / "interruptions.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for what in given.what or MEASUREMENTS:
        found[what] = MEASUREMENTS[what](given.times)
    OUT.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    shutil.rmtree(Path(MEMORY) / f"composerlite-{os.getuid()}" / "benchmark", ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
