"""Outcomes of saves, deletions and uploads: counts failures against the limit and reports them to the run's loggers."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

from composerlite import dist
from composerlite.checkpoint.save.job import SaveReport
from composerlite.checkpoint.save.publish import Destinations, Publication
from composerlite.errors import CheckpointError, ObjectStoreError, RankError
from composerlite.types import CheckpointNews, CheckpointStep

__all__ = ["FAILURES", "Outcomes", "RunLogger"]

log = logging.getLogger(__name__)
FAILURES = (OSError, CheckpointError, ObjectStoreError)
"""What makes a save fail and is not our own error."""
_REPORTS = 100


class RunLogger(Destinations, Protocol):
    """Interface of the run's loggers that outcomes are reported to."""

    def log_metrics(self, metrics: Mapping[str, Any]) -> None: ...

    def log_checkpoint(self, news: CheckpointNews) -> None: ...


@final
class _FailuresInARow:
    """Counts failures since the last success, the same on every rank: rank 0 warns for all.

    Args:
        limit: so many in a row are tolerated, with a warning each.
        what: could not be done to a checkpoint: ``'saved'``.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self._count = 0

    @property
    def last_failed(self) -> bool:
        """True if the last save or upload failed."""
        return self._count > 0

    def note(self, error: Exception | None, logger: RunLogger | None) -> None:
        """Take note of one that went well, or continue with a warning after ``error``, as long as it is not too often.

        Raises:
            Exception: ``error``, if it is, or if it is none of those that may be tolerated.
        """
        if error is None:
            self._count = 0
            return
        self._count += 1
        if self._count > self._limit or not _may_be_tolerated(error):
            raise error
        warn = log.warning if dist.get_global_rank() == 0 else log.debug
        warn(
            "a checkpoint could not be %s (%d in a row, save_failure_limit=%d): %s: %s",
            self._what,
            self._count,
            self._limit,
            type(error).__name__,
            error,
        )
        if logger is not None:
            logger.log_metrics({"checkpoint/failures_in_a_row": self._count})


@final
class Outcomes:
    """Counts failures, tells those who keep a record what happens, and logs what it cost as metrics ``checkpoint/…``.

    All of it on the training thread, by all ranks; rank 0 tells. Nothing is told before :meth:`tell_to`.

    Args:
        failure_limit: so many in a row are tolerated, with a warning each, of saves, of deletions and of uploads.

    Attributes:
        reports: how the last saves went.
    """

    def __init__(self, failure_limit: int) -> None:
        self.reports: deque[SaveReport] = deque(maxlen=_REPORTS)
        self._ended: deque[SaveReport | None] = deque()
        self._saves = _FailuresInARow(failure_limit, "saved")
        self._deletions = _FailuresInARow(failure_limit, "deleted")
        self._uploads = _FailuresInARow(failure_limit, "published")
        self._logger: RunLogger | None = None
        # One save is in flight at a time.
        self._begun = CheckpointNews(what="begun", name="", where="", batch=0, at=0.0)

    def tell_to(self, logger: RunLogger) -> None:
        """Set the loggers that receive the outcomes."""
        self._logger = logger

    def begun(self, name: str, where: str, batch: int, *, ephemeral: bool) -> None:
        """Training hands a checkpoint over now."""
        self._begun = CheckpointNews(
            what="begun", name=name, where=where, batch=batch, at=time.time(), ephemeral=ephemeral
        )
        self._tell(self._begun)

    @property
    def last_failed(self) -> bool:
        """True if the save that ended last failed."""
        return self._saves.last_failed

    def take_ended(self) -> list[SaveReport | None]:
        """Return the reports of saves that ended since the last call, oldest first; ``None`` for one that failed."""
        return [self._ended.popleft() for _ in range(len(self._ended))] if self._ended else []

    def committed(self, report: SaveReport) -> None:
        """The checkpoint that was begun last exists, and older ones were given up for it."""
        self._saves.note(None, self._logger)
        self.reports.append(report)
        self._ended.append(report)
        at = self._begun.at + report.seconds["total"] - report.seconds.get("waiting", 0.0)
        size, seconds = report.size_bytes, dict(report.seconds)
        self._tell(dataclasses.replace(self._begun, what="committed", at=at, size_bytes=size, seconds=seconds))
        self.deleted(report.deleted, self._begun.where, at)
        costs = {f"{name}_seconds": value for name, value in report.seconds.items()}
        self._log(**costs, bytes=report.size_bytes, batch=report.batch)

    def failed(self, error: Exception) -> None:
        """The save that was begun last has failed.

        Raises:
            Exception: ``error``, unless it is tolerated.
        """
        self._tell(dataclasses.replace(self._begun, what="failed", at=time.time(), error=_text(error)))
        self._ended.append(None)
        self._saves.note(error, self._logger)

    def tidied(self, error: Exception | None) -> None:
        """Older checkpoints than the last are deleted, or could not be: the newest is there, whatever becomes of them.

        Raises:
            Exception: ``error``, unless it is tolerated.
        """
        self._deletions.note(error, self._logger)

    def published(self, one: Publication) -> None:
        """An upload has ended, well or not.

        Raises:
            Exception: what made it fail, unless it is tolerated.
        """
        what: CheckpointStep = "uploaded" if one.error is None else "upload failed"
        self._tell(
            CheckpointNews(
                what=what,
                name=one.name,
                where=one.where,
                batch=one.batch,
                at=one.at,
                size_bytes=one.size_bytes,
                seconds={"upload": one.seconds},
                error=None if one.error is None else _text(one.error),
            )
        )
        self.deleted(one.deleted, one.where, one.at)
        if one.error is None:
            self._log(
                uploaded_batch=one.batch,
                uploaded_bytes=one.size_bytes,
                upload_seconds=one.seconds,
                upload_lag_seconds=one.lag_seconds,
            )
        self._uploads.note(one.error, self._logger)

    def deleted(self, names: Sequence[str], where: str, at: float | None = None) -> None:
        """Checkpoints are gone from ``where``, since ``at`` or now."""
        for name in names:
            at = time.time() if at is None else at
            self._tell(CheckpointNews(what="deleted", name=name, where=where, batch=None, at=at))

    def _tell(self, news: CheckpointNews) -> None:
        if self._logger is not None and dist.get_global_rank() == 0:
            self._logger.log_checkpoint(news)

    def _log(self, **metrics: float) -> None:
        """Log ``metrics`` with every logger of the run; docs/logging.md lists their names."""
        if self._logger is not None:
            self._logger.log_metrics({f"checkpoint/{name}": value for name, value in metrics.items()})


def _may_be_tolerated(error: Exception) -> bool:
    """Return true if the error is neither a bug of ours nor a rank that is gone."""
    if isinstance(error, RankError):
        return bool(error.causes) and all(isinstance(cause, FAILURES) for cause in error.causes)
    return isinstance(error, FAILURES)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
