"""The directory of a sharded checkpoint in any place: how its files get there, and which of them count.

Its manifest lies in ``.manifest/<name>.json`` of the place that it is in: there the catalogs look for those of all
checkpoints. A directory without one was written by another program, and is read unverified.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast, final

import xxhash

from composerlite.checkpoint.format import INDEX, INDEXES, SUFFIX
from composerlite.checkpoint.format.weight_files import folder_index, holds_weights, is_part_of_weights
from composerlite.checkpoint.place.bucket import Bucket, has_index
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import Commit
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import NewFile, Place, SaveHandle
from composerlite.checkpoint.record.manifest import FileRecord, Manifest, record_path
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from composerlite.storage import FileDigest, ObjectStore, Sink, is_uri, open_store, parse_uri

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = [
    "INDEX",
    "MOST_CHUNKS",
    "ON_ALL_NODES",
    "FinalizedManifest",
    "PathOrUri",
    "ShardedDirectory",
    "chunk_bytes_of",
    "directory_at",
    "text_of",
]

_LEAST_CHUNK_BYTES = 32 << 10
MOST_CHUNKS = 1 << 15
"""Parts in which a file is verified: the digests of all are in one manifest."""
ON_ALL_NODES = (
    "Load it on all the nodes that saved it, or copy the files of all of them to one folder; save to a folder that all "
    "nodes share, or to a bucket, to be free of that."
)
"""What to do about files on the disks of other nodes."""


@final
@dataclass(frozen=True)
class FinalizedManifest:
    """Index and manifest that every disk gets, where nodes have disks of their own.

    Attributes:
        index: the content of ``.metadata``.
        manifest: the commit record, but for the disk that it lies on.
    """

    index: bytes
    manifest: Manifest


@final
class ShardedDirectory:
    """The directory of one sharded checkpoint. Used as a context manager, or until :meth:`close`.

    A save of it goes: :meth:`claim` in one process for all, :meth:`write` on any rank, :meth:`commit` in the first
    process. Where nodes have disks of their own, each has this directory with the files that its ranks wrote:
    :meth:`join` in one process for each other disk; :meth:`write`; :meth:`sealed` in the first process; :meth:`prepare`
    for each disk; :meth:`complete` in the first process, which is the commit, and then for each other disk. What is
    prepared is durable: after a kill it is completed if the first disk is.

    Args:
        place: that it is in, with its manifest; closed with it.
        name: of it, below the place.

    Attributes:
        only: the one file of the folder ``name`` that counts, a file of weights; ``None``: all.
        template: in the manifest, where there is no ``record``: that of the name.
        record: what the manifest says besides files, at the next commit; ``None``: as little as can be.
        committed: the manifest of the last save, on the first rank.
        brought: a folder with files of this directory that are on other disks, to be read from.
    """

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.name = self._shown = name
        self.only: str | None = None
        self.template = name
        self.record: Manifest | None = None
        self.committed: Manifest | None = None
        self.brought: Path | None = None
        self._catalog = Catalog(place)
        self._handle: SaveHandle | None = None
        self._overwrite = False
        self._prepared: Commit | None = None

    @classmethod
    def on_disk(cls, path: Path, root: Path | None = None) -> ShardedDirectory:
        """Return the directory ``path`` in the folder of checkpoints ``root``, or in that above it.

        Raises:
            ConfigError: there is none above it.
        """
        path = Path(os.path.realpath(path))
        folder = path.parent if root is None else Path(os.path.realpath(root))
        if path == folder:
            raise ConfigError(f"{str(path)!r} is no directory for a checkpoint: give one below it.")
        return cls(Folder(folder), str(path.relative_to(folder)))

    @classmethod
    def of_file(cls, place: Place, path: str) -> ShardedDirectory:
        """Return the file of weights ``path``, whose header is its index, as a directory with nothing else in it."""
        folder, _, file = path.rpartition("/")
        found = cls(place, folder)
        found.only = file
        return found

    @classmethod
    def in_store(cls, store: ObjectStore, root: str, *, threads: int = 8, closes: bool = False) -> ShardedDirectory:
        """Directory below ``root/`` of ``store``, moved by ``threads`` threads; ``closes``: closes ``store``, too.

        Raises:
            ConfigError: ``root`` is empty.
        """
        path = PurePosixPath(root.strip("/"))
        if not path.name:
            raise ConfigError(f"{store.get_uri('x')[:-1]!r} is a bucket: give a directory in it, as 'run/step100'.")
        above = "" if str(path.parent) == "." else str(path.parent)
        return cls(Bucket.of(store, above, threads=threads, closes=closes), path.name)

    @property
    def uri(self) -> str:
        """Path or URI of the directory, for messages."""
        return self.place.uri(self.name) if self.only is None else self.place.uri(self._at(self.only))

    def _at(self, name: str) -> str:
        return f"{self._shown}/{name}" if self._shown else name

    @property
    def found_as(self) -> str:
        """Name under which :meth:`index` last found it: another one while it is between two names."""
        return self._shown

    @property
    def path(self) -> Path | None:
        """The directory on this machine; ``None``: it is in a bucket."""
        return self.place.path_of(self.name)

    def identity(self) -> str:
        """Return the same on all ranks that see one and the same checkpoint here; another where they see a copy."""
        if self.only is not None:
            return self.place.identity([self._at(self.only)])
        index = [self._at(INDEX)] if self.has(INDEX) else []  # a folder of weights has none
        return self.place.identity([self._shown, *index])

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def names(self) -> list[str]:
        """Return the names of what is in it; none if it is not there."""
        return self._names_in(self.name)

    def _names_in(self, path: str) -> list[str]:
        try:
            return self.place.names(path)
        except NotADirectoryError as e:
            raise ConfigError(f"{self.uri!r} is a file and no directory of a sharded checkpoint.") from e

    def manifest(self) -> Manifest | None:
        """Return its manifest; ``None`` if it has none.

        Raises:
            CorruptCheckpointError: it is damaged, or that of another checkpoint.
        """
        if self.only is not None:
            return None
        manifest = self._catalog.manifest_of(self.name)
        if manifest is not None and manifest.kind not in ("sharded", "weights"):
            raise CorruptCheckpointError(f"manifest {self.uri!r} is that of another checkpoint, {manifest.name!r}.")
        return manifest

    def index(self) -> bytes:
        """Return the bytes of ``.metadata``, or what the files of weights say; FileNotFoundError if there are none."""
        if self.only is not None:
            if not self.has(self.only):
                raise FileNotFoundError(errno.ENOENT, "there is no such file", self.uri)
            return self._of_weights([self.only])
        for name in (self.name, *self.place.between_names(self.name)):
            with contextlib.suppress(FileNotFoundError):
                index = self.place.read(f"{name}/{INDEX}")
                self._shown = name
                return index
            if holds_weights(names := self._names_in(name)):
                self._shown = name
                return self._of_weights(names)
        raise FileNotFoundError(errno.ENOENT, "there is no such file", f"{self.uri}/{INDEX}")

    def _of_weights(self, names: Sequence[str]) -> bytes:
        digests = (
            {}
            if (manifest := self.manifest()) is None
            else {record.path.removeprefix(f"{self.name}/"): record.digest for record in manifest.files}
        )

        def read(name: str, offset: int, size: int) -> bytes:
            digest = digests.get(name)
            if digest is not None and (not digest.chunk_bytes or digest.size_bytes != self.size(name)):
                digest = None  # another program has written it anew, which the reader sees
            with self.opened(name, digest, threads=1) as source:
                return source.read(offset, size)

        try:
            found = folder_index(names, self.size, read, only=self.only)
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}: {e}") from e
        assert found is not None
        return found

    def begun(self) -> Iterable[Manifest]:
        """Return the manifests of saves that have begun to give names, and have not ended."""
        return self._catalog.begun(self.name)

    def described(self) -> tuple[bytes, Manifest | None]:
        """Return the index, and the manifest that is its own; FileNotFoundError if there is no index.

        Where a save that replaces the checkpoint has got between the two, or was killed there, that is the manifest of
        that save. If none fits, the manifest is that which is there.
        """
        index, manifest = self.index(), self.manifest()
        if manifest is None or not has_index(manifest, index):
            for begun in self.begun():
                if has_index(begun, index):
                    return index, begun
        return index, manifest

    def has(self, name: str) -> bool:
        """Return true if the file ``name`` is in it here."""
        return self.place.exists(self._at(name))

    def size(self, name: str) -> int:
        """Return the size of the file ``name``, in bytes; FileNotFoundError."""
        return self.place.size(self._at(name))

    def opened(
        self, name: str, digest: FileDigest | None, *, threads: int
    ) -> contextlib.AbstractContextManager[ByteSource]:
        """Open the file ``name``, whose bytes are compared with ``digest`` as they are read; FileNotFoundError."""
        if self.path is not None and not self.has(name):
            if self.brought is not None:
                return Folder(self.brought).opened(name, digest, threads=threads)
            self._refuse_elsewhere(name)
        return self.place.opened(self._at(name), digest, threads=threads)

    def _refuse_elsewhere(self, name: str) -> None:
        records = () if (manifest := self.manifest()) is None else manifest.files
        nodes = [record.node for record in records if record.path == f"{self.name}/{name}"]
        if nodes and nodes[0] is not None:
            raise IncompatibleCheckpointError(
                f"checkpoint {self.uri!r}: its file {name!r} was saved to the disk of node {nodes[0]} of its run, and "
                f"is not on this one. {ON_ALL_NODES}"
            )

    def fetch(self, name: str, digest: FileDigest | None, target: Path) -> None:
        """Make the file ``name`` the local file ``target``, verified."""
        self.place.write_to(target, self._at(name), digest)

    def missing(self) -> CheckpointNotFoundError:
        """Error to raise where there is no ``.metadata``."""
        names = self.names()
        if not names:
            return CheckpointNotFoundError(f"there is no checkpoint {self.uri!r}: there is no such directory.")
        hint = ""
        if "model_and_optim" in names:
            hint = f" Did you mean {self.uri.rstrip('/') + '/model_and_optim'!r}?"
        return CheckpointNotFoundError(
            f"{self.uri!r} is no sharded checkpoint, or one whose save did not end: it has no {INDEX!r} and holds "
            f"{', '.join(sorted(names)[:8])}.{hint}"
        )

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def check_free(self, *, overwrite: bool) -> bool:
        """See that a checkpoint may be saved here; return whether anything is there.

        What a save that was killed has left is nothing.

        Raises:
            CheckpointExistsError: there is something, and ``overwrite`` is false.
            ConfigError: a checkpoint cannot have this name.
        """
        self.place.check_name(self.name)
        names = self.names()
        left_over = all(name.endswith(SUFFIX) or is_part_of_weights(name) for name in names)
        if not overwrite and not left_over:
            what = "holds a checkpoint" if not {*INDEXES}.isdisjoint(names) else f"is not empty: it holds {names[0]!r}"
            raise CheckpointExistsError(
                f"{self.uri!r} {what}. Give another directory, delete it, or pass save_overwrite=True."
            )
        return bool(names)

    def claim(self, *, overwrite: bool) -> SaveHandle:
        """Begin a save, in one process for all. Raises as :meth:`check_free` does."""
        self.place.check_name(self.name)
        self._overwrite = overwrite
        handle = self.place.begin(self.name, lambda: self.check_free(overwrite=overwrite), overwrite=overwrite)
        self._handle = handle
        return handle

    def join(self, handle: SaveHandle, *, overwrite: bool) -> None:
        """Take part in a save that another process has begun, for the disk that this one writes to.

        Raises:
            CheckpointExistsError: as :meth:`check_free`.
            FileExistsError: it is the disk of that process, too.
        """
        self._overwrite = overwrite
        self.place.join(self.name, handle, lambda: self.check_free(overwrite=overwrite))
        self._handle = handle

    def write(
        self,
        handle: SaveHandle,
        name: str,
        most_bytes: int,
        fill: Callable[[Sink], object],
        most_chunks: int = MOST_CHUNKS,
    ) -> FileDigest:
        """Make a durable file of what ``fill`` gives, at most ``most_bytes``; return what it contains.

        It is verified in ``most_chunks`` parts at most.
        """
        (digest,) = self.write_all(handle, [NewFile(name, most_bytes, fill, chunk_bytes_of(most_bytes, most_chunks))])
        return digest

    def write_all(self, handle: SaveHandle, files: Iterable[NewFile]) -> list[FileDigest]:
        """Make durable files, by their names, in their order; return what they contain."""
        folder = PurePosixPath(self.name).with_name(handle.place)
        return self.place.write_all(file._replace(path=str(folder / file.path)) for file in files)

    def commit(
        self,
        handle: SaveHandle,
        index: bytes,
        files: Mapping[str, FileDigest],
        facts: Mapping[str, object],
        *,
        index_name: str = INDEX,
    ) -> None:
        """Make the checkpoint exist, in the process that claimed: with ``index`` first, the manifest at last.

        Args:
            handle: what :meth:`claim` gave.
            index: the content of the index.
            files: all others.
            facts: further fields of the manifest.
            index_name: the file that has the index.
        """
        manifest = self._manifest_of(index, files, facts, index_name=index_name)
        with self._staged(handle, index, manifest, index_name) as commit:
            commit.commit()
        self.committed = manifest
        self.place.release(self.name)

    def sealed(
        self, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object], nodes: Mapping[str, int]
    ) -> FinalizedManifest:
        """Build the manifest for all disks; ``nodes``: by file, the node whose disk has it."""
        return FinalizedManifest(index, self._manifest_of(index, files, facts, nodes))

    def prepare(self, sealed: FinalizedManifest, node: int) -> None:
        """Make all of this disk's part durable, so that nothing is left but to rename it."""
        assert self._handle is not None
        self._prepared = self._staged(self._handle, sealed.index, dataclasses.replace(sealed.manifest, node=node))

    def commit_part(self) -> None:
        """Give this disk's part, which is prepared, its name and its manifest."""
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        with prepared:
            prepared.commit()
        self.place.release(self.name)

    def _staged(self, handle: SaveHandle, index: bytes, manifest: Manifest, index_name: str = INDEX) -> Commit:
        """Return the commit, prepared."""
        if not self._overwrite:
            self.check_free(overwrite=False)  # another process may have saved here meanwhile
        parts = self.place.parts(self.name, handle, index_name, index)
        with contextlib.ExitStack() as stack:
            commit = stack.enter_context(
                self.place.commit(self.name, parts, overwrite=self._overwrite, record=record_path(self.name))
            )
            commit.prepare(manifest)
            stack.pop_all()
            return commit

    def abandon(self, handle: SaveHandle) -> None:
        """Remove the files written so far, after an error, when no rank writes any more. Raises nothing."""
        if self._prepared is not None:
            with self._prepared:
                self._prepared = None
        self.place.abandon(self.name, handle)

    def close(self) -> None:
        """Close connections. May be called twice."""
        if self._prepared is not None:  # it is not known here how the save ended: the next start finds out
            self._prepared.leave()
            with self._prepared:
                self._prepared = None
            self.place.release(self.name)
        self.place.close()

    def __enter__(self) -> ShardedDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _manifest_of(
        self,
        index: bytes,
        files: Mapping[str, FileDigest],
        facts: Mapping[str, object],
        nodes: Mapping[str, int] | None = None,
        *,
        index_name: str = INDEX,
    ) -> Manifest:
        digests = {**files, index_name: FileDigest(len(index), xxhash.xxh3_128_hexdigest(index))}
        records = tuple(
            FileRecord.of(f"{self.name}/{name}", digest, (nodes or {}).get(name))
            for name, digest in sorted(digests.items())
        )
        if self.record is not None:
            return dataclasses.replace(self.record, files=records)
        return Manifest(
            name=self.name,
            kind="sharded",
            template=self.template,
            run_name="",
            timestamp={"batch": 0},
            files=records,
            **facts,  # type: ignore[arg-type]
        )


