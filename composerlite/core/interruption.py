"""Interruption: a request from outside to end the process soon, where training looks for it, and that it is the run's
alone: the worker processes of loaders are kept from it.
"""

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

    A signal handler calls :meth:`request`, which only sets a flag. Training checks :attr:`agreed` at every safe point:
    after each batch, each epoch, each batch of an evaluation. There the run is after a whole number of steps, the same
    on every rank.

    Attributes:
        requested: on this rank.
        leave: what to do then, at the next safe point; it does not return. ``None``: nobody listens for signals.
        evaluation: the event that an evaluation belongs to which was begun, and the labels of the evaluators that have
            not finish; ``None`` if there is none. In checkpoints: a resumed run begins with it.
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
        """True if a rank is preempted and all know: the same on every rank."""
        return self._asking.total > 0

    @property
    def is_watched(self) -> bool:
        """True if a listener is there, so that looking at it is of use. The same on every rank."""
        return self.leave is not None

    def watch(self, leave: Callable[[], None], signals: Sequence[int]) -> None:
        """Call ``leave`` at the next safe point after a :meth:`request`, from now on. Earlier ones do not count.

        Args:
            leave: ends the run; called on every rank, at the same point.
            signals: by which the process may be asked; the workers of loaders are kept from them.
        """
        self.leave, self._signals = leave, signals
        self.requested = False
        self._asking.reduced = 0

    def unwatch(self) -> None:
        """Nobody looks any more: training is over."""
        self.leave, self._signals = None, ()

    def request(self) -> None:
        """Ask for the end of the run. Signal handlers and other threads may call this."""
        self.requested = True

    def look(self) -> None:
        """A safe point: leave if all ranks have agreed to."""
        if self.leave is not None and self.agreed:
            self.leave()

    @contextlib.contextmanager
    def shielding_workers(self, loader: Any) -> Generator[None]:
        """Workers of ``loader`` that are forked within it heed the signals only if they come from this process.

        Schedulers and terminals send them to all processes of a job. Without its workers a loader would fail before the
        run could save what it has. Workers that are not forked stay as they are.
        """
        global _shielded
        if not self._signals or not _forks(loader):
            yield
            return
        # Blocked before the fork: there is no moment at which a signal could end the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        _shielded = tuple(self._signals)
        try:
            yield
        finally:
            _shielded = ()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ── the workers of loaders ──────────────────────────────────────────────────────────────────────────────────────────
_shielded: tuple[int, ...] = ()
"""The signals that a process which is forked now heeds from its parent only."""


def _forks(loader: Any) -> bool:
    context: Any = getattr(loader, "multiprocessing_context", None) or multiprocessing
    return context.get_start_method() == "fork"


def _watch_parent() -> None:
    """Exit, in a worker process, when the parent says so: it stops workers that hang in this way."""
    if _shielded and not start_threads(functools.partial(_exit_with_parent, _shielded), 1, name="signals"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _shielded)  # it ends with the others, rather than never


def _exit_with_parent(signals: Sequence[int]) -> None:
    while True:
        if signal.sigwaitinfo(signals).si_pid == os.getppid():
            os._exit(0)


os.register_at_fork(after_in_child=_watch_parent)
