"""Pools of threads for what is done beside the caller, who does it where there are none, and the wait for what is not
done when the program ends.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar, final

from composerlite.errors import ConfigError
from composerlite.threads import start_threads

log = logging.getLogger(__name__)

_IDLE_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.05
_T = TypeVar("_T")

Job = Callable[["Batch"], int]
"""Job of one thread; returns the number of bytes moved, besides those that it has reported."""


def number_of(count: int | None, default: int, name: str = "thread_count") -> int:
    """Return ``count``, of threads or processes, or the ``default``.

    Args:
        count: number, or ``None`` for the default.
        default: the default.
        name: of the argument, for errors.

    Returns:
        The number.

    Raises:
        ConfigError: it is less than 1; names ``name``.
    """
    if count is not None and count < 1:
        raise ConfigError(f"{name}={count}: expected 1 or more, or None")
    return default if count is None else count


class _StoppedError(Exception):
    """The batch was stopped: its job ends here, whatever it had got."""


@final
class Batch:
    """Jobs of one call of :meth:`WorkerPool.run`.

    Attributes:
        stopped: is set when no job may begin any more and those that run should end.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.stopped = threading.Event()
        self._jobs = iter(jobs)
        self._changed = threading.Condition()
        self._exhausted = False
        self._running = self._touching = 0
        self._moved = self._told = 0
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def touching(self) -> Generator[None]:
        """Mark, within a job, the use of memory or a file of the caller, who waits for the end of the block only."""
        with self._changed:
            if self.stopped.is_set():
                raise _StoppedError
            self._touching += 1
        try:
            yield
        finally:
            with self._changed:
                self._touching -= 1
                self._changed.notify_all()

    def tell(self, moved: int) -> None:
        """Report, within a job, that bytes were moved."""
        with self._changed:
            self._moved += moved
            self._changed.notify_all()

    def works(self) -> Iterator[Callable[[], None]]:
        """Yield the jobs, each to be called once."""
        for job in self._jobs:
            with self._changed:
                if self.stopped.is_set():
                    break
                self._running += 1
            yield partial(self._do, job)
        with self._changed:
            self._exhausted = True
            self._changed.notify_all()

    def _do(self, job: Job) -> None:
        """Run ``job``. Raises nothing; an error stops the others."""
        moved, error = 0, None
        try:
            moved = job(self)
        except _StoppedError:
            pass
        except BaseException as e:  # noqa: BLE001 - raised by wait
            error = e
        with self._changed:
            self._running -= 1
            self._moved += moved
            if error is not None and not self.stopped.is_set():
                self._error = error
                self.stopped.set()
            self._changed.notify_all()

    def wait(self, progress: Callable[[int], object]) -> None:
        """Wait until all jobs are done, or one has failed: its error is raised, while others may be in the network."""
        ended = False
        while not ended:
            with self._changed:
                self._changed.wait_for(lambda: self._moved > self._told or self._ended(), _LOOK_SECONDS)
                ended = self._ended()
            self.pass_on(progress)
        if self._error is not None:
            raise self._error

    def pass_on(self, progress: Callable[[int], object]) -> None:
        """Call ``progress``, in the thread that waits for the batch, with the bytes moved since the last time."""
        with self._changed:
            new, self._told = self._moved - self._told, self._moved
        if new:
            progress(new)

    def stop(self, error: BaseException) -> None:
        """Stop the jobs because of ``error``, and wait until none uses memory or files of the caller."""
        with self._changed:
            self._error = self._error or error
            self.stopped.set()
            self._changed.notify_all()
            while self._touching:
                self._changed.wait(_LOOK_SECONDS)

    def drain(self, seconds: float) -> bool:
        """Wait until no job is in the network either; return true if that was so in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, seconds)

    def _ended(self) -> bool:
        if self.stopped.is_set():
            return self._touching == 0
        return self._exhausted and self._running == 0


@final
class WorkerPool:
    """Up to ``most`` threads, started when there is work; without any, the caller does the work.

    Callers take turns: who has little to do does not wait for who has much. A thread that had nothing to do for a
    minute ends. All are daemons: none keeps a process alive. Used as a context manager, or until :meth:`close`.

    Args:
        most: threads at the same time.
        name: of the threads.
        first: called in each of them before anything else.
    """

    def __init__(self, most: int, *, name: str, first: Callable[[], object] = lambda: None) -> None:
        self._most = most
        self._name = name
        self._first = first
        self._sources: deque[Iterator[Callable[[], None]]] = deque()
        self._batches: list[Batch] = []
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Run ``work`` in a thread; return its future."""
        future: Future[_T] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as e:  # noqa: BLE001 - it is the future's
                    future.set_exception(e)
                else:
                    future.set_result(result)

        self._add(iter([do]), threads=1)
        return future

    def run(self, batch: Batch, progress: Callable[[int], object]) -> None:
        """Do all of ``batch``. ``progress`` is called in this thread with each number of bytes moved.

        Args:
            batch: jobs to run.
            progress: called with each number of bytes moved.

        Raises:
            Exception: the first that a job raised. Then, and after an interrupt, no job touches any more what is the
                caller's.
        """
        self._batches.append(batch)
        try:
            self._add(batch.works(), threads=self._most, after_each=lambda: batch.pass_on(progress))
            batch.wait(progress)
        except BaseException as e:
            batch.stop(e)
            raise
        finally:
            self._batches.remove(batch)

    def close(self, seconds: float | None = None) -> None:
        """Stop the threads, once all submitted jobs are done; batches that run are stopped. May be called twice.

        A thread that waits for the network for longer than ``seconds`` is left to end by itself.
        """
        with self._changed:
            self._closed = True
            threads = list(self._threads)
            self._changed.notify_all()
        for batch in list(self._batches):
            batch.stop(_closed())
        end = None if seconds is None else time.monotonic() + seconds
        for thread in threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _add(
        self,
        source: Iterator[Callable[[], None]],
        *,
        threads: int,
        after_each: Callable[[], object] = lambda: None,
    ) -> None:
        """Run the jobs of ``source`` in up to ``threads`` idle threads, or here, calling ``after_each``."""
        with self._changed:
            if self._closed:
                raise _closed()
            self._sources.append(source)
            wanted = len(self._sources) + threads - 1 - self._idle
            new = min(wanted, self._most - len(self._threads))
            self._threads.update(start_threads(self._work, new, name=self._name))
            self._changed.notify(threads)
            has_threads = bool(self._threads)
        while not has_threads and (do := self._take()) is not None:
            do()
            after_each()

    def _work(self) -> None:
        self._first()
        while (do := self._next()) is not None:
            do()

    def _next(self) -> Callable[[], None] | None:
        """Return work of the caller whose turn it is; ``None`` when this thread should end."""
        with self._changed:
            while (do := self._take()) is None:
                self._idle += 1
                in_time = not self._closed and self._changed.wait(_IDLE_SECONDS)
                self._idle -= 1
                if not in_time and not self._sources:
                    self._threads.discard(threading.current_thread())  # an interrupt came while it was started
                    return None
            return do

    def _take(self) -> Callable[[], None] | None:
        with self._changed:
            while self._sources:
                source = self._sources.popleft()
                if (do := next(source, None)) is not None:
                    self._sources.append(source)
                    return do
        return None


