"""What runs on each of several ranks that differ in what they measure, see or live to see, and save all the same."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

from checkpoint.parts import new_state
from checkpoint.saving_ranks import ready, sharded_state, step
from tiny_training import trainer
from torch import nn

from composerlite import dist
from composerlite.checkpoint.place import node_disks
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.core import Event, State
from composerlite.errors import ConfigError, RankError


def _by_rank(state: State, event: Event) -> bool:
    return event is Event.BATCH_CHECKPOINT and int(state.timestamp.batch) % (2 + dist.get_global_rank()) == 0


INTERVALS: dict[str, Any] = {"function": _by_rank, "1s": "1s", "auto:1%": "auto:1%"}


def saves_by_interval(folder: Path) -> dict[str, list[str]]:
    """The names that each interval gives to twelve batches, which take longer on rank 0."""
    told: dict[str, list[str]] = {}
    for number, (name, interval) in enumerate(INTERVALS.items()):
        state = new_state()
        state.world_size = dist.get_world_size()
        saver, logger = ready(folder / str(number), state, filename="ba{batch}.pt", save_interval=interval, lazy=False)
        for _ in range(12):
            nn.init.constant_(state.model.get_parameter("bias"), float(state.timestamp.batch))
            state.previous_timestamp = state.timestamp
            state.timestamp = state.timestamp.to_next_batch(4, 8, 4.5 if dist.get_global_rank() == 0 else 0.1)
            saver.batch_checkpoint(state, logger)
        saver.fit_end(state, logger)
        saver.close(state, logger)
        told[name] = [Path(path).name for path in saver.saved_checkpoints]
    return told


@contextlib.contextmanager
def timeout_of(seconds: float) -> Generator[None]:
    """Ranks are waited for so long: they have met, which may take longer."""
    control = dist.get_group()
    before = control.timeout
    object.__setattr__(control, "timeout", timedelta(seconds=seconds))
    try:
        yield
    finally:
        object.__setattr__(control, "timeout", before)


@contextlib.contextmanager
def slow_disk(seconds: float) -> Generator[None]:
    """Writing takes so long on rank 1."""
    real = ShardedDirectory.write

    def write(self: ShardedDirectory, *arguments: Any) -> Any:
        threading.Event().wait(seconds)
        return real(self, *arguments)

    if dist.get_global_rank() == 1:
        setattr(ShardedDirectory, "write", write)  # noqa: B010 - pyright: it takes less
    try:
        yield
    finally:
        ShardedDirectory.write = real


def save_slowly(folder: Path) -> list[str]:
    """A save in which rank 1 writes for longer than it is waited for."""
    state = sharded_state()
    saver, logger = ready(folder, state, filename="ba{batch}.pt", save_interval="1ba")
    step(state)
    with timeout_of(1.5), slow_disk(3.5):  # both ranks live, also where the machine is busy
        saver.batch_checkpoint(state, logger)
        saver.fit_end(state, logger)
        saver.close(state, logger)
    return [Path(path).name for path in saver.saved_checkpoints]


def folders_apart(folder: Path) -> dict[str, Any]:
    """What each rank raises for a folder that is another one on rank 1, and what it does with one file."""
    there = Path.cwd()
    mine = folder / str(dist.get_global_rank())
    mine.mkdir(parents=True, exist_ok=True)
    os.chdir(mine)
    patience = node_disks._APPEARS_SECONDS  # pyright: ignore[reportPrivateUsage]
    setattr(node_disks, "_APPEARS_SECONDS", 0.2)  # noqa: B010 - it is private
    told: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "sharded": {"save_folder": "run", "parallelism_config": {"fsdp": {}}},
        "full": {"save_folder": "run", "parallelism_config": {"fsdp": {"state_dict_type": "full"}}},
        "DDP": {"save_folder": "ddp"},
    }
    try:
        for name, case in cases.items():
            told[name] = _outcome(case)
        told["files"] = sorted(str(path.relative_to(mine)) for path in mine.rglob("*.pt"))
    finally:
        setattr(node_disks, "_APPEARS_SECONDS", patience)  # noqa: B010 - it is private
        os.chdir(there)
    return told


def _outcome(case: dict[str, Any]) -> Any:
    try:
        with trainer(**case, max_duration="1ep") as run:
            run.fit()
    except ConfigError as e:
        return str(e)
    return run.saved_checkpoints


def save_alone(folder: Path) -> tuple[str, float]:
    """Rank 1 fails in training where rank 0 comes to save: what rank 0 raises, and how long it takes to close."""
    state = sharded_state()
    saver, logger = ready(folder, state, filename="ba{batch}.pt", save_interval="1ba")
    step(state)
    if dist.get_global_rank() == 1:
        error = OSError("the data of this rank are gone")
        dist.get_group().leave(error)
        raise error
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(saver.close, state, logger)
            saver.batch_checkpoint(state, logger)
    except RankError as e:
        return str(e), time.monotonic() - began
    return "nothing was raised", 0.0


def all_agree(folder: Path) -> dict[str, Any]:
    """All of the above that leaves the ranks as they were."""
    cases: dict[str, Callable[[Path], Any]] = {
        "intervals": saves_by_interval,
        "slow": save_slowly,
        "apart": folders_apart,
    }
    return {name: case(folder / name) for name, case in cases.items()}
