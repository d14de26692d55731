"""Saves with a Checkpointer and dies behind training, each time some steps later: ``checkpointer_kills.py FOLDER``.

A step is whatever python reports to audit hooks about a file of the attempt. Each attempt has a folder of its own,
``first<n>`` or ``again<n>``, with the checkpoint ``step1``; it dies while ``step2`` is saved, for ``again`` in the
place of one that is there. The last of each kind survives. The names of all are printed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from checkpoint.sharded_kills import STEPS
from checkpoint.sharded_parts import small_model
from torch.optim import SGD

from composerlite.checkpoint import Checkpointer


def attempt(folder: Path, die_at: int) -> bool:
    """Train and save in a process that dies before step ``die_at`` of the second save; whether it did."""
    child = os.fork()
    if child == 0:
        left, armed = die_at, False

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if armed and event in STEPS and arguments and str(folder) in str(arguments[0]):
                left -= 1
                if left < 0 and threading.current_thread() is not threading.main_thread():
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        again = folder.name.startswith("again")
        model = small_model()
        optim = SGD(model.parameters(), lr=0.1)
        checkpointer = Checkpointer(save_overwrite=True)
        for step in (1, 2):
            with torch.no_grad():
                next(model.parameters()).fill_(step)
            if step == 2 and again:
                checkpointer.save(folder / "step2", (model, optim), {"step": 2, "old": True})
            armed = step == 2
            checkpointer.save_async(folder / f"step{step}", (model, optim), {"step": step, "old": False}).result()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(folder: str) -> None:
    root = Path(folder)
    torch.set_num_threads(1)
    for kind in ("first", "again"):
        for number in range(0, 300, 9):
            folder = root / f"{kind}{number}"
            folder.mkdir()
            died = attempt(folder, number)
            sys.stdout.write(f"{folder.name}\n")
            sys.stdout.flush()
            if not died:
                break


if __name__ == "__main__":
    main(sys.argv[1])
