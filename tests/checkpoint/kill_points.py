"""Does one thing to a folder of checkpoints again and again, and dies each time one step later than before.

A step is whatever python reports to audit hooks about a file below the folder: opened, renamed, removed, linked. The
process kills itself, as the kernel would, right before the step; files that are being written are also cut off by the
kernel at given sizes. Run as a program: ``kill_points.py <root>``. Every attempt gets a folder of its own,
``<root>/<scenario>/<attempt>``, and a line is printed for each: scenario, attempt, and where it died.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parts import new_state, save_batch

from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog
from composerlite.core import Logger, State

STEPS = ("open", "os.rename", "os.remove", "os.symlink", "os.mkdir", "fcntl.flock")


def nothing(folder: Path) -> None:
    """A folder that is not there yet."""


def two_batches(folder: Path) -> None:
    """A run that keeps two checkpoints and has saved both."""
    for batch in (1, 2):
        save_batch(folder, batch)


def a_fixed_name(folder: Path) -> None:
    """A run that saves to one name."""
    save_batch(folder, 2, template="fixed.pt", overwrite=True)


def saver(folder: Path, **arguments: Any) -> tuple[CheckpointSaver, State]:
    """A saver at batch 3 of the run."""
    state = new_state(3, value=3.0)
    saver = CheckpointSaver(folder=folder, latest_filename="latest.pt", **arguments)
    saver.init(state, Logger(state))
    return saver, state


def first(folder: Path) -> None:
    """The first save of a run."""
    new, state = saver(folder, filename="ba{batch}.pt")
    new.save(state)


def next_with_retention(folder: Path) -> None:
    """A save after which the oldest checkpoint goes."""
    new, state = saver(folder, filename="ba{batch}.pt", num_checkpoints_to_keep=2)
    new.save(state)


def overwrite(folder: Path) -> None:
    """A save in place of an older checkpoint of the same name."""
    new, state = saver(folder, filename="fixed.pt", overwrite=True)
    new.save(state)


def recover(folder: Path) -> None:
    """What a run does with the remains of a killed one."""
    Catalog(folder).recover()


def killed_commit(folder: Path) -> None:
    """The remains of a run that was killed after its data got its name and before its manifest did."""
    a_fixed_name(folder)
    (manifest,) = (folder / ".manifest").iterdir()
    old = manifest.read_bytes()
    save_batch(folder, 3, template="fixed.pt", overwrite=True)
    manifest.rename(folder / ".manifest" / ".fixed.pt.json.tmp-0123456789abcdef")
    manifest.write_bytes(old)
    (folder / ".unrelated.pt.tmp-0123456789abcdef").write_bytes(b"half of it")
    (folder / ".latest.pt.tmp-0123456789abcdef").symlink_to("fixed.pt")


SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "first": (nothing, first),
    "next": (two_batches, next_with_retention),
    "overwrite": (a_fixed_name, overwrite),
    "recover": (killed_commit, recover),
}


def die_at_step(number: int, folder: Path, said: int) -> None:
    """Kill this process right before the step ``number`` from now."""
    steps = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal steps
        if event in STEPS and (event == "fcntl.flock" or str(folder) in str(arguments[:2])):
            steps += 1
            if steps > number:
                os.write(said, f"{event} {arguments[:2]}".replace(str(folder), "…").encode())
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def die_at_size(size_bytes: int) -> None:
    """Let the kernel kill this process when it writes a file beyond ``size_bytes``."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def attempt(act: Callable[[Path], None], folder: Path, arm: Callable[[int], None]) -> tuple[int, str]:
    """Do it in a process that is ``arm``-ed to die: how it ended, and what it said last."""
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            arm(said)
            act(folder)
        except BaseException:  # noqa: BLE001 - the process ends here and says so
            os._exit(1)
        os._exit(0)
    os.close(said)
    _, status = os.waitpid(child, 0)
    with os.fdopen(heard) as pipe:
        return os.waitstatus_to_exitcode(status), pipe.read()


def main(root: str) -> None:
    torch.set_num_threads(1)  # processes are forked
    new_state()  # torch imports half of itself for the first optimizer: not in every process
    for what in SCENARIOS:
        run(what, Path(root, what))


def run(what: str, root: Path) -> None:
    prepare, act = SCENARIOS[what]
    template = root / "template"
    prepare(template)

    def folder_for(name: str) -> Path:
        folder = root / name
        if template.exists():
            shutil.copytree(template, folder, symlinks=True)
        return folder

    def report(folder: Path, how: str) -> None:
        sys.stdout.write(f"{what}\t{folder.name}\t{how}\n")

    number, code = 0, -signal.SIGKILL
    while code != 0:
        folder = folder_for(f"step{number}")
        code, where = attempt(act, folder, lambda said, n=number, f=folder: die_at_step(n, f, said))  # type: ignore[misc]
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"{folder}: ended with {code} {where}")
        report(folder, where or "not at all")
        number += 1
    for size_bytes in () if what == "recover" else (0, 64, 500, 1000, 4000, 8000):
        folder = folder_for(f"size{size_bytes}")
        code, _ = attempt(act, folder, lambda _, size_bytes=size_bytes: die_at_size(size_bytes))  # type: ignore[misc]
        if code != -signal.SIGXFSZ:
            raise SystemExit(f"{folder}: ended with {code}")
        report(folder, f"at byte {size_bytes}")


if __name__ == "__main__":
    main(*sys.argv[1:])
