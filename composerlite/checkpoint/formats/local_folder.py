"""The directory of a sharded checkpoint on a disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import final

from composerlite.checkpoint.formats.checkpoint_folder import (
    INDEX,
    MANIFESTS,
    SUFFIX,
    CheckpointFolder,
    Claim,
    checked_record,
    write_file,
)
from composerlite.checkpoint.formats.torch_reader import ByteSource
from composerlite.checkpoint.manifest import Manifest
from composerlite.errors import ConfigError
from composerlite.storage import (
    FileDigest,
    ParallelReader,
    Sink,
    StagedFile,
    atomic_write,
    fsync_folder,
    make_folder,
    verify_file,
)

__all__ = ["SAVING", "LocalFolder", "remove_folder", "take_name"]

log = logging.getLogger(__name__)
SAVING = re.compile(r"\.(.+)\.saving-[0-9a-f]{16}(?:-old|-failed)?")
"""The name of a directory that is being written, and in it that which it will have."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@final
class LocalFolder(CheckpointFolder):
    """A directory of this machine, or one that all machines mount.

    A save is written to ``.<name>.saving-<id>`` beside it, which is locked as long as the process lives, and renamed.

    Args:
        path: of the directory.
        root: the folder of checkpoints that it is in; ``None``: that above it.

    Attributes:
        record: what the commit record says besides files, at the next commit; ``None``: as little as can be.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = Path(os.path.realpath(path))
        self._root = self.path.parent if root is None else Path(os.path.realpath(root))
        self.name = str(self.path.relative_to(self._root)) if root is not None else self.path.name
        self.record: Manifest | None = None
        if not self.name:
            raise ConfigError(f"{str(path)!r} is no directory for a checkpoint: give one below it.")
        self._lock = -1
        self._claimed = ""
        self._overwrite = False

    @property
    def uri(self) -> str:
        return str(self.path)

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
            data = self._manifest_path.read_bytes()
        except FileNotFoundError:
            return None
        return checked_record(Manifest.from_json(data, str(self._manifest_path)), self.name, str(self._manifest_path))

    def index(self) -> bytes:
        return (self.path / INDEX).read_bytes()

    @contextlib.contextmanager
    def opened(self, name: str, digest: FileDigest | None, *, threads: int) -> Generator[ByteSource]:
        with ParallelReader(self.path / name, digest, threads=threads) as reader:
            yield reader

    def fetch(self, name: str, digest: FileDigest | None, target: Path) -> None:
        shutil.copyfile(self.path / name, target)
        if digest is not None:
            verify_file(target, digest)

    def claim(self, *, overwrite: bool) -> Claim:
        self.check_free(overwrite=overwrite)
        self._overwrite = overwrite
        make_folder(self.path.parent)
        self.sweep()
        while True:
            place = self.path.with_name(f".{self.path.name}.saving-{secrets.token_hex(8)}")
            place.mkdir()
            self._lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if place.is_dir():
                self._claimed = place.name
                return Claim(place.name, "")
            self._unlock()  # a sweep was faster than our lock: take another name

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
        place = self.path.with_name(claim.place)
        self.check_free(overwrite=self._overwrite)  # another process may have saved here meanwhile
        with (place / INDEX).open("xb") as file:
            file.write(index)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(place)
        make_folder(self._manifest_path.parent)
        with StagedFile(self._manifest_path) as intention:
            intention.file.write(self._manifest_of(index, files, facts, self.record).to_json())
            intention.flush()
            before = self._manifest_path.read_bytes() if self._manifest_path.exists() else None
            self._manifest_path.unlink(missing_ok=True)
            fsync_folder(self._manifest_path.parent)
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
        if self._claimed == claim.place:  # only one process removes what all have written
            remove_folder(self.path.with_name(claim.place))
            self._unlock()
            self._claimed = ""

    def sweep(self) -> None:
        """Remove what saves of dead processes have left."""
        for place in self.path.parent.glob(f".{glob.escape(self.path.name)}.saving-*"):
            try:
                descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(place)
                log.info("removed %s, left by a process that died while it saved", place)
            except OSError:  # its process lives, or nothing can be proven dead here
                continue
            finally:
                os.close(descriptor)

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
