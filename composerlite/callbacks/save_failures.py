"""Saves and uploads that may fail, as long as not too many do so in a row."""

from __future__ import annotations

import logging
from typing import final

from composerlite import dist
from composerlite.core import Logger
from composerlite.errors import CheckpointError, ObjectStoreError, RankError

__all__ = ["FAILURES", "FailuresInARow"]

log = logging.getLogger(__name__)
FAILURES = (OSError, CheckpointError, ObjectStoreError)
"""What makes a save fail and is not our own error."""


@final
class FailuresInARow:
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
        """Whether the last one could not be."""
        return self._count > 0

    def succeeded(self) -> None:
        """Begin to count anew."""
        self._count = 0

    def failed(self, error: Exception, logger: Logger | None) -> None:
        """Go on with a warning, as long as it is not too often.

        Raises:
            Exception: ``error``, if it is, or if it is none of those that may be tolerated.
        """
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


def _may_be_tolerated(error: Exception) -> bool:
    """Whether it is no error of our own, and no rank that is gone."""
    if isinstance(error, RankError):
        return bool(error.causes) and all(isinstance(cause, FAILURES) for cause in error.causes)
    return isinstance(error, FAILURES)
