"""The directory of a checkpoint in a place (a folder or bucket): data files, and the deciding file with the record.

A sharded checkpoint exists once the deciding file exists. A directory without a record was written by another program,
and is read unverified.

A step is a directory that ``Checkpointer`` saves, in the layout of OLMo-core: ``train/rank*.pt``, ``model_and_optim/``
and, written last, ``.metadata.json``, which makes the directory a checkpoint for OLMo-core. The record is in
``model_and_optim/.metadata``, and names the files in ``train/``, too. Files of ranks have fixed names, so no atomic
operation can replace the files: a save deletes the old step first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, cast, final

import xxhash

from composerlite.checkpoint.format import INDEX, INDEXES, MARKER, MODEL, TRAIN
from composerlite.checkpoint.format.weight_files import holds_weights
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import read_index, record_in
from composerlite.checkpoint.place.commit import delete_checkpoint, garbage, put_decider
from composerlite.checkpoint.place.place import Folder, NewFile, Place, check_name
from composerlite.checkpoint.record.naming import data_file_id
from composerlite.checkpoint.record.record import FileRecord, Manifest, new_id, seal_index, seal_weights_index
from composerlite.errors import (
    CheckpointError,
    CheckpointExistsError,
    ConfigError,
    CorruptCheckpointError,
    ObjectStoreError,
)
from composerlite.storage import FileDigest, ObjectStore, StagedFile, is_uri, make_folder, open_store, parse_uri
from composerlite.storage.disk.files import temporary_name
from composerlite.types import Closing, StateDict

log = logging.getLogger(__name__)
_OLD = timedelta(days=1)
"""Age from which files of killed saves are removed, for saves without a lease."""
_SEEN_SECONDS = 20.0
"""Longest wait until a network file system shows a new file on other machines."""
LEAST_CHUNK_BYTES = 32 << 10
"""Smallest chunk with a digest. Small, because a read of a shard is often a single tensor among many."""
ON_ALL_NODES = (
    "Load it on all the nodes that saved it, or copy the files of all of them to one folder. Save to a folder that "
    "all nodes share, or to a bucket, to avoid this."
)
"""Advice about files on the disks of other nodes."""
RANK_FILE = re.compile(r"rank(\d+)\.pt")
"""Name of the file of a rank in ``train/``."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHandle:
    """A save in progress, equal on all ranks.

    Attributes:
        overwrite: replace an existing checkpoint.
        decider: name of the deciding file in the directory.
        id: id of the save, by default a new id. The names of data files end with this id.
    """

    overwrite: bool
    decider: str = INDEX
    id: str = field(default_factory=new_id)

    @property
    def suffix(self) -> str:
        """End of the names of data files, before the extension."""
        return f"_{self.id}"


