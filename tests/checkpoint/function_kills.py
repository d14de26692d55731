"""Saves with a function again and again, and dies each time one step later.

A step is whatever python reports to audit hooks about a file. After each death another save goes to a name beside it;
what there is in the folder then is printed, a line of JSON for each death.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint.sharded_kills import STEPS

from composerlite.checkpoint import Checkpointer, save_state_dict


def function(folder: Path, name: str, value: int) -> None:
    """Save a state dict."""
    save_state_dict(folder / name, {"x": torch.full((10,), value)}, save_overwrite=True)


def checkpointer(folder: Path, name: str, value: int) -> None:
    """Save a step."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, value)
    Checkpointer(save_overwrite=True).save(folder / name, model, {"value": value})


def file(folder: Path, name: str, value: int) -> None:
    """Write a file beside the first step; then save another."""
    Checkpointer(save_overwrite=True).write_file(folder / "step1", "notes.txt", str(value))
    if name != "step1":
        checkpointer(folder, name, value)


def died(save: Callable[[Path, str, int], None], folder: Path, at: int) -> bool:
    """Save in a process that dies before its step ``at``; whether it did."""
    if (child := os.fork()) == 0:
        left = at

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in STEPS and arguments and str(folder) in str(arguments[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save(folder, "step1", 2)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(root: str, kind: str, stride: str) -> None:
    """Until one survives."""
    save = {"function": function, "checkpointer": checkpointer, "file": file}[kind]
    for number in range(0, 1000, int(stride)):
        folder = Path(root, f"{kind}{number}")
        folder.mkdir()
        save(folder, "step1", 1)
        was_killed = died(save, folder, number)
        save(folder, "step2", 3)
        found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        sys.stdout.write(json.dumps([was_killed, found]) + "\n")
        sys.stdout.flush()
        if not was_killed:
            break
