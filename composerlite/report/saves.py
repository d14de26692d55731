"""Combine the checkpoint events in a record with the existing checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import final

from composerlite.checkpoint.tools.surveying import Found
from composerlite.report.record import Line

_MINIMUM_DELAY_SECONDS = 0.1
"""A rank is not reported as slow for a shorter delay."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An existing checkpoint.

    Attributes:
        name: name of the checkpoint.
        uri: path or URI.
        where: ``'local'`` or ``'remote'``.
        state: ``'committed'``, ``'copy'``, ``'unverified'`` or ``'incomplete'``.
        faults: reasons why the checkpoint is not committed.
        kind: ``'monolithic'``, ``'sharded'``, ….
        run_name, epoch, batch, ephemeral, metrics: as recorded in the checkpoint.
        saved_at: time in seconds since 1970.
        size_bytes: size of all files.
        stall_seconds: time that training waited for the save.
    """

    name: str
    uri: str
    where: str
    state: str
    faults: tuple[str, ...]
    kind: str
    size_bytes: int
    run_name: str | None = None
    epoch: int | None = None
    batch: int | None = None
    saved_at: float | None = None
    ephemeral: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    stall_seconds: float | None = None


@final
@dataclass(slots=True, kw_only=True)
class Save:
    """A save. A value is ``None`` if the event did not happen or is unknown.

    Attributes:
        state: ``'begun'``, ``'committed'``, ``'deleted'``, ``'failed'`` or ``'cut off'`` (by a kill).
        slowest_rank: the rank that wrote longest.
        straggler_seconds: delay of the slowest rank, compared with the median of the others.
        is_held_up: the delay was at least half of the time of the save.
    """

    name: str
    where: str = ""
    batch: int | None
    begun_at: float
    committed_at: float | None = None
    uploaded_at: float | None = None
    size_bytes: int | None = None
    stall_seconds: float | None = None
    upload_seconds: float | None = None
    slowest_rank: int | None = None
    straggler_seconds: float = 0.0
    is_held_up: bool = False
    state: str = "begun"
    is_uploaded: bool = False
    error: str | None = None


def stored_at(found: Found) -> Stored:
    """Describe an existing checkpoint."""
    stored = Stored(
        name=found.name,
        uri=found.uri,
        where="remote" if found.place.path_of("") is None else "local",
        state=found.state,
        faults=found.faults,
        kind=found.kind,
        size_bytes=found.size_bytes,
    )
    if (manifest := found.manifest) is None:
        return stored
    epoch, batch = (manifest.timestamp.get(name) for name in ("epoch", "batch"))
    return replace(
        stored,
        run_name=manifest.run_name,
        epoch=None if epoch is None else int(epoch),
        batch=None if batch is None else int(batch),
        saved_at=datetime.fromisoformat(manifest.saved_at).timestamp(),
        ephemeral=manifest.ephemeral,
        metrics=dict(manifest.run.metrics),
        stall_seconds=manifest.timings.get("stall"),
    )


def saves_in(lines: Sequence[Line], stored: Sequence[Stored]) -> list[Save]:
    """Return all saves of a run in the record or among the existing checkpoints, oldest first."""
    saves: list[Save] = []
    for line in lines:
        if line.kind == "checkpoint":
            _apply_event(saves, line)
        elif line.starts_launch:
            for save in saves:
                save.state = "cut off" if save.state == "begun" else save.state
    by_name = {_last_part(save.name): save for save in saves}
    for checkpoint in stored:
        if checkpoint.state != "committed" or checkpoint.saved_at is None:
            continue
        save = by_name.get(_last_part(checkpoint.name))
        if save is None:
            save = Save(name=checkpoint.name, batch=checkpoint.batch, begun_at=checkpoint.saved_at)
            save.stall_seconds = checkpoint.stall_seconds
            by_name[_last_part(checkpoint.name)] = save
            saves.append(save)
        save.state = "committed"  # the checkpoint exists, even if the record is older
        save.size_bytes = checkpoint.size_bytes if save.size_bytes is None else save.size_bytes
        save.is_uploaded |= checkpoint.where == "remote"
    return sorted(saves, key=lambda save: save.begun_at)


def _apply_event(saves: list[Save], line: Line) -> None:
    """Add a checkpoint event to the save of the same name, or to a new save."""
    name, where, what = line.text("name"), line.text("where"), line.text("what")
    is_bucket = "://" in where
    matching = [  # names of folders may differ in a bucket
        save for save in saves if _last_part(save.name) == _last_part(name) and (is_bucket or save.where == where)
    ]
    if what == "begun" or not matching:
        if what in ("deleted", "failed"):
            return  # the record does not have this save
        saves.append(Save(name=name, where=where, batch=line.batch, begun_at=line.at))
        matching = saves
    save, seconds = matching[-1], line.numbers("seconds")
    if what == "committed":
        save.state, save.committed_at = "committed", line.at
        size, rank = line.number("size_bytes"), line.number("slowest_rank")
        save.size_bytes = None if size is None else int(size)
        save.stall_seconds = seconds.get("stall")
        if rank is not None:
            save.slowest_rank, save.straggler_seconds = int(rank), seconds.get("straggler", 0.0)
            own_seconds = seconds.get("total", 0.0) - seconds.get("waiting", 0.0)
            save.is_held_up = save.straggler_seconds >= max(_MINIMUM_DELAY_SECONDS, own_seconds / 2)
    elif what == "uploaded":
        save.is_uploaded, save.uploaded_at, save.upload_seconds = True, line.at, seconds.get("upload")
        save.state = "committed" if save.state in ("begun", "cut off") else save.state
    elif what == "deleted" and not is_bucket:
        save.state = "deleted"
    elif what in ("failed", "upload failed"):
        save.error = line.text("error")
        save.state = "failed" if what == "failed" else save.state


def _last_part(name: str) -> str:
    return name.rpartition("/")[2]
