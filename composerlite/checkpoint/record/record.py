r"""The record of a checkpoint (class :class:`Manifest`), and how a file keeps the record in its tail.

A checkpoint exists if the deciding files exist. A step (kind ``'step'``) has two deciding files, any other checkpoint
has one. One deciding file has the record in the tail.

A tail is a line of ASCII JSON and a footer with the length and the digest of the line::

    \n{"composerlite": 1, "record": {...}, ...}\nCLREC1 <length: 8 hex digits> <xxh3_128: 32 hex digits>\n

============================== ========================================================================================
deciding file                  place of the tail
============================== ========================================================================================
``.pt``                        the comment of the zip archive, at its end
``.tar``                       after the end-of-archive blocks
``.pt.gz``, ``.tar.gz``, …     the last frame, which decompresses to the tail of the file inside
``.metadata`` of a directory   after the index and the digests of the chunks of the data files
``model.safetensors.index…``   in the JSON, under ``metadata``
============================== ========================================================================================

Other programs that read these formats ignore the tail. A file and its record are one object: renamed, copied and
deleted together.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, TypeAlias, TypeVar, cast, final

import msgspec
import xxhash

from composerlite.checkpoint.format import INDEX, INDEXES, MODEL, TAIL_START, WEIGHTS_INDEX
from composerlite.checkpoint.format.compression import last_frame
from composerlite.checkpoint.record.naming import relative_path
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError, SaveError
from composerlite.storage import FileDigest, chunk_bytes_for
from composerlite.types import Lineage, StateDict

log = logging.getLogger(__name__)
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A whole number in a record, from 0 to 2**63 - 1."""
RESUMABLE = ("monolithic", "sharded", "deepspeed")
"""Kinds of checkpoints from which a run can resume."""
_DECIDERS = {"sharded": INDEX, "weights": WEIGHTS_INDEX, "step": f"{MODEL}/{INDEX}"}
"""Name of the deciding file of a directory, by form."""
_NUMBER = re.compile(r"\d+")
T = TypeVar("T")
VERSION = 1
"""Version of the record's layout. A reader refuses any other version."""
_MOST_COMMENT_BYTES = 0xFFFF - 256
_FOOTER = re.compile(rb"\nCLREC1 ([0-9a-f]{8}) ([0-9a-f]{32})\n\Z")
_FOOTER_BYTES = 50
_VARIABLE_BYTES = 1024
"""Bytes that :func:`tail_room` adds for values known only later: timings, and a name in ``not_finite``."""
_MARK_CHARACTERS = 80
"""Characters kept of a name in ``not_finite`` if the record is too long. A character has up to 12 bytes in JSON."""
_CHUNK_DIGEST_BYTES = 8


@final
class NewerManifestError(IncompatibleCheckpointError):
    """A record was written by a newer version of composerlite."""


