"""Collect the facts about a run."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from composerlite.checkpoint.tools.surveying import place_at, survey
from composerlite.errors import CheckpointNotFoundError, ConfigError
from composerlite.report.launches import Launch, launches_in
from composerlite.report.record import Line, RunRecord, parse_record
from composerlite.report.saves import Save, Stored, saves_in, stored_at
from composerlite.storage import is_uri

_RECORD = re.compile(r"(?:^|/)[^/]*record[^/]*\.jsonl$")
"""Name of a record. Other JSON lines in the folder may be large data files."""
_NOT_CHARTED = ("time/", "wall_clock/", "checkpoint/", "goodput/")
_CHART_ORDER = ("loss/", "metrics/", "lr", "throughput/", "")
PARTS = {
    "training": ("training", "batches that count"),
    "evaluation": ("evaluation", ""),
    "saving": ("stalls", "training waited for saves"),
    "starting": ("starting", "from the construction of the trainer to fit"),
    "ending": ("ending", "the last save, uploads, closing"),
    "lost": ("lost work", "trained again"),
    "down": ("down", "between launches, including imports"),
}
"""Parts of the wall time: name and remark. The sum of all parts is the wall time."""


@final
@dataclass(frozen=True, slots=True)
class Series:
    """A metric as pairs of batch and value.

    Attributes:
        name: name of the metric.
        kept: values of batches that count, by batch.
        lost: for each launch with lost work, the values of batches that a later launch trained again.
    """

    name: str
    kept: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    lost: dict[int, list[tuple[int, float]]] = field(default_factory=dict[int, list[tuple[int, float]]])

    @property
    def finite(self) -> list[tuple[int, float]]:
        """Kept values without infinity and NaN."""
        return [(batch, value) for batch, value in self.kept if math.isfinite(value)]


@final
@dataclass(slots=True, kw_only=True)
class Facts:
    """Facts about a run.

    Attributes:
        run_name: name of the run.
        places: folders, URIs and files that were searched.
        made_at: time of the search, in seconds since 1970.
        status: how the last launch ended, see ``Launch.end``; ``'unknown'`` without a record.
        record: path or URI of the record; ``None``: no record, so all facts from the record are empty.
        faults: damaged checkpoints and unreadable lines.
        other_runs: names of other runs in the same places.
        launches: launches, oldest first.
        saves: saves, oldest first.
        stored: existing checkpoints.
        seconds: wall time by part, see ``PARTS``.
        metrics: curves of the logged metrics.
        hyperparameters: logged hyperparameters.
    """

    run_name: str
    places: list[str]
    made_at: float
    status: str
    record: str | None
    faults: list[str]
    other_runs: list[str]
    launches: list[Launch]
    saves: list[Save]
    stored: list[Stored]
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    metrics: list[Series] = field(default_factory=list[Series])
    hyperparameters: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first launch to the last line."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """Fraction of the wall time spent on training that counts; ``None`` if unknown."""
        return self.seconds["training"] / self.wall_seconds if self.wall_seconds > 0 else None

    @property
    def committed(self) -> list[Stored]:
        """Existing checkpoints that are committed."""
        return [checkpoint for checkpoint in self.stored if checkpoint.state == "committed"]

    @property
    def lost_batches(self) -> int:
        """Number of batches that were trained twice."""
        return sum(launch.lost_batches for launch in self.launches)

    @property
    def kills(self) -> int:
        """Number of launches without an end in the record."""
        return sum(launch.end == "killed" for launch in self.launches)

    @property
    def last_batch(self) -> int | None:
        """Number of finished batches; ``None`` if unknown."""
        if self.launches:
            return self.launches[-1].last_batch
        return max((save.batch for save in self.saves if save.batch is not None), default=None)


def collect_facts(places: Sequence[str], run: str | None = None) -> Facts:
    """Collect the facts about a run.

    Args:
        places: folders and URIs with checkpoints and records, and files of records.
        run: name of the run. By default the run that was active last.

    Raises:
        CheckpointNotFoundError: a folder or file does not exist, or contains no run.
        ConfigError: a URI is invalid, or no run has the name ``run``.
        OSError, ObjectStoreError: a place cannot be read.
    """
    records: list[RunRecord] = []
    stored: list[Stored] = []
    for text in places:
        is_file = text.endswith(".jsonl")
        folder = text if not is_file else text.rpartition("/")[0] if is_uri(text) else str(Path(text).parent)
        with place_at(folder) as place:
            if is_file:
                names = [text.rpartition("/")[2]]
            else:
                stored += [stored_at(found) for found in survey(place)]
                names = [path for path in place.files() if _RECORD.search(path)]
            for name in names:
                try:
                    records += parse_record(place.read(name), place.uri(name))
                except FileNotFoundError as e:
                    raise CheckpointNotFoundError(f"there is no file {place.uri(name)!r}.") from e
    if not records and not stored:
        raise CheckpointNotFoundError(
            f"there is no run in {', '.join(places)}: expected a folder or URI with checkpoints, or the file of a "
            "JSONLLogger."
        )
    active = [(record.lines[-1].at, record.run_name) for record in records]
    active += [(one.saved_at or 0.0, one.run_name) for one in stored if one.run_name is not None]
    names = list(dict.fromkeys(name for _, name in active))
    if run is not None and run not in names:
        raise ConfigError(f"--run {run}: no run has this name in {', '.join(places)}. Runs: {', '.join(names)}.")
    run_name = run if run is not None else max(active, default=(0.0, ""))[1]
    of_run = [record for record in records if record.run_name == run_name]
    record = max(of_run, key=lambda record: record.lines[-1].at, default=None)
    stored = [one for one in stored if one.run_name in (run_name, None)]
    faults = [] if record is None else list(record.faults)
    now, lines = time.time(), [] if record is None else record.lines
    launches = launches_in(lines, now)
    hyperparameters: dict[str, Any] = {}
    for line in lines:
        if line.kind == "hyperparameters":
            hyperparameters |= line.fields.get("hyperparameters") or {}
    return Facts(
        run_name=run_name,
        places=list(places),
        made_at=now,
        status=launches[-1].end if launches else "unknown",
        record=None if record is None else record.source,
        faults=faults + [f"{one.uri}: {fault}" for one in stored for fault in one.faults],
        other_runs=[name for name in names if name and name != run_name],
        launches=launches,
        saves=saves_in(lines, stored),
        stored=sorted(stored, key=lambda one: (one.saved_at is None, one.saved_at or 0.0, one.where, one.name)),
        seconds=_wall_time(launches, lines),
        metrics=_metrics(lines, launches),
        hyperparameters=hyperparameters,
    )


def _wall_time(launches: Sequence[Launch], lines: Sequence[Line]) -> dict[str, float]:
    """Split the wall time into ``PARTS``."""
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0) if launches else {}
    stalls: list[tuple[float, float]] = []
    for line in lines:
        if line.kind == "checkpoint" and line.text("what") == "committed":
            seconds = line.numbers("seconds")
            stalls.append((line.at, max(seconds.get("stall", 0.0), seconds.get("longest_stall", 0.0))))
    for index, launch in enumerate(launches):
        if index:
            parts["down"] += max(0.0, launch.launched_at - launches[index - 1].ended_at)
        if launch.began_at is None:
            parts["starting"] += launch.ended_at - launch.launched_at
            continue
        until = launch.worked_until - launch.lost_seconds
        evaluating = sum(one.seconds for one in launch.evaluations if launch.began_at <= one.ended_at <= until)
        saving = sum(stall for at, stall in stalls if launch.began_at <= at <= until)
        parts["starting"] += launch.began_at - launch.launched_at
        parts["ending"] += launch.ended_at - launch.worked_until
        parts["lost"] += launch.lost_seconds
        parts["evaluation"] += evaluating
        parts["saving"] += saving
        parts["training"] += max(0.0, until - launch.began_at - evaluating - saving)
    return parts


def _metrics(lines: Sequence[Line], launches: Sequence[Launch]) -> list[Series]:
    """Return the curves of all metrics, losses first."""
    series: dict[str, Series] = {}
    index = -1
    for line in lines:
        if line.starts_launch or index < 0:
            index += 1
        if line.kind != "metrics" or line.batch is None:
            continue
        launch = launches[index]
        is_lost = launch.lost_batches > 0 and line.batch > max(launch.kept_batches, launch.first_batch)
        for name, value in line.numbers("metrics").items():
            if name.startswith(_NOT_CHARTED):
                continue
            curve = series.setdefault(name, Series(name))
            points = curve.lost.setdefault(index, []) if is_lost else curve.kept
            points.append((line.batch, value))
    ordered = [name for prefix in _CHART_ORDER for name in series if name.startswith(prefix)]
    return [series[name] for name in dict.fromkeys(ordered)]


def to_json(facts: Facts) -> dict[str, Any]:
    """Convert facts to JSON types. Of a metric, the result has the last value and the number of values."""
    plain = dataclasses.asdict(dataclasses.replace(facts, metrics=[]))
    plain["metrics"] = {
        series.name: {
            "count": len(series.kept) + sum(map(len, series.lost.values())),
            "last_batch": series.kept[-1][0],
            "last": series.kept[-1][1],
        }
        for series in facts.metrics
        if series.kept
    }
    for launch, fields in zip(facts.launches, plain["launches"], strict=True):
        del fields["batch_times"]
        fields |= {"lost_batches": launch.lost_batches, "lost_seconds": launch.lost_seconds}
    for name in ("lost_batches", "kills", "last_batch", "wall_seconds", "goodput"):
        plain[name] = getattr(facts, name)
    return plain
