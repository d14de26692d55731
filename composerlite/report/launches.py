"""Launches of a run by its record: first and last batch, how each ended, and the work it lost."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, final

from composerlite.report.record import Line

_QUIET_SECONDS = 120.0
"""A launch without an end that has said something so recently may be running."""


@final
@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """An evaluation in the record of a run, with the time of its end (seconds since 1970) and how long it took."""

    label: str
    batch: int | None
    ended_at: float
    seconds: float


@final
@dataclass(slots=True, kw_only=True)
class Launch:
    """One process that trained the run.

    Attributes:
        launched_at: the trainer was being built. began_at: ``fit`` was called. ended_at: the last that is known of it.
        first_batch: optimizer steps done when it began. last_batch: done at its end, as far as is known.
        resumed_from: the checkpoint; ``None``: it began the run.
        end: ``'finished'``; ``'interrupted'``: it was preempted; ``'error'``; ``'closed'``: before the end of
            training; ``'killed'``: it says nothing of an end; ``'running'``: nor does it yet.
        error: what ended it.
        kept_batches: up to this batch its work counts: the launches after it resumed from there.
        lost_from: when it had trained that; ``None``: nothing is lost.
        evaluations: of it. batch_times: when each batch ended.
        setting: what it said of itself: host, process, ranks, versions.
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
        """The end of its last batch or evaluation; what follows is the end of the last save, uploads, closing."""
        if self.end in ("killed", "running"):
            return self.ended_at
        known = [at for _, at in self.batch_times[-1:]] + [one.ended_at for one in self.evaluations[-1:]]
        return max(known, default=self.ended_at)

    @property
    def lost_batches(self) -> int:
        """Trained here and again by a later launch."""
        return max(0, self.last_batch - max(self.kept_batches, self.first_batch))

    @property
    def lost_seconds(self) -> float:
        """Seconds that the lost work took."""
        return 0.0 if self.lost_from is None else max(0.0, self.worked_until - self.lost_from)


def launches_in(lines: Sequence[Line], now: float) -> list[Launch]:
    """The launches of a run, in their order. ``now``: seconds since 1970."""
    launches: list[Launch] = []
    for line in lines:
        if line.kind in ("start", "resume") or not launches:
            launches.append(_begun(line))
        _take(launches[-1], line)
    for number, launch in enumerate(launches):
        later = [one.first_batch for one in launches[number + 1 :]]
        launch.kept_batches = min([launch.last_batch, *later])
        if launch.lost_batches > 0:
            launch.lost_from = _time_of(launch, max(launch.kept_batches, launch.first_batch))
    if launches and launches[-1].end == "killed" and now - launches[-1].ended_at < _QUIET_SECONDS:
        launches[-1].end = "running"
    return launches


def _begun(line: Line) -> Launch:
    batch = line.batch or 0
    launch = Launch(launched_at=line.at, ended_at=line.at, first_batch=batch, last_batch=batch)
    if line.kind in ("start", "resume"):
        launch.resumed_from = line.text("from") or None
        names = ("host", "pid", "world_size", "max_duration", "batches_per_epoch", "versions")
        launch.setting = {name: line.facts[name] for name in names if line.facts.get(name) is not None}
        with contextlib.suppress(ValueError):  # it does not say
            launch.launched_at = min(line.at, datetime.fromisoformat(line.text("launched_at")).timestamp())
    return launch


def _take(launch: Launch, line: Line) -> None:
    """Add the facts of ``line`` to ``launch``."""
    launch.ended_at = max(launch.ended_at, line.at)
    launch.last_batch = max(launch.last_batch, line.batch or 0)
    if line.kind == "fit_start" and launch.began_at is None:
        launch.began_at = line.at
    elif line.kind == "metrics" and line.batch is not None and "time/batch" in line.metrics:
        launch.batch_times.append((line.batch, line.at))
    elif line.kind == "evaluation":
        launch.evaluations.append(
            EvaluationRecord(line.text("label"), line.batch, line.at, line.number("seconds") or 0.0)
        )
    elif line.kind == "fit_end":
        launch.end = "finished"
    elif line.kind == "error":
        launch.error = line.text("error")
    elif line.kind == "end":
        launch.end = line.text("how") or "closed"


def _time_of(launch: Launch, batch: int) -> float:
    """Return the time when ``batch`` was done: the last one known before training resumed from there."""
    times = [at for number, at in launch.batch_times if number <= batch]
    return times[-1] if times else launch.began_at or launch.launched_at
