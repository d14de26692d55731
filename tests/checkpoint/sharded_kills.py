"""Saves a sharded checkpoint again and again, and dies each time one step later: ``sharded_kills.py FOLDER``.

A step is whatever python reports to audit hooks about a file of the attempt. Each attempt has a folder of its own,
``first<n>`` or ``replace<n>``; the last of each kind survives. The names of all are printed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from composerlite.checkpoint import save_state_dict

STEPS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "fcntl.flock", "os.listdir", "os.scandir")


def attempt(folder: Path, die_at: int, overwrite: bool) -> bool:
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

        sys.addaudithook(hook)
        save_state_dict(folder / "c", {"a": torch.full((1000,), 2.0)}, save_overwrite=overwrite)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(folder: str) -> None:
    root = Path(folder)
    torch.set_num_threads(1)
    save_state_dict(root / "warm", {"a": torch.ones(3)})
    for kind in ("first", "replace"):
        for number in range(200):
            folder = root / f"{kind}{number}"
            folder.mkdir()
            if kind == "replace":
                save_state_dict(folder / "c", {"a": torch.full((1000,), 1.0)})
            died = attempt(folder, number, overwrite=kind == "replace")
            sys.stdout.write(f"{folder.name}\n")
            sys.stdout.flush()
            if not died:
                break


if __name__ == "__main__":
    main(sys.argv[1])
