"""Threads for background work, and the wait for unfinished work when the program ends."""

from __future__ import annotations

import atexit
import importlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, final

from composerlite.errors import ConfigError
from composerlite.threads import start_threads

log = logging.getLogger(__name__)

_MESSAGE_SECONDS = 1.0
_POLL_SECONDS = 0.05
_T = TypeVar("_T")


def number_of(count: int | None, default: int, name: str = "thread_count") -> int:
    """Return ``count``, a number of threads or processes, or the ``default``.

    Args:
        count: number, or ``None`` for the default.
        default: the default.
        name: name of the argument, for errors.

    Returns:
        The number.

    Raises:
        ConfigError: ``count`` is less than 1.
    """
    if count is not None and count < 1:
        raise ConfigError(f"{name}={count}: expected 1 or more, or None")
    return default if count is None else count


@final
class WorkerPool:
    """Up to ``most`` daemon threads, started when there is work. Jobs run in the order of :meth:`submit`.

    Unlike the threads of ``ThreadPoolExecutor`` these threads do not keep a process alive. If the system gives no
    thread, :meth:`submit` runs the job itself. Used as a context manager, or until :meth:`close`.

    Args:
        most: largest number of threads.
        name: name of the threads.
        first: called in each thread before its first job.
    """

    def __init__(self, most: int, *, name: str, first: Callable[[], object] | None = None) -> None:
        self._most = most
        self._name = name
        self._first = first
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Run ``work`` in a thread and return its future.

        Raises:
            RuntimeError: the pool is closed.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool of threads is closed")
            self._queue.put((future, work))
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self._most):
                self._threads += start_threads(self._work, 1, name=self._name)
            has_threads = bool(self._threads)
        if not has_threads:
            self._do_next()
        return future

    def close(self, seconds: float | None = None) -> None:
        """Finish the submitted jobs and stop the threads. May be called twice.

        Args:
            seconds: time to wait; ``None`` waits for the jobs. A thread that takes longer ends by itself.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _work(self) -> None:
        if self._first is not None:
            self._first()
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Run the next job and return true; false if the thread should end. Keeps no reference to the job."""
        item = self._queue.get()
        if item is None:
            return False
        future, work = item
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as e:  # noqa: BLE001 - raised by the future
                future.set_exception(e)
            else:
                future.set_result(result)
        with self._lock:
            self._unfinished -= 1
        return True


# ── the end of the program ───────────────────────────────────────────────────────────────────────────────────────────
_unfinished: dict[int, tuple[Callable[[], Sequence[str]], float]] = {}
"""Work that the end of the program waits for: a function that returns what is pending, and seconds to wait."""
_leave_by = math.inf


def wait_at_exit(work: object, pending: Callable[[], Sequence[str]], seconds: float) -> None:
    """Wait for ``work`` when this process ends, until :func:`wait_no_more`. Forked processes do not wait.

    Args:
        work: any object that identifies the work.
        pending: returns the names of the unfinished jobs, for messages.
        seconds: longest wait. Jobs that are unfinished then are logged as an error.
    """
    _unfinished[id(work)] = (pending, seconds)


def wait_no_more(work: object) -> None:
    """End the registration of :func:`wait_at_exit`. May be called twice."""
    _unfinished.pop(id(work), None)


def leave_by(moment: float = math.inf) -> None:
    """Wait for no background work after ``moment``, in the time of ``time.monotonic``: this process will be killed."""
    global _leave_by
    _leave_by = moment


def seconds_left() -> float:
    """Return the seconds until the moment of :func:`leave_by`: 0 after it, infinite without one."""
    return max(0.0, _leave_by - time.monotonic())


def _finish() -> None:
    """Wait for unfinished work while the interpreter ends. Ctrl-C ends the wait. Log an error if work is missing."""
    began, is_told, why = time.monotonic(), False, ""
    try:
        while any(time.monotonic() < min(began + seconds, _leave_by) for _, seconds in list(_unfinished.values())):
            if not is_told and time.monotonic() - began > _MESSAGE_SECONDS:
                is_told = True
                log.warning("the program ends when this is done; Ctrl-C ends the wait: %s", ", ".join(_missing()))
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        why = ", because of Ctrl-C"
    if missing := _missing():
        seconds = time.monotonic() - began
        log.error("the program ends, after %.0f s%s, before this was done: %s", seconds, why, ", ".join(missing))
    _unfinished.clear()


def _missing() -> list[str]:
    return [what for pending, _ in list(_unfinished.values()) for what in pending()]


os.register_at_fork(after_in_child=_unfinished.clear)
# threading calls these before it joins threads, also in processes of multiprocessing, and in reverse order: executors,
# which the work may use, must register first.
importlib.import_module("concurrent.futures.thread")
threading._register_atexit(_finish)  # type: ignore[attr-defined]
atexit.register(_finish)  # for jobs that other handlers of atexit submit