new_id = functools.partial(secrets.token_hex, 8)
"""Returns a new id of a save: 16 hexadecimal digits."""


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """Path of a file of a checkpoint, and the size and hashes of its content.

    Args:
        path: relative to the folder of checkpoints.
        size_bytes, xxh3_128, chunk_bytes, chunks, tail_bytes, tail_xxh3_128: as in
            :class:`composerlite.storage.FileDigest`.
        node: number of the node whose own disk has the file; ``None``: every folder with the record has the file.
    """

    path: str
    size_bytes: Count
    xxh3_128: str
    chunk_bytes: Count = 0
    chunks: str = ""
    node: Count | None = None
    tail_bytes: Count = 0
    tail_xxh3_128: str = ""

    @property
    def digest(self) -> FileDigest:
        """Size and hashes of the content."""
        chunks = (self.chunk_bytes, self.chunks) if self.chunks else (0, "")  # a listing reads no digests of chunks
        return FileDigest(self.size_bytes, self.xxh3_128, *chunks, self.tail_bytes, self.tail_xxh3_128)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A training run at the moment of a save.

    Attributes:
        name: name of the run; empty for a checkpoint without a run.
        timestamp: the fourteen fields of the timestamp; clocks in seconds.
        fit_calls: number of calls of ``fit`` so far. ``reset_time`` sets the timestamp back, so batch counts order the
            saves of a run only together with this number.
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

    @property
    def moment(self) -> tuple[int, int]:
        """Calls of ``fit`` and optimizer steps before the save: the progress of the attempt."""
        return self.fit_calls, int(self.timestamp["batch"])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The record of a checkpoint: the files, and the run at the moment of the save.

    Attributes:
        name: path of the checkpoint below the folder of checkpoints.
        id: 16 hexadecimal digits, new for each save.
        also: further names of the same bytes in a bucket, mapped to the template of each name. In a record from a
            file, the first key is the name at the save: :attr:`saved_as`.
        kind: ``'monolithic'``: all parts of the state, in a file; ``'sharded'``: in a directory; ``'deepspeed'``: in
            archives; ``'weights'``: the model only; ``'crash'``: all parts, saved after an exception; ``'step'``: saved
            by ``Checkpointer``.
        form: ``'file'``; ``'archives'``: a file of each rank; ``'sharded'``, ``'weights'`` (safetensors), ``'step'``:
            a directory.
        template: template of the file name. Savers of one folder have different templates.
        run: the run at the moment of the save.
        files: all files, on all disks; the deciding file first. A record to write excludes the deciding file.
        left_out: globs of parts of the state that were not saved; ``['<function>']`` for a choice by a function.
        unpacked_bytes: size of the decompressed file, of the file in the archive, or of the largest archive of a rank
            before compression; 0: unknown.
        ephemeral: retention deletes the checkpoint after the next commit.
        timings: seconds of the phases of the save, by name: see ``SaveReport``.
        saved_at: time of the save, ISO 8601 in UTC.
        node: number of the node whose disk has this record, if nodes have disks of their own; ``None``: all files are
            in the same folder.
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
    id: str = field(default_factory=new_id)
    also: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)

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
    def batch(self) -> int:
        """Number of optimizer steps before the save."""
        return self.run.moment[1]

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key of checkpoints of one run, oldest first: attempt, the two numbers of the moment, ``saved_at``."""
        return self.run.lineage.attempt, *self.run.moment, self.saved_at

    # ── the files ────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def saved_as(self) -> str:
        """Name at the save; empty if not from a file. Differs from ``name`` after a move or copy by hand."""
        return next(iter(self.also), "")

    @property
    def is_directory(self) -> bool:
        """True if the checkpoint is a directory."""
        return self.form in _DECIDERS

    @property
    def home(self) -> str:
        """Folder with the files, with a slash at the end; empty: the folder of checkpoints itself."""
        if self.is_directory:
            return f"{self.name}/" if self.name else ""
        return "".join(self.name.rpartition("/")[:2])

    @property
    def here(self) -> tuple[FileRecord, ...]:
        """The files in the folder of this record. Disks of other nodes may have other files."""
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
        raise ValueError(f"{decider!r} is not the deciding file of a checkpoint of the form {self.form!r}")

    def check(self) -> None:
        """Check the fields of a record from a file.

        The timestamp needs a batch count. The names of archives must differ in numbers only.

        Archives are deleted only if their own records agree: :func:`composerlite.checkpoint.place.commit.own_files`.

        Raises:
            ValueError: a rule is broken.
        """
        if type(self.timestamp.get("batch")) is not int or self.batch < 0:
            raise ValueError(f"its timestamp has an invalid number of batches: {self.timestamp.get('batch')!r}")
        if strange := [name for name, value in self.timestamp.items() if not -(2**63) < value < 2**63]:
            raise ValueError(f"its timestamp has an invalid number for {strange[0]!r}")
        paths = [file.path for file in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("it names a file twice")
        if self.form == "file" and len(paths) > 1:
            raise ValueError(f"it is one file, and names {paths[1]!r}, too")
        others = paths[1:] if self.form == "archives" else []
        if strange := [path for path in others if _NUMBER.sub("0", path) != _NUMBER.sub("0", self.name)]:
            raise ValueError(f"{strange[0]!r} is not a file of checkpoint {self.name!r}")


# ── fields from files ─────────────────────────────────────────────────────────────────────────────────────────────────
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
        raise ValueError(f"it holds {type(found).__name__} and not an object")
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

    The name and the paths of the other files are derived from the path of ``decider``, so the record in a copied
    directory names the files of the copy.

    Raises:
        ValueError: a field is missing or has another type, or :meth:`Manifest.check` finds a fault.
    """
    saved = recorded(Manifest, fields)
    for path in (saved.name, *saved.also, *(file.path for file in saved.files)):
        relative_path(path)
    name = saved.path_of(decider.path)
    names = {saved.name: saved.template, **saved.also}
    moved = dataclasses.replace(saved, name=name, template=names.get(name, saved.template), also=names)
    home = moved.home
    if saved.form == "archives":
        dataclasses.replace(saved, files=(decider, *saved.files)).check()
        if f"/{decider.path}".endswith(f"/{saved.name}"):
            home = decider.path.removesuffix(saved.name)
    others = tuple(dataclasses.replace(file, path=home + file.path) for file in saved.files)
    manifest = dataclasses.replace(moved, files=(decider, *others))
    if saved.form != "archives":
        manifest.check()
    return manifest


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(FileRecord)}


