"""What a process does to the files below a folder, recorded by a small library in front of the C library.

It sees every thread, O_DIRECT, reserved space, names and flushes, and needs a C compiler and nothing else. Who replays
a log compares the end of the replay with the real folder: that shows that no call went past the recorder.
"""

from __future__ import annotations

import ctypes
import enum
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("storage_recorder.c")


class Kind(enum.IntEnum):
    """What a call does."""

    CREATE = 1
    TRUNCATE = 2
    WRITE = 3
    ALLOCATE = 4
    SYNC = 5
    RENAME = 6
    UNLINK = 7
    MKDIR = 8
    RMDIR = 9
    SYMLINK = 10
    LINK = 11
    MARK = 12
    UNKNOWN = 13
    SYNC_ALL = 14
    EXCHANGE = 15


TAKES_SPACE, OTHER, SHORT_WRITE = 1, 2, 4
"""Which calls may fail: those that a full disk refuses, all others, or writes that take only a part."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call that succeeded.

    Attributes:
        inode: of the file; 0 where only names matter.
        a, b: offset of a write, new size of a truncation; offset and size of an allocation.
        path, other: absolute paths: the one made, removed or renamed; the new name of a rename, the target of a link.
        data: what was written.
    """

    kind: Kind
    inode: int
    a: int
    b: int
    path: str
    other: str
    data: bytes


def compile_recorder(folder: Path) -> Path:
    """The library, compiled into ``folder``. Skips the test where there is no Linux or no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("recording system calls needs Linux and a C compiler")
    library = folder / "storage_recorder.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def run_recorded(library: Path, program: Path, *arguments: str) -> str:
    """What ``program`` printed, run under the recorder, which it switches on itself: see :class:`Recorder`."""
    preload = " ".join([str(library), *filter(None, [os.environ.get("LD_PRELOAD")])])
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env={**os.environ, "LD_PRELOAD": preload},
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Recorder:
    """For the program that is recorded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.recorder_calls.restype = ctypes.c_long
        self._library.recorder_fail_at.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int]

    def start(self, folder: Path, log: Path | None) -> None:
        """Watch what happens below ``folder``; write it to ``log``."""
        self._library.recorder_start(os.fsencode(folder), os.fsencode(log or ""))

    def stop(self) -> None:
        """Watch nothing; let nothing fail."""
        self._library.recorder_stop()

    def mark(self, what: str) -> None:
        """Put a line of one's own into the log."""
        self._library.recorder_mark(what.encode())

    def fail_at(self, number: int, error: int, *, for_good: bool, kinds: int) -> None:
        """Let the call ``number`` from now fail with ``error``, and with ``for_good`` all that follow."""
        self._library.recorder_fail_at(number, error, for_good, kinds)

    @property
    def calls(self) -> int:
        """How many calls there were since :meth:`fail_at` that could have failed."""
        return self._library.recorder_calls()


def read_log(log: Path) -> list[Call]:
    """The calls, in the order in which they happened."""
    data, at, calls = log.read_bytes(), 0, []
    head = struct.Struct("=4i3q")
    while at < len(data):
        kind, first, second, size, inode, a, b = head.unpack_from(data, at)
        at += head.size
        path, at = data[at : at + first], at + first
        other, at = data[at : at + second], at + second
        payload, at = data[at : at + size], at + size
        calls.append(Call(Kind(kind), inode, a, b, os.fsdecode(path), os.fsdecode(other), payload))
    return calls
