"""The commit record of a checkpoint. A checkpoint exists if and only if its manifest does."""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, final

import xxhash

from composerlite.checkpoint.record.recorded import Amount, RelativePath, json_object, recorded
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.storage import FileDigest
from composerlite.types import Lineage

__all__ = ["SCHEMA", "FileRecord", "Manifest", "plain_timestamp", "versions"]

SCHEMA = 3
"""The newest manifest schema that this code writes and reads: that of checkpoints with a lineage."""
_SEVERAL_DISKS = 2
"""The schema of those whose files lie on several disks."""
_ONE_FOLDER = 1
"""The schema of those whose files are in one folder."""
_NUMBER = re.compile(r"\d+")


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint: its path below the folder of checkpoints, and what it must contain.

    ``node`` is the one whose disk has it, where nodes have disks of their own; ``None``: it is in every folder that has
    the manifest. The rest is as in :class:`composerlite.storage.FileDigest`.
    """

    path: RelativePath
    size_bytes: int
    xxh3_128: str
    chunk_bytes: int = 0
    chunks: str = ""
    node: int | None = None

    @property
    def digest(self) -> FileDigest:
        """What the file must contain."""
        return FileDigest(self.size_bytes, self.xxh3_128, self.chunk_bytes, self.chunks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of, and of which moment of which run it is.

    Attributes:
        name: path of the checkpoint below its folder.
        kind: ``'monolithic'``: everything, in a file; ``'sharded'``: in a directory; ``'weights'``: the model only;
            ``'crash'``: everything, as an exception left it.
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
        node: of the run that saved it, whose folder this record lies in, where nodes have disks of their own; ``None``:
            all files are in one folder.
        lineage: the attempt of the run that saved it.
    """

    name: RelativePath
    kind: str
    template: str
    run_name: str
    timestamp: Mapping[str, Amount]
    files: tuple[FileRecord, ...]
    fit_calls: int = 0
    world_size: int = 1
    left_out: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    unpacked_bytes: int = 0
    ephemeral: bool = False
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    saved_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    node: int | None = None
    lineage: Lineage = field(default_factory=Lineage)

    @property
    def schema(self) -> int:
        """The oldest schema that has all that is in it."""
        if self.lineage != Lineage():
            return SCHEMA
        on_disks = self.node is not None or any(file.node is not None for file in self.files)
        return _SEVERAL_DISKS if on_disks else _ONE_FOLDER

    @property
    def here(self) -> tuple[FileRecord, ...]:
        """The files that are in the folder of this record."""
        return tuple(file for file in self.files if file.node in (None, self.node))

    @property
    def identity(self) -> str:
        """What the records of one save have in common on all disks, and no other has."""
        return _digest({**dataclasses.asdict(self), "node": None})

    @property
    def batch(self) -> int:
        """Optimizer steps done when it was saved."""
        return int(self.timestamp["batch"])

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory with files in it."""
        return any(file.path.startswith(f"{self.name}/") for file in self.files)

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

    def to_json(self) -> bytes:
        """The record as JSON, with a digest of itself."""
        fields: dict[str, Any] = {**dataclasses.asdict(self), "schema": self.schema}
        for one in (fields, *fields["files"]):
            if one["node"] is None:  # as in records of the older schema
                del one["node"]
        if self.schema < SCHEMA:
            del fields["lineage"]
        return json.dumps({**fields, "digest": _digest(fields)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, source: str) -> Manifest:
        """The record that :meth:`to_json` wrote.

        Raises:
            CorruptCheckpointError: it is damaged or edited. ``source`` names it in the message.
            IncompatibleCheckpointError: it is of a newer schema.
        """
        try:
            fields = json_object(data)
            digest = fields.pop("digest")
            if digest != _digest(fields):
                raise CorruptCheckpointError(f"manifest {source!r} is damaged: its digest does not match.")
            if type(schema := fields.pop("schema")) is not int or schema < _ONE_FOLDER:
                raise ValueError(f"there is no schema {schema!r}")
            if schema > SCHEMA:
                raise IncompatibleCheckpointError(
                    f"manifest {source!r} has schema {schema}, this version reads up to {SCHEMA}: update composerlite."
                )
            manifest = recorded(cls, fields)
            manifest._check()
        except KeyError as e:
            raise CorruptCheckpointError(f"manifest {source!r} cannot be read: field {e} is missing") from e
        except (ValueError, RecursionError) as e:
            raise CorruptCheckpointError(f"manifest {source!r} cannot be read: {e}") from e
        return manifest

    def _check(self) -> None:
        """See that its parts agree. It names its own files only: those are deleted, renamed and replaced with it.

        Raises:
            ValueError: they do not.
        """
        if type(self.timestamp.get("batch")) is not int or self.batch < 0:
            raise ValueError(f"its timestamp has no whole number of batches: {self.timestamp.get('batch')!r}")
        if not self.files:
            raise ValueError("it names no file")
        paths = [file.path for file in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("it names a file twice")
        if strange := [path for path in paths if not self._owns(path)]:
            raise ValueError(f"{strange[0]!r} is no file of checkpoint {self.name!r}")

    def _owns(self, path: str) -> bool:
        """Whether ``path`` is its name, below its name, or, where each rank has a file, its name for another rank."""
        if self.kind == "deepspeed":
            return _NUMBER.sub("0", path) == _NUMBER.sub("0", self.name)
        return path == self.name or path.startswith(f"{self.name}/")


def _digest(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def plain_timestamp(fields: Mapping[str, Any]) -> dict[str, int | float]:
    """Timestamp fields as JSON numbers; clocks in seconds."""
    return {name: v.total_seconds() if isinstance(v, timedelta) else v for name, v in fields.items()}


@functools.cache
def versions() -> Mapping[str, str]:
    """What a checkpoint is saved with."""
    from importlib.metadata import version  # not to list checkpoints

    import torch

    return {
        "composerlite": version("composerlite"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
