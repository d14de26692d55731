"""The files and threads that a test leaves open in its process."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

__all__ = ["opened"]


def opened() -> set[str | threading.Thread]:
    """Return the open files, each with its number, and the threads.

    ``opened() <= before`` where nothing is left open: what tests before this one had left may be closed meanwhile.
    """
    found: set[str | threading.Thread] = set(threading.enumerate())
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder that was listed
            found.add(f"{entry.name}: {entry.readlink()}")
    return found
