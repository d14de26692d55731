"""Threads that help: work is done without them where the system gives none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["start_threads"]

log = logging.getLogger(__name__)
_warned = threading.Event()


def start_threads(run: Callable[[], object], count: int, *, name: str, daemon: bool = True) -> list[threading.Thread]:
    """Threads that call ``run``: ``count`` of them, or as many as the system lets this process start.

    Who calls this does the work by itself, or has it done by those that there are. The first time that some are
    missing a warning says so.
    """
    threads: list[threading.Thread] = []
    for _ in range(count):
        thread = threading.Thread(target=run, name=name, daemon=daemon)
        try:
            thread.start()
        except RuntimeError as e:  # "can't start new thread": a limit of the user's or of a container
            if not _warned.is_set():
                _warned.set()
                log.warning(
                    "a thread (%s) could not be started: %s. Checkpoints are saved without it, and training waits "
                    "longer. Raise the limit of processes (ulimit -u, pids.max) to have it.",
                    name,
                    e,
                )
            break
        threads.append(thread)
    return threads
