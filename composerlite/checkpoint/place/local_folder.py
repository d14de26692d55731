"""The directory of a sharded checkpoint on a disk."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import glob
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

from composerlite.checkpoint.place.checkpoint_folder import (
    INDEX,
    MANIFESTS,
    SUFFIX,
    CheckpointFolder,
    Claim,
    Sealed,
    checked_record,
    write_file,
)
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.storage import (
    FileDigest,
    ParallelReader,
    Sink,
    StagedFile,
    atomic_write,
    fsync_folder,
    is_abandoned,
    make_folder,
    read_small_file,
    verify_file,
)

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = ["ON_ALL_NODES", "SAVING", "LocalFolder", "remove_folder", "take_name"]

log = logging.getLogger(__name__)
SAVING = re.compile(r"\.(.+)\.saving-[0-9a-f]{16}(?:-old|-failed)?")
"""The name of a directory that is being written, and in it that which it will have."""
ON_ALL_NODES = (
    "Load it on all the nodes that saved it, or copy the files of all of them to one folder; save to a folder that all "
    "nodes share, or to a bucket, to be free of that."
)
"""What to do about files on the disks of other nodes."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


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
        self.path = Path(os.path.realpath(path))
        self._root = self.path.parent if root is None else Path(os.path.realpath(root))
        self.name = str(self.path.relative_to(self._root)) if root is not None else self.path.name
        self.record: Manifest | None = None
        if not self.name:
            raise ConfigError(f"{str(path)!r} is no directory for a checkpoint: give one below it.")
        self.brought: Path | None = None
        self._lock = -1
        self._claimed = ""
        self._overwrite = False
        self._prepared: StagedFile | None = None

    @property
    def uri(self) -> str:
        return str(self.path)

    def identity(self) -> str:
        seen = [(self.path / name).stat() for name in ("", INDEX)]  # a network file system shows all machines the same
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
        return self._root / MANIFESTS / f"{self.name}.json"

    def manifest(self) -> Manifest | None:
        try:
            data = read_small_file(self._manifest_path)
        except FileNotFoundError:
            return None
        return checked_record(Manifest.from_json(data, str(self._manifest_path)), self.name, str(self._manifest_path))

    def index(self) -> bytes:
        return (self.path / INDEX).read_bytes()

    def has(self, name: str) -> bool:
        """Whether the file ``name`` is on this disk."""
        return (self.path / name).exists()

    @contextlib.contextmanager
    def opened(self, name: str, digest: FileDigest | None, *, threads: int) -> Generator[ByteSource]:
        with ParallelReader(self._place_of(name) / name, digest, threads=threads) as reader:
            yield reader

    def _place_of(self, name: str) -> Path:
        """The folder that has the file ``name``."""
        if self.has(name):
            return self.path
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
        shutil.copyfile(self.path / name, target)
        if digest is not None:
            verify_file(target, digest)

    def claim(self, *, overwrite: bool) -> Claim:
        while True:
            claim = Claim(f".{self.path.name}.saving-{secrets.token_hex(8)}", "")
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
        self.sweep()
        place = self.path.with_name(claim.place)
        place.mkdir()
        self._lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
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
        self.check_free(overwrite=self._overwrite)  # another process may have saved here meanwhile
        with self._staged(index, self._manifest_of(index, files, facts, self.record)) as intention:
            before = self._record()
            self._manifest_path.unlink(missing_ok=True)
            fsync_folder(self._manifest_path.parent)
            self._take_over(intention, before)

    def sealed(
        self, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object], nodes: Mapping[str, int]
    ) -> Sealed:
        """What all disks get; ``nodes`` are those whose disks have each of ``files``."""
        return Sealed(index, self._manifest_of(index, files, facts, self.record, nodes))

    def prepare(self, sealed: Sealed, node: int) -> None:
        """Make all of this disk's part durable, so that nothing is left but to rename it."""
        self.check_free(overwrite=self._overwrite)
        self._prepared = self._staged(sealed.index, dataclasses.replace(sealed.manifest, node=node))
        fsync_folder(self._manifest_path.parent)

    def complete(self) -> None:
        """Give this disk's part, which is prepared, its name and its commit record."""
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        with prepared:
            self._take_over(prepared, self._record())  # which stays until then: there is the old one or the new one

    def _staged(self, index: bytes, manifest: Manifest) -> StagedFile:
        """The index in its place, and the commit record under a temporary name; both durable."""
        place = self.path.with_name(self._claimed)
        with (place / INDEX).open("xb") as file:
            file.write(index)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(place)
        make_folder(self._manifest_path.parent)
        with contextlib.ExitStack() as stack:
            intention = stack.enter_context(StagedFile(self._manifest_path))
            intention.file.write(manifest.to_json())
            intention.flush()
            stack.pop_all()
            return intention

    def _record(self) -> bytes | None:
        return self._manifest_path.read_bytes() if self._manifest_path.exists() else None

    def _take_over(self, intention: StagedFile, before: bytes | None) -> None:
        """Replace what has this name, and the commit record ``before``, by what is staged."""
        place = self.path.with_name(self._claimed)
        intention.leave_behind()  # a kill from here on leaves what completes the commit at the next start
        old = take_name(place, self.path)
        try:
            fsync_folder(self.path.parent)
            intention.publish()
        except BaseException:
            self._give_name_back(place, old, before)
            raise
        self._unlock()
        if old is not None:
            self._remove_old(old)

    def _give_name_back(self, place: Path, old: Path | None, manifest: bytes | None) -> None:
        """Undo a commit that failed halfway."""
        failed = place.with_name(f"{place.name}-failed")
        self.path.rename(failed)
        if old is not None:
            old.rename(self.path)
        if manifest is not None:
            with atomic_write(self._manifest_path) as file:
                file.write(manifest)
        remove_folder(failed)

    def _remove_old(self, old: Path) -> None:
        """Remove the checkpoint that was replaced; what is not part of it goes to where it was."""
        for entry in list(old.iterdir()):
            if entry.name != INDEX and not entry.name.endswith(SUFFIX):
                entry.replace(self.path / entry.name)
        remove_folder(old)

    def abandon(self, claim: Claim) -> None:
        if self._claimed == claim.place:  # only one process removes what all have written to this disk
            if self._prepared is not None:
                with self._prepared:
                    self._prepared = None
            remove_folder(self.path.with_name(claim.place))
            self._unlock()
            self._claimed = ""

    def close(self) -> None:
        if self._prepared is not None:  # it is not known here how the save ended: the next start finds out
            self._prepared.leave_behind()
            with self._prepared:
                self._prepared = None
            self._unlock()

    def sweep(self) -> None:
        """Remove what saves of dead processes have left."""
        for place in self.dead_saves():
            remove_folder(place)
            log.info("removed %s, left by a process that died while it saved", place)

    def dead_saves(self) -> Iterator[Path]:
        """What saves of dead processes have left; each is locked while the caller looks at it."""
        for place in self.path.parent.glob(f".{glob.escape(self.path.name)}.saving-*"):
            with is_abandoned(place) as dead:
                if dead and SAVING.fullmatch(place.name) and place.is_dir():
                    yield place

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def take_name(place: Path, path: Path) -> Path | None:
    """Rename the directory ``place`` to ``path``; where the one is that was there, unless it was empty."""
    try:
        place.rename(path)  # an empty directory is replaced
        return None
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _exchange(place, path):
        return place
    old = place.with_name(f"{place.name}-old")
    path.rename(old)
    place.rename(path)
    return old


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names at one instant; whether the system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))


def remove_folder(folder: Path) -> None:
    """Remove a directory that nobody needs. What cannot be removed is logged: it is not a checkpoint."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as e:
        log.warning("%s cannot be removed and is left behind: %s", folder, e)
