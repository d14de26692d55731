"""Saves and loads of two ranks that fail at one stage after the other, and what is there afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from checkpoint.parts import new_state
from checkpoint.saving_ranks import next_batch, ready, sharded_state, step

from composerlite import dist
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog, load_checkpoint
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.save import save, sharded_plan
from composerlite.checkpoint.save.form import FileWriter, SaveRequest
from composerlite.checkpoint.save.save import LONGEST_WORK
from composerlite.checkpoint.save.snapshot import StagingMemory
from composerlite.core import Logger, State
from composerlite.dist.votes import Vote
from composerlite.storage.disk import files
from composerlite.storage.disk.writer import StreamWriter

Stage = tuple[str, int, Any, str]
"""Its name, the rank that fails there, and the function in which it does."""
STAGES: dict[str, list[Stage]] = {
    "copies": [
        ("gather", 1, SaveRequest, "gathered"),
        ("state", 0, State, "state_dict"),
        ("snapshot", 0, StagingMemory, "take"),
        ("write", 0, FileWriter, "write"),
        ("flush", 0, StreamWriter, "finish"),
        ("commit", 0, FileWriter, "commit"),
        ("latest", 0, files, "_move_link"),
        ("retention", 0, save, "delete_checkpoint"),
    ],
    "shards": [
        ("gather", 1, SaveRequest, "gathered"),
        ("plan", 1, sharded_plan, "RankState"),
        ("claim", 0, ShardedDirectory, "begin"),
        ("snapshot", 1, StagingMemory, "take"),
        ("commit", 0, ShardedDirectory, "commit"),
        ("latest", 0, files, "_move_link"),
        ("retention", 0, save, "delete_checkpoint"),
    ],
}
THEIRS = b"that of another run"


@contextlib.contextmanager
def instead(rank: int, owner: Any, name: str, act: Callable[..., Any]) -> Generator[None]:
    """On ``rank``, ``act`` is called with the real function ``name`` before its arguments."""
    real = getattr(owner, name)
    if dist.get_global_rank() == rank:
        setattr(owner, name, lambda *arguments, **others: act(real, *arguments, **others))
    try:
        yield
    finally:
        setattr(owner, name, real)


def no_space(real: Callable[..., Any], *_: Any, **__: Any) -> None:
    """The disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")


def outcome(act: Callable[[], str]) -> str:
    """What ``act`` gives, or what it raises, with the rank that is named in a note."""
    try:
        return act()
    except Exception as e:  # noqa: BLE001 - it is the outcome
        whose = [note for note in getattr(e, "__notes__", []) if note.startswith("Seen by")]
        return f"{type(e).__name__}: {e} {' '.join(whose)}"


class Run:
    """A run that keeps one checkpoint, in a folder of its own."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.is_sharded = kind == "shards"
        self.state: State = sharded_state() if self.is_sharded else new_state()
        self.saver: CheckpointSaver
        self.logger: Logger
        self.saver, self.logger = ready(
            folder, self.state, filename="ba{batch}.pt", save_interval="1ba", num_checkpoints_to_keep=1
        )

    @property
    def next_name(self) -> str:
        """Of the next checkpoint."""
        return f"ba{int(self.state.timestamp.batch) + 1}{'' if self.is_sharded else '.pt'}"

    def next_batch(self) -> str:
        """Train a batch and save: what that raises, or the name of the checkpoint."""
        return outcome(self._next_batch)

    def _next_batch(self) -> str:
        if self.is_sharded:
            step(self.state)
            self.saver.batch_checkpoint(self.state, self.logger)
        else:
            next_batch(self.state, self.saver, self.logger)
        self.saver.fit_end(self.state, self.logger)
        return Path(self.saver.saved_checkpoints[-1]).name


def fail_everywhere(folder: Path, kind: str) -> dict[str, tuple[str, list[str], str, str]]:
    """By stage: what was raised, which checkpoints were there then, and the name of the next one and what it gave."""
    run = Run(folder, kind)
    run.next_batch()
    told: dict[str, tuple[str, list[str], str, str]] = {}
    for name, rank, owner, function in STAGES[kind]:
        with instead(rank, owner, function, no_space):
            raised = run.next_batch()
        dist.barrier("the save has failed")
        there = [manifest.name for manifest in Catalog(folder).manifests()]
        for manifest in Catalog(folder).manifests():
            Catalog(folder).verify(manifest)
        dist.barrier("all have looked")
        told[name] = raised, there, run.next_name, run.next_batch()
    run.saver.close(run.state, run.logger)
    return told


def meet_another_run(folder: Path, kind: str) -> tuple[str, str]:
    """Another run gives its checkpoint the name of ours, while ours is being written: the name, and what is raised."""
    run = Run(folder, kind)
    run.next_batch()
    name = run.next_name

    def they_are_faster(real: Callable[..., Any], *arguments: Any, **others: Any) -> Any:
        if arguments[0].timeout > LONGEST_WORK:  # a vote on a commit
            place = folder / name
            if run.is_sharded:
                place.mkdir(exist_ok=True)
                place /= ".metadata"
            place.write_bytes(THEIRS)
        return real(*arguments, **others)

    with instead(0, Vote, "decide", they_are_faster):
        raised = run.next_batch()
    run.saver.close(run.state, run.logger)
    return name, raised


def see_different_folders(folder: Path) -> dict[str, str]:
    """Each rank has its own view of one folder, as on a network file system; rank 1 lacks a file, or all of it."""
    rank = dist.get_global_rank()
    run = Run(folder / "view0", "shards")
    name = run.next_batch()
    run.saver.close(run.state, run.logger)
    told: dict[str, str] = {}
    for what in ("file", "directory"):
        if rank == 1:
            shutil.copytree(
                folder / "view0",
                folder / f"view1 without {what}",
                symlinks=True,
                ignore=shutil.ignore_patterns("*.lease"),
            )
            lacks = folder / f"view1 without {what}" / name
            shutil.rmtree(lacks) if what == "directory" else next(lacks.glob("__1_0_*")).unlink()
        dist.barrier("the views are there")
        with contextlib.chdir(folder / ("view0" if rank == 0 else f"view1 without {what}")):
            told[what] = outcome(lambda: str(load_checkpoint(Path(name), sharded_state())))
    return told


def all_failures(folder: Path) -> dict[str, Any]:
    """Both kinds of saves, and a load."""
    told: dict[str, Any] = {
        kind: (fail_everywhere(folder / kind, kind), meet_another_run(folder / f"{kind} of two runs", kind))
        for kind in STAGES
    }
    return {**told, "views": see_different_folders(folder / "views")}
