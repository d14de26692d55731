"""The record of a checkpoint (class :class:`Manifest`), and the attempts of a run in a set of records.

The record is in the deciding file of its checkpoint (:mod:`composerlite.checkpoint.record.tail`). The checkpoint exists
if this file exists.

An attempt is one course of a run, from a start until the run is started over. A run that resumes from its newest
checkpoint continues the attempt. Otherwise a new attempt begins, and the attempts before are the ancestors.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, cast, final

import msgspec

from composerlite.checkpoint.format import INDEX, INDEXES, MARKER, MODEL, WEIGHTS_INDEX
from composerlite.errors import IncompatibleCheckpointError
from composerlite.storage import FileDigest
from composerlite.types import Ancestor, Lineage

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A whole number in a record, from 0 to 2**63 - 1."""
RESUMABLE = ("monolithic", "sharded", "deepspeed")
"""Kinds of checkpoints from which a run can resume."""
_DECIDERS = {"sharded": INDEX, "weights": WEIGHTS_INDEX, "step": f"{MODEL}/{INDEX}"}
"""Name of the deciding file of a directory, by form."""
_NUMBER = re.compile(r"\d+")
T = TypeVar("T")


@final
class NewerManifestError(IncompatibleCheckpointError):
    """A record was written by a newer version of composerlite."""


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """Path of a file of a checkpoint, and the size and hashes of its content.

    Args:
        path: relative to the folder of checkpoints.
        size_bytes, xxh3_128, chunk_bytes, chunks, tail_bytes, tail_xxh3_128: as in
            :class:`composerlite.storage.FileDigest`.
        node: number of the node with the file on its own disk; ``None``: the file is in every folder with the record.
    """

    path: str
    size_bytes: Count
    xxh3_128: str
    chunk_bytes: Count = 0
    chunks: str = ""
    node: Count | None = None
    tail_bytes: Count = 0
    tail_xxh3_128: str = ""

    @classmethod
    def of(cls, path: str, digest: FileDigest, node: int | None = None) -> FileRecord:
        """Make the record of a file.

        Args:
            path: path of the file, relative to the folder of checkpoints.
            digest: size and hashes of the content.
            node: as in the class.

        Returns:
            The record.
        """
        return cls(path, **dataclasses.asdict(digest), node=node)

    @property
    def digest(self) -> FileDigest:
        """Size and hashes of the content."""
        chunks = (self.chunk_bytes, self.chunks) if self.chunks else (0, "")  # a listing does not read chunks
        return FileDigest(self.size_bytes, self.xxh3_128, *chunks, self.tail_bytes, self.tail_xxh3_128)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A training run at the moment of a save.

    Attributes:
        name: name of the run; empty for a checkpoint without a run.
        timestamp: the fourteen fields of the timestamp; clocks in seconds.
        fit_calls: number of calls of ``fit`` so far. Only with this number are batch counts of a run in order:
            ``reset_time`` sets the timestamp back.
        world_size: number of ranks.
        lineage: the attempt of the run.
        metrics: metric values, by name.
        not_finite: names of losses and gradient norms of the last batch, or of a weight, with NaN or infinity. A
            resume skips a checkpoint with such names, and such a checkpoint is never among the best.
    """

    name: str
    timestamp: Mapping[str, int | float]
    fit_calls: Count = 0
    world_size: Count = 1
    lineage: Lineage = field(default_factory=Lineage)
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    not_finite: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The record of a checkpoint: the files, and the run at the moment of the save.

    Attributes:
        name: path of the checkpoint below the folder of checkpoints.
        id: 16 hexadecimal digits, new for each save.
        also: further names of the same bytes in a bucket, and the template of each name.
        kind: ``'monolithic'``: all parts of the state, in a file; ``'sharded'``: in a directory; ``'deepspeed'``: in
            archives; ``'weights'``: the model only; ``'crash'``: all parts, saved after an exception; ``'step'``: saved
            by ``Checkpointer``.
        form: ``'file'``; ``'archives'``: a file of each rank; ``'sharded'``, ``'weights'`` (safetensors), ``'step'``:
            a directory.
        template: template of the file name. Savers of one folder have different templates.
        run: the run at the moment of the save.
        files: the data files, on all disks; the deciding file first.
        left_out: globs of parts of the state that were not saved; ``['<function>']`` for a choice by a function.
        unpacked_bytes: size of the decompressed file or of the file in the archive; 0: unknown.
        ephemeral: retention deletes the checkpoint after the next commit.
        timings: seconds of the phases of the save, by name: see ``SaveReport``.
        saved_at: time of the save, ISO 8601 in UTC.
        node: number of the node with the files beside this record, if nodes have disks of their own; ``None``: all
            files are in the same folder.
    """

    name: str
    kind: str
    template: str
    run: SavedRun
    files: tuple[FileRecord, ...]
    left_out: tuple[str, ...] = ()
    unpacked_bytes: Count = 0
    ephemeral: bool = False
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    saved_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    node: Count | None = None
    form: str = "file"
    id: str = field(default_factory=lambda: new_id())
    also: Mapping[str, str] = field(default_factory=dict[str, str])

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def run_name(self) -> str:
        """Name of the run."""
        return self.run.name

    @property
    def timestamp(self) -> Mapping[str, int | float]:
        """Fields of the timestamp at the save."""
        return self.run.timestamp

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metric values at the save, by name."""
        return self.run.metrics

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Names of values with NaN or infinity at the save, as in :class:`SavedRun`."""
        return self.run.not_finite

    @property
    def batch(self) -> int:
        """Number of optimizer steps before the save."""
        return int(self.timestamp["batch"])

    @property
    def moment(self) -> tuple[int, int]:
        """Calls of ``fit`` and optimizer steps before the save: the progress of the attempt."""
        return self.run.fit_calls, self.batch

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key of checkpoints of one run, oldest first: attempt, the two numbers of the moment, ``saved_at``."""
        return self.run.lineage.attempt, *self.moment, self.saved_at

    def marked(self, weights: Iterable[str | None]) -> Manifest:
        """Return the record with the first name in ``weights`` as ``not_finite``, unless ``not_finite`` has names.

        ``weights`` has an item for each rank: the name of a weight with NaN or infinity, or ``None``.
        """
        found = next((name for name in weights if name is not None), None)
        if found is None or self.not_finite:
            return self
        return dataclasses.replace(self, run=dataclasses.replace(self.run, not_finite=(found,)))

    # ── the files ────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def is_directory(self) -> bool:
        """True if the checkpoint is a directory."""
        return self.form in _DECIDERS

    @property
    def home(self) -> str:
        """Folder with the files of the checkpoint, with a slash at the end; empty: the place itself."""
        if self.is_directory:
            return f"{self.name}/" if self.name else ""
        return "".join(self.name.rpartition("/")[:2])

    @property
    def deciders(self) -> tuple[str, ...]:
        """Deciding files, in the order of the writes: the checkpoint exists if all exist."""
        marker = (f"{self.home}{MARKER}",) if self.form == "step" else ()
        return f"{self.home}{_DECIDERS[self.form]}" if self.is_directory else self.name, *marker

    @property
    def here(self) -> tuple[FileRecord, ...]:
        """The files in the folder of this record. If nodes have disks of their own, other disks have the others."""
        return tuple(file for file in self.files if file.node in (None, self.node))

    @property
    def size_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size_bytes for file in self.files)

    def path_of(self, decider: str) -> str:
        """Return the path of the checkpoint with the deciding file ``decider``.

        Raises:
            ValueError: a checkpoint of this form has no deciding file of that name.
        """
        last = _DECIDERS.get(self.form)
        if last is None and decider.rpartition("/")[2] not in INDEXES:
            return decider
        if last is not None and f"/{decider}".endswith(f"/{last}"):
            return decider.removesuffix(last).rstrip("/")
        raise ValueError(f"{decider!r} is no deciding file of a checkpoint of the form {self.form!r}")

    def lying_at(self, path: str) -> Manifest | None:
        """Return the record with the name ``path``, if ``path`` is ``name`` or in ``also``.

        ``None``: the checkpoint at ``path`` is a copy made by hand.
        """
        if path == self.name:
            return self
        return dataclasses.replace(self, name=path, template=self.also[path]) if path in self.also else None

    def check(self) -> None:
        """Check the fields of a record from a file.

        The timestamp needs a batch count. All files of a directory must be in the directory. The names of archives must
        differ in numbers only.

        Archives are deleted only if their own records agree: :func:`composerlite.checkpoint.place.commit.own_files`.

        Raises:
            ValueError: a rule is broken.
        """
        if type(self.timestamp.get("batch")) is not int or self.batch < 0:
            raise ValueError(f"its timestamp has no whole number of batches: {self.timestamp.get('batch')!r}")
        if strange := [name for name, value in self.timestamp.items() if not -(2**63) < value < 2**63]:
            raise ValueError(f"its timestamp has no number of the usual size for {strange[0]!r}")
        paths = [file.path for file in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("it names a file twice")
        if self.form == "file" and len(paths) > 1:
            raise ValueError(f"it is one file, and names {paths[1]!r}, too")
        if self.form == "archives":
            strange = [path for path in paths[1:] if _NUMBER.sub("0", path) != _NUMBER.sub("0", self.name)]
        else:
            strange = [path for path in paths if self.is_directory and not path.startswith(self.home)]
        if strange:
            raise ValueError(f"{strange[0]!r} is no file of checkpoint {self.name!r}")


def new_id() -> str:
    """Return a new id of a save: 16 hexadecimal digits."""
    return secrets.token_hex(8)


# ── attempts of a run ─────────────────────────────────────────────────────────────────────────────────────────────
# A run that is started over leaves the checkpoints of the attempt before in the same folder. Batch counts do not tell
# the attempts apart, and clocks may jump. So each attempt has a number: the highest number in the folder or the bucket,
# plus one.
def in_line(lineage: Lineage, manifest: Manifest) -> bool:
    """Return true if the attempt of ``lineage``, or an ancestor, saved the checkpoint.

    Of an ancestor, only checkpoints up to the checkpoint from which the next attempt started count.
    """
    own = manifest.run.lineage
    if (own.attempt, own.id) == (lineage.attempt, lineage.id):
        return True
    return any(
        (own.attempt, own.id) == (ancestor.attempt, ancestor.id) and manifest.moment <= ancestor.until
        for ancestor in lineage.ancestors
    )


@final
class Position(NamedTuple):
    """Position of a run in training.

    Attributes:
        run_name: name of the run.
        moment: as in :attr:`Manifest.moment`.
        lineage: the attempt.
    """

    run_name: str
    moment: tuple[int, int]
    lineage: Lineage

    def own(self, manifests: Iterable[Manifest], template: str) -> list[Manifest]:
        """Select the checkpoints of this run with names of ``template``, also from before a resume, oldest first.

        Checkpoints of abandoned attempts are left out. So are checkpoints ahead of the run: a run that was started over
        must not take old checkpoints for newer checkpoints.
        """
        own = [
            manifest
            for manifest in manifests
            if manifest.run_name == self.run_name
            and manifest.template == template
            and in_line(self.lineage, manifest)
            and manifest.moment <= self.moment
        ]
        return sorted(own, key=lambda manifest: manifest.order)


def living_line(items: Sequence[T], manifest_of: Callable[[T], Manifest]) -> list[T]:
    """Select the checkpoints of the newest attempt and its ancestors. All others are abandoned.

    The newest attempt has the highest number among checkpoints of a kind in ``RESUMABLE``. Of two attempts with the
    same number, begun at the same time, the attempt with the last save is the newest. Checkpoints of later attempts,
    which have other kinds only, are selected, too.
    """
    manifests = [manifest_of(item) for item in items]
    whole = [manifest for manifest in manifests if manifest.kind in RESUMABLE] or manifests
    if not whole:
        return []
    newest = max(whole, key=lambda m: (m.run.lineage.attempt, m.saved_at)).run.lineage
    return [
        item
        for item, manifest in zip(items, manifests, strict=True)
        if in_line(newest, manifest) or manifest.run.lineage.attempt > newest.attempt
    ]


def highest_attempt(manifests: Iterable[Manifest]) -> int:
    """Return the highest attempt number of ``manifests``; 0 if there are no records."""
    return max((manifest.run.lineage.attempt for manifest in manifests), default=0)


def new_attempt(highest: int, origin: Manifest | None = None, *, passed_over: bool = False) -> Lineage:
    """Return the lineage of a new attempt.

    Args:
        highest: the highest known attempt number.
        origin: the checkpoint of the same run to start from; ``None``: the run starts from scratch, or elsewhere.
        passed_over: later checkpoints of the attempt of ``origin`` could not be used.
    """
    if origin is None:
        return Lineage(highest + 1, new_id())
    parent = origin.run.lineage
    earlier = (dataclasses.replace(one, until=min(one.until, origin.moment)) for one in parent.ancestors)
    left = Ancestor(parent.attempt, parent.id, origin.moment, passed_over)
    return Lineage(highest + 1, new_id(), (*earlier, left), origin.name)


def continued(
    chosen: Manifest, known: Sequence[Manifest], resumable: Iterable[Manifest], *, is_incomplete: bool = False
) -> Lineage:
    """Return the lineage of a run that resumes from ``chosen``.

    The run continues the attempt of ``chosen`` if no newer checkpoint is skipped. Otherwise a new attempt begins, so
    that skipped checkpoints do not count as newer than the next saves.

    Args:
        chosen: the checkpoint.
        known: all checkpoints of the run.
        resumable: the checkpoints of the run from which a run can resume, ``chosen`` included.
        is_incomplete: ``known`` lacks checkpoints whose records cannot be read, and which may be newer.
    """
    own = chosen.run.lineage
    newer = is_incomplete or any(in_line(own, one) and one.order[:3] > chosen.order[:3] for one in resumable)
    highest = highest_attempt(known)
    return new_attempt(highest, chosen, passed_over=newer) if newer or highest > own.attempt else own


def may_be_replaced(lineage: Lineage, manifest: Manifest) -> bool:
    """Return true if an ancestor of ``lineage`` saved ``manifest``, and its last checkpoints were skipped at a resume.

    The run saves under the names of skipped checkpoints again.
    """
    own = manifest.run.lineage
    return any(
        (own.attempt, own.id) == (ancestor.attempt, ancestor.id) and ancestor.passed_over
        for ancestor in lineage.ancestors
    )


# ── values from files ─────────────────────────────────────────────────────────────────────────────────────────────────
_LONGEST_PATH, _LONGEST_PART = 4096, 255
_TEMPORARY_BYTES = len("..tmp-") + 16
"""Bytes that a temporary name has more than the final name."""


def relative_path(value: str) -> str:
    """Return ``value`` if it is the path of a file inside a folder, with slashes between the parts.

    Raises:
        ValueError: the value is no such path, or no file system takes it. The message states the rule.
    """
    parts = [part for part in value.split("/") if part not in ("", ".")]
    shown = repr(value if len(value) <= 80 else f"{value[:80]}…")
    try:
        lengths = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError as e:
        raise ValueError(f"{shown} is no path: it has characters that no file name can have") from e
    is_inside = ".." not in value.replace("\\", "/").split("/") and not value.startswith(("/", "\\"))
    if not parts or not is_inside or not value.endswith(parts[-1]):
        rule = "expected the path of a file inside the folder, relative to it, without '..'"
    elif any(ord(character) < 32 or ord(character) == 127 for character in value):
        rule = "it has control characters"
    elif sum(lengths) + len(parts) > _LONGEST_PATH or max(lengths) > _LONGEST_PART:
        rule = f"file systems take {_LONGEST_PART} bytes in a part and {_LONGEST_PATH} in all"
    else:
        return value
    raise ValueError(f"path {shown}: {rule}")


def new_name(value: str, *, on_disk: bool = True) -> str:
    """Return ``value`` if a new checkpoint, or a new file in a checkpoint, can have this name.

    Args:
        value: the name, below its place.
        on_disk: the place is a folder, with temporary names, which are longer.

    Raises:
        ValueError: as :func:`relative_path`, or the name is too long for a temporary name.
    """
    name = relative_path(value)
    length, most = len(os.fsencode(name.rpartition("/")[2])), _LONGEST_PART - _TEMPORARY_BYTES
    if on_disk and length > most:
        raise ValueError(
            f"the name has {length} bytes, of at most {most}: file systems take {_LONGEST_PART}, of which temporary "
            f"names need {_TEMPORARY_BYTES}"
        )
    return name


def json_object(data: bytes | str) -> dict[str, Any]:
    """Return the JSON object in ``data``.

    Raises:
        ValueError: the data are no JSON, no object, or nested too deeply.
    """
    try:
        found: object = json.loads(data)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    if not isinstance(found, dict):
        raise ValueError(f"it holds {type(found).__name__} and no object")
    return cast("dict[str, Any]", found)


_converting = threading.Lock()
"""msgspec 0.22 may crash the process if several threads convert to one dataclass for the first time."""


def recorded(kind: type[T], fields: object) -> T:
    """Return the dataclass ``kind`` with the JSON ``fields``, each checked against its annotation.

    Raises:
        ValueError: a field is missing or has another type; the message names the field.
    """
    with _converting:
        return msgspec.convert(fields, kind)


def manifest_from(fields: object, decider: FileRecord) -> Manifest:
    """Return the record with the JSON ``fields``, with ``decider`` as the first file.

    The paths of the other files are made relative to the place of ``decider``: a copied directory names its own files.
    ``Manifest.name`` is the name at the save, also for a copy.

    Raises:
        ValueError: a field is missing or has another type, or :meth:`Manifest.check` finds a fault.
    """
    saved = recorded(Manifest, fields)
    for path in (saved.name, *saved.also, *(file.path for file in saved.files)):
        relative_path(path)
    moved = dataclasses.replace(saved, name=saved.path_of(decider.path))
    home = moved.home
    if saved.form == "archives":
        dataclasses.replace(saved, files=(decider, *saved.files)).check()
        if f"/{decider.path}".endswith(f"/{saved.name}"):
            home = decider.path.removesuffix(saved.name)
    others = tuple(dataclasses.replace(file, path=home + file.path) for file in saved.files)
    manifest = dataclasses.replace(moved, files=(decider, *others))
    if saved.form != "archives":
        manifest.check()
    return dataclasses.replace(manifest, name=saved.name)
