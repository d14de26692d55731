"""Jobs in the background: in order where order matters, and what fails is raised in training."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, final

from composerlite.errors import ComposerliteError, raise_all
from composerlite.storage.workers import WorkerPool, seconds_left, wait_at_exit, wait_no_more

log = logging.getLogger(__name__)


class _Job(NamedTuple):
    """Something to do.

    Attributes:
        what: for messages: ``'a.txt'``.
        lane: jobs of one lane run one after the other, in the order in which they came; ``None``: it waits for none.
        dropped: is called instead of ``work`` if something newer takes its place.
    """

    what: str
    work: Callable[[], object]
    lane: str | None
    dropped: Callable[[], object]


class Background:
    """Does jobs in threads of its own; with one thread in the order in which they came.

    What fails is kept until :meth:`raise_failures` or :meth:`close` raises it; later jobs are done all the same. The
    threads end with :meth:`stop`; a program that ends without it waits for what is pending.

    Args:
        who: wants them done, for messages: ``'MLFlowLogger'``.
        jobs: what they are, for messages. done: what they are to be.
        num_concurrent: jobs at the same time, of different lanes.
        timeout: seconds that :meth:`close`, or the end of the program, waits for jobs.
        error: what is raised for a job that cannot be taken. late_error: for some that are not done in the end.

    Attributes:
        timeout: as given.
    """

    def __init__(
        self,
        who: str,
        *,
        jobs: str = "things",
        done: str = "done",
        num_concurrent: int = 1,
        timeout: float = 3600.0,
        error: type[ComposerliteError] = ComposerliteError,
        late_error: type[Exception] = TimeoutError,
    ) -> None:
        self._who = who
        self._jobs = jobs
        self._done = done
        self._pool = WorkerPool(num_concurrent, name=f"{who} background")
        self.timeout = timeout
        self._error = error
        self._late_error = late_error
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._failures: list[Exception] = []
        self._changed = threading.Condition()
        self._closing = False

    def submit(
        self,
        what: str,
        work: Callable[[], object],
        *,
        lane: str | None = None,
        replaces: bool = False,
        dropped: Callable[[], object] = lambda: None,
    ) -> None:
        """Run ``work`` in the background, after everything submitted before in its lane.

        Args:
            what: is done, for messages.
            work: does it.
            lane: what has to be in order, such as the name of an object.
            replaces: what waits in the lane and has not begun is not done any more: this is newer.
            dropped: is called if this is not done for that reason, or because of :meth:`stop`.

        Raises:
            ComposerliteError: after :meth:`stop`.
        """
        obsolete: list[_Job] = []
        with self._changed:
            if self._closing:
                raise self._error(f"{self._who}: {what} comes too late: it is closed.")
            if replaces:
                obsolete = [job for job in self._waiting if job.lane == lane]
                self._waiting = deque(job for job in self._waiting if job.lane != lane)
            self._waiting.append(_Job(what, work, lane, dropped))
            wait_at_exit(self, lambda: self.pending, self.timeout)
        for job in obsolete:
            job.dropped()
        self._pool.submit(self._run)

    @property
    def closed(self) -> bool:
        """True after :meth:`stop`."""
        return self._closing

    @property
    def pending(self) -> list[str]:
        """Jobs that are not done yet, the oldest first."""
        with self._changed:
            return [job.what for job in (*self._running, *self._waiting)]

    @property
    def failed(self) -> str:
        """Failures since the last time that failures were raised, for messages."""
        return "; ".join(str(failure) for failure in self._failures)

    def raise_failures(self) -> None:
        """Raise the errors of jobs that failed since the last call, if any, each with a note that names the job."""
        with self._changed:
            failures, self._failures = self._failures, []
        raise_all(failures, f"{self._who}: {len(failures)} {self._jobs} failed")

    def wait(self, seconds: float, *, lane: str | None = None, at_most: int = 0) -> bool:
        """Wait until at most ``at_most`` jobs are pending, for ``seconds`` at most, and no longer than a grace period.

        ``lane``: only those of this lane count.

        Args:
            seconds: to wait at most.
            lane: count only jobs of this lane; ``None``: of all.
            at_most: jobs that may be pending.

        Returns:
            True if at most ``at_most`` jobs are pending.
        """
        until = time.monotonic() + min(seconds, seconds_left())
        with self._changed:
            while sum(lane in (None, job.lane) for job in (*self._running, *self._waiting)) > at_most:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 1.0))  # in short turns, so that an interrupt is heard
        return True

    def stop(self, seconds: float) -> list[str]:
        """Wait until all jobs are done, ``seconds`` at most, and stop the threads. May be called twice.

        Returns:
            What is not done by then. It is dropped, if it has not begun.
        """
        in_time = self.wait(seconds)
        late = self.pending
        with self._changed:
            self._closing = True
            left, self._waiting = self._waiting, deque()
            wait_no_more(self)
        for job in left:
            job.dropped()
        self._pool.close(None if in_time else 0.0)
        return [] if in_time else late

    def close(self, seconds: float | None = None) -> None:
        """Wait until all jobs are done, stop the threads and raise errors of jobs. May be called twice.

        Where a grace period ends before that, the log says what is missing: it is no error.

        Args:
            seconds: to wait at most; ``None``: the timeout.

        Raises:
            TimeoutError, or ``late_error``: it is not within ``seconds``; the message says what is missing.
            Exception: what failed.
        """
        seconds = self.timeout if seconds is None else seconds
        late = self.stop(seconds)
        if late and not seconds_left():
            log.error("%s: not %s by the end of the grace period: %s", self._who, self._done, ", ".join(late))
        elif late:
            failed = f" Failed: {self.failed}" if self.failed else ""
            raise self._late_error(f"{self._who}: not {self._done} within {seconds:.0f} s: {', '.join(late)}.{failed}")
        self.raise_failures()

    def _run(self) -> None:
        """Do jobs as long as there is one whose lane is free, the oldest first."""
        while (job := self._next()) is not None:
            failure: Exception | None = None
            started = time.perf_counter()
            try:
                job.work()
                log.debug("%s: %s took %.1f s", self._who, job.what, time.perf_counter() - started)
            except Exception as e:  # noqa: BLE001 - raised by raise_failures, in the thread that can do something about it
                log.error("%s: %s failed: %s", self._who, job.what, e)
                e.add_note(f"{self._who} failed in the background: {job.what}.")
                failure = e
            with self._changed:
                if failure is not None:
                    self._failures.append(failure)
                self._running.remove(job)
                if not self._running and not self._waiting:
                    wait_no_more(self)
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            busy = {job.lane for job in self._running} - {None}
            for job in self._waiting:
                if job.lane not in busy:
                    self._waiting.remove(job)
                    self._running.append(job)
                    return job
        return None


@final
class StagedFiles:
    """Copies of files that wait to be uploaded, which nobody else changes.

    A second name for a file would follow what is written to it.

    Args:
        folder: where a folder for them is made; that of the system for temporary files by default.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._parent = None if folder is None else Path(folder).absolute()  # the script may change its folder
        self._folder: Path | None = None
        self._count = 0

    def prepare(self) -> None:
        """Make the folder, which is made again where something has removed it meanwhile.

        Raises:
            OSError: it cannot be made.
        """
        if self._folder is not None and self._folder.is_dir():
            return
        if self._parent is not None:
            self._parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="composerlite-files-", dir=self._parent))

    def copy(self, file: Path, name: str) -> Path:
        """Make a copy of ``file`` that is called ``name``.

        Args:
            file: to copy.
            name: of the copy.

        Returns:
            Path of the copy.

        Raises:
            FileNotFoundError: there is no such file.
        """
        self.prepare()
        assert self._folder is not None
        self._count += 1
        staged = self._folder / str(self._count) / name
        staged.parent.mkdir()
        try:
            shutil.copyfile(file, staged)
        except BaseException:
            self.give_back(staged)
            raise
        return staged

    def give_back(self, staged: Path) -> None:
        """Remove a copy that :meth:`copy` made."""
        shutil.rmtree(staged.parent, ignore_errors=True)

    def remove(self) -> None:
        """Remove all. May be called twice."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
