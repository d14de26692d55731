"""The facts of a run: what a report is made of."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast, final

from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.tools.surveying import place_at, survey
from composerlite.errors import CheckpointNotFoundError, ConfigError
from composerlite.report.launches import Launch, launches_in
from composerlite.report.record import Line, RunRecord, parse_record
from composerlite.report.saves import Save, Stored, saves_in, stored_at
from composerlite.storage import is_uri

_SUFFIX = ".jsonl"
_RECORD = re.compile(r"(?:^|/)[^/]*record[^/]*\.jsonl$")
"""What a record is called; other files of lines may be data, and large."""
_NOT_CHARTED = ("time/", "wall_clock/", "checkpoint/", "goodput/")
PARTS: tuple[str, ...] = ("training", "lost", "saving", "straggler", "evaluation", "starting", "down", "ending")
"""Where the wall time went. All of them together are the wall time."""
_BLOCKING = 0.9
"""If a save has kept training waiting for so much of its time, it was not in the background."""


@final
@dataclass(frozen=True, slots=True)
class Point:
    """A value of a metric at a batch; ``is_lost``: a later launch has trained that batch again."""

    batch: int
    value: float
    is_lost: bool


@final
@dataclass(frozen=True, slots=True)
class Series:
    """A metric: its name, and the points in the order in which they were logged."""

    name: str
    points: list[Point]

    @property
    def kept(self) -> list[Point]:
        """Points that count, by batch."""
        return sorted((point for point in self.points if not point.is_lost), key=lambda point: point.batch)


@final
@dataclass(slots=True, kw_only=True)
class Facts:
    """Facts about a run.

    Attributes:
        run_name: of it. places: where it was looked for. made_at: when.
        status: ``'finished'``, ``'running'``, ``'interrupted'``, ``'error'``, ``'killed'``, ``'closed'``: how the last
            launch ended; ``'unknown'``: there is no record.
        record: the file; ``None``: there is none, and what follows from it is empty.
        faults: what is damaged or could not be read.
        launches, saves: the first first. stored: the checkpoints that are there.
        seconds: where the wall time went, by part. goodput: the part of it that was training that counts.
        metrics: the curves. hyperparameters: as they were logged.
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
        """Seconds from the first launch to the last known moment."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """The part of the wall time that was training that counts; ``None``: nothing is known."""
        return self.seconds["training"] / self.wall_seconds if self.seconds and self.wall_seconds > 0 else None

    @property
    def committed(self) -> list[Stored]:
        """The checkpoints that are there and whole."""
        return [one for one in self.stored if one.state == "committed"]

    @property
    def lost_batches(self) -> int:
        """Number of batches that were trained twice."""
        return sum(launch.lost_batches for launch in self.launches)

    @property
    def kills(self) -> int:
        """Launches that ended without a word."""
        return sum(launch.end == "killed" for launch in self.launches)

    @property
    def last_batch(self) -> int | None:
        """Last batch that the run reached."""
        known = [save.batch for save in self.saves if save.batch is not None]
        known += [self.launches[-1].last_batch] if self.launches else []
        return known[-1] if self.launches else max(known, default=None)

    @property
    def max_duration(self) -> str:
        """Duration that the run was to reach; empty if not known."""
        given = [str(one.setting["max_duration"]) for one in self.launches if "max_duration" in one.setting]
        return given[-1] if given else ""


def facts_of(places: Sequence[str], run: str | None = None) -> Facts:
    """Collect the facts of the run in ``places``: folders, URIs and files of records.

    Of several runs the one of the name ``run`` is meant, or the one that was active last.

    Raises:
        CheckpointNotFoundError: there is no such folder or file, or nothing of a run in them.
        ConfigError: a URI names no store, or there is no run of that name.
        OSError, ObjectStoreError: a place cannot be read.
    """
    found, now = _gathered(places, run), time.time()
    lines = [] if found.record is None else found.record.lines
    launches = launches_in(lines, now)
    return Facts(
        run_name=found.run_name,
        places=list(places),
        made_at=now,
        status=launches[-1].end if launches else "unknown",
        record=None if found.record is None else found.record.source,
        faults=found.faults,
        other_runs=found.other_runs,
        launches=launches,
        saves=saves_in(lines, found.stored),
        stored=sorted(found.stored, key=lambda one: (one.saved_at is None, one.saved_at or 0.0, one.where, one.name)),
        seconds=_seconds(launches, lines),
        metrics=_series(lines, launches),
        hyperparameters=_hyperparameters(lines),
    )


# ── what there is ────────────────────────────────────────────────────────────────────────────────────────────────────
class _Gathered(NamedTuple):
    """The record of a run, if there is one, and its checkpoints."""

    run_name: str
    record: RunRecord | None
    stored: list[Stored]
    faults: list[str]
    other_runs: list[str]


def _gathered(places: Sequence[str], run: str | None) -> _Gathered:
    """Collect the records and checkpoints of the run in ``places``. Of several runs, the one that was active last."""
    records: list[RunRecord] = []
    stored: list[Stored] = []
    for text in places:
        if text.endswith(_SUFFIX):
            folder, _, name = text.rpartition("/")
            if not is_uri(text):
                folder, name = str(Path(text).parent), Path(text).name
            with place_at(folder) as place:
                records += _records(place, [name], run)
        else:
            with place_at(text) as place:
                stored += [stored_at(one) for one in survey(place)]
                records += _records(place, [path for path in place.files() if _RECORD.search(path)], run)
    asked, run = run, _last_run(records, stored) if run is None else run
    if run is None:
        raise CheckpointNotFoundError(
            f"there is no run in {', '.join(places)}: expected a folder or a URI with checkpoints, or the file that a "
            "JSONLLogger has written."
        )
    mine = [record for record in records if record.run_name == run]
    record = max(mine, key=lambda record: record.lines[-1].at, default=None)
    names = [one.run_name for one in stored if one.run_name is not None]
    names += [name for known in records for name in (known.run_name, *known.other_runs)]
    others = [name for name in dict.fromkeys(names) if name and name != run]
    if asked is not None and record is None and not any(one.run_name == run for one in stored):
        there = f" There are: {', '.join(others)}." if others else ""
        raise ConfigError(f"--run {asked}: no run of that name in {', '.join(places)}.{there}")
    stored = [one for one in stored if one.run_name in (run, None)]
    faults = [] if record is None else list(record.faults)
    faults += [f"{one.uri}: {fault}" for one in stored for fault in one.faults]
    return _Gathered(run, record, stored, faults, others)


def _records(place: Place, names: Sequence[str], run: str | None) -> list[RunRecord]:
    records: list[RunRecord] = []
    for name in names:
        try:
            data = place.read(name)
        except FileNotFoundError as e:
            raise CheckpointNotFoundError(f"there is no file {place.uri(name)!r}.") from e
        record = parse_record(data, place.uri(name), run)
        if record is not None:
            records.append(record)
    return records


def _last_run(records: Sequence[RunRecord], stored: Sequence[Stored]) -> str | None:
    """The name of the run that did something last."""
    active = [(record.lines[-1].at, record.run_name) for record in records]
    active += [(one.saved_at, one.run_name) for one in stored if one.saved_at is not None and one.run_name is not None]
    return max(active)[1] if active else ("" if stored else None)


# ── where the time went ──────────────────────────────────────────────────────────────────────────────────────────────
def _seconds(launches: Sequence[Launch], lines: Sequence[Line]) -> dict[str, float]:
    if not launches:
        return {}
    parts = dict.fromkeys(PARTS, 0.0)
    stalls = _stalls(lines)
    for number, launch in enumerate(launches):
        if number:
            parts["down"] += max(0.0, launch.launched_at - launches[number - 1].ended_at)
        if launch.began_at is None:
            parts["starting"] += launch.ended_at - launch.launched_at
            continue
        parts["starting"] += launch.began_at - launch.launched_at
        parts["ending"] += launch.ended_at - launch.worked_until
        until = launch.worked_until if launch.lost_from is None else min(launch.worked_until, launch.lost_from)
        parts["lost"] += launch.worked_until - until
        evaluating = sum(one.seconds for one in launch.evaluations if launch.began_at <= one.ended_at <= until)
        counted = [(stall, held_up) for at, stall, held_up in stalls if launch.began_at <= at <= until]
        saving, straggler = (sum(kind) for kind in zip(*counted, strict=True)) if counted else (0.0, 0.0)
        parts["evaluation"] += evaluating
        parts["saving"] += saving - straggler
        parts["straggler"] += straggler
        parts["training"] += max(0.0, until - launch.began_at - evaluating - saving)
    return parts


def _stalls(lines: Sequence[Line]) -> list[tuple[float, float, float]]:
    """List when each save was committed, how long it kept training waiting on any rank, and how much of that the
    slowest rank has caused: in this save if training waited for its end, else in the save before, which it waited for.
    """
    found: list[tuple[float, float, float]] = []
    before = 0.0
    for line in lines:
        if line.kind != "checkpoint" or line.text("what") != "committed":
            continue
        stall = max(line.seconds("stall") or 0.0, line.seconds("longest_stall") or 0.0)
        straggler, total = line.seconds("straggler") or 0.0, line.seconds("total")
        held_up = min(before, line.seconds("waiting") or 0.0)
        if total is not None and stall >= _BLOCKING * total:
            held_up += straggler
        found.append((line.at, stall, min(stall, held_up)))
        before = straggler
    return found


# ── what was logged ──────────────────────────────────────────────────────────────────────────────────────────────────
def _series(lines: Sequence[Line], launches: Sequence[Launch]) -> list[Series]:
    """The curves of all metrics, the losses first."""
    points: dict[str, list[Point]] = {}
    number = -1
    for line in lines:
        if line.kind in ("start", "resume") or number < 0:
            number += 1
        if line.kind != "metrics" or line.batch is None:
            continue
        launch = launches[number]
        is_lost = launch.lost_batches > 0 and line.batch > max(launch.kept_batches, launch.first_batch)
        for name, value in line.metrics.items():
            if not name.startswith(_NOT_CHARTED):
                points.setdefault(name, []).append(Point(line.batch, value, is_lost))
    order = ("loss/", "metrics/", "lr", "throughput/")
    rank = {name: next((at for at, one in enumerate(order) if name.startswith(one)), len(order)) for name in points}
    return [Series(name, points[name]) for name in sorted(points, key=lambda name: rank[name])]


def _hyperparameters(lines: Sequence[Line]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for line in lines:
        given = line.facts.get("hyperparameters")
        if line.kind == "hyperparameters" and isinstance(given, dict):
            merged |= cast("dict[str, Any]", given)
    return merged


# ── as JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def to_plain(facts: Facts) -> dict[str, Any]:
    """The facts as JSON has them. Times are ISO 8601 in UTC; of a metric there are the last value and how many."""
    plain = cast("dict[str, Any]", _plain("", facts))
    plain["metrics"] = {
        series.name: {"count": len(series.points), "last_batch": series.kept[-1].batch, "last": series.kept[-1].value}
        for series in facts.metrics
        if series.kept
    }
    for launch, fields in zip(facts.launches, plain["launches"], strict=True):
        del fields["batch_times"]
        fields |= {"lost_batches": launch.lost_batches, "lost_seconds": launch.lost_seconds}
    lost = {"lost_batches": facts.lost_batches, "kills": facts.kills, "last_batch": facts.last_batch}
    return {**plain, **lost, "wall_seconds": facts.wall_seconds, "goodput": facts.goodput}


def _plain(name: str, value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, float):
        is_time = (name.endswith("_at") or name == "lost_from") and math.isfinite(value)
        return datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds") if is_time else value
    if isinstance(value, Mapping):
        return {key: _plain(str(key), inner) for key, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(name, inner) for inner in cast("Sequence[Any]", value)]
    return value
