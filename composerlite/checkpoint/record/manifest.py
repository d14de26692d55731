"""The record of a checkpoint (class :class:`Manifest`), and the attempts of a run that a set of records gives.

The record is in the deciding file of its checkpoint: :mod:`composerlite.checkpoint.record.tail`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, cast, final

import msgspec

from composerlite.checkpoint.format import INDEX, INDEXES, MARKER, MODEL, WEIGHTS_INDEX
from composerlite.errors import IncompatibleCheckpointError
from composerlite.storage import FileDigest
from composerlite.types import Ancestor, Lineage

__all__ = [
    "RESUMABLE",
    "Count",
    "FileRecord",
    "Manifest",
    "NewerManifestError",
    "Position",
    "continued",
    "highest_attempt",
    "in_line",
    "json_object",
    "living_line",
    "may_be_replaced",
    "new_attempt",
    "new_id",
    "new_name",
    "recorded",
    "relative_path",
]

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A whole number that a file may give."""
RESUMABLE = ("monolithic", "sharded", "deepspeed")
"""The kinds of checkpoints that autoresume takes."""
_DECIDERS = {"sharded": INDEX, "weights": WEIGHTS_INDEX, "step": f"{MODEL}/{INDEX}"}
"""The file in a directory that contains the record, by form."""
_NUMBER = re.compile(r"\d+")
T = TypeVar("T")


