"""Pools of threads, background jobs with errors raised in the training thread, and a wait for jobs at exit."""

from __future__ import annotations

import atexit
import importlib
import logging
import math
import os
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, final

from composerlite.errors import ComposerliteError, ConfigError, raise_all
from composerlite.threads import start_threads
from composerlite.types import Closing

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
class WorkerPool(Closing):
    """Up to ``most`` daemon threads, started when there is work. Jobs run in the order of :meth:`submit`.

    Unlike the threads of ``ThreadPoolExecutor`` these threads do not keep a process alive. If no thread can start,
    :meth:`submit` runs the job in the calling thread. Use the pool as a context manager, or call :meth:`close`.

    Args:
        most: largest number of threads; 0: :meth:`submit` runs each job in the calling thread.
        name: name of the threads.
    """

    def __init__(self, most: int, *, name: str) -> None:
        self._most = most
        self._name = name
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
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self._most):
                self._threads += start_threads(self._work, 1, name=self._name)
            if self._threads:
                self._queue.put((future, work))
                return future
        self._do(future, work)
        return future

    def close(self, seconds: float | None = None) -> None:
        """Finish the submitted jobs and stop the threads. May be called twice.

        Args:
            seconds: longest wait; ``None``: no limit. A thread that needs longer finishes all submitted jobs and ends.
        """
        with self._lock:
            self._closed = True
            self._queue.put(None)
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Wait for a job, run the job and return true; return false if the thread should end.

        The job is a local variable here, so an idle thread keeps no reference to a finished job.
        """
        item = self._queue.get()
        if item is None:  # end the other threads, too, even a thread not in _threads after an interrupted start
            self._queue.put(None)
            return False
        self._do(*item)
        return True

    def _do(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as e:  # noqa: BLE001 - raised by the future
                future.set_exception(e)
            else:
                future.set_result(result)
        with self._lock:
            self._unfinished -= 1


# ── background jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
class _Job(NamedTuple):
    """Arguments of :meth:`Background.submit`."""

    what: str
    work: Callable[[], object]
    lane: str | None
    dropped: Callable[[], object]


class Background:
    """Runs jobs in background threads. With one thread jobs run in the order of :meth:`submit`.

    Errors are kept until :meth:`raise_failures` or :meth:`close` raises them, and do not stop later jobs. The threads
    end with :meth:`close`. A program that ends without :meth:`close` waits for pending jobs.

    Args:
        who: owner of the jobs, for messages, such as ``'MLFlowLogger'``.
        num_concurrent: number of jobs at the same time. Jobs of one lane run one after the other.
        timeout: seconds that :meth:`close`, or the end of the program, waits for jobs.

    Attributes:
        timeout: as given.
        closed: true after :meth:`close`.
    """

    late_error: ClassVar[type[Exception]] = TimeoutError
    """Raised by :meth:`close` if jobs are unfinished."""

    def __init__(self, who: str, *, num_concurrent: int = 1, timeout: float = 3600.0) -> None:
        self._who = who
        self._pool = WorkerPool(num_concurrent, name=f"{who} background")
        self.timeout = timeout
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._failures: list[Exception] = []
        self._changed = threading.Condition()
        self.closed = False

    def submit(
        self,
        what: str,
        work: Callable[[], object],
        *,
        lane: str | None = None,
        replaces: bool = False,
        dropped: Callable[[], object] = lambda: None,
    ) -> None:
        """Run ``work`` in the background, after all earlier jobs of its lane.

        Args:
            what: name of the job, for messages.
            work: the job.
            lane: jobs of one lane run in order, such as uploads of one object; ``None``: in any order.
            replaces: drop jobs of the same ``lane`` that have not begun.
            dropped: called if the job is dropped, by a newer job or by :meth:`close`.

        Raises:
            ComposerliteError: after :meth:`close`.
        """
        with self._changed:
            if self.closed:
                raise ComposerliteError(f"{self._who}: cannot start {what}: already closed.")
            obsolete = [job for job in self._waiting if replaces and job.lane == lane]
            self._waiting = [job for job in self._waiting if job not in obsolete]
            self._waiting.append(_Job(what, work, lane, dropped))
            wait_at_exit(self, lambda: self.pending, self.timeout)
        for job in obsolete:
            job.dropped()
        self._pool.submit(self._run)

    @property
    def pending(self) -> list[str]:
        """Names of the unfinished jobs, the oldest first."""
        with self._changed:
            return [job.what for job in (*self._running, *self._waiting)]

    def raise_failures(self) -> None:
        """Raise the errors of jobs since the last call, if any, each with a note that names the job."""
        with self._changed:
            failures, self._failures = self._failures, []
        raise_all(failures, f"{self._who}: {len(failures)} jobs failed")

    def wait(self, seconds: float, *, lane: str | None = None, at_most: int = 0) -> bool:
        """Wait until at most ``at_most`` jobs are pending, but not beyond the moment of :func:`leave_by`.

        Args:
            seconds: longest wait.
            lane: count only jobs of this lane; ``None``: all jobs.
            at_most: number of jobs that may be pending.

        Returns:
            True if at most ``at_most`` jobs are pending.
        """
        until = time.monotonic() + min(seconds, seconds_left())
        with self._changed:
            while sum(lane in (None, job.lane) for job in (*self._running, *self._waiting)) > at_most:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 1.0))
        return True

    def close(self) -> None:
        """Wait until all jobs are done, stop the threads and raise errors of jobs. May be called twice.

        After the timeout running jobs continue in their threads, and the others are dropped. Jobs unfinished at the
        moment of :func:`leave_by` are logged as an error, and raise no error.

        Raises:
            TimeoutError, or the ``late_error`` of a subclass: jobs are unfinished; the message names these jobs. In an
                ExceptionGroup with the errors of other jobs, if any.
            Exception: the error of a job.
        """
        late = [] if self.wait(self.timeout) else self.pending
        with self._changed:
            self.closed = True
            left, self._waiting = self._waiting, []
            wait_no_more(self)
        for job in left:
            job.dropped()
        self._pool.close(0.0 if late else None)
        if late and not seconds_left():
            log.error("%s: not finished at the end of the grace period: %s", self._who, ", ".join(late))
        elif late:
            text = f"{self._who}: not finished within {self.timeout:.0f} s: {', '.join(late)}."
            self._failures.insert(0, self.late_error(text))
        self.raise_failures()

    def _run(self) -> None:
        """Run waiting jobs of free lanes, the oldest first."""
        while True:
            with self._changed:
                busy = {job.lane for job in self._running} - {None}
                job = next((job for job in self._waiting if job.lane not in busy), None)
                if job is None:
                    return
                self._waiting.remove(job)
                self._running.append(job)
            try:
                job.work()
            except Exception as e:  # noqa: BLE001 - raised by raise_failures in the training thread
                log.error("%s: %s failed: %s", self._who, job.what, e)
                e.add_note(f"{self._who} failed in the background: {job.what}.")
                with self._changed:
                    self._failures.append(e)
            with self._changed:
                self._running.remove(job)
                if not self._running and not self._waiting:
                    wait_no_more(self)
                self._changed.notify_all()


@final
class StagedFiles:
    """Copies of files for later uploads, so that the originals may change meanwhile.

    Args:
        folder: parent folder of the copies; ``None``: the folder of the system for temporary files.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        # Absolute: the script may change the working directory.
        parent = Path(tempfile.gettempdir() if folder is None else folder).absolute()
        self._root = parent / f"composerlite-files-{secrets.token_hex(8)}"

    def prepare(self) -> None:
        """Make the folder for the copies.

        Raises:
            OSError: the folder cannot be made.
        """
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def copy(self, file: Path, name: str) -> Path:
        """Copy a file.

        Args:
            file: the file.
            name: name of the copy.

        Returns:
            Path of the copy, in a new folder.

        Raises:
            FileNotFoundError: ``file`` does not exist.
        """
        self.prepare()
        return Path(shutil.copyfile(file, Path(tempfile.mkdtemp(dir=self._root)) / name))

    def give_back(self, staged: Path) -> None:
        """Remove a copy made by :meth:`copy`."""
        shutil.rmtree(staged.parent, ignore_errors=True)

    def remove(self) -> None:
        """Remove all copies. May be called twice."""
        shutil.rmtree(self._root, ignore_errors=True)


