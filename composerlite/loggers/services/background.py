"""What loggers do behind training: one thing after the other, and what fails is raised in training."""

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

from composerlite.errors import ComposerliteError

__all__ = ["Background", "StagedFiles"]

log = logging.getLogger(__name__)


def _nothing() -> object:
    return None


class _Job(NamedTuple):
    """Something to do.

    Attributes:
        what: for messages: ``'a.txt'``.
        name: a later job of this name takes its place as long as it has not begun; ``None``: it is done in any case.
        dropped: is called instead of ``work`` if that happens.
    """

    what: str
    work: Callable[[], object]
    name: str | None
    dropped: Callable[[], object]


@final
class Background:
    """Does jobs in a thread of its own, one after the other, in the order in which they came.

    What fails is kept until :meth:`raise_failures` or :meth:`close` raises it; later jobs are done all the same. The
    thread begins with the first job and ends with :meth:`close`; a program that ends without it does not wait.

    Args:
        who: wants them done, for messages: ``'MLFlowLogger'``.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._failures: list[Exception] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(
        self,
        what: str,
        work: Callable[[], object],
        *,
        name: str | None = None,
        dropped: Callable[[], object] = _nothing,
    ) -> None:
        """Have ``work`` done after everything that came before.

        Args:
            what: is done, for messages.
            work: does it.
            name: this is newer than what waits under the same name, which is not done any more.
            dropped: is called if this is not done, for that reason or because of :meth:`close`.

        Raises:
            ComposerliteError: after :meth:`close`.
        """
        with self._changed:
            if self._closing:
                raise ComposerliteError(f"{self._who}: {what} comes too late: the logger is closed.")
            old = [job for job in self._waiting if name is not None and job.name == name]
            self._waiting = deque(job for job in self._waiting if job not in old)
            self._waiting.append(_Job(what, work, name, dropped))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._who} background", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        for job in old:
            job.dropped()

    def raise_failures(self) -> None:
        """Raise what failed since the last time, if anything did. A note says what it was."""
        with self._changed:
            failures, self._failures = self._failures, []
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup(f"{self._who}: {len(failures)} things failed", failures)

    def wait(self, seconds: float) -> bool:
        """Wait until everything is done, ``seconds`` at most; whether it is."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._waiting or self._running is not None:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 1.0))  # in short turns, so that an interrupt is heard
        return True

    def close(self, seconds: float) -> None:
        """Wait until everything is done, end the thread and raise what failed; twice is fine.

        Raises:
            TimeoutError: it is not within ``seconds``; the message says what is missing.
            Exception: what failed.
        """
        in_time = self.wait(seconds)
        with self._changed:
            self._closing = True
            running = [] if self._running is None else [self._running]
            late = [job.what for job in (*running, *self._waiting)]
            left, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for job in left:
            job.dropped()
        if not in_time:
            failed = "; ".join(str(failure) for failure in self._failures)
            raise TimeoutError(
                f"{self._who}: not done within {seconds:.0f} s: {', '.join(late)}.{failed and f' Failed: {failed}'}"
            )
        if self._thread is not None:
            self._thread.join()
        self.raise_failures()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            failure: Exception | None = None
            try:
                job.work()
            except Exception as e:  # noqa: BLE001 - raised by raise_failures, in the thread that can do something about it
                log.error("%s: %s failed: %s", self._who, job.what, e)
                e.add_note(f"{self._who} could not do this behind training: {job.what}.")
                failure = e
            with self._changed:
                if failure is not None:
                    self._failures.append(failure)
                self._running = None
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        """The oldest job; ``None`` at the end."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running


@final
class StagedFiles:
    """Copies of files that wait to be uploaded, which nobody else changes.

    A second name for a file would follow what is written to it.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._count = 0

    def copy(self, file: Path, name: str) -> Path:
        """A copy of ``file`` that is called ``name``.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="composerlite-files-"))
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
        """Remove what :meth:`copy` gave."""
        shutil.rmtree(staged.parent, ignore_errors=True)

    def remove(self) -> None:
        """Remove all; twice is fine."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