@final
class NewerManifestError(IncompatibleCheckpointError):
    """A record was written by a newer version.

    Args:
        message: what the user reads.
        fields: what it says, none of it checked.
    """

    def __init__(self, message: str, fields: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__(message)
        also = fields.get("also")
        self.run_name, self.name = fields.get("run_name"), fields.get("name")
        self.names = (self.name, *(also if isinstance(also, dict) else ()))

    def may_be_of(self, run_name: str, path: str) -> bool:
        """Return false if the record of the checkpoint at ``path`` is of another run, or of a copy made by hand."""
        return self.run_name in (None, run_name) and (self.name is None or path in self.names)


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint: its path below the folder of checkpoints, and what it must contain.

    Args:
        path: relative to the folder of checkpoints.
        size_bytes, xxh3_128, chunk_bytes, chunks, tail_bytes, tail_xxh3_128: as in
            :class:`composerlite.storage.FileDigest`.
        node: number of the node whose disk has it, where nodes have disks of their own; ``None``: it is in every folder
            that has the manifest.
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
        """Make the record of the file ``path``, which contains what ``digest`` says.

        Args:
            path: of the file, relative to the folder of checkpoints.
            digest: size and hashes of its content.
            node: number of the node whose disk has it; ``None`` if every folder has it.

        Returns:
            The record.
        """
        return cls(path, **dataclasses.asdict(digest), node=node)

    @property
    def digest(self) -> FileDigest:
        """Digest of what the file must contain."""
        chunks = (self.chunk_bytes, self.chunks) if self.chunks else (0, "")  # a listing does not read them
        return FileDigest(self.size_bytes, self.xxh3_128, *chunks, self.tail_bytes, self.tail_xxh3_128)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The record of a checkpoint: its files, and the moment of the run at which it was saved.

    Attributes:
        name: path of the checkpoint below its folder.
        id: 16 hexadecimal digits, new for each save.
        also: other names under which the same bytes are uploaded, each with its template.
        kind: ``'monolithic'``: everything, in a file; ``'sharded'``: in a directory; ``'weights'``: the model only;
            ``'crash'``: everything, as an exception left it.
        form: ``'file'``; ``'archives'``: a file of each rank; ``'sharded'``, ``'weights'`` (safetensors), ``'step'``:
            a directory.
        template: the file name template it was named by; tells the savers of one folder apart.
        run_name: the run it belongs to.
        timestamp: the fourteen fields of the timestamp; clocks in seconds.
        fit_calls: calls of ``fit`` in the run so far. Counts of one run only grow together with it: ``reset_time``
            sets the timestamp back.
        world_size: number of ranks that saved.
        files: the data, on all disks.
        left_out: globs of what was ignored when saving; ``['<function>']`` where a function chose.
        metrics: metric values at the save, by name.
        unpacked_bytes: size of the file inside, where the data are compressed or in an archive; 0: not known.
        ephemeral: it goes as soon as a newer one is committed.
        timings: what the save cost, in seconds by name: see ``SaveReport``.
        versions: of composerlite, torch and python.
        saved_at: time of the save, ISO 8601 in UTC.
        node: number of the node whose files lie beside this record, where nodes have disks of their own; ``None``: all
            files are in one folder.
        lineage: the attempt of the run that saved it.
        not_finite: names of the losses and gradient norms of its last batch that were no finite numbers, or of a weight
            in it that is not finite: the mark of a checkpoint that nobody resumes from unasked, and that is none of the
            best.
    """

    name: str
    kind: str
    template: str
    run_name: str
    timestamp: Mapping[str, int | float]
    files: tuple[FileRecord, ...]
    fit_calls: Count = 0
    world_size: Count = 1
    left_out: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    unpacked_bytes: Count = 0
    ephemeral: bool = False
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    saved_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    node: Count | None = None
    lineage: Lineage = field(default_factory=Lineage)
    not_finite: tuple[str, ...] = ()
    form: str = "file"
    id: str = field(default_factory=lambda: new_id())
    also: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def is_directory(self) -> bool:
        """True for a directory with files in it."""
        return self.form in _DECIDERS

    @property
    def home(self) -> str:
        """Folder that the files of the checkpoint are in, with a slash; empty: the place itself."""
        if self.is_directory:
            return f"{self.name}/" if self.name else ""
        return "".join(self.name.rpartition("/")[:2])

    @property
    def deciders(self) -> tuple[str, ...]:
        """Files whose existence makes the checkpoint exist, in the order in which they are written."""
        marker = (f"{self.home}{MARKER}",) if self.form == "step" else ()
        return f"{self.home}{_DECIDERS[self.form]}" if self.is_directory else self.name, *marker

    def path_of(self, decider: str) -> str:
        """Return the path at which the checkpoint lies whose deciding file is ``decider``.

        Raises:
            ValueError: a checkpoint of this form has no such deciding file.
        """
        last = _DECIDERS.get(self.form)
        if last is None and decider.rpartition("/")[2] not in INDEXES:
            return decider
        if last is not None and f"/{decider}".endswith(f"/{last}"):
            return decider.removesuffix(last).rstrip("/")
        raise ValueError(f"{decider!r} is no deciding file of a checkpoint of the form {self.form!r}")

    def lying_at(self, path: str) -> Manifest | None:
        """Return the record of the same checkpoint under the name ``path``. ``None``: a copy has no such name."""
        if path == self.name:
            return self
        return dataclasses.replace(self, name=path, template=self.also[path]) if path in self.also else None

    def marked(self, weights: Iterable[str | None]) -> Manifest:
        """Return the record of the same checkpoint, marked if one of its files has a weight that is not finite."""
        found = next((name for name in weights if name is not None), None)
        return self if found is None or self.not_finite else dataclasses.replace(self, not_finite=(found,))

    @property
    def here(self) -> tuple[FileRecord, ...]:
        """The files that are in the folder of this record."""
        return tuple(file for file in self.files if file.node in (None, self.node))

    @property
    def batch(self) -> int:
        """Optimizer steps done when it was saved."""
        return int(self.timestamp["batch"])

    @property
    def moment(self) -> tuple[int, int]:
        """Calls of ``fit`` and optimizer steps done: where its attempt stood."""
        return self.fit_calls, self.batch

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key of the checkpoints of one run, the oldest first: attempt, moment, time of the save."""
        return self.lineage.attempt, *self.moment, self.saved_at

    @property
    def size_bytes(self) -> int:
        """Size of all its files."""
        return sum(file.size_bytes for file in self.files)

    def check(self) -> None:
        """Check that the parts agree, files of a directory lie in it, and names of archives differ in numbers only.

        Archives are deleted with it only if they name it: :func:`composerlite.checkpoint.place.commit.own_files`.

        Raises:
            ValueError: they do not.
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
    """Return the id of a save: 16 hexadecimal digits, never given twice."""
    return secrets.token_hex(8)


# ── attempts of a run ─────────────────────────────────────────────────────────────────────────────────────────────
# A run that is started over leaves the checkpoints of the attempt before it in the same folder. Batch counts do not
# tell the two apart, and clocks may jump, so each attempt has a number: one more than any that was in the folder or the
# bucket when it began.
def in_line(lineage: Lineage, manifest: Manifest) -> bool:
    """Check that ``manifest`` belongs to the attempt of ``lineage``, or to an ancestor before it was left."""
    own = manifest.lineage
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
        run_name: of the run. moment: as ``Manifest.moment`` counts.
        lineage: its attempt.
    """

    run_name: str
    moment: tuple[int, int]
    lineage: Lineage

    def own(self, manifests: Iterable[Manifest], template: str) -> list[Manifest]:
        """Select the checkpoints that the run wrote under names of ``template``, before a resume too, oldest first.

        Those of an attempt that was abandoned are not among them, nor are those ahead of the run: they are left from
        before it was started over, and would count as newer than what it saves now.
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
    """Select the checkpoints of the newest attempt and of its ancestors; the others are abandoned.

    The newest attempt is the one with the highest number of those that can be resumed from. Where two began at the same
    time, neither knowing of the other, it is the one that saved last. A later attempt that has saved weights alone so
    far is not abandoned either.
    """
    manifests = [manifest_of(item) for item in items]
    whole = [manifest for manifest in manifests if manifest.kind in RESUMABLE] or manifests
    if not whole:
        return []
    newest = max(whole, key=lambda m: (m.lineage.attempt, m.saved_at)).lineage
    return [
        item
        for item, manifest in zip(items, manifests, strict=True)
        if in_line(newest, manifest) or manifest.lineage.attempt > newest.attempt
    ]


def highest_attempt(manifests: Iterable[Manifest]) -> int:
    """Return the highest attempt number of ``manifests``, 0 if there are none."""
    return max((manifest.lineage.attempt for manifest in manifests), default=0)


def new_attempt(highest: int, origin: Manifest | None = None, *, passed_over: bool = False) -> Lineage:
    """Begin an attempt.

    Args:
        highest: the highest attempt number that is known.
        origin: the checkpoint of the same run that it starts from; ``None``: it starts from scratch, or elsewhere.
        passed_over: later checkpoints of that attempt could not be used.
    """
    if origin is None:
        return Lineage(highest + 1, uuid.uuid4().hex[:16])
    parent = origin.lineage
    earlier = (dataclasses.replace(one, **_at(min(one.until, origin.moment))) for one in parent.ancestors)
    left = Ancestor(parent.attempt, parent.id, **_at(origin.moment), passed_over=passed_over)
    return Lineage(highest + 1, uuid.uuid4().hex[:16], (*earlier, left), origin.name)


def continued(
    chosen: Manifest, known: Sequence[Manifest], resumable: Iterable[Manifest], *, damaged: bool = False
) -> Lineage:
    """Return the lineage of a run that resumes from ``chosen``.

    It is that of ``chosen`` where nothing newer is left behind; otherwise a new attempt begins, so that
    skipped checkpoints do not come before those that are saved from now on.

    Args:
        chosen: the checkpoint. known: all of the run. resumable: those that were tried, or would have been.
        damaged: there are checkpoints with a manifest that cannot be read, which may be newer.
    """
    newer = damaged or any(in_line(chosen.lineage, one) and one.order[:3] > chosen.order[:3] for one in resumable)
    highest = highest_attempt(known)
    if newer or highest > chosen.lineage.attempt:
        return new_attempt(highest, chosen, passed_over=newer)
    return chosen.lineage


def may_be_replaced(lineage: Lineage, manifest: Manifest) -> bool:
    """Check that ``manifest`` was skipped when an attempt of this line began; that one saves its name again."""
    own = manifest.lineage
    return any(
        (own.attempt, own.id) == (ancestor.attempt, ancestor.id) and ancestor.passed_over
        for ancestor in lineage.ancestors
    )


def _at(moment: tuple[int, int]) -> dict[str, int]:
    return {"fit_calls": moment[0], "batch": moment[1]}


# ── values that come from files ──────────────────────────────────────────────────────────────────────────────────────
_LONGEST_PATH, _LONGEST_PART = 4096, 255
_AROUND_NAMES = len("..tmp-") + 16  # of a temporary name, and of its number


def relative_path(value: object) -> str:
    """``value`` if it is the path of a file inside a folder, its parts apart by slashes.

    Raises:
        ValueError: it is something else, leads out of the folder, to the records of other checkpoints, or no file
            system can have it; the message says which rule it breaks.
    """
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is no path")
    parts = [part for part in value.split("/") if part not in ("", ".")]  # which change nothing
    try:
        encoded = [os.fsencode(part) for part in parts]
    except UnicodeEncodeError as e:
        raise ValueError(f"{_short(value)} is no path: it has characters that no file name can have") from e
    if not parts or ".." in parts or value.startswith("/") or not value.endswith(parts[-1]):
        rule = "expected the path of a file inside the folder, relative to it, without '..'"
    elif any(ord(character) < 32 or ord(character) == 127 for character in value):
        rule = "it has control characters"
    elif value.startswith("\\") or ".." in value.replace("\\", "/").split("/"):
        rule = "it leads out of the folder where backslashes separate folders"
    elif sum(map(len, encoded)) + len(parts) > _LONGEST_PATH or max(map(len, encoded)) > _LONGEST_PART:
        rule = f"file systems take {_LONGEST_PART} bytes in a part and {_LONGEST_PATH} in all"
    else:
        return value
    raise ValueError(f"path {_short(value)}: {rule}")


def new_name(value: object, *, on_disk: bool = True) -> str:
    """``value`` if a checkpoint, or a file in one, can be saved under this name, and found again by its record.

    Args:
        value: the name, below its place.
        on_disk: whether temporary names, which are longer, are made of it.

    Raises:
        ValueError: as :func:`relative_path`, or it is too long for that.
    """
    name = relative_path(value)
    length = len(os.fsencode(name.rpartition("/")[2]))
    if on_disk and length > _LONGEST_PART - _AROUND_NAMES:
        raise ValueError(
            f"the name has {length} bytes, of at most {_LONGEST_PART - _AROUND_NAMES}: file "
            f"systems take {_LONGEST_PART}, of which temporary names need {_AROUND_NAMES}"
        )
    return name


def json_object(data: bytes | str) -> dict[str, Any]:
    """The object that ``data`` holds as JSON.

    Raises:
        ValueError: it is no JSON, something else than an object, or nested too deeply.
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
    """The dataclass ``kind`` of JSON ``fields``, each of which is checked against its annotation.

    Raises:
        ValueError: a field is missing or of another type; the message names it.
    """
    with _converting:
        return msgspec.convert(fields, kind)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of too many digits, or what is nested too deeply
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"
