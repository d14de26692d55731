"""What becomes of a saver's checkpoints, told to the loggers of the run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import final

from composerlite import dist
from composerlite.checkpoint import SaveReport
from composerlite.checkpoint.save.publishing import Publication
from composerlite.core import CheckpointNews, CheckpointStep, Logger

__all__ = ["SaveNews"]


@final
class SaveNews:
    """Tells those who keep a record what happens, on rank 0, and logs what it cost as metrics ``checkpoint/…``.

    All of it on the training thread. Nothing is told before :meth:`tell_to`.
    """

    def __init__(self) -> None:
        self._logger: Logger | None = None
        # One save is in flight at a time.
        self._begun = CheckpointNews(what="begun", name="", where="", batch=0, at=0.0)

    def tell_to(self, logger: Logger) -> None:
        """Whom to tell."""
        self._logger = logger

    def begun(self, name: str, where: str, batch: int, *, ephemeral: bool) -> None:
        """Training hands a checkpoint over now."""
        self._begun = CheckpointNews(
            what="begun", name=name, where=where, batch=batch, at=time.time(), ephemeral=ephemeral
        )
        self._tell(self._begun)

    def committed(self, report: SaveReport) -> None:
        """The checkpoint that was begun last exists, and older ones were given up for it."""
        at = self._begun.at + report.seconds["total"] - report.seconds.get("waiting", 0.0)
        size, seconds = report.size_bytes, dict(report.seconds)
        self._tell(dataclasses.replace(self._begun, what="committed", at=at, size_bytes=size, seconds=seconds))
        self.deleted(report.deleted, self._begun.where, at)
        costs = {f"{name}_seconds": value for name, value in report.seconds.items()}
        self._log(**costs, bytes=report.size_bytes, batch=report.batch)

    def failed(self, error: Exception) -> None:
        """The save that was begun last has failed."""
        self._tell(dataclasses.replace(self._begun, what="failed", at=time.time(), error=_text(error)))

    def published(self, one: Publication) -> None:
        """An upload has ended, well or not."""
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

    def deleted(self, names: Sequence[str], where: str, at: float | None = None) -> None:
        """Checkpoints are gone from ``where``, since ``at`` or now."""
        for name in names:
            at = time.time() if at is None else at
            self._tell(CheckpointNews(what="deleted", name=name, where=where, batch=None, at=at))

    def _tell(self, news: CheckpointNews) -> None:
        if self._logger is not None and dist.get_global_rank() == 0:
            self._logger.log_checkpoint(news)

    def _log(self, **metrics: float) -> None:
        """To every logger of the run; docs/logging.md names them all."""
        if self._logger is not None:
            self._logger.log_metrics({f"checkpoint/{name}": value for name, value in metrics.items()})


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