# ── the end of the program ───────────────────────────────────────────────────────────────────────────────────────────
_unfinished: dict[int, tuple[Callable[[], Sequence[str]], float]] = {}
"""Work to wait for at exit: a function that returns the names of pending jobs, and the longest wait in seconds."""
_leave_by = math.inf


def wait_at_exit(work: object, pending: Callable[[], Sequence[str]], seconds: float) -> None:
    """Register ``work``: this process waits at exit, until :func:`wait_no_more`. Forked processes do not wait.

    Args:
        work: any object that identifies the work.
        pending: returns the names of the unfinished jobs, for messages.
        seconds: longest wait. Jobs unfinished after the wait are logged as an error.
    """
    _unfinished[id(work)] = (pending, seconds)


def wait_no_more(work: object) -> None:
    """End the registration of :func:`wait_at_exit`. May be called twice."""
    _unfinished.pop(id(work), None)


def leave_by(moment: float = math.inf) -> None:
    """Set the moment after which this process waits for no background work, for a process that will be killed.

    Args:
        moment: time by ``time.monotonic``; by default no limit.
    """
    global _leave_by
    _leave_by = moment


def seconds_left() -> float:
    """Return the seconds until the moment of :func:`leave_by`: 0 after that moment, infinite if no moment is set."""
    return max(0.0, _leave_by - time.monotonic())


def _finish() -> None:
    """Wait for registered work while the interpreter exits. Ctrl-C ends the wait. Log unfinished jobs as an error."""
    began, is_told, why = time.monotonic(), False, ""
    try:
        while any(time.monotonic() < min(began + seconds, _leave_by) for _, seconds in list(_unfinished.values())):
            if not is_told and time.monotonic() - began > _MESSAGE_SECONDS:
                is_told = True
                log.warning("waiting before exit (Ctrl-C stops the wait) for: %s", ", ".join(_missing()))
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        why = ", because of Ctrl-C"
    if missing := _missing():
        seconds = time.monotonic() - began
        log.error("the program ends after %.0f s%s without finishing: %s", seconds, why, ", ".join(missing))
    _unfinished.clear()


def _missing() -> list[str]:
    """Return the names of the unfinished jobs of all registered work."""
    return [what for pending, _ in list(_unfinished.values()) for what in pending()]


os.register_at_fork(after_in_child=_unfinished.clear)
# At exit, threading calls the functions of _register_atexit before it joins threads, also in processes of
# multiprocessing. The order is reversed: executors, which the work may use, must register first to be closed last.
importlib.import_module("concurrent.futures.thread")
threading._register_atexit(_finish)  # type: ignore[attr-defined]
atexit.register(_finish)  # for jobs that other handlers of atexit submit