PathOrUri = str | os.PathLike[str] | ShardedDirectory
"""Where a sharded checkpoint is: a path, or a URI of an object store."""


def text_of(place: object) -> str:
    """The path or URI ``place`` as text. Raises ConfigError if it is neither."""
    try:
        return os.fsdecode(cast("Any", place))
    except TypeError as e:
        raise ConfigError(f"{place!r} is of the type {type(place).__name__}: expected a path or a URI, as text.") from e


def directory_at(place: PathOrUri, *, threads: int | None = None) -> ShardedDirectory:
    """Return the directory at ``place``. ``threads`` are those that move bytes to and from an object store.

    Raises:
        ConfigError: it is no path, or the URI names no store, or nothing in it.
    """
    if isinstance(place, ShardedDirectory):
        return place
    text = text_of(place)
    if is_uri(text):
        return ShardedDirectory.in_store(open_store(text), parse_uri(text)[2], threads=threads or 8, closes=True)
    return ShardedDirectory.on_disk(Path(parse_uri(text)[2]))


def chunk_bytes_of(size_bytes: int, most_chunks: int) -> int:
    """Bytes that are verified at once: few, since a read of a shard is often of one tensor among many."""
    chunk_bytes = _LEAST_CHUNK_BYTES
    while size_bytes > chunk_bytes * most_chunks:
        chunk_bytes *= 2
    return chunk_bytes
