"""Uploads that go on behind training: in order where order matters, and never lost without a word."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, final

from composerlite.errors import ObjectStoreError
from composerlite.storage.helpers import start_threads
from composerlite.storage.transfer import Transfer

__all__ = ["Uploader"]

log = logging.getLogger(__name__)
Work = Callable[[Transfer], object]


class _Job(NamedTuple):
    """Something to upload.

    Attributes:
        lane: jobs of one lane run one after the other, in the order in which they came.
        what: for messages.
        dropped: is called instead of ``work`` if something newer takes its place.
    """

    lane: str
    what: str
    work: Work
    dropped: Callable[[], object]


@final
class Uploader:
    """Runs uploads in threads of its own.

    What fails is kept until :meth:`raise_failures` or :meth:`close` raises it. The threads begin with the first upload
    and end with :meth:`close`; a program that ends without it does not wait for them.

    Args:
        transfer: moves the bytes. It is closed with this.
        num_concurrent: uploads at the same time, of different lanes.
    """

    def __init__(self, transfer: Transfer, *, num_concurrent: int = 1) -> None:
        self.transfer = transfer
        self._num_concurrent = num_concurrent
        self._waiting: deque[_Job] = deque()
        self._running: dict[str, _Job] = {}
        self._failures: list[Exception] = []
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def submit(
        self,
        lane: str,
        work: Work,
        *,
        what: str,
        replaces: bool = False,
        dropped: Callable[[], object] = lambda: None,
    ) -> None:
        """Have ``work`` done behind this thread, after everything that came before in its lane.

        Args:
            lane: what has to be in order, such as the name of an object.
            work: is called with the transfer.
            what: what is uploaded, for messages.
            replaces: what waits in the lane and has not begun is not done any more: this is newer.
            dropped: is called if this is not done for that reason, or because of :meth:`close`.
        """
        obsolete: list[_Job] = []
        with self._changed:
            if self._closing:
                raise ObjectStoreError(f"{what} cannot be uploaded: the uploader is closed.")
            if replaces:
                obsolete = [job for job in self._waiting if job.lane == lane]
                self._waiting = deque(job for job in self._waiting if job.lane != lane)
            if len(self._threads) < self._num_concurrent:
                self._threads += start_threads(self._run, 1, name="uploader")
            if not self._threads:
                raise ObjectStoreError(f"{what} cannot be uploaded: no thread can be started for it.")
            self._waiting.append(_Job(lane, what, work, dropped))
            self._changed.notify_all()
        for job in obsolete:
            job.dropped()

    @property
    def pending(self) -> list[str]:
        """What is not uploaded yet, the oldest first."""
        with self._changed:
            return [job.what for job in (*self._running.values(), *self._waiting)]

    def raise_failures(self) -> None:
        """Raise what failed since the last time, if anything did."""
        with self._changed:
            failures, self._failures = self._failures, []
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup(f"{len(failures)} uploads failed", failures)

    def wait(self, timeout: float, *, lane: str | None = None, at_most: int = 0) -> bool:
        """Wait until at most so many uploads are pending, ``timeout`` seconds at most; whether that is so.

        ``lane``: only those of this lane count.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while sum(lane in (None, job.lane) for job in (*self._running.values(), *self._waiting)) > at_most:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 1.0))  # in short turns, so that an interrupt is heard
        return True

    def close(self, timeout: float = 3600.0) -> None:
        """Wait for all uploads, end the threads and raise what failed; twice is fine.

        Raises:
            ObjectStoreError: an upload was not done in ``timeout`` seconds; the message lists them.
            Exception: what made one fail.
        """
        in_time = self.wait(timeout)
        late = self.pending
        with self._changed:
            self._closing = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for job in left:
            job.dropped()
        if in_time:
            for thread in self._threads:
                thread.join()
        self.transfer.close()
        if not in_time:
            failed = "; ".join(str(failure) for failure in self._failures)
            raise ObjectStoreError(
                f"not uploaded within {timeout:.0f} s: {', '.join(late)}.{failed and f' Failed before: {failed}'}"
            )
        self.raise_failures()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            started = time.perf_counter()
            try:
                job.work(self.transfer)
            except Exception as e:  # noqa: BLE001 - raised by raise_failures, in the thread that can do something about it
                log.error("the upload of %s failed: %s", job.what, e)
                failure: Exception | None = e
            else:
                log.info("uploaded %s in %.1f s", job.what, time.perf_counter() - started)
                failure = None
            with self._changed:
                if failure is not None:
                    self._failures.append(failure)
                del self._running[job.lane]
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        """The oldest job whose lane is free; ``None`` at the end."""
        with self._changed:
            while True:
                for job in self._waiting:
                    if job.lane not in self._running:
                        self._waiting.remove(job)
                        self._running[job.lane] = job
                        return job
                if self._closing:
                    return None
                self._changed.wait()
