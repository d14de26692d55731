"""Saves a sharded checkpoint again and again, and dies each time one step later: ``sharded_kills.py FOLDER``.

A step is whatever python reports to audit hooks about a file of the attempt. Each attempt has a folder of its own,
``first<n>`` or ``replace<n>``; the last of each kind survives. The names of all are printed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from composerlite.checkpoint import save_state_dict

STEPS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "fcntl.flock", "os.listdir", "os.scandir")


def plain(value: float) -> dict[str, Any]:
    """A state of one tensor."""
    return {"a": torch.full((1000,), value)}


def _save(folder: Path, state: Callable[[float], dict[str, Any]], value: float) -> None:
    """Save in a process of its own: one with process groups cannot be forked."""
    child = os.fork()
    if child == 0:
        save_state_dict(folder, state(value))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def attempt(folder: Path, die_at: int, overwrite: bool, state: Callable[[float], dict[str, Any]]) -> bool:
    """Save in a process that dies before its step ``die_at``; whether it did."""
    child = os.fork()
    if child == 0:
        left = die_at

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in STEPS and arguments and str(folder) in str(arguments[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        made = state(2.0)
        sys.addaudithook(hook)
        save_state_dict(folder / "c", made, save_overwrite=overwrite)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def run(root: Path, state: Callable[[float], dict[str, Any]]) -> None:
    """Make all attempts to save ``state`` in ``root``."""
    torch.set_num_threads(1)
    save_state_dict(root / "warm", {"a": torch.ones(3)})
    for kind in ("first", "replace"):
        for number in range(200):
            folder = root / f"{kind}{number}"
            folder.mkdir()
            if kind == "replace":
                _save(folder / "c", state, 1.0)
            died = attempt(folder, number, kind == "replace", state)
            sys.stdout.write(f"{folder.name}\n")
            sys.stdout.flush()
            if not died:
                break


def main(folder: str) -> None:
    run(Path(folder), plain)


if __name__ == "__main__":
    main(sys.argv[1])
