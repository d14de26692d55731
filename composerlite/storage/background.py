"""Background jobs: in order where order matters. Errors are raised in training."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple, final

from composerlite.errors import ComposerliteError, raise_all
from composerlite.storage.workers import WorkerPool, seconds_left, wait_at_exit, wait_no_more

log = logging.getLogger(__name__)


class _Job(NamedTuple):
    what: str
    work: Callable[[], object]
    lane: str | None
    dropped: Callable[[], object]


class Background:
    """Runs jobs in threads of its own. With one thread jobs run in the order of :meth:`submit`.

    Errors are kept until :meth:`raise_failures` or :meth:`close` raises them; later jobs run all the same. The threads
    end with :meth:`stop`. A program that ends without :meth:`stop` waits for pending jobs.

    Args:
        who: owner of the jobs, for messages, such as ``'MLFlowLogger'``.
        num_concurrent: number of jobs at the same time, of different lanes.
        timeout: seconds that :meth:`close`, or the end of the program, waits for jobs.

    Attributes:
        timeout: as given.
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
        """Run ``work`` in the background, after all earlier jobs of its lane.

        Args:
            what: name of the job, for messages.
            work: the job.
            lane: jobs of one lane run in order, such as uploads of one object; ``None``: in any order.
            replaces: drop the jobs of the lane that have not begun.
            dropped: called if the job is dropped, by a newer job or by :meth:`stop`.

        Raises:
            ComposerliteError: after :meth:`stop`.
        """
        with self._changed:
            if self._closing:
                raise ComposerliteError(f"{self._who}: {what} comes too late: it is closed.")
            obsolete = [job for job in self._waiting if replaces and job.lane == lane]
            self._waiting = [job for job in self._waiting if job not in obsolete]
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
        """Names of the unfinished jobs, the oldest first."""
        with self._changed:
            return [job.what for job in (*self._running, *self._waiting)]

    def raise_failures(self) -> None:
        """Raise the errors of jobs since the last call, if any, each with a note that names the job."""
        with self._changed:
            failures, self._failures = self._failures, []
        raise_all(failures, f"{self._who}: {len(failures)} jobs failed")

    def wait(self, seconds: float, *, lane: str | None = None, at_most: int = 0) -> bool:
        """Wait until at most ``at_most`` jobs are pending. Ends with the grace period of :func:`leave_by`.

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

    def stop(self, seconds: float) -> list[str]:
        """Wait until all jobs are done and stop the threads. May be called twice.

        Args:
            seconds: longest wait.

        Returns:
            Names of the unfinished jobs. Jobs that have not begun are dropped.
        """
        in_time = self.wait(seconds)
        late = self.pending
        with self._changed:
            self._closing = True
            left, self._waiting = self._waiting, []
            wait_no_more(self)
        for job in left:
            job.dropped()
        self._pool.close(None if in_time else 0.0)
        return [] if in_time else late

    def close(self, seconds: float | None = None) -> None:
        """Wait until all jobs are done, stop the threads and raise errors of jobs. May be called twice.

        Jobs that a grace period cuts off are logged and not raised.

        Args:
            seconds: longest wait; ``None``: the timeout.

        Raises:
            TimeoutError, or ``late_error``: jobs are unfinished; the message names them.
            Exception: the error of a job.
        """
        seconds = self.timeout if seconds is None else seconds
        late = self.stop(seconds)
        if late and not seconds_left():
            log.error("%s: not done by the end of the grace period: %s", self._who, ", ".join(late))
        elif late:
            failed = "; ".join(str(failure) for failure in self._failures)
            raise self.late_error(
                f"{self._who}: not done within {seconds:.0f} s: {', '.join(late)}.{failed and f' Failed: {failed}'}"
            )
        self.raise_failures()

    def _run(self) -> None:
        """Run the oldest job whose lane is free, if any. The job after it in its lane is run here, too."""
        while (job := self._next()) is not None:
            failure: Exception | None = None
            started = time.perf_counter()
            try:
                job.work()
                log.debug("%s: %s took %.1f s", self._who, job.what, time.perf_counter() - started)
            except Exception as e:  # noqa: BLE001 - raised by raise_failures in the training thread
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
    """Copies of files that wait for an upload. The copies do not change when the originals do.

    Args:
        folder: where the copies are made; ``None``: the folder of the system for temporary files.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._parent = None if folder is None else Path(folder).absolute()  # the script may change its folder
        self._folders: set[Path] = set()

    def prepare(self) -> None:
        """Check that copies can be made.

        Raises:
            OSError: the folder cannot be written.
        """
        self.give_back(self._new_folder() / "file")

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
        staged = self._new_folder() / name
        try:
            shutil.copyfile(file, staged)
        except BaseException:
            self.give_back(staged)
            raise
        return staged

    def give_back(self, staged: Path) -> None:
        """Remove a copy that :meth:`copy` made."""
        shutil.rmtree(staged.parent, ignore_errors=True)
        self._folders.discard(staged.parent)

    def remove(self) -> None:
        """Remove all copies. May be called twice."""
        for folder in list(self._folders):
            self.give_back(folder / "file")

    def _new_folder(self) -> Path:
        if self._parent is not None:
            self._parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="composerlite-files-", dir=self._parent))
        self._folders.add(folder)
        return folder
