"""LocalObjectStore: objects that are the files below a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Generator, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, final

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError, checked_arguments
from composerlite.storage.disk.files import StagedFile, abandoned_temporaries, fsync_folder, is_temporary, make_folder
from composerlite.storage.stores.base import ABSENT, PIECE_BYTES, BackendStore, Entry, Meaning, files_below

_TRANSIENT = {errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH}
"""Errors of network file systems when a server is away for a moment."""
_ID_LENGTH = len(".tmp-0123456789abcdef")


def name_of_temporary(name: str) -> str:
    """Return the name of the file that a temporary file called ``name`` was to become."""
    return name[1:-_ID_LENGTH]


@final
class LocalObjectStore(BackendStore):
    """Keeps objects as the files below ``folder``, on a disk of this machine or one that all machines mount.

    Objects appear atomically and are durable when a method returns. Symbolic links are neither followed nor listed. As
    files and folders share their names, ``a`` and ``a/b`` cannot both be objects (ObjectStoreError). The temporary
    files of killed writers are :meth:`unfinished_parts`.

    Args:
        folder: must exist. A missing folder is a missing bucket.
    """

    @checked_arguments
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        super().__init__(f"{self.folder.as_uri()}/")

    @property
    def creates_atomically(self) -> bool:
        return True

    @property
    def swaps_atomically(self) -> bool:
        return True

    def get_uri(self, name: str) -> str:
        return (self.folder / name).as_uri()

    def _key(self, name: str) -> str:
        key = super()._key(name)
        if any(is_temporary(part) for part in key.split("/")):
            raise ConfigError(f"object name {name!r}: this is the name of an unfinished file. Choose another one.")
        return key

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _put(self, key: str, file: IO[bytes], size: int, version: str | None) -> None:
        path = self._path(key)
        with contextlib.ExitStack() as locked:
            if version:
                # NFS locks only files that are open for writing. The lock of another swap is a transient error.
                current = locked.enter_context(path.open("rb+"))
                fcntl.flock(current, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._check_version(key, version)
            try:
                make_folder(path.parent)
                staged = StagedFile(path)
            except FileExistsError as e:
                raise NotADirectoryError(errno.ENOTDIR, "a part of the name is an object") from e
            except FileNotFoundError as e:
                raise OSError(errno.EAGAIN, "the folder was removed with its last object at this moment") from e
            with staged:
                shutil.copyfileobj(file, staged.file, PIECE_BYTES)
                staged.flush()
                staged.publish(overwrite=version != ABSENT)

    def _read(self, key: str, offset: int, size: int) -> Generator[Any]:
        with self._opened(key) as file:
            total = os.fstat(file.fileno()).st_size
            start = max(0, total + offset) if offset < 0 else offset
            yield _version(file), total
            file.seek(start)
            left = min(size, total - start)
            while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
                left -= len(piece)
                yield piece

    def _stat(self, key: str) -> tuple[str, int]:
        with self._opened(key) as file:
            return _version(file), os.fstat(file.fileno()).st_size

    def _list(self, prefix: str, *, level: bool) -> Iterable[Entry]:
        self._path("x")
        return files_below(self._entries, prefix, level=level)

    def _delete(self, key: str) -> None:
        path = self._path(key)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):  # there is no object
            path.unlink()
            fsync_folder(path.parent)
        with contextlib.suppress(OSError):  # the folder has other files
            while path.parent != self.folder:
                path = path.parent
                path.rmdir()

    def _unfinished(self, prefix: str) -> Iterable[tuple[str, str, datetime]]:
        for folder, _, _ in os.walk(self.folder):
            for temporary in abandoned_temporaries(Path(folder)):
                key = temporary.relative_to(self.folder).with_name(name_of_temporary(temporary.name)).as_posix()
                if key.startswith(prefix):
                    yield key, str(temporary), datetime.fromtimestamp(temporary.lstat().st_mtime, UTC)

    def _abort(self, key: str, upload_id: str) -> None:
        Path(upload_id).unlink(missing_ok=True)

    # ── files and folders ────────────────────────────────────────────────────────────────────────────────────────
    def _path(self, key: str) -> Path:
        """Return the path of an object."""
        if not self.folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder of the store does not exist")
        path = self.folder / key
        if path.parent.resolve() != self.folder.resolve() / path.parent.relative_to(self.folder):
            raise OSError(errno.ELOOP, "a folder of the name is a symbolic link, which may lead out of the store")
        return path

    @contextlib.contextmanager
    def _opened(self, key: str) -> Generator[IO[bytes]]:
        """Open the file of an object."""
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise FileNotFoundError(errno.ENOENT, "there is no such object") from e
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "this is no file, and so no object")
        with os.fdopen(descriptor, "rb") as file:
            yield file

    def _entries(self, folder: str) -> Iterator[Entry]:
        """Yield the files and folders in ``folder`` that are objects or hold objects."""
        try:
            entries = list(os.scandir(self._path(f"{folder}/x" if folder else "x").parent))
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return
            raise
        for entry in entries:
            key = f"{folder}/{entry.name}" if folder else entry.name
            if is_temporary(entry.name) or not _is_text(key):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield Entry(key, -1, None)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted since
                    status = entry.stat(follow_symlinks=False)
                    yield Entry(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))

    def _meaning(self, error: Exception) -> Meaning | None:
        if not isinstance(error, OSError):
            return None
        cause = f"{error.strerror or error}"
        if isinstance(error, FileNotFoundError | FileExistsError):
            return type(error), cause
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            return PermissionError, cause
        if error.errno in _TRANSIENT:
            return ObjectStoreTransientError, cause
        if isinstance(error, IsADirectoryError | NotADirectoryError):
            cause += ": a name cannot be that of an object and of a folder of objects"
        return ObjectStoreError, cause


def _version(file: IO[bytes]) -> str:
    status = os.fstat(file.fileno())
    return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"


def _is_text(name: str) -> bool:
    """Return true if ``name`` can be written as UTF-8. A file with another name is no object."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
