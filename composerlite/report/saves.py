"""The saves of a run: what the event log says of each, joined with the records of the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import final

from composerlite.checkpoint.tools.surveying import Found
from composerlite.report.record import Line

_HELD_UP_SECONDS = 0.1
"""Below that a rank is not said to be slow."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint that is there, in one place.

    Attributes:
        name: of it. uri: where it is. where: ``'local'`` or ``'remote'``.
        state: ``'committed'`` or ``'incomplete'``. faults: what is wrong with it.
        kind, run_name, epoch, batch, saved_at, ephemeral, metrics, seconds: as its record says.
    """

    name: str
    uri: str
    where: str
    state: str
    faults: tuple[str, ...]
    kind: str
    run_name: str | None
    epoch: int | None
    batch: int | None
    saved_at: float | None
    size_bytes: int
    ephemeral: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])


@final
@dataclass(slots=True, kw_only=True)
class Save:
    """A save to the folder ``where``, as far as it came. What is ``None`` did not happen, or is not known.

    Attributes:
        slowest_rank: the rank that wrote longest. straggler_seconds: so much longer than the median of the others.
        is_held_up: it took half of the time of the save, or more, to wait for that rank.
    """

    name: str
    where: str = ""
    batch: int | None
    begun_at: float
    committed_at: float | None = None
    uploaded_at: float | None = None
    deleted_at: float | None = None
    size_bytes: int | None = None
    stall_seconds: float | None = None
    upload_seconds: float | None = None
    slowest_rank: int | None = None
    straggler_seconds: float = 0.0
    is_held_up: bool = False
    state: str = "begun"  # or committed, deleted, failed, cut off
    is_uploaded: bool = False
    error: str | None = None


def stored_at(found: Found) -> Stored:
    """Return the facts about a checkpoint in its record."""
    manifest = found.manifest
    counts: Mapping[str, int | float] = {} if manifest is None else manifest.timestamp
    epoch, batch = counts.get("epoch"), counts.get("batch")
    return Stored(
        name=found.name,
        uri=found.uri,
        where="remote" if found.place.path_of("") is None else "local",
        state=found.state,
        faults=found.faults,
        kind=found.kind,
        run_name=found.run_name,
        epoch=None if epoch is None else int(epoch),
        batch=None if batch is None else int(batch),
        saved_at=None if manifest is None else _seconds(manifest.saved_at),
        size_bytes=found.size_bytes,
        ephemeral=manifest is not None and manifest.ephemeral,
        metrics={} if manifest is None else dict(manifest.run.metrics),
        seconds={} if manifest is None else dict(manifest.timings),
    )


def saves_in(lines: Sequence[Line], stored: Sequence[Stored]) -> list[Save]:
    """List the saves that the event log or a checkpoint's record has, oldest first."""
    saves: list[Save] = []
    for line in lines:
        if line.kind == "checkpoint":
            _take(saves, line)
        elif line.kind in ("start", "resume"):  # the process is another one
            for save in saves:
                save.state = "cut off" if save.state == "begun" else save.state
    by_name = {save.name.rpartition("/")[2]: save for save in saves}
    for one in stored:
        if one.state == "committed" and one.saved_at is not None:
            _take_stored(saves, by_name, one)
    return sorted(saves, key=lambda save: save.begun_at)


def _take(saves: list[Save], line: Line) -> None:
    name, where, what = line.text("name"), line.text("where"), line.text("what")
    if what == "begun":
        saves.append(Save(name=name, where=where, batch=line.batch, begun_at=line.at))
        return
    save = _known(saves, name, where)
    if save is None:
        if what in ("deleted", "failed"):
            return  # of a save that the record does not know
        save = Save(name=name, where=where, batch=line.batch, begun_at=line.at)
        saves.append(save)
    if what == "committed":
        save.state, save.committed_at = "committed", line.at
        size = line.number("size_bytes")
        save.size_bytes = None if size is None else int(size)
        save.stall_seconds = line.seconds("stall")
        rank = line.number("slowest_rank")
        if rank is not None:
            save.slowest_rank, save.straggler_seconds = int(rank), line.seconds("straggler") or 0.0
            own_seconds = (line.seconds("total") or 0.0) - (line.seconds("waiting") or 0.0)
            save.is_held_up = save.straggler_seconds >= max(_HELD_UP_SECONDS, own_seconds / 2)
    elif what == "uploaded":
        save.is_uploaded, save.uploaded_at, save.upload_seconds = True, line.at, line.seconds("upload")
        save.state = "committed" if save.state in ("begun", "cut off") else save.state
    elif what == "deleted" and "://" not in where:
        save.state, save.deleted_at = "deleted", line.at
    elif what in ("failed", "upload failed"):
        save.error = line.text("error")
        save.state = "failed" if what == "failed" else save.state


def _known(saves: Sequence[Save], name: str, where: str) -> Save | None:
    """The last save of that name in that folder; for a bucket the last in any, whose folders may be others there."""
    last, is_bucket = name.rpartition("/")[2], "://" in where
    same = (one for one in reversed(saves) if one.name.rpartition("/")[2] == last)
    return next((one for one in same if is_bucket or one.where == where), None)


def _take_stored(saves: list[Save], by_name: dict[str, Save], one: Stored) -> None:
    """A checkpoint that is there was committed, whatever the record says."""
    assert one.saved_at is not None
    key = one.name.rpartition("/")[2]
    save = by_name.get(key)
    if save is None:
        save = by_name[key] = Save(name=one.name, batch=one.batch, begun_at=one.saved_at)
        save.stall_seconds = one.seconds.get("stall")
        saves.append(save)
    save.state = "committed"
    save.size_bytes = one.size_bytes if save.size_bytes is None else save.size_bytes
    save.is_uploaded |= one.where == "remote"


def _seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
