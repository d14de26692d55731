"""Keeping the worker processes of loaders from signals that are meant for the run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Sequence
from typing import Any

__all__ = ["spared_children"]

_spared: tuple[int, ...] = ()


@contextlib.contextmanager
def spared_children(signals: Sequence[int], loader: Any = None) -> Generator[None]:
    """Processes that are forked within it heed these signals only if they come from this process.

    Schedulers and terminals send them to all processes of a job. Without its workers a loader would fail before the run
    could save what it has.

    Args:
        signals: numbers of signals.
        loader: whose workers are to be started. Those that are not forked stay as they are.
    """
    global _spared
    if not signals or not _forks(loader):
        yield
        return
    # Blocked before the fork: there is no moment at which a signal could end the child.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _spared = tuple(signals)
    try:
        yield
    finally:
        _spared = ()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forks(loader: Any) -> bool:
    context: Any = getattr(loader, "multiprocessing_context", None) or multiprocessing
    return context.get_start_method() == "fork"


def _watch_parent() -> None:
    """In a child: end when the parent says so, which is how it ends workers that hang."""
    if _spared:
        threading.Thread(target=_end_with_parent, args=(_spared,), name="signals", daemon=True).start()


def _end_with_parent(signals: Sequence[int]) -> None:
    while True:
        if signal.sigwaitinfo(signals).si_pid == os.getppid():
            os._exit(0)


os.register_at_fork(after_in_child=_watch_parent)
