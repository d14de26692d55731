"""The directory of a sharded checkpoint on a disk."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

from composerlite.checkpoint.place.checkpoint_folder import (
    INDEX,
    CheckpointFolder,
    Claim,
    Sealed,
    checked_record,
    write_file,
)
from composerlite.checkpoint.place.commit import FolderCommit, between_names, end_dead_saves, intentions, record_path
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.storage import (
    FileDigest,
    ParallelReader,
    Sink,
    fsync_folder,
    make_folder,
    read_small_file,
    verify_file,
)

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = ["ON_ALL_NODES", "LocalFolder"]

log = logging.getLogger(__name__)
ON_ALL_NODES = (
    "Load it on all the nodes that saved it, or copy the files of all of them to one folder; save to a folder that all "
    "nodes share, or to a bucket, to be free of that."
)
"""What to do about files on the disks of other nodes."""


@final
class LocalFolder(CheckpointFolder):
    """A directory of this machine, or one that all machines mount.

    A save is written to ``.<name>.saving-<id>`` beside it, which is locked as long as the process lives, and renamed.

    Args:
        path: of the directory.
        root: the folder of checkpoints that it is in; ``None``: that above it.

    Where nodes have disks of their own, each has this directory with the files that its ranks wrote. A save then goes:
    :meth:`claim` in one process for all and :meth:`join` in one for each other disk; :meth:`write`; :meth:`sealed` in
    the first process; :meth:`prepare` for each disk; :meth:`complete` in the first process, which is the commit, and
    then for each other disk. What is prepared is durable: after a kill it is completed if the first disk is.

    Attributes:
        record: what the commit record says besides files, at the next commit; ``None``: as little as can be.
        brought: a folder with files of this directory that are on other disks, to be read from.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = self._shown = Path(os.path.realpath(path))
        self._root = self.path.parent if root is None else Path(os.path.realpath(root))
        self.name = str(self.path.relative_to(self._root)) if root is not None else self.path.name
        self.record: Manifest | None = None
        if not self.name:
            raise ConfigError(f"{str(path)!r} is no directory for a checkpoint: give one below it.")
        self.brought: Path | None = None
        self._lock = -1
        self._claimed = ""
        self._overwrite = False
        self._prepared: FolderCommit | None = None

    @property
    def uri(self) -> str:
        return str(self.path)

    def identity(self) -> str:
        seen = [(self._shown / name).stat() for name in ("", INDEX)]  # NFS shows all machines the same
        return repr([(found.st_ino, found.st_mtime_ns, found.st_ctime_ns) for found in seen])

    def names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.path.iterdir())
        except FileNotFoundError:
            return []
        except NotADirectoryError as e:
            raise ConfigError(f"{str(self.path)!r} is a file and no directory of a sharded checkpoint.") from e

    @property
    def _manifest_path(self) -> Path:
        return record_path(self._root, self.name)

    def manifest(self) -> Manifest | None:
        try:
            data = read_small_file(self._manifest_path)
        except FileNotFoundError:
            return None
        return checked_record(Manifest.from_json(data, str(self._manifest_path)), self.name, str(self._manifest_path))

    def begun(self) -> Iterable[Manifest]:
        return intentions(self._root, self.name)

    def index(self) -> bytes:
        for place in (self.path, *between_names(self.path)):
            with contextlib.suppress(FileNotFoundError):
                index = (place / INDEX).read_bytes()
                self._shown = place
                return index
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(self.path / INDEX))

    def has(self, name: str) -> bool:
        """Whether the file ``name`` is on this disk."""
        return (self._shown / name).exists()

    @contextlib.contextmanager
    def opened(self, name: str, digest: FileDigest | None, *, threads: int) -> Generator[ByteSource]:
        with ParallelReader(self._place_of(name) / name, digest, threads=threads) as reader:
            yield reader

    def _place_of(self, name: str) -> Path:
        """The folder that has the file ``name``."""
        if self.has(name):
            return self._shown
        if self.brought is not None:
            return self.brought
        records = () if (manifest := self.manifest()) is None else manifest.files
        nodes = [record.node for record in records if record.path == f"{self.name}/{name}"]
        if nodes and nodes[0] is not None:
            raise IncompatibleCheckpointError(
                f"checkpoint {self.uri!r}: its file {name!r} was saved to the disk of node {nodes[0]} of its run, and "
                f"is not on this one. {ON_ALL_NODES}"
            )
        return self.path

    def fetch(self, name: str, digest: FileDigest | None, target: Path) -> None:
        shutil.copyfile(self._shown / name, target)
        if digest is not None:
            verify_file(target, digest)

    def claim(self, *, overwrite: bool) -> Claim:
        while True:
            number = secrets.token_hex(8)
            suffix = f"_{number[:8]}" if overwrite else ""  # in a bucket they come beside the files that they replace
            claim = Claim(f".{self.path.name}.saving-{number}", suffix)
            if self._claimed_as(claim, overwrite=overwrite):
                return claim

    def join(self, claim: Claim, *, overwrite: bool) -> None:
        """Take part in a save that another process has begun, for the disk that this one writes to.

        Raises:
            CheckpointExistsError: as :meth:`check_free`.
            FileExistsError: it is the disk of that process, too.
        """
        try:
            joined = self._claimed_as(claim, overwrite=overwrite)
        except FileExistsError as e:
            raise FileExistsError(
                errno.EEXIST,
                "the nodes had folders of their own when the run began, and now one of them has made this for another. "
                "Start the run again when all nodes see what they are to see. It is there already",
                str(self.path.with_name(claim.place)),
            ) from e
        if not joined:
            raise FileNotFoundError(errno.ENOENT, "another process has swept what was made for it", str(self.path))

    def _claimed_as(self, claim: Claim, *, overwrite: bool) -> bool:
        self.check_free(overwrite=overwrite)
        self._overwrite = overwrite
        make_folder(self.path.parent)
        end_dead_saves(self._root, self.name)
        place = self.path.with_name(claim.place)
        place.mkdir()
        try:
            self._lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # swept by another save, which saw it before it could be locked
            return False
        with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        if place.is_dir():
            self._claimed = place.name
            return True
        self._unlock()  # a sweep was faster than our lock: it takes another name
        return False

    def write(self, claim: Claim, name: str, most_bytes: int, fill: Callable[[Sink], object]) -> FileDigest:
        place = self.path.with_name(claim.place)
        if not place.is_dir():
            raise FileNotFoundError(
                errno.ENOENT,
                "the first rank made this directory, and here it is not: each rank writes its part of a sharded "
                "checkpoint. Give a folder on a file system that all nodes share, or a bucket; or "
                "state_dict_type='full', with which rank 0 writes one file. Not here",
                str(place),
            )
        return write_file(place / name, most_bytes, fill)

    def commit(self, claim: Claim, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object]) -> None:
        with self._staged(index, self._manifest_of(index, files, facts, self.record)) as commit:
            commit.commit()
        self._unlock()

    def sealed(
        self, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object], nodes: Mapping[str, int]
    ) -> Sealed:
        """What all disks get; ``nodes`` are those whose disks have each of ``files``."""
        return Sealed(index, self._manifest_of(index, files, facts, self.record, nodes))

    def prepare(self, sealed: Sealed, node: int) -> None:
        """Make all of this disk's part durable, so that nothing is left but to rename it."""
        self._prepared = self._staged(sealed.index, dataclasses.replace(sealed.manifest, node=node))

    def complete(self) -> None:
        """Give this disk's part, which is prepared, its name and its commit record."""
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        with prepared:
            prepared.commit()
        self._unlock()

    def _staged(self, index: bytes, manifest: Manifest) -> FolderCommit:
        """The commit, prepared: the index in its place, and the commit record under a temporary name."""
        self.check_free(overwrite=self._overwrite)  # another process may have saved here meanwhile
        place = self.path.with_name(self._claimed)
        with (place / INDEX).open("xb") as file:
            file.write(index)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(place)
        with contextlib.ExitStack() as stack:
            commit = FolderCommit({self.path: place}, self._manifest_path, overwrite=self._overwrite)
            stack.enter_context(commit)
            commit.prepare(manifest)
            stack.pop_all()
            return commit

    def abandon(self, claim: Claim) -> None:
        if self._claimed == claim.place:  # only one process removes what all have written to this disk
            if self._prepared is not None:
                with self._prepared:
                    self._prepared = None
            _remove_folder(self.path.with_name(claim.place))
            self._unlock()
            self._claimed = ""

    def close(self) -> None:
        if self._prepared is not None:  # it is not known here how the save ended: the next start finds out
            self._prepared.leave()
            with self._prepared:
                self._prepared = None
            self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_folder(folder: Path) -> None:
    """Remove a directory that nobody needs. What cannot be removed is logged: it is not a checkpoint."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as e:
        log.warning("%s cannot be removed and is left behind: %s", folder, e)
