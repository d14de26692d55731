"""Turns: one thread or process of a machine at a time works at a path."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path

__all__ = ["turn_at"]

_PAUSE_SECONDS = 0.02
_PATIENCE = timedelta(hours=2)
_turns: set[tuple[int, int, int, int]] = set()
"""Those that threads of this process have: process, thread, device and inode."""


@contextlib.contextmanager
def turn_at(path: Path, timeout: timedelta = _PATIENCE) -> Generator[None]:
    """Within it no other thread or process of this machine is in one at ``path``.

    A process that dies gives its turn to the next. Within a turn of the same thread, as a handler of a signal that
    saves may be, there is nothing to wait for.

    Args:
        path: a directory, or a file, which is made if need be.
        timeout: to wait for the others.

    Raises:
        OSError: a link is there, or what cannot be opened; or the file system has no locks.
        TimeoutError: the others have taken longer than ``timeout``.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    how = os.O_DIRECTORY if path.is_dir() else os.O_WRONLY | os.O_CREAT
    file = os.open(path, how | os.O_NOFOLLOW, 0o666)
    status = os.fstat(file)
    turn = os.getpid(), threading.get_ident(), status.st_dev, status.st_ino
    try:
        if turn in _turns:
            yield
            return
        while not _locked(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"other processes have held {str(path)!r} for {timeout}: does one of them hang?")
            time.sleep(_PAUSE_SECONDS)
        _turns.add(turn)
        try:
            yield
        finally:
            _turns.discard(turn)
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile would hold it on
    finally:
        os.close(file)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
