"""LocalObjectStore: objects that are the files below a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, final

from composerlite.errors import ObjectStoreError, ObjectStoreTransientError, checked_arguments
from composerlite.storage.disk.files import TEMPORARY, StagedFile, abandoned_temporaries, fsync_folder, make_folder
from composerlite.storage.part_uploads import FileSource
from composerlite.storage.stores.base import ABSENT, PIECE_BYTES, Entry, Meaning, MultipartStore, files_below

_PARTS = ".composerlite-parts"
"""Folder of the parts of unfinished uploads; it is beside the objects, so that it is on their file system."""
_TRANSIENT = {errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH}
"""Errors of network file systems when a server is away for a moment."""
_LINK = "a symbolic link in a store of files is neither an object nor a folder of some"


@final
class LocalObjectStore(MultipartStore):
    """Keeps objects as the files below ``folder``, for a disk of this machine or one that all machines mount.

    Objects appear atomically and are durable when a verb returns. Symbolic links below ``folder`` are neither
    followed nor listed: no name leads out of it. As files and folders share their names, ``a`` and ``a/b`` cannot both
    be objects (ObjectStoreError). What writers that were killed left behind is swept by :meth:`check_writable`.

    Args:
        folder: exists, and is not made: that it is missing is what a missing bucket is.
    """

    _reserved = re.compile(f"{re.escape(_PARTS)}|{TEMPORARY.pattern}")

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

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _upload(self, key: str, source: FileSource, version: str | None) -> None:
        with self._staged(self.folder / key) as staged:
            while piece := source.read(PIECE_BYTES):
                staged.file.write(piece)
            staged.flush()
            staged.publish(overwrite=version != ABSENT)

    def _put(self, key: str, data: memoryview, version: str | None = None) -> None:
        path = self.folder / key
        if version:
            # Open for writing: NFS locks nothing else. A lock of another swap is an ObjectStoreTransientError.
            with self._opened(key), path.open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._check_version(key, version)
                self._put(key, data)
            return
        with self._staged(path) as staged:
            staged.file.write(data)
            staged.flush()
            staged.publish(overwrite=version != ABSENT)

    def _read(self, key: str, offset: int, size: int | None, version: Callable[[str], object]) -> Generator[bytes]:
        with self._opened(key) as file:
            status = os.fstat(file.fileno())
            version(f"{status.st_ino} {status.st_mtime_ns} {status.st_size}")
            file.seek(offset)
            left = status.st_size if size is None else size
            while left and (piece := file.read(min(left, PIECE_BYTES))):
                left -= len(piece)
                yield piece

    def _tail(self, key: str, most_bytes: int) -> tuple[int, bytes]:
        with self._opened(key) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most_bytes))
            return size, file.read(most_bytes)

    def _size(self, key: str) -> int:
        with self._opened(key) as file:
            return os.fstat(file.fileno()).st_size

    def _list(self, prefix: str, *, level: bool = False) -> Iterable[Entry]:
        self._check_there()
        return files_below(self._entries, prefix, level=level)

    def _delete(self, key: str) -> None:
        path = self.folder / key
        self._check_there()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):  # there is no object
            self._check_no_link(path.parent)
            path.unlink()
            fsync_folder(path.parent)
            self._remove_empty(path.parent)

    def _is_folder(self, key: str) -> bool:
        return (self.folder / key).is_dir()

    def _check_writable(self, key: str) -> None:
        path = self.folder / key
        with self._staged(path) as staged:
            staged.file.write(b"check")
            staged.flush()
        for folder, _, _ in [*os.walk(path.parent), (self.folder / _PARTS, [], [])]:
            for temporary in abandoned_temporaries(Path(folder)):
                temporary.unlink(missing_ok=True)
        self._remove_empty(path.parent)

    # ── parts: ``<upload_id>`` holds the name, ``<upload_id>.<number>`` a part ───────────────────────────────────
    def _start(self, key: str) -> tuple[str, datetime]:
        upload_id = f"{time.time_ns():020}-{secrets.token_hex(4)}"
        with self._staged(self.folder / _PARTS / upload_id) as staged:
            staged.file.write(key.encode())
            staged.flush()
            staged.publish()
        return upload_id, _started_at(upload_id)

    def _unfinished(self, prefix: str) -> Iterable[tuple[str, str, datetime]]:
        self._check_there()
        for path in (self.folder / _PARTS).glob("*"):
            if re.fullmatch(r"\d{20}-[0-9a-f]{8}", path.name):
                with contextlib.suppress(FileNotFoundError):  # ended since
                    if (key := path.read_text()).startswith(prefix):
                        yield key, path.name, _started_at(path.name)

    def _list_parts(self, key: str, upload_id: str) -> dict[int, Path]:
        self._check_known(upload_id)
        return {int(path.suffix[1:]): path for path in (self.folder / _PARTS).glob(f"{upload_id}.*")}

    def _recognized(self, part: Path, data: memoryview) -> Path | None:
        with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
            pieces = range(0, data.nbytes, PIECE_BYTES)
            if os.fstat(file.fileno()).st_size == data.nbytes and all(
                memoryview(file.read(PIECE_BYTES)) == data.cast("B")[at : at + PIECE_BYTES] for at in pieces
            ):
                return part
        return None

    def _send_part(self, key: str, upload_id: str, number: int, data: memoryview) -> Path:
        self._check_known(upload_id)
        part = self.folder / _PARTS / f"{upload_id}.{number:05}"
        # Not made durable: a part that a crash damages is one that is not recognized.
        with StagedFile(part) as staged:
            staged.file.write(data)
            staged.file.flush()
            staged.publish()
        return part

    def _complete(self, key: str, upload_id: str, parts: Sequence[Path], *, create_only: bool) -> None:
        self._check_known(upload_id)
        with self._staged(self.folder / key) as staged:
            for path in parts:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, staged.file, PIECE_BYTES)
            staged.flush()
            staged.publish(overwrite=not create_only)
        self._abort(key, upload_id)

    def _abort(self, key: str, upload_id: str) -> None:
        # The name goes last: an abort that is killed is found among the unfinished and ended by the next.
        for part in (self.folder / _PARTS).glob(f"{upload_id}.*"):
            part.unlink(missing_ok=True)
        (self.folder / _PARTS / upload_id).unlink(missing_ok=True)

    def _check_known(self, upload_id: str) -> None:
        if not (self.folder / _PARTS / upload_id).exists():
            raise FileNotFoundError(errno.ENOENT, "the upload was completed or aborted")

    # ── files and folders ────────────────────────────────────────────────────────────────────────────────────────
    def _check_there(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder of the store does not exist")

    def _check_no_link(self, folder: Path) -> None:
        """See that no folder from that of the store down to ``folder`` is a link. ``folder`` need not exist."""
        if self._is_behind_link(folder):
            raise OSError(errno.ELOOP, _LINK)

    def _is_behind_link(self, folder: Path) -> bool:
        """Return true if a folder from that of the store down to ``folder`` is a link."""
        while folder != self.folder:
            if folder.is_symlink():
                return True
            folder = folder.parent
        return False

    @contextlib.contextmanager
    def _opened(self, key: str) -> Generator[IO[bytes]]:
        """Open the file of an object."""
        path = self.folder / key
        self._check_there()
        try:
            self._check_no_link(path.parent)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise FileNotFoundError(errno.ENOENT, "there is no such object") from e
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "this is no file, and so no object")
        with os.fdopen(descriptor, "rb") as file:
            yield file

    @contextlib.contextmanager
    def _staged(self, path: Path) -> Generator[StagedFile]:
        """Open a file that will have the name ``path``, in a folder that is made where it is missing."""
        for tries_left in reversed(range(100)):  # who deletes a folder's last object removes it: make it once more
            self._check_there()
            self._check_no_link(path.parent)
            try:
                make_folder(path.parent)
                staged = StagedFile(path)
                break
            except FileExistsError as e:
                raise NotADirectoryError(errno.ENOTDIR, "a part of the name is an object") from e
            except FileNotFoundError:
                if not tries_left:
                    raise
        else:
            raise AssertionError("the last try returns or raises")
        with staged:
            yield staged

    def _remove_empty(self, folder: Path) -> None:
        """Remove ``folder`` and those above it that hold nothing, down from that of the store."""
        with contextlib.suppress(OSError):  # it holds something, or may not be removed: it does no harm
            while folder != self.folder:
                folder.rmdir()
                folder = folder.parent

    def _entries(self, folder: str) -> Iterator[Entry]:
        """Yield the files and folders in ``folder`` that are objects and folders of some."""
        if self._is_behind_link(self.folder / folder):
            return
        try:
            entries = list(os.scandir(self.folder / folder))
        except (FileNotFoundError, NotADirectoryError):  # there is none, or no more
            return
        for entry in entries:
            key = f"{folder}/{entry.name}" if folder else entry.name
            if self._reserved.fullmatch(entry.name) or not _is_text(key):
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
        cause = error.strerror or str(error)
        for kind in (FileNotFoundError, FileExistsError):
            if isinstance(error, kind):
                return kind, f"{cause}."
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            return PermissionError, f"{cause}."
        if error.errno in _TRANSIENT:
            return ObjectStoreTransientError, f"{cause}."
        if isinstance(error, IsADirectoryError | NotADirectoryError):
            cause += ": a name cannot be that of an object and of a folder of objects"
        return ObjectStoreError, f"{cause}."


def _started_at(upload_id: str) -> datetime:
    return datetime.fromtimestamp(int(upload_id[:20]) / 1e9, UTC)


def _is_text(name: str) -> bool:
    """Return true if ``name`` can be written as UTF-8. A file whose name cannot is no object."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
