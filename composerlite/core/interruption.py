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

__all__ = ["BatchAbandonedError", "EvaluationAbandonedError", "Interruption"]

_SLOW_SECONDS = 1.0
"""A batch that takes longer, its loading included, may be given up for an interruption; a shorter one is finished."""


class BatchAbandonedError(Exception):
    """Training gives up the batch that it has begun: the run is to end before it could be done."""


class EvaluationAbandonedError(Exception):
    """An evaluation is given up: the run is to end. The resumed one begins with it."""


@final
class Interruption:
    """A request from outside to end the process soon, such as a scheduler's SIGTERM.

    A signal handler calls :meth:`request`, which only sets a flag. Training checks :attr:`agreed` at every safe point:
    after each batch, each epoch, each batch of an evaluation; and, where batches take long, between microbatches and
    while it waits for the loader. There the run is as after a whole number of steps, on every rank the same.

    Attributes:
        requested: on this rank.
        leave: what to do then, at the next safe point; it does not return. ``None``: nobody listens for signals.
        evaluation: the event that an evaluation belongs to which was begun, and the labels of the evaluators that have
            not finish; ``None`` if there is none. In checkpoints: a resumed run begins with it.
        may_abandon: the batch that is trained on may be given up between microbatches. The same on every rank.
    """

    def __init__(self, piggyback: list[dist.PiggybackCounter]) -> None:
        self.requested = False
        self.leave: Callable[[], None] | None = None
        self.evaluation: tuple[Event, tuple[str, ...]] | None = None
        self.may_abandon = False
        self._signals: Sequence[int] = ()
        self._seconds = 0.0
        self._breaks = False
        self._asking = dist.PiggybackCounter(lambda: int(self.requested))
        self._slow = dist.PiggybackCounter(lambda: int(self._seconds > _SLOW_SECONDS))
        piggyback += [self._asking, self._slow]

    @property
    def agreed(self) -> bool:
        """True if a rank is preempted and all know: the same on every rank."""
        return self._asking.total > 0

    @property
    def batches_are_slow(self) -> bool:
        """True if the last batch took long on a rank: the same on every rank."""
        return self._slow.total > 0

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

    def request(self, *, here: bool = False) -> None:
        """Ask for the end of the run.

        Args:
            here: this is the training thread, in a signal handler.

        Raises:
            BatchAbandonedError: with ``here``, where training waits for its loader and may stop to do so.
        """
        self.requested = True
        if here and self._breaks:
            self._breaks = False
            raise BatchAbandonedError

    def batch_took(self, microseconds: int) -> None:
        """Take note of how long a batch took, its loading included."""
        self._seconds = microseconds / 1e6

    def look(self) -> None:
        """A safe point: leave if all ranks have agreed to."""
        if self.leave is not None and self.agreed:
            self.leave()

    @contextlib.contextmanager
    def breaking(self) -> Generator[None]:
        """Within it a request on this thread raises :class:`BatchAbandonedError`, wherever the loader is."""
        if self.requested:
            raise BatchAbandonedError
        self._breaks = True
        try:
            yield
        finally:
            self._breaks = False

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
