"""Threads that share the work of several transfers, and leave at once what is not wanted any more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import final

from composerlite.storage.helpers import start_threads

__all__ = ["Batch", "Crew", "Job"]

_IDLE_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 1.0

Job = Callable[["Batch"], int]
"""Is run by one thread; returns how many bytes it moved, besides those that it has told of."""


class _StoppedError(Exception):
    """The batch was stopped: its job ends here, whatever it had got."""


@final
class Batch:
    """The jobs of one call.

    Attributes:
        stopped: is set when no job may begin any more and those that run should end.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.stopped = threading.Event()
        self._jobs = iter(jobs)
        self._changed = threading.Condition()
        self._exhausted = False
        self._running = self._touching = 0
        self._moved = 0
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def touching(self) -> Generator[None]:
        """For a job, while it uses memory or a file of the caller, who waits for the end of this and of no more."""
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
        """For a job: so many bytes were moved, and there are more to come."""
        with self._changed:
            self._moved += moved
            self._changed.notify_all()

    def take(self) -> Job | None:
        """The next job, if there is one."""
        with self._changed:
            job = None if self.stopped.is_set() else next(self._jobs, None)
            if job is None:
                self._exhausted = True
                self._changed.notify_all()
            else:
                self._running += 1
            return job

    def do(self, job: Job) -> None:
        """Run ``job``, which was taken. Raises nothing; an error stops the others."""
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
        """Until all jobs are done, or one has failed: its error is raised, while others may still be in the network."""
        told = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=told: self._moved > seen or self._ended(), _LOOK_SECONDS)
                new, ended = self._moved - told, self._ended()
            if new:
                progress(new)
                told += new
            if ended:
                break
        if self._error is not None:
            raise self._error

    def stop(self, error: BaseException) -> None:
        """Have the jobs end because of ``error``, and wait until none uses what is the caller's."""
        with self._changed:
            self._error = self._error or error
            self.stopped.set()
            self._changed.notify_all()
            while self._touching:
                self._changed.wait(_LOOK_SECONDS)

    def drain(self, seconds: float) -> bool:
        """Wait until no job is in the network either; whether that was so in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, seconds)

    def _ended(self) -> bool:
        if self.stopped.is_set():
            return self._touching == 0
        return self._exhausted and self._running == 0


@final
class Crew:
    """Up to ``threads`` threads, started when there is work. Batches take turns: a small one does not wait for a large.

    A thread that had nothing to do for a minute ends. All are daemons: none keeps a process alive.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._batches: deque[Batch] = deque()
        self._threads: list[threading.Thread] = []
        self._ready = threading.Condition()
        self._closed = False

    def run(self, batch: Batch, progress: Callable[[int], object]) -> None:
        """Do all of ``batch``. ``progress`` is told, in this thread, of each so many bytes moved.

        Raises:
            Exception: the first that a job raised. Then, and after an interrupt, no job touches any more what is the
                caller's.
        """
        try:
            self._add(batch)
            batch.wait(progress)
        except BaseException as e:
            batch.stop(e)
            raise

    def close(self) -> None:
        """End the threads; twice is fine. One that waits for the network is left to end by itself."""
        with self._ready:
            self._closed = True
            batches, self._batches = list(self._batches), deque()
            threads = list(self._threads)
            self._ready.notify_all()
        for batch in batches:
            batch.stop(_closed())
        end = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _add(self, batch: Batch) -> None:
        with self._ready:
            if self._closed:
                raise _closed()
            self._batches.append(batch)
            while len(self._threads) < self._most:
                started = start_threads(self._work, 1, name="transfer")
                self._threads += started
                if not started:
                    break
            self._ready.notify_all()
            has_threads = bool(self._threads)
        while not has_threads and (job := batch.take()) is not None:
            batch.do(job)

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            batch, job = taken
            batch.do(job)

    def _next(self) -> tuple[Batch, Job] | None:
        """A job of the batch whose turn it is; ``None`` when this thread should end."""
        with self._ready:
            while True:
                while self._batches:
                    batch = self._batches.popleft()
                    if (job := batch.take()) is not None:
                        self._batches.append(batch)
                        return batch, job
                if self._closed or (not self._ready.wait(_IDLE_SECONDS) and not self._batches):
                    self._threads.remove(threading.current_thread())
                    return None


def _closed() -> RuntimeError:
    return RuntimeError("the transfer is closed")
