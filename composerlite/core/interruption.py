"""Interruption: a request from outside to end the process. Workers of data loaders ignore such signals."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from typing import Any, final

from composerlite import dist
from composerlite.core.event import Event
from composerlite.threads import start_threads

__all__ = ["Interruption"]


@final
class Interruption:
    """A request from outside to end the process soon, such as a scheduler's SIGTERM.

    A signal handler calls :meth:`request`, which only sets a flag. Training checks :attr:`agreed` at safe points: after
    each batch, each epoch and each batch of an evaluation. At a safe point all ranks have completed the same number of
    steps.

    Attributes:
        requested: an interruption was requested on this rank.
        leave: function that ends the run at a safe point and does not return; ``None`` without a listener for signals.
        evaluation: event of the current evaluation and labels of its unfinished evaluators; ``None`` outside of
            evaluations. Saved in checkpoints, so that a resumed run continues the evaluation.
    """

    def __init__(self, piggyback: list[dist.PiggybackCounter]) -> None:
        self.requested = False
        self.leave: Callable[[], None] | None = None
        self.evaluation: tuple[Event, tuple[str, ...]] | None = None
        self._signals: Sequence[int] = ()
        self._asking = dist.PiggybackCounter(lambda: int(self.requested))
        piggyback.append(self._asking)

    @property
    def agreed(self) -> bool:
        """True if an interruption was requested on a rank and all ranks know. The same on every rank."""
        return self._asking.total > 0

    @property
    def is_watched(self) -> bool:
        """True if there is a listener. The same on every rank."""
        return self.leave is not None

    def watch(self, leave: Callable[[], None], signals: Sequence[int]) -> None:
        """Call ``leave`` at the next safe point after a future :meth:`request`. Earlier requests are dropped.

        Args:
            leave: function that ends the run, called on every rank at the same point.
            signals: signals that request an interruption; workers of data loaders ignore them.
        """
        self.leave, self._signals = leave, signals
        self.requested = False
        self._asking.reduced = 0

    def unwatch(self) -> None:
        """Remove the listener, since training is over."""
        self.leave, self._signals = None, ()

    def request(self) -> None:
        """Request the end of the run. Signal handlers and other threads may call this."""
        self.requested = True

    def poll(self) -> None:
        """Call ``leave`` if the ranks have agreed. Call at safe points."""
        if self.leave is not None and self.agreed:
            self.leave()

    @contextlib.contextmanager
    def shielding_workers(self, loader: Any) -> Generator[None]:
        """Make workers of ``loader`` that are forked inside the block ignore signals from other processes.

        Schedulers and terminals send signals to all processes of a job. A loader without workers fails before the run
        can save. Workers that are not forked still receive the signals.
        """
        global _shielded
        if not self._signals or not _forks(loader):
            yield
            return
        # Block before the fork, so that no signal can end the child in between.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        _shielded = tuple(self._signals)
        try:
            yield
        finally:
            _shielded = ()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_shielded: tuple[int, ...] = ()
"""Signals that a process forked now accepts from its parent only."""


def _forks(loader: Any) -> bool:
    context: Any = getattr(loader, "multiprocessing_context", None) or multiprocessing
    return context.get_start_method() == "fork"


def _watch_parent() -> None:
    """In a worker process: exit on a signal from the parent, which stops hanging workers with signals."""
    if _shielded and not start_threads(functools.partial(_exit_with_parent, _shielded), 1, name="signals"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _shielded)  # without a thread, accept signals of all processes


def _exit_with_parent(signals: Sequence[int]) -> None:
    while True:
        if signal.sigwaitinfo(signals).si_pid == os.getppid():
            os._exit(0)


os.register_at_fork(after_in_child=_watch_parent)
