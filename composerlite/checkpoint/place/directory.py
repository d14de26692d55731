"""The directory of a sharded checkpoint in any place: its files, and the deciding file with the record.

A directory without a record was written by another program, and is read unverified.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

from composerlite.checkpoint.format import INDEX, INDEXES, WEIGHTS_INDEX
from composerlite.checkpoint.format.weight_files import folder_index, holds_weights
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import record_in, with_node
from composerlite.checkpoint.place.commit import data_file_id, garbage
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import NewFile, Place, StagedDecider
from composerlite.checkpoint.record.manifest import FileRecord, Manifest, new_id
from composerlite.checkpoint.record.tail import (
    index_of,
    seal_index,
    seal_weights_index,
    unseal_index,
    unseal_weights_index,
)
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    ObjectStoreError,
)
from composerlite.storage import FileDigest, ObjectStore, Sink, is_uri, open_store, parse_uri

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = [
    "INDEX",
    "MOST_CHUNKS",
    "ON_ALL_NODES",
    "PathOrUri",
    "SaveHandle",
    "ShardedDirectory",
    "chunk_bytes_of",
    "directory_at",
    "text_of",
]

log = logging.getLogger(__name__)
_LEAST_CHUNK_BYTES = 32 << 10
_OLD = timedelta(days=1)
"""Age from which files that no record names are those of a killed save, where no lease tells."""
MOST_CHUNKS = 1 << 15
"""Parts in which a file is verified: the digests of all are in one manifest."""
ON_ALL_NODES = (
    "Load it on all the nodes that saved it, or copy the files of all of them to one folder; save to a folder that all "
    "nodes share, or to a bucket, to be free of that."
)
"""What to do about files on the disks of other nodes."""


class SaveHandle(NamedTuple):
    """A save of a directory in progress, as all ranks know it.

    Attributes:
        id: of the save; the names of its data files end with it.
        decider: name of the deciding file in the directory.
    """

    id: str
    decider: str = INDEX

    @property
    def suffix(self) -> str:
        """End of the names of data files, before the extension."""
        return f"_{self.id}"


@final
class ShardedDirectory:
    """The directory of one sharded checkpoint. Used as a context manager, or until :meth:`close`.

    A save: :meth:`claim` in one process; :meth:`write` on any rank, each file durable and under its final name;
    :meth:`commit` in the process that claimed. Where nodes have disks of their own, one process of each other disk
    calls :meth:`join` before the ranks write, and :meth:`commit` too: the checkpoint exists if every disk has it.

    Args:
        place: that the directory is in; closed with it.
        name: of the directory, below the place.

    Attributes:
        only: the one file of the folder ``name`` that counts, a file of weights; ``None``: all.
        record: what the record says besides files, at the next commit; ``None``: as little as can be.
        committed: the record of the last save, in the process that committed.
        brought: a folder with files of this directory that are on other disks, to be read from.
    """

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.name = name
        self.only: str | None = None
        self.record: Manifest | None = None
        self.committed: Manifest | None = None
        self.brought: Path | None = None
        self._decider: StagedDecider | None = None
        self._overwrite = False

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
        return f"{self.name}/{name}" if self.name else name

    @property
    def path(self) -> Path | None:
        """The directory on this machine; ``None``: it is in a bucket."""
        return self.place.path_of(self.name)

    def identity(self) -> str:
        """Return the same on all ranks that see one and the same checkpoint here; another where they see a copy."""
        if self.only is not None:
            return self.place.identity([self._at(self.only)])
        index = [self._at(INDEX)] if self.has(INDEX) else []  # a folder of weights has none
        return self.place.identity([self.name, *index])

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def names(self) -> list[str]:
        """Return the names of what is in it; none if it is not there."""
        try:
            return self.place.names(self.name)
        except NotADirectoryError as e:
            raise ConfigError(f"{self.uri!r} is a file and no directory of a sharded checkpoint.") from e

    def described(self) -> tuple[bytes, Manifest | None]:
        """Return the index and the record that is in the same file, ``None`` if another program wrote that.

        Raises:
            FileNotFoundError: there is no index, and there are no weights.
            CorruptCheckpointError: the record or the index is damaged.
        """
        if self.only is not None:
            if not self.has(self.only):
                raise FileNotFoundError(errno.ENOENT, "there is no such file", self.uri)
            return self._of_weights([self.only], None), None
        with contextlib.suppress(FileNotFoundError):
            data = self.place.read(self._at(INDEX))
            record = self._record_in(data)
            return index_of(data, self.place.uri(self._at(INDEX))), record
        if holds_weights(names := self.names()):
            manifest = self._record_of_weights()
            return self._of_weights(names, manifest), manifest
        raise FileNotFoundError(errno.ENOENT, "there is no such file", f"{self.uri}/{INDEX}")

    def manifest(self) -> Manifest | None:
        """Return the record; ``None`` if there is none. Raises CorruptCheckpointError if it is damaged."""
        if self.only is not None:
            return None
        with contextlib.suppress(FileNotFoundError):
            return self._record_in(self.place.read(self._at(INDEX)))
        return self._record_of_weights()

    def _record_in(self, data: bytes) -> Manifest | None:
        found = unseal_index(self._at(INDEX), data, self.place.uri(self._at(INDEX)))
        return None if found is None else with_node(self.place, found)

    def _record_of_weights(self) -> Manifest | None:
        path = self._at(WEIGHTS_INDEX)
        with contextlib.suppress(FileNotFoundError):
            return unseal_weights_index(path, self.place.read(path), self.place.uri(path))
        return None

    def _of_weights(self, names: Sequence[str], manifest: Manifest | None) -> bytes:
        digests = {record.path: record.digest for record in (() if manifest is None else manifest.files[1:])}

        def read(name: str, offset: int, size: int) -> bytes:
            digest = digests.get(self._at(name))
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

        Leftovers of a killed save do not count.

        Raises:
            CheckpointExistsError: there is something, and ``overwrite`` is false.
            ConfigError: a checkpoint cannot have this name.
        """
        self.place.check_name(self.name)
        names = self.names()
        left_over = all(data_file_id(name) is not None or ".tmp-" in name for name in names)
        if not overwrite and not left_over:
            what = "holds a checkpoint" if not {*INDEXES}.isdisjoint(names) else f"is not empty: it holds {names[0]!r}"
            raise CheckpointExistsError(
                f"{self.uri!r} {what}. Give another directory, delete it, or pass save_overwrite=True."
            )
        return bool(names)

    def claim(self, *, overwrite: bool, index_name: str = INDEX) -> SaveHandle:
        """Begin a save, in one process for all. Raises as :meth:`check_free` does."""
        self.check_free(overwrite=overwrite)
        handle = SaveHandle(new_id(), index_name)
        self._stage(handle, overwrite=overwrite)
        return handle

    def sweep(self) -> None:
        """Remove leftovers of killed saves in the directory that are older than a day. Failures are logged.

        For saves without a lease, in one process for all.
        """
        try:
            self.place.inside(self.name).sweep(_OLD)
            until = datetime.now(UTC) - _OLD
            files = self.place.files(self.name).values()
            old = [file.path for file in files if file.modified_at is not None and file.modified_at < until]
            names = re.compile(re.escape(self.name))
            self.place.delete_all(garbage(self.place, old, names, lambda path: record_in(self.place, path)))
        except (OSError, ObjectStoreError) as e:
            log.warning("could not remove leftovers of killed processes in %s: %s", self.uri, e)

    def join(self, handle: SaveHandle, *, overwrite: bool) -> None:
        """Take part in a save that another process has begun, for the disk that this one writes to.

        Raises:
            CheckpointExistsError: as :meth:`check_free`.
            FileExistsError: it is the disk of that process, too.
        """
        self.check_free(overwrite=overwrite)
        try:
            self._stage(handle, overwrite=overwrite)
        except FileExistsError as e:
            raise FileExistsError(
                errno.EEXIST,
                "the nodes had folders of their own when the run began, and now two of them see the same. Start the "
                "run again when all nodes see what they are to see. It is there already",
                str(self.path),
            ) from e

    def _stage(self, handle: SaveHandle, *, overwrite: bool) -> None:
        self._overwrite = overwrite
        self._decider = self.place.stage_decider(self._at(handle.decider), handle.id)

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
        if self._decider is None:
            self.place.wait_until_seen(self._at(handle.decider), handle.id)
        return self.place.write_all(file._replace(path=f"{self.name}/{file.path}") for file in files)

    def commit(
        self,
        handle: SaveHandle,
        index: bytes,
        files: Mapping[str, FileDigest],
        facts: Mapping[str, object],
        *,
        nodes: Mapping[str, int] | None = None,
    ) -> None:
        """Make the checkpoint exist, in the process that claimed, or joined: put ``index`` with the record.

        Args:
            handle: what :meth:`claim` gave.
            index: the content of the index.
            files: digests of all other files, by name.
            facts: further fields of the record.
            nodes: by file, the node whose disk has it, where nodes have disks of their own.

        Raises:
            CheckpointExistsError: another process has saved here meanwhile, and that must not be replaced.
        """
        assert self._decider is not None
        manifest = self._record_with(handle, files, facts, nodes or {})
        replaced = self._replaced() if self._overwrite else None
        is_weights = manifest.form == "weights"
        data = seal_weights_index(manifest, json.loads(index)) if is_weights else seal_index(manifest, index)
        if not self._overwrite:
            self.check_free(overwrite=False)
        try:
            self._decider.commit(data, overwrite=self._overwrite)
        except CheckpointExistsError:
            raise
        except FileExistsError as e:
            raise CheckpointExistsError(f"checkpoint {self.uri!r} was saved by another process meanwhile.") from e
        self._decider = None
        if is_weights:
            path = self._at(WEIGHTS_INDEX)
            self.committed = unseal_weights_index(path, data, self.place.uri(path))
        else:
            self.committed = self._record_in(data)
        kept = {file.path for file in manifest.files}
        for file in () if replaced is None else replaced.files[1:]:
            if file.path not in kept:
                self.place.delete(file.path)

    def _replaced(self) -> Manifest | None:
        try:
            return self.manifest()
        except CorruptCheckpointError:
            return None  # nothing says which files it has: garbage collection finds them

    def _record_with(
        self,
        handle: SaveHandle,
        files: Mapping[str, FileDigest],
        facts: Mapping[str, object],
        nodes: Mapping[str, int],
    ) -> Manifest:
        form = "weights" if any(name.endswith(".safetensors") for name in files) else "sharded"
        minimal = Manifest(
            name=self.name, kind="sharded", template=self.name, run_name="", timestamp={"batch": 0}, files=()
        )
        record = dataclasses.replace(minimal, **facts) if self.record is None else self.record  # type: ignore[arg-type]
        form = record.form if record.form == "step" else form
        record = dataclasses.replace(record, form=form, id=handle.id)
        own = [FileRecord.of(self._at(name), digest, nodes.get(name)) for name, digest in sorted(files.items())]
        return dataclasses.replace(record, files=(*own, *record.files))

    def abandon(self, handle: SaveHandle) -> None:
        """Remove the files written so far, after an error, when no rank writes any more. Raises nothing.

        In the process that claimed, or joined; in others it does nothing.
        """
        decider, self._decider = self._decider, None
        if decider is None:
            return
        try:
            for name in self.names():
                if data_file_id(name) == handle.id:
                    self.place.delete(self._at(name))
            decider.close()
            self.place.remove_empty(self.name)
        except (OSError, ObjectStoreError) as e:  # the save's own error is the one that counts
            log.warning("%s: files of a save that failed are left behind: %s", self.uri, e)

    def close(self) -> None:
        """Close connections. May be called twice."""
        if self._decider is not None:
            self._decider.close()
            self._decider = None
        self.place.close()

    def __enter__(self) -> ShardedDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