# ── writing a tail ────────────────────────────────────────────────────────────────────────────────────────────────────
def tail_room(manifest: Manifest, body_bytes: int) -> int:
    """Return the size of the tail to reserve, in bytes, before the body (the bytes before the tail) is written.

    A zip archive states the size of its comment before the comment, so the size must not depend on the digests.

    Args:
        manifest: the record.
        body_bytes: size of the body before compression, in bytes.

    Raises:
        SaveError: the record is too long for the comment of a zip archive.
    """
    most_chunks = body_bytes // chunk_bytes_for(body_bytes) + 16  # compression may make the body a little larger
    chunks = "x" * (-(-_CHUNK_DIGEST_BYTES * most_chunks // 3) * 4)
    longest = FileDigest(2**63 - 1, "0" * 32, 2**40, chunks)  # each number with the most digits
    least = len(_tail(_fields(_shortened(manifest), longest, longest)))
    if least > _MOST_COMMENT_BYTES:
        raise SaveError(
            f"checkpoint {manifest.name!r}: its record has {least} bytes, of at most {_MOST_COMMENT_BYTES}. Shorten "
            "save_ignore_keys."
        )
    return min(len(_tail(_fields(manifest, longest, longest))) + _VARIABLE_BYTES, _MOST_COMMENT_BYTES)


def seal(manifest: Manifest, stored: FileDigest, plain: FileDigest | None = None, *, room: int | None = None) -> bytes:
    """Return the tail of a file.

    Args:
        manifest: the record. ``manifest.files`` excludes the deciding file.
        stored: digest of the bytes before the tail, as in the file.
        plain: digest of the decompressed bytes, for a compressed file.
        room: exact size of the tail in bytes; spaces fill the rest. Metrics and timings are dropped if the record does
            not fit. ``None``: no fixed size.

    Raises:
        SaveError: the record does not fit even without metrics and timings.
    """
    tail = _tail(_fields(manifest, stored, plain), room)
    if room is not None and len(tail) > room:
        log.warning(
            "checkpoint %s: its metrics and timings are too large for its record and are left out", manifest.name
        )
        tail = _tail(_fields(_shortened(manifest), stored, plain), room)
    if room is not None and len(tail) > room:
        raise SaveError(
            f"checkpoint {manifest.name!r}: its record has {len(tail)} bytes, of at most {room}. "
            "Shorten save_ignore_keys."
        )
    return tail


def _shortened(manifest: Manifest) -> Manifest:
    """Return the record without metrics and timings, and with one short name in ``not_finite``."""
    marks = tuple(name[:_MARK_CHARACTERS] for name in manifest.run.not_finite[:1])
    run = dataclasses.replace(manifest.run, metrics={}, not_finite=marks)
    return dataclasses.replace(manifest, run=run, timings={})


def seal_index(manifest: Manifest, index: bytes) -> bytes:
    """Return the content of ``.metadata``: the index, the digests of the chunks of all files, and the tail."""
    missing = [file.path for file in manifest.files if file.chunk_bytes and file.digest.body_bytes and not file.chunks]
    assert not missing, f"no digests of chunks: {missing}"
    body = index + b"".join(base64.b64decode(file.chunks) for file in manifest.files)
    stored = FileDigest(len(body), xxhash.xxh3_128_hexdigest(body))
    return body + _tail(_fields(manifest, stored))


def seal_weights_index(manifest: Manifest, index: Mapping[str, Any]) -> bytes:
    """Return the content of ``model.safetensors.index.json``, with the record under ``metadata``."""
    text = _index_text(index)
    stored = FileDigest(len(text), xxhash.xxh3_128_hexdigest(text))
    tail = _tail(_fields(manifest, stored, with_chunks=True))
    return _index_text({**index, "metadata": {**index["metadata"], "composerlite": tail.decode()}})


def _index_text(index: Mapping[str, Any]) -> bytes:
    return json.dumps(index, indent=1, sort_keys=True).encode()


def _fields(
    manifest: Manifest, stored: FileDigest, plain: FileDigest | None = None, *, with_chunks: bool = False
) -> dict[str, Any]:
    """Return the JSON of a tail. Paths are relative to the folder of the checkpoint, and defaults are left out.

    The digests of the chunks of the files in the record are left out, too, unless ``with_chunks`` is true.
    """
    record = dataclasses.asdict(dataclasses.replace(manifest, files=()))
    del record["node"]  # depends on where a record is read
    home = "" if manifest.form == "archives" else manifest.home  # each rank may have its own folder
    bare = [file if with_chunks else dataclasses.replace(file, chunks="") for file in manifest.files]
    record["files"] = [{**_without_defaults(file), "path": file.path.removeprefix(home)} for file in bare]
    fields = {"composerlite": VERSION, "record": record, "stored": _without_defaults(stored)}
    if plain is not None:
        fields["plain"] = _without_defaults(dataclasses.replace(plain, chunk_bytes=0, chunks=""))
    return fields


def _without_defaults(value: FileRecord | FileDigest) -> dict[str, Any]:
    return {key: field for key, field in dataclasses.asdict(value).items() if field != _DEFAULTS[key]}


def _tail(fields: Mapping[str, Any], size: int | None = None) -> bytes:
    text = b"\n" + json.dumps(fields).encode("ascii")
    if size is not None:
        text = text.ljust(size - _FOOTER_BYTES)
    return text + f"\nCLREC1 {len(text):08x} {xxhash.xxh3_128_hexdigest(text)}\n".encode()


# ── reading a tail ────────────────────────────────────────────────────────────────────────────────────────────────────
def tail_bytes(end: bytes) -> int:
    """Return the size of the tail at the end of ``end``, as the footer states; 0 if there is no footer."""
    footer = _FOOTER.search(end)
    return 0 if footer is None else int(footer[1], 16) + _FOOTER_BYTES


def unseal(path: str, size_bytes: int, end: bytes, uri: Callable[[str], str]) -> Manifest | None:
    """Return the record in the file ``path``. ``None``: the file has no tail.

    The name and the paths of the record's files are derived from ``path``. Only the record in an index of weights has
    the digests of the chunks of data files.

    Args:
        path: path of the file, relative to the folder of checkpoints.
        size_bytes: size of the file.
        end: the end of the file, with the whole tail: see :func:`tail_bytes`.
        uri: returns the URI of ``path``, or the full path, for messages.

    Raises:
        CorruptCheckpointError: the tail is damaged, or belongs to a file of another size.
        NewerManifestError: a newer version of composerlite wrote the record.
    """
    with _reading(path, uri):
        text = _text_of(end)
        before = len(end) - len(text or b"") - _FOOTER_BYTES
        if text is None and (frame := last_frame(end)) is not None:
            before, text = frame[0], _text_of(frame[1])
        if text is None:
            if TAIL_START in end:
                raise ValueError("its footer is damaged")
            return None
        fields = json_object(text)
        if type(version := fields.get("composerlite")) is not int:
            raise ValueError("its version is not an integer")
        if version != VERSION:
            raise NewerManifestError(
                f"the record of {uri(path)!r} has version {version}, this version reads {VERSION}: update composerlite."
            )
        # ``plain`` is the digest of the file after another program has decompressed the file.
        digests = [recorded(FileDigest, fields[key]) for key in ("stored", "plain") if key in fields]
        body_bytes = size_bytes - len(end) + before
        digest = next((one for one in digests if one.size_bytes == body_bytes and not one.tail_bytes), None)
        if digest is None:
            saved = " or ".join(str(one.size_bytes) for one in digests)
            raise ValueError(f"{body_bytes} bytes precede it, but {saved or 'an unknown number of'} bytes were saved")
        digest = digest.with_tail(end[before:])
        digest.chunk_digests(path)
        return manifest_from(fields["record"], FileRecord(path, **dataclasses.asdict(digest)))


def unseal_index(path: str, data: bytes, uri: Callable[[str], str]) -> tuple[bytes, Manifest | None]:
    """Return the index in ``.metadata``, and the record with the digests of chunks. ``data``: the whole content.

    Without a tail, the index is the whole content, and the record is ``None``. The bytes before the tail are verified
    with the digest in the tail. Other arguments and errors are those of :func:`unseal`.
    """
    manifest = unseal(path, len(data), data, uri)
    if manifest is None:
        return data, None
    decider, *others = manifest.files
    body = data[: decider.digest.body_bytes]
    counts = [-(-file.digest.body_bytes // file.chunk_bytes) if file.chunk_bytes else 0 for file in others]
    end = at = len(body) - _CHUNK_DIGEST_BYTES * sum(counts)
    if at < 0 or min(counts, default=0) < 0 or xxhash.xxh3_128_hexdigest(body) != decider.xxh3_128:
        raise CorruptCheckpointError(f"the bytes of {uri(path)!r} differ from the saved bytes.")
    files = [decider]
    for file, count in zip(others, counts, strict=True):
        chunks = body[at : at + _CHUNK_DIGEST_BYTES * count]
        files.append(dataclasses.replace(file, chunks=base64.b64encode(chunks).decode()))
        at += len(chunks)
    return body[:end], dataclasses.replace(manifest, files=tuple(files))


def unseal_weights_index(path: str, data: bytes, uri: Callable[[str], str]) -> Manifest | None:
    """Return the record, with the digests of chunks, in ``model.safetensors.index.json`` with the content ``data``.

    ``None``: another program wrote the index. Errors are those of :func:`unseal`.
    """
    try:
        index = json_object(data)
    except ValueError as e:
        raise CorruptCheckpointError(f"{uri(path)!r} is not an index of weights: {e}") from e
    with _reading(path, uri):
        about = index.get("metadata")
        tail = cast("StateDict", about).pop("composerlite", None) if isinstance(about, dict) else None
        if tail is None and b"CLREC1 " not in data:
            return None
        end, body = str(tail).encode(), _index_text(index)
    manifest = unseal(path, len(body) + len(end), end, uri)
    if manifest is None or manifest.files[0].xxh3_128 != xxhash.xxh3_128_hexdigest(body):
        raise CorruptCheckpointError(f"the bytes of {uri(path)!r} differ from the saved bytes.")
    decider = FileRecord(path, len(data), xxhash.xxh3_128_hexdigest(data))
    return dataclasses.replace(manifest, files=(decider, *manifest.files[1:]))


@contextlib.contextmanager
def _reading(path: str, uri: Callable[[str], str]) -> Generator[None]:
    """Raise errors about wrong fields within the block as CorruptCheckpointError with the URI of ``path``."""
    try:
        yield
    except (KeyError, TypeError) as e:
        raise CorruptCheckpointError(f"the record of {uri(path)!r} cannot be read: field {e} is missing") from e
    except (ValueError, RecursionError, CorruptCheckpointError) as e:
        raise CorruptCheckpointError(f"the record of {uri(path)!r} cannot be read: {e}") from e


def _text_of(end: bytes) -> bytes | None:
    """Return the JSON line of the tail at the end of ``end``; ``None`` if there is no footer.

    Raises:
        ValueError: the digest in the footer does not match.
    """
    footer = _FOOTER.search(end)
    if footer is None:
        return None
    start = footer.start() - int(footer[1], 16)
    text = end[max(0, start) : footer.start()]
    if start < 0 or xxhash.xxh3_128_hexdigest(text).encode() != footer[2]:
        raise ValueError("its digest does not match")
    return text