class Directory(Closing):
    """A directory in a place. A context manager; otherwise call :meth:`close`.

    Args:
        place: the place, closed together with the directory.
        name: name of the directory, below the place; empty: the place itself.
        only: name of a file of weights, to read this file alone; ``None``: the whole directory.
    """

    def __init__(self, place: Place, name: str, only: str | None = None) -> None:
        self.place = place
        self.name = name
        self._only = only

    @classmethod
    def of(cls, place: object, *, threads: int | None = None) -> Self:
        """Return the directory at a path or a URI; a directory is returned unchanged.

        ``threads`` threads move bytes to and from an object store; ``None``: 8.

        Raises:
            ConfigError: ``place`` is no path and no URI, or the URI names no store.
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
        """Return the directory below ``root/`` of ``store``. With ``closes``, :meth:`close` closes ``store``, too."""
        above, _, name = root.strip("/").rpartition("/")
        return cls(Bucket.of(store, above, threads=threads, closes=closes), name)

    @property
    def uri(self) -> str:
        """Path or URI of the directory, or of the file of weights, for messages."""
        return self.place.uri(self.at(self._only or ""))

    def at(self, name: str) -> str:
        """Return the path of the file ``name`` below the place."""
        return "/".join(part for part in (self.name, name) if part)

    def has(self, name: str) -> bool:
        """Return true if the file ``name`` exists."""
        return self.place.exists(self.at(name))

    def close(self) -> None:
        """Close connections. May be called twice."""
        self.place.close()


@final
class ShardedDirectory(Directory):
    """The directory of one sharded checkpoint, or one file of weights, whose header is the index.

    To save, call :meth:`begin` in one process, :meth:`write` on any rank, and :meth:`commit` in the process that called
    :meth:`begin`. A written file is durable and has the final name. If nodes have disks of their own, one process for
    each other disk calls :meth:`begin` and :meth:`commit`, too. The checkpoint exists if every disk has the deciding
    file. No method is collective: the caller orders the calls of the ranks.

    Args:
        place, name, only: as in :class:`Directory`.
    """

    _handle: SaveHandle | None = None
    """The save that this process has begun."""
    _staged: StagedFile | None = None
    """The deciding file of this save, in a folder."""

    @property
    def path(self) -> Path | None:
        """Path of the directory on this machine; ``None`` in a bucket."""
        return self.place.path_of(self.name)

    def identity(self) -> str:
        """Return a text that is equal on all ranks with the same checkpoint, and differs for a copy."""
        if (here := self.path) is None:
            return self.uri
        paths = [here, here / INDEX] if self._only is None else [here / self._only]
        seen = [path.stat() for path in paths if path.exists()]  # stat is equal on all machines with NFS
        return repr([(found.st_ino, found.st_mtime_ns, found.st_ctime_ns) for found in seen])

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def described(self) -> tuple[bytes, Manifest | None]:
        """Return the index and the record; the record is ``None`` if another program wrote the checkpoint.

        Raises:
            FileNotFoundError: there is no index, and there are no weights.
            CorruptCheckpointError: the record or the index is damaged.
            NewerManifestError: a newer version of composerlite wrote the record.
        """
        names = [self._only or ""]
        if self._only is None:
            path = self.at(INDEX)
            with contextlib.suppress(FileNotFoundError):
                return read_index(self.place, path, self.place.read(path))
            names = self.place.names(self.name)
            if not holds_weights(names):
                raise FileNotFoundError(errno.ENOENT, "there is no such file", self.place.uri(path))
        from composerlite.checkpoint.format.folder_index import folder_index  # imports torch

        record = self.record()
        digests = {file.path: file.digest for file in (() if record is None else record.files[1:])}

        def read(name: str, offset: int, size: int) -> bytes:
            path = self.at(name)
            digest = digests.get(path)
            if digest is not None and (not digest.chunk_bytes or digest.size_bytes != self.place.size(path)):
                digest = None  # another program rewrote the file, which the reader notices
            with self.place.opened(path, digest, threads=1) as source:
                return source.read(offset, size)

        try:
            return folder_index(names, lambda name: self.place.size(self.at(name)), read, only=self._only), record
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}: {e}") from e

    def record(self) -> Manifest | None:
        """Return the record, with digests of chunks; ``None`` if there is no record.

        Raises:
            CorruptCheckpointError: the record is damaged.
            NewerManifestError: a newer version of composerlite wrote the record.
        """
        indexes = INDEXES if self._only is None else ()
        found = (record_in(self.place, self.at(index), chunks=True) for index in indexes)
        return next((record for record in found if record is not None), None)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def check_free(self, *, overwrite: bool) -> None:
        """Check that a checkpoint may be saved here. Files of a killed save do not count.

        Raises:
            CheckpointExistsError: the directory has other files, and ``overwrite`` is false.
            ConfigError: a checkpoint cannot have this name.
        """
        check_name(self.place, self.name)
        names = self.place.names(self.name)
        left_over = all(data_file_id(name) is not None or ".tmp-" in name for name in names)
        if not overwrite and not left_over:
            what = "holds a checkpoint" if not {*INDEXES}.isdisjoint(names) else f"is not empty: it holds {names[0]!r}"
            raise CheckpointExistsError(
                f"{self.uri!r} {what}. Give another directory, delete it, or pass save_overwrite=True."
            )

    def sweep(self) -> None:
        """Remove files of killed saves in the directory, older than a day. Failures of the disk or store are logged.

        For saves without a lease. Called by one process for all ranks.

        Raises:
            ConfigError: a checkpoint cannot have this name.
            NewerManifestError: a newer version of composerlite wrote the record.
        """
        check_name(self.place, self.name)
        try:
            self.place.inside(self.name).sweep(_OLD)
            until = datetime.now(UTC) - _OLD
            files = self.place.files(self.name).values()
            old = [file.path for file in files if file.modified_at is not None and file.modified_at < until]
            self.place.delete(garbage(self.place, old, re.compile(re.escape(self.name))), folders=True)
        except (OSError, ObjectStoreError) as e:
            log.warning("could not remove leftovers of killed processes in %s: %s", self.uri, e)

    def begin(self, handle: SaveHandle) -> None:
        """Begin a save. Called by one process, or by one process for each disk if nodes have disks of their own.

        In a folder this makes the directory and the deciding file under a temporary name. The file is locked until the
        save or this process ends. While the lock is held, data files with the id of the save are no garbage.

        Raises:
            CheckpointExistsError: the directory has other files, and ``handle.overwrite`` is false.
            ConfigError: a checkpoint cannot have this name.
            FileExistsError: another process has begun this save on this disk.
        """
        self.check_free(overwrite=handle.overwrite)
        if (folder := self.path) is not None:
            make_folder(folder)
            self._staged = StagedFile(folder / handle.decider, handle.id)
        self._handle = handle

    def write(self, handle: SaveHandle, file: NewFile) -> FileDigest:
        """Write a durable file, with a path relative to the directory, and return the digest.

        In a process that did not call :meth:`begin`, this first waits up to 20 s for the temporary deciding file.

        Raises:
            FileNotFoundError: the temporary deciding file does not appear: the machines share no folder.
        """
        if self._handle is None and (folder := self.path) is not None:
            staged = folder / temporary_name(handle.decider, handle.id)
            deadline = time.monotonic() + _SEEN_SECONDS
            while not staged.exists():
                if time.monotonic() > deadline:
                    raise FileNotFoundError(
                        errno.ENOENT,
                        f"the first rank made this file {_SEEN_SECONDS:g} s ago, but this rank does not see it. "
                        "Each rank writes its part of a sharded checkpoint. Give a folder that all nodes share, "
                        "or a bucket, or state_dict_type='full', so that rank 0 writes one file. Not here",
                        str(staged),
                    )
                time.sleep(0.05)
        return self.place.write(file._replace(path=self.at(file.path)))

    def commit(
        self, index: bytes | StateDict, files: Mapping[str, tuple[FileDigest, int | None]], record: Manifest
    ) -> Manifest:
        """Commit the checkpoint: write the deciding file with ``index`` and the record.

        Called in a process that called :meth:`begin`. After an error, :meth:`abandon` removes the files of the save.

        Args:
            index: content of the index: bytes for a sharded checkpoint, a dict for weights in safetensors.
            files: digests of all other files, by name in the directory, each with the number of the node whose disk has
                the file; ``None`` if there is one folder for all nodes.
            record: the record. ``record.files`` has only files outside of the directory, such as those in ``train/``.

        Returns:
            The record, parsed from the content of the deciding file.

        Raises:
            CheckpointExistsError: another process saved here meanwhile, and ``overwrite`` is false.
        """
        handle = self._handle
        assert handle is not None
        try:
            own = [
                FileRecord(self.at(name), **dataclasses.asdict(digest), node=node)
                for name, (digest, node) in sorted(files.items())
            ]
            form = "step" if record.form == "step" else "sharded" if isinstance(index, bytes) else "weights"
            record = dataclasses.replace(record, form=form, id=handle.id, files=(*own, *record.files))
            data = seal_index(record, index) if isinstance(index, bytes) else seal_weights_index(record, index)
            decider = self.at(handle.decider)
            replaced: list[str] = []  # readers may prefer an old index of ours; indexes of other programs stay
            if handle.overwrite:
                with contextlib.suppress(CorruptCheckpointError):  # the files of a damaged record become garbage
                    there = self.record()
                    replaced = [] if there is None else [file.path for file in there.files if file.path != decider]
            else:
                self.check_free(overwrite=False)
            put_decider(self.place, decider, data, self._staged, overwrite=handle.overwrite)
        except BaseException:
            self.abandon()
            raise
        self._end()
        kept = {file.path for file in record.files}
        self.place.delete(path for path in replaced if path not in kept)
        _, committed = read_index(self.place, decider, data)
        assert committed is not None
        return committed

    def abandon(self) -> None:
        """Remove the files of a failed save. Call after the last write of all ranks. Raises no error.

        Only a process that called :meth:`begin` removes files. The files stay if the checkpoint exists: then the error
        came after the commit, for example because the answer of a bucket was lost.
        """
        handle = self._handle
        if handle is None:
            return
        there: Manifest | None = None
        try:
            with contextlib.suppress(CheckpointError):  # an earlier save's record is damaged or of a newer version
                there = record_in(self.place, self.at(handle.decider))
            if there is not None and there.id == handle.id:
                log.warning("checkpoint %s exists and is complete, although its save failed", self.uri)
            else:
                self.place.delete(
                    self.at(name) for name in self.place.names(self.name) if data_file_id(name) == handle.id
                )
            self._end()
            if (folder := self.path) is not None:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
        except (OSError, ObjectStoreError) as e:  # the error of the save is raised instead
            log.warning("%s: could not remove the files of a failed save: %s", self.uri, e)

    def _end(self) -> None:
        staged, self._staged, self._handle = self._staged, None, None
        if staged is not None:
            staged.__exit__(None, None, None)

    def close(self) -> None:
        """End a save without a commit, and close connections. Data files stay. May be called twice."""
        self._end()
        self.place.close()


@final
class StepFolder(Directory):
    """The directory of one step. A context manager; otherwise call :meth:`close`."""

    def model(self, *, bare: bool = False) -> ShardedDirectory:
        """Return the directory of the model and the optimizer: ``model_and_optim``, or with ``bare`` this directory.

        The result is usable until this directory is closed.
        """
        return ShardedDirectory(self.place.inside(""), self.name if bare else self.at(MODEL))

    def rank_files(self) -> dict[int, str]:
        """Return the paths of the files in ``train/``, by rank."""
        names = self.place.names(self.at(TRAIN))
        return {int(match[1]): self.at(f"{TRAIN}/{match[0]}") for name in names if (match := RANK_FILE.fullmatch(name))}

    def record(self) -> Manifest | None:
        """Return the record of the model; ``None`` if there is no record. The form ``'step'`` covers the whole
        step, and other forms the model alone.

        Raises:
            CorruptCheckpointError: the record is damaged.
            NewerManifestError: a newer version of composerlite wrote the record.
        """
        return record_in(self.place, self.at(f"{MODEL}/{INDEX}"))

    def is_checkpoint(self) -> bool:
        """Return true if the directory has all parts of a step, or the index of a model alone."""
        return self.has(INDEX) or all(self.has(name) for name in (MARKER, f"{MODEL}/{INDEX}", f"{TRAIN}/rank0.pt"))

    def version(self) -> str:
        """Return a digest of this checkpoint: equal on every rank, and different after the checkpoint is replaced."""
        digest = xxhash.xxh3_128()
        for name in (MARKER, f"{MODEL}/{INDEX}", INDEX):
            with contextlib.suppress(FileNotFoundError):
                digest.update(self.place.read(self.at(name)))
        return digest.hexdigest()

    def check_free(self, *, overwrite: bool) -> None:
        """Check that a checkpoint may be saved here. Files of a killed save do not count.

        Raises:
            CheckpointExistsError: the directory has a checkpoint, and ``overwrite`` is false.
            ConfigError: a checkpoint cannot have this name.
        """
        if self.name:  # an empty name is the bucket itself
            check_name(self.place, self.name)
        has_model_alone = False
        with contextlib.suppress(CorruptCheckpointError):
            has_model_alone = (found := self.record()) is not None and found.form != "step"
        if not overwrite and (has_model_alone or self.has(MARKER) or self.has(INDEX)):
            raise CheckpointExistsError(
                f"{self.uri!r} holds a checkpoint. Give another directory, delete it, or set save_overwrite=True."
            )

    def uncommit(self) -> None:
        """Delete the existing step, and old files of killed saves. Called by one process for all ranks."""
        self.place.delete([self.at(MARKER)], durable=True)
        with contextlib.suppress(CorruptCheckpointError):  # the files of a damaged record become garbage
            if (old := self.record()) is not None and old.form == "step":
                delete_checkpoint(self.place, old)
        self.place.delete(self.rank_files().values())
        self.model().sweep()


PathOrUri = str | os.PathLike[str] | ShardedDirectory
"""Place of a sharded checkpoint: a path, a URI of an object store, or an open directory."""
