"""Runs of twelve batches under the recorder: ``recorded_runs.py <root> <mode> <scenario>…``.

For each scenario there are ``<root>/<scenario>/before`` (the disk when the recording starts) with its ``inodes``,
``disk`` (when it ends), ``log``, and ``reference``: what an uninterrupted run was after each batch. The log has a mark
for each checkpoint that the trainer counts as saved: ``saved <name> <batch>``.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from storage_recorder import Recorder
from twelve_batches import WIDE, Digests, build

from composerlite import Callback, Event, Logger, State
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Checkpointer, save_state_dict


class Tell(Callback):
    """Says of each checkpoint, as soon as the trainer counts it among those that are saved, that it is."""

    def __init__(self, say: Callable[[str, int], object]) -> None:
        self._say = say
        self._last = 0

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        for callback in state.callbacks:
            if isinstance(callback, CheckpointSaver) and callback.manager.outcomes.reports:
                self.saved(callback)

    def saved(self, saver: CheckpointSaver) -> None:
        """Say what is new."""
        name = saver.saved_checkpoints[-1]
        batch = saver.manager.outcomes.reports[-1].batch
        if batch > self._last:
            self._last = batch
            self._say(name, batch)


SCENARIOS: dict[str, dict[str, Any]] = {
    "keep all": {"save_interval": "3ba"},
    "new folder": {"save_interval": "6ba"},
    "rotation": {"save_interval": "2ba", "num_checkpoints_to_keep": 2},
    "one name": {"save_interval": "4ba", "filename": "newest.pt", "overwrite": True},
    "folders": {"save_interval": "6ba", "filename": "{epoch}/of/ba{batch}.pt"},
    "resumed": {"save_interval": "3ba", "num_checkpoints_to_keep": 2},
    "large": {"save_interval": "6ba", "num_checkpoints_to_keep": 1, "width": WIDE},
}


def leave_remains(folder: Path, mode: str) -> None:
    """A run that was killed after its second checkpoint was committed, and before its link was moved."""
    with build(folder, mode, save_interval="3ba", max_duration="6ba") as trainer:
        trainer.fit()
    (folder / "latest.pt").unlink()
    (folder / "latest.pt").symlink_to("ba3.pt")
    (folder / ".ba7.pt.tmp-0123456789abcdef").write_bytes(b"half of it")
    (folder / ".latest.pt.tmp-0123456789abcdef").symlink_to("ba6.pt")


DIRECTORIES = "directories"
"""Scenario of saves without a trainer: a directory that is replaced, and steps."""


def save_directories(folder: Path, saved: Callable[[str, int], object]) -> None:
    """Save three times to one directory, and to a new step each time."""
    for value in (1, 2, 3):
        save_state_dict(folder / "c", {"x": torch.full((2000,), value)}, save_overwrite=True)
        saved("c", value)
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, value)
        Checkpointer().save(folder / f"step{value}", model, {"value": value})
        saved("step", value)


def main(root: str, mode: str, *scenarios: str) -> None:
    torch.set_num_threads(1)
    recorder = Recorder()
    references: dict[int, dict[int, str]] = {}
    for scenario in scenarios:
        arguments = SCENARIOS.get(scenario, {})
        width = arguments.get("width", 8)
        if width not in references:
            digests = Digests()
            with build(None, mode, width=width, callbacks=[digests]) as run:
                run.fit()
            references[width] = digests.at
        home = Path(root, scenario)
        disk = home / "disk"
        disk.mkdir(parents=True)
        if scenario == "resumed":
            leave_remains(disk / "run", mode)
        elif scenario != "new folder":
            (disk / "run").mkdir()
        (home / "reference").write_text(json.dumps(references[width]))
        shutil.copytree(disk, home / "before", symlinks=True)
        paths = [disk, *(path for path in disk.rglob("*") if not path.is_symlink())]
        inodes = {str(path.relative_to(disk)): path.stat().st_ino for path in paths}
        (home / "inodes").write_text(json.dumps(inodes))
        recorder.start(disk, home / "log")
        if scenario == DIRECTORIES:
            save_directories(disk / "run", lambda name, value: recorder.mark(f"saved {name} {value}"))
        else:
            tell = Tell(lambda name, batch: recorder.mark(f"saved {name} {batch}"))
            with build(disk / "run", mode, callbacks=[tell], **arguments) as run:
                run.fit()
        recorder.mark("closed")
        recorder.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
