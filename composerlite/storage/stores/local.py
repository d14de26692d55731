"""LocalObjectStore: objects that are the files below a folder."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Generator, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, final

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError, checked_arguments
from composerlite.storage.disk.files import StagedFile, abandoned_temporaries, atomic_write, fsync_folder, make_folder
from composerlite.storage.object_store import ObjectInfo, ObjectStore, PartUpload, Progress, check_name

__all__ = ["LocalObjectStore"]

_PARTS = ".composerlite-parts"
"""Folder of the parts of unfinished uploads; it is beside the objects, so that it is on their file system."""
_OURS = re.compile(rf"{re.escape(_PARTS)}|\..+\.tmp-[0-9a-f]{{16}}")
"""Files and folders that are no objects: what is being written."""
_PIECE_BYTES = 1 << 20
_TRANSIENT = {errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH}
"""What network file systems say when a server is away for a moment."""
_LINK = "a symbolic link in a store of files is neither an object nor a folder of some"


@final
class LocalObjectStore(ObjectStore):
    """Keeps objects as the files below ``folder``, for a disk of this machine or one that all machines mount.

    Objects appear atomically and are durable when a verb returns. Symbolic links below ``folder`` are neither
    followed nor listed: no name leads out of it. As files and folders share their names, ``a`` and ``a/b`` cannot both
    be objects (ObjectStoreError). What writers that were killed left behind is swept by :meth:`check_writable`.

    Args:
        folder: exists, and is not made: that it is missing is what a missing bucket is.
    """

    @checked_arguments
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self._files = _Folder(self.folder)

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> LocalObjectStore:
        return cls(bucket, **backend_kwargs)

    @property
    def creates_atomically(self) -> bool:
        return True

    def get_uri(self, name: str) -> str:
        return self._files.path(name).as_uri()

    def upload_object(self, name: str, filename: str | Path, callback: Progress | None = None) -> None:
        path = self._files.path(name)
        with (
            Path(filename).open("rb") as source,
            self._files.translated("upload", name),
            self._files.staged(path) as staged,
        ):
            _copy(source, staged.file, os.fstat(source.fileno()).st_size, callback)
            staged.flush()
            staged.publish()

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        path = self._files.path(name)
        with self._files.translated("put", name), self._files.staged(path) as staged:
            staged.file.write(data)
            staged.flush()
            if create_only:
                os.link(staged.temporary, path)
                fsync_folder(path.parent)
            else:
                staged.publish()

    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        target = Path(filename)
        if target.exists() and not overwrite:
            raise FileExistsError(f"{target} is there already: pass overwrite=True to replace it.")
        with self._files.opened("download", name) as source, atomic_write(target) as file:
            _copy(source, file, os.fstat(source.fileno()).st_size, callback)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        with self._files.opened("read", name) as file, self._files.translated("read", name):
            file.seek(offset)
            return file.read(size)

    def get_object_size(self, name: str) -> int:
        with self._files.opened("look at", name) as file:
            return os.fstat(file.fileno()).st_size

    def list_objects(self, prefix: str = "", *, start_after: str = "") -> Sequence[ObjectInfo]:
        with self._files.translated("list", prefix):
            self._files.check_there()
            found = self._files.below(prefix.rpartition("/")[0], prefix)
            return sorted((info for info in found if info.name > start_after), key=lambda info: info.name)

    def delete_object(self, name: str) -> None:
        path = self._files.path(name)
        with self._files.translated("delete", name):
            self._files.check_there()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):  # there is no object
                self._files.check_no_link(path.parent)
                path.unlink()
                fsync_folder(path.parent)
                self._files.remove_empty(path.parent)

    def check_writable(self, prefix: str) -> None:
        # Beside what will be written: in the folder of that name if there is one.
        inside = not prefix or prefix.endswith("/") or (self.folder / prefix).is_dir()
        name = f"{prefix.rstrip('/')}/check".lstrip("/") if inside else f"{prefix}.check"
        path = self._files.path(name)
        with self._files.translated("check that one can write below", prefix):
            with self._files.staged(path) as staged:
                staged.file.write(b"check")
                staged.flush()
            for folder, _, _ in [*os.walk(path.parent), (self.folder / _PARTS, [], [])]:
                for temporary in abandoned_temporaries(Path(folder)):
                    temporary.unlink(missing_ok=True)
            self._files.remove_empty(path.parent)

    def close(self) -> None:
        """There is nothing to let go of."""

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    def start_parts(self, name: str) -> PartUpload:
        self._files.path(name)
        upload_id = f"{time.time_ns():020}-{secrets.token_hex(4)}"
        with (
            self._files.translated("start the parts of", name),
            self._files.staged(self.folder / _PARTS / upload_id) as staged,
        ):
            staged.file.write(name.encode())
            staged.flush()
            staged.publish()
        return _LocalParts(self._files, name, upload_id)

    def unfinished_parts(self, prefix: str) -> Sequence[PartUpload]:
        with self._files.translated("list the parts of", prefix):
            self._files.check_there()
            if not (self.folder / _PARTS).is_dir():
                return ()
            uploads = self._uploads()
            return [_LocalParts(self._files, name, upload_id) for upload_id, name in uploads if name.startswith(prefix)]

    def _uploads(self) -> Iterator[tuple[str, str]]:
        """Id and name of every unfinished upload, oldest first."""
        for path in sorted((self.folder / _PARTS).iterdir()):
            if re.fullmatch(r"\d{20}-[0-9a-f]{8}", path.name):
                with contextlib.suppress(FileNotFoundError):  # ended since
                    yield path.name, path.read_text()


@final
class _Folder:
    """A folder whose files are objects: their paths, how they are opened and made, and what its errors become."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """The file of the object ``name``."""
        for part in check_name(name).split("/"):
            if _OURS.fullmatch(part):
                raise ConfigError(f"object name {name!r}: {part!r} is a name for what is not written to its end yet.")
        return self.root / name

    def check_there(self) -> None:
        if not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder of the store does not exist")

    def check_no_link(self, folder: Path) -> None:
        """See that no folder from that of the store down to ``folder`` is a link. ``folder`` need not exist."""
        if self.is_behind_link(folder):
            raise OSError(errno.ELOOP, _LINK)

    def is_behind_link(self, folder: Path) -> bool:
        """Whether a folder from that of the store down to ``folder`` is a link."""
        while folder != self.root:
            if folder.is_symlink():
                return True
            folder = folder.parent
        return False

    @contextlib.contextmanager
    def opened(self, operation: str, name: str) -> Generator[IO[bytes]]:
        """The file of the object ``name``, to be read."""
        path = self.path(name)
        with self.translated(operation, name):
            self.check_there()
            try:
                self.check_no_link(path.parent)
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError) as e:
                raise FileNotFoundError(errno.ENOENT, "there is no such object") from e
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileNotFoundError(f"{operation} {self.root / name}: this is no file, and so no object.")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def staged(self, path: Path) -> Generator[StagedFile]:
        """A file that will have the name ``path``, in a folder that is made where it is missing."""
        staged = None
        for tries_left in reversed(range(100)):  # who deletes a folder's last object removes it: make it once more
            self.check_there()
            self.check_no_link(path.parent)
            try:
                make_folder(path.parent)
                staged = StagedFile(path)
                break
            except FileExistsError as e:
                raise NotADirectoryError(errno.ENOTDIR, "a part of the name is an object") from e
            except FileNotFoundError:
                if not tries_left:
                    raise
        assert staged is not None
        with staged:
            yield staged

    def remove_empty(self, folder: Path) -> None:
        """Remove ``folder`` and those above it that hold nothing, down from that of the store."""
        with contextlib.suppress(OSError):  # it holds something, or may not be removed: it does no harm
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent

    def below(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """The objects in ``folder`` and below whose names begin with ``prefix``."""
        if folder and any(part in ("", ".", "..") for part in folder.split("/")):
            return  # no name begins like that
        if self.is_behind_link(self.root / folder):
            return
        try:
            entries = list(os.scandir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):  # there is none, or no more
            return
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if _OURS.fullmatch(entry.name) or not _is_text(name):
                continue
            if entry.is_dir(follow_symlinks=False):
                if f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"):
                    yield from self.below(name, prefix)
            elif name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted since
                    status = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(name, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))

    @contextlib.contextmanager
    def translated(self, operation: str, name: str) -> Generator[None]:
        """Raise the system's errors as what the verbs promise."""
        where = f"{operation} {self.root / name}"
        try:
            yield
        except FileNotFoundError as e:
            raise FileNotFoundError(f"{where}: {e.strerror or e}.") from e
        except FileExistsError as e:
            raise FileExistsError(f"{where}: the object exists already.") from e
        except OSError as e:
            cause = e.strerror or str(e)
            if isinstance(e, PermissionError) or e.errno == errno.EROFS:
                raise PermissionError(f"{where}: {cause}.") from e
            if e.errno in _TRANSIENT:
                raise ObjectStoreTransientError(f"{where}: {cause}.") from e
            if isinstance(e, IsADirectoryError | NotADirectoryError):
                cause = f"{cause}: a name cannot be that of an object and of a folder of objects"
            raise ObjectStoreError(f"{where}: {cause}.") from e


