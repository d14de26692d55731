"""One process of a machine after the other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path

__all__ = ["turn_at", "turn_of_this_node"]

_PAUSE_SECONDS = 0.02
_PATIENCE = timedelta(hours=2)


def turn_of_this_node() -> contextlib.AbstractContextManager[None]:
    """Within it no other process of this machine and user is in one. Raises as :func:`turn_at` does."""
    return turn_at(Path(tempfile.gettempdir()) / f"composerlite-{os.getuid()}.turn")


@contextlib.contextmanager
def turn_at(path: Path, timeout: timedelta = _PATIENCE) -> Generator[None]:
    """Within it no other process of this machine is in one at ``path``, a file that is made if need be.

    A process that dies gives its turn to the next.

    Raises:
        TimeoutError: the others have taken longer than ``timeout``.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    with path.open("ab") as file:
        while not _locked(file.fileno()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"other processes have held {str(path)!r} for {timeout}: does one of them hang?")
            time.sleep(_PAUSE_SECONDS)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