def _closed() -> RuntimeError:
    return RuntimeError("the pool of threads is closed")


# ── the end of the program ───────────────────────────────────────────────────────────────────────────────────────────
class _Unfinished(NamedTuple):
    pending: Callable[[], Sequence[str]]
    seconds: float


_unfinished: dict[int, _Unfinished] = {}
_leave_by = math.inf


def wait_at_exit(work: object, pending: Callable[[], Sequence[str]], seconds: float) -> None:
    """Wait for ``work`` when this process ends, until :func:`wait_no_more`; a process that it forks does not.

    Args:
        work: what threads do.
        pending: returns what of it is not done, for messages.
        seconds: to wait at most. What is not done then is logged as an error.
    """
    _unfinished[id(work)] = _Unfinished(pending, seconds)
    atexit.unregister(_finish)
    atexit.register(_finish)  # before all that was registered until now, which the work may need


def wait_no_more(work: object) -> None:
    """``work`` is done, or was given up. May be called twice."""
    _unfinished.pop(id(work), None)


def leave_by(moment: float = math.inf) -> None:
    """Wait for nothing in the background after ``moment``, as ``time.monotonic`` counts: this process is killed."""
    global _leave_by
    _leave_by = moment


def seconds_left() -> float:
    """Seconds until the moment of :func:`leave_by`: 0 after it, infinite where there is none."""
    return max(0.0, _leave_by - time.monotonic())


def _finish() -> None:
    """Wait for what is not done, as the interpreter ends; Ctrl-C ends the wait. What is missing then is logged."""
    began, told, why = time.monotonic(), False, ""
    try:
        while any(time.monotonic() < min(began + one.seconds, _leave_by) for one in list(_unfinished.values())):
            if not told and time.monotonic() - began > _LOOK_SECONDS:
                told = True
                log.warning("the program ends when this is done; Ctrl-C ends the wait: %s", ", ".join(_missing()))
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        why = ", because of Ctrl-C"
    if missing := _missing():
        seconds = time.monotonic() - began
        log.error("the program ends, after %.0f s%s, before this was done: %s", seconds, why, ", ".join(missing))
    _unfinished.clear()


def _missing() -> list[str]:
    return [what for one in list(_unfinished.values()) for what in one.pending()]


os.register_at_fork(after_in_child=_unfinished.clear)
atexit.register(partial(_finish))  # and after all handlers that may begin something, which can register nothing more
# Before threads are waited for, which is all that processes of multiprocessing do, and before executors end, which have
# to be registered earlier for that. ``atexit`` comes after other threads, which may train on when the main one is over.
importlib.import_module("concurrent.futures.thread")
getattr(threading, "_register_atexit", atexit.register)(_finish)
