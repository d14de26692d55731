"""Threads of composerlite: all are started here, and where the system gives none their work is done without them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["start_threads"]

log = logging.getLogger(__name__)
_warned = threading.Event()


def start_threads(run: Callable[[], object], count: int, *, name: str) -> list[threading.Thread]:
    """Start daemon threads that call ``run``: ``count`` of them, or as many as the system lets this process start.

    Who calls this does the work by itself, or has it done by those that there are. The first time that some are
    missing a warning says so. A handler of ``atexit`` gets none: the interpreter would end before they do.

    Args:
        run: called by each thread.
        count: number of threads.
        name: of each thread.

    Returns:
        The threads that were started.
    """
    threads: list[threading.Thread] = []
    if threading.current_thread() is threading.main_thread() and not threading.main_thread().is_alive():
        return threads
    for _ in range(count):
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as e:  # "can't start new thread": a limit of the user's or of a container
            if isinstance(e.__context__, KeyboardInterrupt):  # it came within threading, which the thread has outlived
                raise e.__context__ from None
            if not _warned.is_set():
                _warned.set()
                log.warning(
                    "a thread (%s) could not be started: %s. Its work is done without it, and training waits longer. "
                    "Raise the limit of processes and threads (ulimit -u, pids.max) to have it.",
                    name,
                    e,
                )
            break
        threads.append(thread)
    return threads
