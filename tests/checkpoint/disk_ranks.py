"""What runs on each of several ranks whose nodes have disks of their own."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
from checkpoint.loading_ranks import outcome
from checkpoint.saving_ranks import die_in, ready, sharded_state, step, whole

from composerlite import dist
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog, load_checkpoint, rng, save_checkpoint
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.core import Logger, State
from composerlite.errors import RankError


def on_nodes(folder: Path, *, ranks_per_node: int = 1, order: Sequence[int] = (0, 1)) -> None:
    """This rank's node has a disk of its own. Paths are relative: the same on every node, and another place."""
    rank = dist.get_global_rank()
    node = rank // ranks_per_node
    local = {"LOCAL_RANK": rank % ranks_per_node, "LOCAL_WORLD_SIZE": ranks_per_node, "GROUP_RANK": node}
    os.environ.update({name: str(value) for name, value in local.items()})
    here = folder / f"node{order[node]}"
    here.mkdir(parents=True, exist_ok=True)
    os.chdir(here)


def save_some(name: str, state: State, batches: int = 3, **arguments: Any) -> list[str]:
    """So many batches with a save at each; the names of what stays."""
    how: dict[str, Any] = {"filename": "ba{batch}.pt", "save_interval": "1ba", **arguments}
    saver, logger = ready(Path(name), state, **how)
    for _ in range(batches):
        step(state)
        saver.batch_checkpoint(state, logger)
    saver.fit_end(state, logger)
    saver.close(state, logger)
    return [Path(path).name for path in saver.saved_checkpoints]


def is_loaded(path: str, shape: tuple[int, ...], expected: dict[str, torch.Tensor], number: float) -> bool:
    """Whether what is in ``path`` has these numbers, and the random one that follows."""
    state = sharded_state(shape)
    step(state)
    generators = load_checkpoint(path, state)
    assert generators is not None
    rng.restore(generators, dist.get_global_rank())
    found = whole(state)
    same = found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    return same and random.random() == number


def saves_and_loads(folder: Path) -> dict[str, Any]:
    """Two nodes with two ranks each save, and load it: as they are, in another topology, and in the other order."""
    told: dict[str, Any] = {}
    for kind, shape, other in (("FSDP", (4,), (2, 2)), ("HSDP", (2, 2), (4,))):
        on_nodes(folder, ranks_per_node=2)
        random.seed(dist.get_global_rank())
        state = sharded_state(shape)
        told[f"{kind} saved"] = save_some(kind, state, num_checkpoints_to_keep=2)
        by_hand = save_checkpoint(state, f"by hand/{kind}-ba{{batch}}")
        expected, number = whole(state), random.random()
        told[f"{kind} by hand"] = is_loaded(by_hand, other, expected, number)
        told[f"{kind} latest"] = is_loaded(f"{kind}/latest", shape, expected, number)
        dist.barrier()
        on_nodes(folder, ranks_per_node=2, order=(1, 0))
        told[f"{kind} moved"] = is_loaded(f"{kind}/ba3", shape, expected, number)
        told[f"{kind} found"] = str(choose([RunPlace(Catalog(kind))], "run").path)
    return told


def save_and_be_killed(folder: Path, rank: int, stage: str, saves: int) -> str:
    """So many saves, in the last of which ``rank`` is killed when it comes to ``stage``: what the other one raises."""
    on_nodes(folder)
    state = sharded_state()
    saver, logger = ready(Path("run"), state, filename="ba{batch}.pt", save_interval="1ba", num_checkpoints_to_keep=1)
    for _ in range(saves - 1):
        step(state)
        saver.batch_checkpoint(state, logger)
        saver.fit_end(state, logger)
    step(state)
    dist.barrier()
    object.__setattr__(dist.get_group(), "timeout", timedelta(seconds=3))  # all has been imported: that takes longer
    if dist.get_global_rank() == rank:
        die_in(ShardedDirectory, stage)
    try:
        saver.batch_checkpoint(state, logger)
        saver.fit_end(state, logger)
    except RankError as e:
        return str(e)
    return "nothing was raised"


def go_on(folder: Path) -> dict[str, Any]:
    """The same two nodes start again, load what they find, and save once more."""
    on_nodes(folder)
    state = sharded_state()
    logger = Logger(state)
    saver = CheckpointSaver("run", "ba{batch}.pt", save_interval="1ba", num_checkpoints_to_keep=1)
    saver.init(state, logger)
    found = choose([saver.manager.place], "run").path
    if found is not None:
        load_checkpoint(found, state)
    saver.after_load(state, logger)
    saver.fit_start(state, logger)
    told: dict[str, Any] = {"found": found and str(found), "batch": int(state.timestamp.batch)}
    told["latest"] = Path("run/latest").resolve().name if Path("run/latest").is_symlink() else None
    step(state)
    saver.batch_checkpoint(state, logger)
    saver.fit_end(state, logger)
    saver.close(state, logger)
    # The process that survived has the lease of the saver that it could not close.
    return {**told, "left": sorted(path.name for path in Path("run").iterdir() if path.suffix != ".lease")}


def fail_to_delete_on_the_second_node(folder: Path, asynchronous: bool, failures: int) -> dict[str, Any]:
    """Three saves of which one is kept. Deletions on the second node fail."""
    on_nodes(folder)
    told: dict[str, Any] = {}

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if told or event != "os.remove":  # the test is over, and this process serves others
            return
        if (path := Path(arguments[0])).suffix == ".distcp" and path.parent.name.startswith("ba"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(arguments[0]))

    if dist.get_global_rank() == 1:
        sys.addaudithook(look)
    state = sharded_state()
    arguments: dict[str, Any] = {"num_checkpoints_to_keep": 1, "asynchronous": asynchronous, "failure_limit": failures}
    saver, logger = ready(Path("run"), state, filename="ba{batch}.pt", save_interval="1ba", **arguments)

    def save() -> None:
        for _ in range(3):
            step(state)
            saver.batch_checkpoint(state, logger)
        saver.fit_end(state, logger)

    logging.getLogger("composerlite").addHandler(kept := BufferingHandler(1000))
    said = [outcome(save), outcome(lambda: saver.close(state, logger))]
    logging.getLogger("composerlite").removeHandler(kept)
    told |= {"saved": [Path(path).name for path in saver.saved_checkpoints]}
    told |= {"outcome": said, "warnings": [record.getMessage() for record in kept.buffer]}
    return told


def lose_parts(folder: Path) -> dict[str, Any]:
    """What two nodes find when more and more is lost or damaged on the second one."""
    on_nodes(folder)
    save_some("run", sharded_state())
    told: dict[str, Any] = {}
    second, here = dist.get_global_rank() == 1, Path("run")
    cases: dict[str, Callable[[], object]] = {
        "whole": lambda: None,
        "damaged": lambda: next((here / "ba3").glob("__1_0_*.distcp")).write_bytes(b"x"),
        "gone": lambda: delete_checkpoint(Catalog(here).place, Catalog(here).manifests()[-1]),
        "all gone": lambda: shutil.rmtree(here),
    }
    for name, lose in cases.items():
        if second:
            lose()
        dist.barrier()
        told[name] = outcome(lambda: str(choose([RunPlace(Catalog(here))], "run").path))
        told[f"{name} here"] = sorted(path.name for path in here.iterdir()) if here.exists() else []
    return told
