"""Reconstruct the launches of a run from its record: batches, how each launch ended, and lost work."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, final

from composerlite.report.record import Line

_RUNNING_SECONDS = 120.0
"""A launch without an end counts as running if its last line is not older."""
_SETTING = ("host", "pid", "world_size", "max_duration", "batches_per_epoch", "versions")


@final
@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """An evaluation: label, batch, end (seconds since 1970) and duration in seconds."""

    label: str
    batch: int | None
    ended_at: float
    seconds: float


@final
@dataclass(slots=True, kw_only=True)
class Launch:
    """A process that trained the run. Times are in seconds since 1970.

    Attributes:
        launched_at: start of the construction of the trainer.
        began_at: call of ``fit``; ``None``: ``fit`` was not called.
        ended_at: time of the last line.
        first_batch: number of finished batches at the start.
        last_batch: number of finished batches at the end.
        resumed_from: name of the loaded checkpoint; ``None``: the run began here.
        end: ``'finished'``, ``'interrupted'`` (preempted), ``'error'``, ``'closed'`` (before the end of training),
            ``'killed'`` (no end in the record) or ``'running'`` (no end, but a recent line).
        error: message of the error at the end.
        kept_batches: later launches resumed at or after this batch.
        lost_from: time when ``kept_batches`` was reached; ``None``: nothing was lost.
        evaluations: finished evaluations.
        batch_times: number and end of each batch.
        setting: host, process id, number of ranks, versions.
    """

    launched_at: float
    began_at: float | None = None
    ended_at: float
    first_batch: int
    last_batch: int
    resumed_from: str | None = None
    end: str = "killed"
    error: str | None = None
    kept_batches: int = 0
    lost_from: float | None = None
    evaluations: list[EvaluationRecord] = field(default_factory=list[EvaluationRecord])
    batch_times: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    setting: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def worked_until(self) -> float:
        """End of the last batch or evaluation. The last save, uploads and closing follow."""
        if self.end in ("killed", "running"):
            return self.ended_at
        known = [at for _, at in self.batch_times[-1:]] + [evaluation.ended_at for evaluation in self.evaluations[-1:]]
        return max(known, default=self.ended_at)

    @property
    def lost_batches(self) -> int:
        """Number of batches that a later launch trained again."""
        return max(0, self.last_batch - max(self.kept_batches, self.first_batch))

    @property
    def lost_seconds(self) -> float:
        """Seconds spent on the lost batches."""
        return 0.0 if self.lost_from is None else max(0.0, self.worked_until - self.lost_from)


def launches_in(lines: Sequence[Line], now: float) -> list[Launch]:
    """Return the launches of a run, oldest first. ``now`` is in seconds since 1970."""
    launches: list[Launch] = []
    for line in lines:
        batch = line.batch or 0
        if line.starts_launch or not launches:
            launch = Launch(launched_at=line.at, ended_at=line.at, first_batch=batch, last_batch=batch)
            launch.resumed_from = line.text("from") or None
            launch.setting = {name: line.fields[name] for name in _SETTING if line.fields.get(name) is not None}
            with contextlib.suppress(ValueError):  # not in the line
                launch.launched_at = min(line.at, datetime.fromisoformat(line.text("launched_at")).timestamp())
            launches.append(launch)
        launch = launches[-1]
        launch.ended_at = max(launch.ended_at, line.at)
        launch.last_batch = max(launch.last_batch, batch)
        if line.kind == "fit_start" and launch.began_at is None:
            launch.began_at = line.at
        elif line.kind == "metrics" and "time/batch" in line.numbers("metrics"):
            launch.batch_times.append((batch, line.at))
        elif line.kind == "evaluation":
            seconds = line.number("seconds") or 0.0
            launch.evaluations.append(EvaluationRecord(line.text("label"), line.batch, line.at, seconds))
        elif line.kind == "fit_end":
            launch.end = "finished"
        elif line.kind == "error":
            launch.error = line.text("error")
        elif line.kind == "end":
            launch.end = line.text("how") or "closed"
    for index, launch in enumerate(launches):
        launch.kept_batches = min([launch.last_batch, *(later.first_batch for later in launches[index + 1 :])])
        if launch.lost_batches > 0:
            kept = max(launch.kept_batches, launch.first_batch)
            before = [at for number, at in launch.batch_times if number <= kept]
            launch.lost_from = before[-1] if before else launch.began_at or launch.launched_at
    if launches and launches[-1].end == "killed" and now - launches[-1].ended_at < _RUNNING_SECONDS:
        launches[-1].end = "running"
    return launches
