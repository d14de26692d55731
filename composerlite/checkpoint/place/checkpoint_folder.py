"""The directory of a sharded checkpoint, wherever it is: how its files get there, and the commit that makes it exist.

Beside the directory, in ``.manifest/<name>.json`` of its parent, lies its commit record: there the catalogs look for
those of all checkpoints. A directory without one was written by another program, and is read unverified.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

import xxhash

from composerlite.checkpoint.format import INDEX, SUFFIX
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError
from composerlite.storage import RING_BYTES, FileDigest, Sink, StreamWriter

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = ["INDEX", "MANIFESTS", "SUFFIX", "CheckpointFolder", "Claim", "Sealed", "checked_record", "write_file"]

MANIFESTS = ".manifest"
"""The folder of commit records."""
_LEAST_CHUNK_BYTES, _MOST_CHUNKS = 32 << 10, 1 << 15


class Claim(NamedTuple):
    """A save that is going on.

    Attributes:
        place: where its files go.
        suffix: what their names need so that they differ from those that are there.
    """

    place: str
    suffix: str


@final
@dataclass(frozen=True)
class Sealed:
    """What every disk gets, where nodes have disks of their own.

    Attributes:
        index: the content of ``.metadata``.
        manifest: the commit record, but for the disk that it lies on.
    """

    index: bytes
    manifest: Manifest


class CheckpointFolder(ABC):
    """The directory of one sharded checkpoint. Used as a context manager, or until :meth:`close`."""

    name: str
    """Its name in the folder or bucket that has its commit record."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where it is, for messages."""

    @abstractmethod
    def identity(self) -> str:
        """The same for all ranks that see one and the same checkpoint here; another for those that see a copy of it."""

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def names(self) -> list[str]:
        """The names of what is in it; empty if it is not there."""

    @abstractmethod
    def manifest(self) -> Manifest | None:
        """Its commit record; ``None`` if it has none.

        Raises:
            CorruptCheckpointError: it is damaged, or that of another checkpoint.
        """

    @abstractmethod
    def index(self) -> bytes:
        """The bytes of ``.metadata``, unverified; FileNotFoundError if there is none."""

    @abstractmethod
    def begun(self) -> Iterable[Manifest]:
        """The commit records of saves that have begun to give names, and have not ended."""

    def described(self) -> tuple[bytes, Manifest | None]:
        """The index, and the commit record that is its own; FileNotFoundError if there is no index.

        Where a save that replaces the checkpoint has got between the two, or was killed there, that is the record of
        that save. If none fits, the record is that which is there.
        """
        index, manifest = self.index(), self.manifest()
        digest = xxhash.xxh3_128_hexdigest(index)
        if manifest is None or not self._has_index(manifest, digest):
            for begun in self.begun():
                if self._has_index(begun, digest):
                    return index, begun
        return index, manifest

    def _has_index(self, manifest: Manifest, digest: str) -> bool:
        path = f"{self.name}/{INDEX}"
        return any(record.path == path and record.xxh3_128 == digest for record in manifest.files)

    @abstractmethod
    def opened(
        self, name: str, digest: FileDigest | None, *, threads: int
    ) -> contextlib.AbstractContextManager[ByteSource]:
        """The file ``name``, whose bytes are compared with ``digest`` as they are read; FileNotFoundError."""

    @abstractmethod
    def fetch(self, name: str, digest: FileDigest | None, target: Path) -> None:
        """Make the file ``name`` the local file ``target``, verified."""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def check_free(self, *, overwrite: bool) -> list[str]:
        """See that a checkpoint may be saved here; the names of what is there.

        What a save that was killed has left is nothing.

        Raises:
            CheckpointExistsError: there is something, and ``overwrite`` is false.
        """
        names = self.names()
        left_over = all(name.endswith(SUFFIX) for name in names)
        if not overwrite and not left_over:
            what = "holds a checkpoint" if INDEX in names else f"is not empty: it holds {names[0]!r}"
            raise CheckpointExistsError(
                f"{self.uri!r} {what}. Give another directory, delete it, or pass save_overwrite=True."
            )
        return names

    @abstractmethod
    def claim(self, *, overwrite: bool) -> Claim:
        """Begin a save, in one process for all. Raises as :meth:`check_free` does."""

    @abstractmethod
    def write(self, claim: Claim, name: str, most_bytes: int, fill: Callable[[Sink], object]) -> FileDigest:
        """Make a durable file of what ``fill`` gives, at most ``most_bytes``; what it contains."""

    @abstractmethod
    def commit(self, claim: Claim, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object]) -> None:
        """Make the checkpoint exist, in the process that claimed: with ``index`` first, the commit record at last.

        Args:
            claim: what :meth:`claim` gave.
            index: the content of ``.metadata``.
            files: all others.
            facts: further fields of the commit record.
        """

    @abstractmethod
    def abandon(self, claim: Claim) -> None:
        """After an error, when no rank writes any more: remove what was written. Raises nothing."""

    def close(self) -> None:
        """Let go of connections; twice is fine."""

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def missing(self) -> CheckpointNotFoundError:
        """What to raise where there is no ``.metadata``."""
        names = self.names()
        if not names:
            return CheckpointNotFoundError(f"there is no checkpoint {self.uri!r}: there is no such directory.")
        hint = ""
        if any(name.partition("/")[0] == "model_and_optim" for name in names):
            hint = f" Did you mean {self.uri.rstrip('/') + '/model_and_optim'!r}?"
        return CheckpointNotFoundError(
            f"{self.uri!r} is no sharded checkpoint, or one whose save did not end: it has no {INDEX!r} and holds "
            f"{', '.join(sorted(names)[:8])}.{hint}"
        )

    def _manifest_of(
        self,
        index: bytes,
        files: Mapping[str, FileDigest],
        facts: Mapping[str, object],
        record: Manifest | None = None,
        nodes: Mapping[str, int] | None = None,
    ) -> Manifest:
        digests = {**files, INDEX: FileDigest(len(index), xxhash.xxh3_128_hexdigest(index))}
        records = tuple(
            FileRecord(
                f"{self.name}/{name}", d.size_bytes, d.xxh3_128, d.chunk_bytes, d.chunks, (nodes or {}).get(name)
            )
            for name, d in sorted(digests.items())
        )
        if record is not None:
            return dataclasses.replace(record, files=records)
        return Manifest(
            name=self.name,
            kind="sharded",
            template=self.name,
            run_name="",
            timestamp={"batch": 0},
            files=records,
            **facts,  # type: ignore[arg-type]
        )


def _chunk_bytes(size_bytes: int) -> int:
    """Small: what is read of a shard is verified by whole chunks, and is often one tensor among many."""
    chunk_bytes = _LEAST_CHUNK_BYTES
    while size_bytes > chunk_bytes * _MOST_CHUNKS:
        chunk_bytes *= 2
    return chunk_bytes


def write_file(path: Path, most_bytes: int, fill: Callable[[Sink], object]) -> FileDigest:
    """Make the durable file ``path`` of what ``fill`` gives, at most ``most_bytes``; what it contains."""
    path.open("xb").close()
    with StreamWriter(path, most_bytes, ring_bytes=RING_BYTES, chunk_bytes=_chunk_bytes(most_bytes)) as sink:
        fill(sink)
        return sink.finish()


def checked_record(manifest: Manifest, name: str, source: str) -> Manifest:
    """``manifest``, from ``source``, if it is that of the sharded checkpoint ``name``; CorruptCheckpointError."""
    if manifest.name != name or manifest.kind not in ("sharded", "weights"):
        raise CorruptCheckpointError(f"manifest {source!r} is that of another checkpoint, {manifest.name!r}.")
    return manifest
