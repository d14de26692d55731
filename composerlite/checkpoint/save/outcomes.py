"""Outcomes of saves, deletions and uploads: events for loggers, and failures in a row."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter, deque
from pathlib import PurePath
from typing import final

from composerlite import dist
from composerlite.checkpoint.save.publish import Publication, deletion
from composerlite.checkpoint.save.save import SaveReport
from composerlite.errors import CheckpointError, ObjectStoreError, RankError
from composerlite.types import CheckpointNews

log = logging.getLogger(__name__)
FAILURES = (OSError, CheckpointError, ObjectStoreError)
"""Errors of disks, networks and stores, tolerated by ``save_failure_limit``."""
_REPORTS = 100
_FAILED = {
    "saved": "failed",
    "deleted": "deletion failed",
    "published": "upload failed",
    "deleted from a bucket": "deletion failed",
}
"""Event of a failure, by the kind of work."""


@final
class Outcomes:
    """Outcomes of the saves of a manager, the same on every rank: rank 0 warns for all.

    Args:
        failure_limit: number of tolerated failures in a row, each with a warning. Saves, deletions and uploads are
            counted separately.

    Attributes:
        reports: of the last 100 successful saves, oldest first.
        blocked_seconds: seconds that training waited for saves.
        maybe_written: names of failed saves: the file may exist.
        last_is_unconfirmed: the last save is in flight, failed or was interrupted: a checkpoint may or may not exist.
    """

    def __init__(self, failure_limit: int) -> None:
        self.reports: deque[SaveReport] = deque(maxlen=_REPORTS)
        self.blocked_seconds = 0.0
        self.maybe_written: set[str] = set()
        self.last_is_unconfirmed = False
        self._limit = failure_limit
        self._failures = Counter[str]()
        self._warned_of_metric = False
        self._events: list[CheckpointNews] = []
        # One save is in flight at a time.
        self._begun = CheckpointNews(what="begun", name="", where="", batch=0, at=0.0)

    def take_events(self) -> list[CheckpointNews]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def begun(self, name: str, where: str, batch: int, *, ephemeral: bool) -> None:
        """Record the start of a save of the checkpoint ``name`` in the folder ``where``."""
        self._begun = CheckpointNews(
            what="begun", name=name, where=where, batch=batch, at=time.time(), ephemeral=ephemeral
        )
        self.last_is_unconfirmed = True
        self._events.append(self._begun)

    def committed(self, report: SaveReport) -> None:
        """Record the success of the last save, and the deletion of older checkpoints by retention."""
        self.last_is_unconfirmed = False
        self.ended("saved", None)
        self.reports.append(report)
        self.blocked_seconds += report.seconds["stall"]
        at = self._begun.at + report.seconds["total"] - report.seconds.get("waiting", 0.0)
        numbers = {f"{name}_seconds": value for name, value in report.seconds.items()}
        numbers |= {"bytes": report.size_bytes, "batch": report.batch}
        if report.slowest_rank is not None:
            numbers["slowest_rank"] = report.slowest_rank
        self._events.append(
            dataclasses.replace(
                self._begun,
                what="committed",
                at=at,
                size_bytes=report.size_bytes,
                seconds=dict(report.seconds),
                slowest_rank=report.slowest_rank,
                metrics=numbers,
            )
        )
        self._events += [deletion(name, self._begun.where, at) for name in report.deleted]

    def published(self, one: Publication) -> None:
        """Record the end of an upload, or of the deletions after an upload.

        Raises:
            Exception: ``one.error``, unless the error is tolerated.
        """
        self._events += one.events
        self.ended(one.work, one.error, one.upload)

    def replicated(self, name: str) -> None:
        """Record the arrival of replicas of the checkpoint ``name`` in the memory of other nodes."""
        for batch in [report.batch for report in self.reports if report.path.name == PurePath(name).name][-1:]:
            news = CheckpointNews(what="replicated", name=name, where=self._begun.where, batch=batch, at=time.time())
            self._events.append(dataclasses.replace(news, metrics={"replicated_batch": batch}))

    def ended(self, what: str, error: Exception | None, news: CheckpointNews | None = None) -> None:
        """Count a failure, record an event, and warn. A success ends a row of failures.

        Args:
            what: the work: ``"saved"``, ``"deleted"``, ``"published"`` or ``"deleted from a bucket"``.
            error: reason of a failure; ``None``: a success.
            news: event of the upload; ``None``: the event of the last save.

        Raises:
            Exception: ``error``, after more failures in a row than the limit, or for any error besides
                :data:`FAILURES`: a bug or a lost rank.
        """
        if error is None:
            self._failures[what] = 0
            return
        base = dataclasses.replace(self._begun, at=time.time()) if news is None else news
        news = dataclasses.replace(base, what=_FAILED[what], error=f"{type(error).__name__}: {error}", metrics={})
        self._failures[what] += 1
        count = self._failures[what]
        causes = error.causes if isinstance(error, RankError) else (error,)
        if count > self._limit or not causes or not all(isinstance(cause, FAILURES) for cause in causes):
            self._events.append(news)
            raise error
        self._events.append(dataclasses.replace(news, metrics={"failures_in_a_row": count}))
        log.log(
            logging.WARNING if dist.get_global_rank() == 0 else logging.DEBUG,
            "a checkpoint could not be %s (%d in a row, save_failure_limit=%d): %s: %s",
            what,
            count,
            self._limit,
            type(error).__name__,
            error,
        )

    def warn_of_missing_metric(self, name: str, metric: str) -> None:
        """Warn about a checkpoint without the metric of ``save_best_k``, once, on rank 0."""
        if not self._warned_of_metric and dist.get_global_rank() == 0:
            log.warning(
                "checkpoint %s has no %r: nothing was evaluated at that batch before the save. save_best_k ignores it. "
                "Give save_interval and eval_interval the same value.",
                name,
                metric,
            )
        self._warned_of_metric = True
