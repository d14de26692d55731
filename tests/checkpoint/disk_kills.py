"""Saves a checkpoint on two disks again and again, and dies each time one step later: ``disk_kills.py FOLDER``.

A step is whatever python reports to audit hooks about a file. Each attempt has a folder of its own, ``first<n>`` or
``replace<n>``, with a folder for each node; the last of each kind survives. The names of all are printed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from sharded_kills import STEPS

from composerlite.checkpoint import Manifest
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.storage import FileDigest


def save(root: Path, value: int, *, overwrite: bool) -> None:
    """One save of both nodes, which does what their ranks do, in that order."""
    nodes = [ShardedDirectory.on_disk(root / f"node{number}" / "c") for number in (0, 1)]
    nodes[0].record = Manifest(
        name="c", kind="sharded", template="c", run_name="run", timestamp={"batch": value}, files=()
    )
    claim = nodes[0].claim(overwrite=overwrite)
    nodes[1].join(claim, overwrite=overwrite)
    files: dict[str, FileDigest] = {}
    for number, node in enumerate(nodes):
        name = f"__{number}_0.distcp"
        files[name] = node.write(claim, name, 100, lambda sink: sink.write(bytes([value]) * 100))
    sealed = nodes[0].sealed(b"the index", files, {}, {name: number for number, name in enumerate(files)})
    for number, node in enumerate(nodes):
        node.prepare(sealed, number)
    for node in nodes:
        node.commit_part()


def attempt(folder: Path, die_at: int, *, overwrite: bool) -> bool:
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
        save(folder, 2, overwrite=overwrite)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(root: Path) -> None:
    for start, kind in enumerate(("first", "replace")):  # which go by the same steps: every other one of each
        for number in range(start, 300, 2):
            folder = root / f"{kind}{number}"
            folder.mkdir()
            if kind == "replace":
                save(folder, 1, overwrite=False)
            died = attempt(folder, number, overwrite=kind == "replace")
            sys.stdout.write(f"{folder.name}\n")
            sys.stdout.flush()
            if not died:
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
