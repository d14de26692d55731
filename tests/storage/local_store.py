"""LocalObjectStore: a store without a service, whose objects are the files below a folder."""

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
from composerlite.storage.disk.files import (
    StagedFile,
    abandoned_temporaries,
    final_name,
    fsync_folder,
    is_temporary,
    make_folder,
)
from composerlite.storage.object_store import ObjectInfo, is_name, span_of
from composerlite.storage.stores.base import ABSENT, PIECE_BYTES, BackendStore, Meaning

_TRANSIENT = {errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH}
"""Errors of network file systems when a server is away for a moment."""


@final
class LocalObjectStore(BackendStore):
    """Keeps objects as the files below ``folder``, on a disk of this machine or one that all machines mount.

    Objects appear atomically and are durable when a method returns. Symbolic links are neither followed nor listed. As
    files and folders share their names, ``a`` and ``a/b`` cannot both be objects (ObjectStoreError). The temporary
    files of killed writers are :meth:`unfinished_parts`.

    Args:
        folder: must exist. A missing folder is a missing bucket.
    """

    creates_atomically = swaps_atomically = True

    @checked_arguments
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        super().__init__(f"{self.folder.as_uri()}/")

    def get_uri(self, name: str) -> str:
        return (self.folder / name).as_uri()

    def _key(self, name: str) -> str:
        key = super()._key(name)
        if _has_temporary(key):
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
                if self.read_versioned(key)[1] != version:
                    raise FileExistsError
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
            yield _version(file), total
            start, end = span_of(offset, size, total)
            file.seek(start)
            while start < end and (piece := file.read(min(end - start, PIECE_BYTES))):
                start += len(piece)
                yield piece

    def _stat(self, key: str) -> tuple[str, int]:
        with self._opened(key) as file:
            return _version(file), os.fstat(file.fileno()).st_size

    def _list(self, prefix: str, *, level: bool) -> Iterable[ObjectInfo]:
        return (entry for entry in self._files(prefix, level=level) if not _has_temporary(entry.name))

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
        for entry in self._files("", level=False):
            folder, slash, last = entry.name.rpartition("/")
            if is_temporary(last) and entry.modified_at is not None:
                key = f"{folder}{slash}{final_name(last)}"
                path = self.folder / entry.name
                if key.startswith(prefix) and path in abandoned_temporaries(path.parent):
                    yield key, entry.name, entry.modified_at

    def _abort(self, key: str, upload_id: str) -> None:
        (self.folder / upload_id).unlink()

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
            raise FileNotFoundError(errno.ENOENT, "this is not a file and therefore not an object")
        with os.fdopen(descriptor, "rb") as file:
            yield file

    def _files(self, prefix: str, *, level: bool) -> Iterator[ObjectInfo]:
        """List files whose keys begin with ``prefix``, in all folders; with ``level`` files and folders of one folder.

        Temporary files are listed, too.
        """
        folder = prefix.rpartition("/")[0]
        if folder and any(part in ("", ".", "..") for part in folder.split("/")):
            return  # no name begins like that
        folders = [folder]
        while folders:
            for entry in self._entries(folders.pop()):
                if level or not entry.name.endswith("/"):
                    if entry.name.startswith(prefix):
                        yield entry
                elif entry.name.startswith(prefix) or prefix.startswith(entry.name):
                    folders.append(entry.name.removesuffix("/"))

    def _entries(self, folder: str) -> Iterator[ObjectInfo]:
        """Yield the files and folders in ``folder``. The names of folders end with a slash."""
        self._path("x")
        try:
            entries = list(os.scandir(self._path(f"{folder}/x" if folder else "x").parent))
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return
            raise
        for entry in entries:
            key = f"{folder}/{entry.name}" if folder else entry.name
            if not is_name(key):  # such as a name that is not UTF-8
                continue
            if entry.is_dir(follow_symlinks=False):
                yield ObjectInfo(f"{key}/", 0)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted since
                    status = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))

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


def _has_temporary(key: str) -> bool:
    """Return true if a part of ``key`` is the name of a temporary file or folder."""
    return any(is_temporary(part) for part in key.split("/"))
