"""The directory of a checkpoint in any place: its files, and the deciding file with the record.

A directory without a record was written by another program, and is read unverified.

A step has ``train/rank*.pt``, ``model_and_optim/`` and, last of all, ``.metadata.json``, which marks it as a checkpoint
for OLMo-core. Its record is in ``model_and_optim/.metadata``, and names the files in ``train/``, too. Files of ranks
have fixed names, which cannot be switched at one instant, so a save that replaces a step deletes that one first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self, cast, final

import xxhash

from composerlite.checkpoint.format import INDEX, INDEXES, MARKER, MODEL, TRAIN, WEIGHTS_INDEX
from composerlite.checkpoint.format.weight_files import holds_weights
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import record_in, with_node
from composerlite.checkpoint.place.commit import delete_checkpoint, garbage, put_decider
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import NewFile, Place
from composerlite.checkpoint.record.manifest import FileRecord, Manifest, new_id
from composerlite.checkpoint.record.naming import data_file_id
from composerlite.checkpoint.record.tail import (
    index_of,
    seal_index,
    seal_weights_index,
    unseal_index,
    unseal_weights_index,
)
from composerlite.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    ObjectStoreError,
)
from composerlite.storage import FileDigest, ObjectStore, StagedFile, is_uri, make_folder, open_store, parse_uri

__all__ = [
    "INDEX",
    "LEAST_CHUNK_BYTES",
    "MOST_CHUNKS",
    "ON_ALL_NODES",
    "RANK_FILE",
    "Directory",
    "PathOrUri",
    "SaveHandle",
    "ShardedDirectory",
    "StepFolder",
]

log = logging.getLogger(__name__)
_OLD = timedelta(days=1)
"""Age from which files that no record names are those of a killed save, where no lease tells."""
_SEEN_SECONDS = 20.0
"""A network file system shows what another machine made some time later."""
LEAST_CHUNK_BYTES = 32 << 10
"""Bytes of a file that are verified at once: few, since a read of a shard is often of one tensor among many."""
MOST_CHUNKS = 1 << 15
"""Parts in which a file is verified: the digests of all are in one manifest."""
ON_ALL_NODES = (
    "Load it on all the nodes that saved it, or copy the files of all of them to one folder; save to a folder that all "
    "nodes share, or to a bucket, to be free of that."
)
"""What to do about files on the disks of other nodes."""
RANK_FILE = re.compile(r"rank(\d+)\.pt")
"""Name of the file of a rank in ``train/``."""


class SaveHandle(NamedTuple):
    """A save of a directory in progress, as all ranks know it.

    Attributes:
        overwrite: replace what is there.
        decider: name of the deciding file in the directory.
        id: of the save; the names of its data files end with it.
    """

    overwrite: bool
    decider: str
    id: str

    @classmethod
    def new(cls, *, overwrite: bool, decider: str = INDEX) -> SaveHandle:
        """Return a handle with a new id."""
        return cls(overwrite, decider, new_id())

    @property
    def suffix(self) -> str:
        """End of the names of data files, before the extension."""
        return f"_{self.id}"


class Directory:
    """A directory in a place. Used as a context manager, or until :meth:`close`.

    Args:
        place: that it is in; closed with it.
        name: of the directory, below the place; empty: the place itself.
    """

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.name = name

    @classmethod
    def of(cls, place: object, *, threads: int | None = None) -> Self:
        """Return the directory at a path or a URI. ``threads`` are those that move bytes to and from an object store.

        Raises:
            ConfigError: it is neither, or the URI names no store.
        """
        if isinstance(place, cls):
            return place
        try:
            text = os.fsdecode(cast("Any", place))
        except TypeError as e:
            kind = type(place).__name__
            raise ConfigError(f"{place!r} is of the type {kind}: expected a path or a URI, as text.") from e
        if is_uri(text):
            return cls.in_store(open_store(text), parse_uri(text)[2], threads=threads or 8, closes=True)
        path = Path(os.path.realpath(parse_uri(text)[2]))
        return cls(Folder(path.parent), path.name)

    @classmethod
    def in_store(cls, store: ObjectStore, root: str, *, threads: int = 8, closes: bool = False) -> Self:
        """Directory below ``root/`` of ``store``, moved by ``threads`` threads; ``closes``: closes ``store``, too."""
        above, _, name = root.strip("/").rpartition("/")
        return cls(Bucket.of(store, above, threads=threads, closes=closes), name)

    @property
    def uri(self) -> str:
        """Path or URI of the directory, for messages."""
        return self.place.uri(self.name)

    def at(self, name: str) -> str:
        """Return the path of the file ``name`` below the place."""
        return "/".join(part for part in (self.name, name) if part)

    def has(self, name: str) -> bool:
        """Return true if there is the file ``name``."""
        return self.place.exists(self.at(name))

    def close(self) -> None:
        """Close connections. May be called twice."""
        self.place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@final
class ShardedDirectory(Directory):
    """The directory of one sharded checkpoint, or the file of weights ``only`` in it, whose header is its index.

    A save: :meth:`begin` in one process; :meth:`write` on any rank, each file durable and under its final name;
    :meth:`commit` in the process that began. Where nodes have disks of their own, one process of each other disk
    calls :meth:`begin` before the ranks write, and :meth:`commit` too: the checkpoint exists if every disk has it.
    """

    def __init__(self, place: Place, name: str, only: str | None = None) -> None:
        super().__init__(place, name)
        self._only = only
        self._handle: SaveHandle | None = None
        """Of the save that this process has begun."""
        self._staged: StagedFile | None = None
        """The deciding file of that save, where it is on this machine."""

    @property
    def uri(self) -> str:
        """Path or URI of the directory, or of its one file, for messages."""
        return self.place.uri(self.at(self._only or ""))

    @property
    def path(self) -> Path | None:
        """The directory on this machine; ``None``: it is in a bucket."""
        return self.place.path_of(self.name)

    def identity(self) -> str:
        """Return the same on all ranks that see one and the same checkpoint here; another where they see a copy."""
        if (here := self.path) is None:
            return self.uri
        paths = [here, here / INDEX] if self._only is None else [here / self._only]  # weights have no index
        seen = [path.stat() for path in paths if path.exists()]  # NFS shows all machines the same
        return repr([(found.st_ino, found.st_mtime_ns, found.st_ctime_ns) for found in seen])

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def described(self) -> tuple[bytes, Manifest | None]:
        """Return the index and the record that is in the same file, ``None`` if another program wrote that.

        Raises:
            FileNotFoundError: there is no index, and there are no weights.
            CorruptCheckpointError: the record or the index is damaged.
        """
        if self._only is None:
            with contextlib.suppress(FileNotFoundError):
                data = self.place.read(self.at(INDEX))
                return index_of(data, self.place.uri(self.at(INDEX))), self._unsealed(INDEX, data)
        names = self.place.names(self.name) if self._only is None else [self._only]
        if self._only is None and not holds_weights(names):
            raise FileNotFoundError(errno.ENOENT, "there is no such file", self.place.uri(self.at(INDEX)))
        from composerlite.checkpoint.format.folder_index import folder_index  # imports torch

        record = self.record()
        digests = {file.path: file.digest for file in (() if record is None else record.files[1:])}

        def read(name: str, offset: int, size: int) -> bytes:
            path = self.at(name)
            digest = digests.get(path)
            if digest is not None and (not digest.chunk_bytes or digest.size_bytes != self.place.size(path)):
                digest = None  # another program has written it anew, which the reader sees
            with self.place.opened(path, digest, threads=1) as source:
                return source.read(offset, size)

        try:
            found = folder_index(names, lambda name: self.place.size(self.at(name)), read, only=self._only)
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}: {e}") from e
        assert found is not None
        return found, record

    def record(self) -> Manifest | None:
        """Return the record; ``None`` if there is none. Raises CorruptCheckpointError if it is damaged."""
        for index in INDEXES if self._only is None else ():
            with contextlib.suppress(FileNotFoundError):
                return self._unsealed(index, self.place.read(self.at(index)))
        return None

    def _unsealed(self, index: str, data: bytes) -> Manifest | None:
        """Return the record in the file ``index``, which contains ``data``."""
        path = self.at(index)
        found = (unseal_index if index == INDEX else unseal_weights_index)(path, data, self.place.uri(path))
        return None if found is None else with_node(self.place, found)

    def missing(self) -> CheckpointNotFoundError:
        """Error to raise where there is no ``.metadata``."""
        names = self.place.names(self.name)
        if not names:
            return CheckpointNotFoundError(f"there is no checkpoint {self.uri!r}: there is no such directory.")
        hint = f" Did you mean '{self.uri.rstrip('/')}/{MODEL}'?" if MODEL in names else ""
        return CheckpointNotFoundError(
            f"{self.uri!r} is no sharded checkpoint, or one whose save did not end: it has no {INDEX!r} and holds "
            f"{', '.join(sorted(names)[:8])}.{hint}"
        )

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def check_free(self, *, overwrite: bool) -> None:
        """See that a checkpoint may be saved here. Leftovers of a killed save do not count.

        Raises:
            CheckpointExistsError: there is something, and ``overwrite`` is false.
            ConfigError: a checkpoint cannot have this name.
        """
        self.place.check_name(self.name)
        names = self.place.names(self.name)
        left_over = all(data_file_id(name) is not None or ".tmp-" in name for name in names)
        if not overwrite and not left_over:
            what = "holds a checkpoint" if not {*INDEXES}.isdisjoint(names) else f"is not empty: it holds {names[0]!r}"
            raise CheckpointExistsError(
                f"{self.uri!r} {what}. Give another directory, delete it, or pass save_overwrite=True."
            )

    def sweep(self) -> None:
        """Remove leftovers of killed saves in the directory that are older than a day. Failures are logged.

        For saves without a lease, in one process for all.

        Raises:
            ConfigError: a checkpoint cannot have this name.
        """
        self.place.check_name(self.name)
        try:
            self.place.inside(self.name).sweep(_OLD)
            until = datetime.now(UTC) - _OLD
            files = self.place.files(self.name).values()
            old = [file.path for file in files if file.modified_at is not None and file.modified_at < until]
            names = re.compile(re.escape(self.name))
            unnamed = garbage(self.place, old, names)
            self.place.delete(unnamed, folders=True)
        except (OSError, ObjectStoreError) as e:
            log.warning("could not remove leftovers of killed processes in %s: %s", self.uri, e)

    def begin(self, handle: SaveHandle) -> None:
        """Begin a save, in one process for all; or take part in it, in one process for each other disk of the nodes.

        The directory is made, with the deciding file under a temporary name that is locked as long as this process
        lives: data files with the id of the save are no garbage as long as that is there. A bucket has no such file.

        Raises:
            CheckpointExistsError: as :meth:`check_free`.
            FileExistsError: another process has begun it on this disk.
        """
        self.check_free(overwrite=handle.overwrite)
        if (folder := self.path) is not None:
            make_folder(folder)
            self._staged = StagedFile(folder / handle.decider, handle.id)
        self._handle = handle

    def write(self, handle: SaveHandle, files: Iterable[NewFile]) -> list[FileDigest]:
        """Make durable files, by their names in the directory, in their order; return what they contain.

        Raises:
            FileNotFoundError: the file made by another machine is not seen: the machines have folders of their own.
        """
        if self._handle is None and (folder := self.path) is not None:
            staged = StagedFile.temporary_of(folder / handle.decider, handle.id)
            deadline = time.monotonic() + _SEEN_SECONDS
            while not staged.exists():
                if time.monotonic() > deadline:
                    raise FileNotFoundError(
                        errno.ENOENT,
                        f"the first rank made this file {_SEEN_SECONDS:g} s ago, and here it is not: each rank writes "
                        "its part of a sharded checkpoint. Give a folder that all nodes share, or a bucket; or "
                        "state_dict_type='full', with which rank 0 writes one file. Not here",
                        str(staged),
                    )
                time.sleep(0.05)
        return self.place.write(file._replace(path=self.at(file.path)) for file in files)

    def commit(self, index: bytes, files: Mapping[str, tuple[FileDigest, int | None]], record: Manifest) -> Manifest:
        """Make the checkpoint exist, in a process that began: put ``index`` with the record.

        Args:
            index: the content of the index.
            files: digests of all other files, by name, with the node whose disk has each, where nodes have their own.
            record: what it says of the checkpoint; and the files that are beside the directory.

        Returns:
            The record as it can be read now.

        Raises:
            CheckpointExistsError: another process has saved here meanwhile, and that must not be replaced.
        """
        handle = self._handle
        assert handle is not None
        own = [FileRecord.of(self.at(name), *what) for name, what in sorted(files.items())]
        is_weights = handle.decider == WEIGHTS_INDEX
        form = "step" if record.form == "step" else "weights" if is_weights else "sharded"
        record = dataclasses.replace(record, form=form, id=handle.id, files=(*own, *record.files))
        data = seal_weights_index(record, json.loads(index)) if is_weights else seal_index(record, index)
        replaced: Sequence[FileRecord] = ()
        if handle.overwrite:
            with contextlib.suppress(CorruptCheckpointError):  # nothing says which files it has: they become garbage
                replaced = () if (there := self.record()) is None else there.files[1:]
        else:
            self.check_free(overwrite=False)
        put_decider(self.place, self.at(handle.decider), data, self._staged, overwrite=handle.overwrite)
        self._end()
        kept = {file.path for file in record.files}
        self.place.delete(file.path for file in replaced if file.path not in kept)
        committed = self._unsealed(handle.decider, data)
        assert committed is not None
        return committed

    def abandon(self) -> None:
        """Remove the files written so far, after an error, when no rank writes any more. Raises nothing.

        In a process that began; in others it does nothing. The files stay if the checkpoint exists: the
        error came after its commit, as where the folder could not be flushed or the answer of a bucket was lost.
        """
        handle = self._handle
        if handle is None:
            return
        there: Manifest | None = None
        try:
            with contextlib.suppress(CheckpointError):  # of a save before: damaged, or of a newer version
                there = record_in(self.place, self.at(handle.decider))
            if there is not None and there.id == handle.id:
                log.warning("checkpoint %s exists and is whole, although its save failed", self.uri)
            else:
                self.place.delete(
                    self.at(name) for name in self.place.names(self.name) if data_file_id(name) == handle.id
                )
            self._end()
            if (folder := self.path) is not None:
                with contextlib.suppress(OSError):  # it holds something else
                    folder.rmdir()
        except (OSError, ObjectStoreError) as e:  # the save's own error is the one that counts
            log.warning("%s: files of a save that failed are left behind: %s", self.uri, e)

    def _end(self) -> None:
        staged, self._staged, self._handle = self._staged, None, None
        if staged is not None:
            staged.__exit__(None, None, None)

    def close(self) -> None:
        """Give up a save, and close connections. May be called twice."""
        self._end()
        self.place.close()


@final
class StepFolder(Directory):
    """The directory of one step. Used as a context manager, or until :meth:`close`."""

    def model(self, *, bare: bool = False) -> ShardedDirectory:
        """Return the directory of the model and the optimizer; ``bare``: this directory is that of a model alone."""
        return ShardedDirectory(self.place.inside(""), self.name if bare else self.at(MODEL))

    def rank_files(self) -> dict[int, str]:
        """Return the paths of the files in ``train/``, by rank."""
        names = self.place.names(self.at(TRAIN))
        return {int(match[1]): self.at(f"{TRAIN}/{match[0]}") for name in names if (match := RANK_FILE.fullmatch(name))}

    def record(self) -> Manifest | None:
        """Return the record of the model, which is that of the step if its form is ``'step'``; ``None``: it has none.

        Raises:
            CorruptCheckpointError: it is damaged.
        """
        return record_in(self.place, self.at(f"{MODEL}/{INDEX}"))

    def is_checkpoint(self) -> bool:
        """Return true if there is all that a checkpoint has, or that of a model alone."""
        return self.has(INDEX) or all(self.has(name) for name in (MARKER, f"{MODEL}/{INDEX}", f"{TRAIN}/rank0.pt"))

    def version(self) -> str:
        """Digest of this checkpoint: equal on every rank, and another once the checkpoint is replaced."""
        digest = xxhash.xxh3_128()
        for name in (MARKER, f"{MODEL}/{INDEX}", INDEX):
            with contextlib.suppress(FileNotFoundError):
                digest.update(self.place.read(self.at(name)))
        return digest.hexdigest()

    def check_free(self, *, overwrite: bool) -> None:
        """See that a checkpoint may be saved here. Files of a save that did not end are no checkpoint.

        Raises:
            CheckpointExistsError: there is one, and ``overwrite`` is false.
            ConfigError: a checkpoint cannot have this name.
        """
        if self.name:  # else a bucket
            self.place.check_name(self.name)
        has_model_alone = False
        with contextlib.suppress(CorruptCheckpointError):  # a damaged one says nothing
            has_model_alone = (found := self.record()) is not None and found.form != "step"
        if not overwrite and (has_model_alone or self.has(MARKER) or self.has(INDEX)):
            raise CheckpointExistsError(
                f"{self.uri!r} holds a checkpoint. Give another directory, delete it, or set save_overwrite=True."
            )

    def uncommit(self) -> None:
        """Delete the step that is there, in one process for all, and what a killed save has left of one."""
        self.place.delete([self.at(MARKER)], durable=True)
        with contextlib.suppress(CorruptCheckpointError):  # nothing says which files it has
            if (old := self.record()) is not None and old.form == "step":
                delete_checkpoint(self.place, dataclasses.replace(old, name=self.name))
        self.place.delete(self.rank_files().values())
        self.model().sweep()


PathOrUri = str | os.PathLike[str] | ShardedDirectory
"""Where a sharded checkpoint is: a path, or a URI of an object store."""
