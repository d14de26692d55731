"""One life of a run that will be killed: it trains, and writes down what it knows in a diary that outlives it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twelve_batches import build, digest

from composerlite import Callback, Event, Logger, State


class Diary(Callback):
    """Writes down each checkpoint, and ``latest``, as soon as they are seen; a line is one write: no kill tears it."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._folder = folder
        self._seen: dict[str, int] = {}

    def write(self, line: str) -> None:
        """Write down a line."""
        os.write(self._file, f"{line}\n".encode())

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.look(int(state.timestamp.batch))

    def look(self, batch: int) -> None:
        """Write down what is new in the folder."""
        try:
            entries = list(os.scandir(self._folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name.startswith(".") or not entry.name.endswith(".pt") or entry.is_symlink():
                continue
            if self._seen.get(entry.name) != entry.inode():
                self._seen[entry.name] = entry.inode()
                self.write(f"committed {entry.name}")
        if "latest" not in self._seen and (self._folder / "latest.pt").is_symlink():
            self._seen["latest"] = 1
            self.write("latest")


def live(folder: str, diary: str, mode: str, arguments: dict[str, Any]) -> None:
    """Train to the end, from wherever an earlier life got to."""
    notes = Diary(Path(diary), Path(folder))
    with build(Path(folder), mode, callbacks=[notes], **arguments) as trainer:
        notes.write(f"resumed {int(trainer.state.timestamp.batch)}")
        trainer.fit()
    notes.look(int(trainer.state.timestamp.batch))
    notes.write(f"ended {digest(trainer.state.state_dict())}")
