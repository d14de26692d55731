"""Does one thing again and again in processes that are killed, each one step later than the one before.

A step is whatever changes a disk or a bucket: what python reports to audit hooks about a file below the folder that is
opened to be written, renamed, removed or linked, or a request that is no GET or HEAD. The process kills itself, as the
kernel would, right before the step. A kill before something that only reads leaves what the next one leaves.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

__all__ = [
    "at_event",
    "attempt",
    "changes_something",
    "die_at_size",
    "die_at_step",
    "kill_at_every_step",
    "refuse_new_names",
]

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink")
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_MOST = 1000


def changes_something(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether the event of an audit hook may change what is on a disk or in a bucket."""
    if event == "open":
        return bool(arguments[2] & _TO_WRITE)
    if event == "http.client.send":
        return not (isinstance(arguments[1], bytes) and arguments[1].startswith((b"GET ", b"HEAD ")))
    return event in _CHANGES


def at_event(
    root: str, number: int, act: Callable[[str], None], counts: Callable[[str, tuple[Any, ...]], bool]
) -> None:
    """Do ``act`` once, right before the event ``number`` of this process that ``counts`` and names ``root``.

    ``act`` is told which. A request to a server counts whatever it names.
    """
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if counts(event, arguments) and (event == "http.client.send" or root in str(arguments[:2])):
            left -= 1
            if left == -1:
                act(f"{event} {arguments[:2]}".replace(root, "…"))

    sys.addaudithook(hook)


def die_at_step(number: int, folder: Path, said: int, *, when: Callable[[], bool] = lambda: True) -> None:
    """Kill this process right before the step ``number`` from now of those that are done ``when`` that is true."""

    def die(where: str) -> None:
        os.write(said, where.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    at_event(str(folder), number, die, lambda event, arguments: changes_something(event, arguments) and when())


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
        except BaseException as e:  # noqa: BLE001 - the process ends here and says so
            os.write(said, f"{type(e).__name__}: {e}".encode())
            os._exit(1)
        os._exit(0)
    os.close(said)
    _, status = os.waitpid(child, 0)
    with os.fdopen(heard) as pipe:
        return os.waitstatus_to_exitcode(status), pipe.read()


def kill_at_every_step(
    root: Path,
    act: Callable[[Path], None],
    *,
    template: Path | None = None,
    stride: int = 1,
    when: Callable[[], bool] = lambda: True,
) -> None:
    """Do it in folders ``<root>/step<n>``, killed right before step ``n`` of it. The last one survives.

    Each is a copy of ``template``, if there is one. A line is printed for each: its name, and where it was killed.
    """
    for number in range(0, _MOST, stride):
        folder = root / f"step{number}"
        if template is None:
            folder.mkdir(parents=True)
        else:
            shutil.copytree(template, folder, symlinks=True)
        code, where = attempt(act, folder, partial(die_at_step, number, folder, when=when))
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"{folder}: ended with {code} {where}")
        sys.stdout.write(f"{folder.name}\t{where}\n")
        if code == 0:
            return
    raise SystemExit(f"{root}: not over after {_MOST} steps")


def refuse_new_names() -> None:
    """Have the kernel refuse renames to free names alone (``RENAME_NOREPLACE``) in this process from now on, as it does
    on NFS (seccomp).
    """
    number = {"x86_64": 316, "aarch64": 276}[platform.machine()]  # of renameat2
    refused = 0x00050000 | 22  # EINVAL
    steps = [
        (32, 0, 0, 0),
        (21, 0, 3, number),
        (32, 0, 0, 48),
        (69, 0, 1, 1),
        (6, 0, 0, refused),
        (6, 0, 0, 0x7FFF0000),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    filtered = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filtered, 0, 0):
        raise OSError(ctypes.get_errno(), "the system calls of this process cannot be filtered")
