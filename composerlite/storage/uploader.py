"""Uploads in the background: in order where order matters, and never lost without a word."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import final

from composerlite.errors import ObjectStoreError
from composerlite.storage.background import Background
from composerlite.storage.transfer import Transfer

__all__ = ["Uploader"]

log = logging.getLogger(__name__)


@final
class Uploader:
    """Runs uploads in threads of its own: a :class:`Background` whose jobs get a transfer.

    Args:
        transfer: moves the bytes. It is closed with this.
        num_concurrent: uploads at the same time, of different lanes.
    """

    def __init__(self, transfer: Transfer, *, num_concurrent: int = 1) -> None:
        self.transfer = transfer
        self._jobs = Background("the uploader", jobs="uploads", num_concurrent=num_concurrent, error=ObjectStoreError)

    def submit(
        self,
        lane: str,
        work: Callable[[Transfer], object],
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

        Raises:
            ObjectStoreError: after :meth:`close`, or where the system gives no thread.
        """

        def upload() -> None:
            started = time.perf_counter()
            work(self.transfer)
            log.info("uploaded %s in %.1f s", what, time.perf_counter() - started)

        self._jobs.submit(what, upload, lane=lane, replaces=replaces, dropped=dropped)

    @property
    def pending(self) -> list[str]:
        """What is not uploaded yet, the oldest first."""
        return self._jobs.pending

    def raise_failures(self) -> None:
        """Raise what failed since the last time, if anything did."""
        self._jobs.raise_failures()

    def wait(self, timeout: float, *, lane: str | None = None, at_most: int = 0) -> bool:
        """Wait until at most so many uploads are pending, ``timeout`` seconds at most; whether that is so.

        ``lane``: only those of this lane count.
        """
        return self._jobs.wait(timeout, lane=lane, at_most=at_most)

    def close(self, timeout: float = 3600.0) -> None:
        """Wait for all uploads, end the threads and raise what failed; twice is fine.

        Raises:
            ObjectStoreError: an upload was not done in ``timeout`` seconds; the message lists them.
            Exception: what made one fail.
        """
        late = self._jobs.stop(timeout)
        self.transfer.close()
        if late:
            failed = f" Failed before: {self._jobs.failed}" if self._jobs.failed else ""
            raise ObjectStoreError(f"not uploaded within {timeout:.0f} s: {', '.join(late)}.{failed}")
        self._jobs.raise_failures()