@final
class _LocalParts(PartUpload):
    """Parts that are files: ``<upload_id>`` holds the name, ``<upload_id>.<number>`` a part."""

    def __init__(self, files: _Folder, name: str, upload_id: str) -> None:
        super().__init__(name, upload_id, datetime.fromtimestamp(int(upload_id[:20]) / 1e9, UTC))
        self._files = files
        self._folder = files.root / _PARTS

    def has(self, number: int, data: memoryview) -> bool:
        with self._translated("look at part"):
            try:
                part = self._part(number).open("rb")
            except FileNotFoundError:
                return False
            with part:
                return os.fstat(part.fileno()).st_size == data.nbytes and _same(part, data.cast("B"))

    def send(self, number: int, data: memoryview) -> None:
        with self._translated("send part"):
            self._check_known()
            # Not made durable: a part that a crash damages is one that has() does not find.
            with StagedFile(self._part(number)) as staged:
                staged.file.write(data)
                staged.file.flush()
                staged.publish()

    def complete(self, *, count: int) -> None:
        with self._translated("complete"):
            self._check_known()
            with self._files.staged(self._files.root / self.name) as staged:
                for number in range(1, count + 1):
                    with self._part(number).open("rb") as part:
                        shutil.copyfileobj(part, staged.file, _PIECE_BYTES)
                staged.flush()
                staged.publish()
        self.abort()

    def abort(self) -> None:
        with self._translated("abort"), contextlib.suppress(FileNotFoundError):
            # The name goes last: an abort that is killed is found among the unfinished and ended by the next.
            for part in self._folder.glob(f"{self.upload_id}.*"):
                part.unlink(missing_ok=True)
            (self._folder / self.upload_id).unlink()

    def _part(self, number: int) -> Path:
        return self._folder / f"{self.upload_id}.{number:05}"

    def _check_known(self) -> None:
        if not (self._folder / self.upload_id).exists():
            raise FileNotFoundError(errno.ENOENT, "the upload was completed or aborted")

    def _translated(self, operation: str) -> contextlib.AbstractContextManager[None]:
        return self._files.translated(operation, self.name)


def _copy(source: IO[bytes], target: IO[bytes], size: int, callback: Progress | None) -> None:
    """Copy ``source`` to its end and tell ``callback``, also when there is nothing to copy."""
    done = 0
    while piece := source.read(_PIECE_BYTES):
        target.write(piece)
        done += len(piece)
        if callback is not None and done < size:
            callback(done, size)
    if callback is not None:
        callback(done, done)


def _same(file: IO[bytes], data: memoryview) -> bool:
    """Whether ``file`` consists of ``data``."""
    return all(
        memoryview(file.read(_PIECE_BYTES)) == data[at : at + _PIECE_BYTES]
        for at in range(0, data.nbytes, _PIECE_BYTES)
    )


def _is_text(name: str) -> bool:
    """Whether ``name`` can be written as UTF-8. A file whose name cannot is no object."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
