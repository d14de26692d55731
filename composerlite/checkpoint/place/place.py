"""Place: the interface of a folder, and of the objects of a bucket below a prefix. Folder: a folder of this machine.

This module does not import torch, since a listing of checkpoints does not need torch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

from composerlite.checkpoint.place.lease import FileLease, Lease, lease_name
from composerlite.checkpoint.record.naming import new_name, relative_path
from composerlite.checkpoint.record.record import FileRecord
from composerlite.errors import ConfigError, CorruptCheckpointError
from composerlite.storage import ParallelReader, StagedFile, StreamWriter, make_folder, verify_file
from composerlite.storage.disk.files import abandoned_temporaries, fsync_folder, is_temporary, staged_symlink
from composerlite.types import Closing

if TYPE_CHECKING:
    from composerlite.checkpoint.format.byte_sources import ByteSource
    from composerlite.storage import FileDigest

log = logging.getLogger(__name__)
LINK_SUFFIX = ".symlink"
"""Suffix of an object that is a link in a bucket."""
MOST_READ_BYTES = 1 << 30
OnBytes = Callable[[int], object]
"""A callback of a transfer: called with the number of bytes of each piece, not with a total."""


class StoredFile(NamedTuple):
    """A file or an object.

    Attributes:
        path: path below the place.
        size_bytes: size in bytes.
        modified_at: time of the last write, if known.
    """

    path: str
    size_bytes: int
    modified_at: datetime | None


class NewFile(NamedTuple):
    """A file to write.

    Attributes:
        path: path below the place.
        most_bytes: upper limit of the size.
        fill: writes the content to the given sink.
        chunk_bytes: size of the chunks, each with a digest, in bytes.
    """

    path: str
    most_bytes: int
    fill: Callable[[StreamWriter], object]
    chunk_bytes: int


class Place(Closing):
    """A folder, or the objects of a bucket below a prefix. A context manager; otherwise call :meth:`close`.

    Paths are relative to the place, with slashes. A path with a slash at the beginning starts at the top of the disk or
    the bucket. FileNotFoundError means absence. All other failures of a disk or a store are raised unchanged.

    Attributes:
        reads_at_once: number of small files to read at the same time.
    """

    reads_at_once: ClassVar[int] = 1

    # ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def uri(self, path: str = "") -> str:
        """Return the URI, or the path on this machine, of ``path`` or of the place."""

    @abstractmethod
    def path_of(self, path: str) -> Path | None:
        """Return ``path`` as a path of this machine; ``None`` in a bucket."""

    @abstractmethod
    def name_of(self, path: str) -> str:
        """Return the full name of ``path``: the path from the top of the disk or the bucket, without the first slash.

        Raises:
            ConfigError: no object of a bucket can have the name.
        """

    @abstractmethod
    def inside(self, path: str) -> Place:
        """Return the place at ``path`` in this place. The result is usable until this place is closed."""

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def files(self, below: str = "") -> Mapping[str, StoredFile]:
        """Return every file below the folder ``below``, by path and in order. Hidden files are included.

        Links in a folder are left out. In a bucket links are objects, and are included. A missing folder is empty.
        """

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names of the files and folders directly in ``folder``. Empty if there is no such folder.

        Some stores list folders without objects.

        Raises:
            ConfigError: ``folder`` is a file on this machine.
        """

    def read(self, path: str) -> bytes:
        """Return the bytes of a small file, such as an index or a link.

        Raises:
            FileNotFoundError: there is no such file.
            CorruptCheckpointError: the file has more than 1 GiB.
        """
        size_bytes, data = self.end(path, MOST_READ_BYTES)
        if len(data) < size_bytes:
            raise CorruptCheckpointError(f"{self.uri(path)!r} is larger than {MOST_READ_BYTES} bytes.")
        return data

    @abstractmethod
    def end(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Return the size of a file, and its last ``most_bytes`` bytes. Raises FileNotFoundError."""

    def size(self, path: str) -> int:
        """Return the size of a file in bytes. Raises FileNotFoundError."""
        return self.end(path, 0)[0]

    def exists(self, path: str) -> bool:
        """Return true if the file exists."""
        with contextlib.suppress(FileNotFoundError):
            self.size(path)
            return True
        return False

    @abstractmethod
    def opened(
        self, path: str, digest: FileDigest | None, *, threads: int = 8
    ) -> contextlib.AbstractContextManager[ByteSource]:
        """Open a file. Every read is compared with ``digest``, if given. Raises FileNotFoundError.

        ``threads`` threads read a file on this machine. For a bucket, the first read may raise the error.
        """

    @abstractmethod
    def verify(self, record: FileRecord, progress: OnBytes = int) -> None:
        """Read a file and compare the bytes with the record.

        Raises:
            CorruptCheckpointError: the size or the bytes differ.
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def fetch(
        self, path: str, target: Path, digest: FileDigest | None, progress: OnBytes = int, *, create_only: bool = False
    ) -> None:
        """Copy a file to the local file ``target``, durable, and verified by ``digest`` if given.

        Raises:
            CorruptCheckpointError: the size or the bytes differ from ``digest``. ``target`` is unchanged.
            FileNotFoundError: there is no such file.
            FileExistsError: ``create_only`` is true, and ``target`` exists.
        """

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def write(self, file: NewFile) -> FileDigest:
        """Write a new file, durable, and return the digest. The file must not exist."""

    @abstractmethod
    def put(self, path: str, data: bytes | Path, *, create_only: bool = False, progress: OnBytes = int) -> None:
        """Write a file whole and durable, in one atomic step, from bytes or from a local file.

        An existing file is replaced. A bucket calls ``progress`` while a local file is uploaded.

        Raises:
            FileExistsError: ``create_only`` is true, and the file exists.
        """

    @abstractmethod
    def delete(self, paths: Iterable[str], *, durable: bool = False, folders: bool = False) -> None:
        """Delete files one after the other. Files behind a link, and links in a folder, stay.

        A missing file is no error.

        Args:
            paths: paths of the files.
            durable: flush the folder, so that no file comes back after a power cut.
            folders: delete folders that become empty, too.
        """

    def quarantine(self, path: str) -> None:
        """Rename a damaged file or directory to ``<path>.damaged``, with a number if that name is taken.

        A bucket has no renames: nothing happens.
        """

    # ── links, locks, leftovers ──────────────────────────────────────────────────────────────────────────────────
    def check_link(self, link: str) -> None:
        """Check that the link ``link`` can be made below the place. A link replaces only links.

        Raises:
            ConfigError: the path leaves the place, or a file has this name.
        """
        try:
            relative_path(link)
        except ValueError as e:
            raise ConfigError(f"link {link!r}: {e}. Give a name below {self.uri()}, such as 'latest-rank0.pt'.") from e

    @abstractmethod
    def pointing(self, links: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
        """Point each link to a checkpoint at the end of the block, if the block raises no error.

        ``links`` has the name of the checkpoint by the name of the link. Errors of :meth:`check_link`, and the OSError
        of a full disk, are raised before the block.
        """

    @abstractmethod
    def target_of(self, link: str) -> str:
        """Return the target of ``link``, relative to the place.

        Raises:
            FileNotFoundError: there is no such link.
        """

    @abstractmethod
    def links(self) -> Mapping[str, str]:
        """Return the target of each link in the place, also of broken links."""

    @abstractmethod
    def lock(self, name: str) -> Lease:
        """Return the lease that protects ``name``, a template of checkpoint names or of a link. Not acquired yet."""

    @abstractmethod
    def sweep(self, older_than: timedelta, *, dry_run: bool = False) -> list[StoredFile]:
        """Remove temporary files and unfinished uploads of killed processes, and return them.

        In a folder, a lock shows if the process of a temporary file is dead. In a bucket, an upload is removed if the
        upload started at least ``older_than`` ago. With ``dry_run`` nothing is removed.
        """

    def close(self) -> None:
        """Close connections. May be called twice."""


@final
class Folder(Place):
    """The checkpoints in the folder ``path``, which may be missing. Listings and deletions follow no links."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    # ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────
    def uri(self, path: str = "") -> str:
        return str(self.path / path)

    def path_of(self, path: str) -> Path:
        return self.path / path

    def name_of(self, path: str) -> str:
        return str(self.path.resolve() / path)[1:]

    def inside(self, path: str) -> Folder:
        return Folder(self.path / path)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def files(self, below: str = "") -> Mapping[str, StoredFile]:
        root = self.path / below
        if below and (root.is_symlink() or (root.exists() and not root.is_dir())):
            log.warning("ignored: %s is not a folder of this folder", root)
            return {}
        found: dict[str, StoredFile] = {}
        for path, entry in _walk(root, f"{below}/" if below else ""):
            with contextlib.suppress(FileNotFoundError):  # deleted since
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and not is_temporary(entry.name):
                    found[path] = StoredFile(path, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))
        return found

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(path.name for path in (self.path / folder).iterdir())
        except FileNotFoundError:
            return []
        except NotADirectoryError as e:
            raise ConfigError(f"{self.uri(folder)!r} is a file, not a directory of a sharded checkpoint.") from e

    def exists(self, path: str) -> bool:
        return (self.path / path).is_file()

    def end(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        target = self.path / path
        try:
            descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
        except NotADirectoryError as e:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(target)) from e
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "no file has that name", str(target))
            size = min(most_bytes, status.st_size)
            return status.st_size, os.pread(descriptor, size, status.st_size - size)
        finally:
            os.close(descriptor)

    def opened(
        self, path: str, digest: FileDigest | None, *, threads: int = 8
    ) -> contextlib.AbstractContextManager[ByteSource]:
        return ParallelReader(self.path / path, digest, threads=threads)

    def verify(self, record: FileRecord, progress: OnBytes = int) -> None:
        verify_file(self.path / record.path, record.digest, progress)

    def fetch(
        self, path: str, target: Path, digest: FileDigest | None, progress: OnBytes = int, *, create_only: bool = False
    ) -> None:
        _write(target, self.path / path, digest, progress, create_only=create_only)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def write(self, file: NewFile) -> FileDigest:
        path = self.path / file.path
        make_folder(path.parent)
        path.touch(exist_ok=False)
        with StreamWriter(path, file.most_bytes, chunk_bytes=file.chunk_bytes) as sink:
            file.fill(sink)
            digest = sink.finish()
        fsync_folder(path.parent)  # the name of a data file is durable before the deciding file is written
        return digest

    def put(self, path: str, data: bytes | Path, *, create_only: bool = False, progress: OnBytes = int) -> None:
        _write(self.path / path, data, None, progress, create_only=create_only)

    def delete(self, paths: Iterable[str], *, durable: bool = False, folders: bool = False) -> None:
        targets = [self.path / path for path in paths]
        for target in targets:
            if target.is_symlink() or not target.is_file() or self._is_behind_a_link(target):
                if os.path.lexists(target):
                    log.warning("%s is not a file or is behind a link: not touched", target)
                continue
            target.unlink(missing_ok=True)
            if durable:
                with contextlib.suppress(FileNotFoundError):  # another process deletes the same folder
                    fsync_folder(target.parent)
        above = {folder for target in targets for folder in target.parents if self.path in folder.parents}
        for folder in sorted(above, reverse=True) if folders else ():
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def _is_behind_a_link(self, path: Path) -> bool:
        return any((self.path / parent).is_symlink() for parent in path.relative_to(self.path).parents[:-1])

    def quarantine(self, path: str) -> None:
        target = self.path / path
        if target.is_symlink() or self._is_behind_a_link(target):
            return
        taken = self.names(path.rpartition("/")[0])
        numbers = ("", *(f"-{count}" for count in range(2, len(taken) + 3)))
        name = next(name for number in numbers if (name := f"{target.name}.damaged{number}") not in taken)
        with contextlib.suppress(FileNotFoundError):
            target.rename(target.with_name(name))
            log.warning("quarantined %s as %s", target, name)

    # ── links, locks, leftovers ──────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def pointing(self, links: Mapping[str, str]) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for link, name in links.items():
                self.check_link(link)
                path = self.path / link
                make_folder(path.parent)
                stack.enter_context(staged_symlink(path, "../" * (len(Path(link).parts) - 1) + name))
            yield

    def check_link(self, link: str) -> None:
        super().check_link(link)
        path = self.path / link
        if self._is_behind_a_link(path) or (os.path.lexists(path) and not path.is_symlink()):
            raise ConfigError(
                f"{str(path)!r} is not a link, so the link of this name cannot replace it. Move it away, or give "
                "another name (save_latest_filename in the Trainer)."
            )

    def target_of(self, link: str) -> str:
        path = self.path / link
        if not path.is_symlink():
            raise FileNotFoundError(errno.ENOENT, "there is no such link", str(path))
        return os.path.relpath(os.path.realpath(path), os.path.realpath(self.path))

    def links(self) -> Mapping[str, str]:
        links = [path for path, entry in _walk(self.path) if entry.is_symlink() and not is_temporary(entry.name)]
        return {path: self.target_of(path) for path in links}

    def lock(self, name: str) -> Lease:
        return FileLease(self.path / lease_name(name))

    def sweep(self, older_than: timedelta, *, dry_run: bool = False) -> list[StoredFile]:
        folders = ["", *(f"{path}/" for path, entry in _walk(self.path) if entry.is_dir(follow_symlinks=False))]
        found: list[StoredFile] = []
        for folder in folders:
            for path in abandoned_temporaries(self.path / folder):
                with contextlib.suppress(FileNotFoundError):  # another process removes the same file
                    found.append(StoredFile(folder + path.name, path.lstat().st_size, None))
                    if not dry_run:
                        path.unlink()
                        log.info("removed %s, left by a killed process", path)
        return found


def _write(
    target: Path, data: bytes | Path, digest: FileDigest | None, progress: OnBytes, *, create_only: bool
) -> None:
    """Write the file ``target`` from bytes or another file: write, flush, verify by ``digest``, rename.

    ``progress`` is called during the verification only, so never without ``digest``.
    """
    make_folder(target.parent)
    with StagedFile(target) as staged:
        if isinstance(data, Path):
            with data.open("rb", buffering=0) as file:
                shutil.copyfileobj(file, staged.file, 8 << 20)
        else:
            staged.file.write(data)
        staged.flush()
        if digest is not None:
            verify_file(staged.temporary, digest, progress)
        staged.publish(overwrite=not create_only)


def _walk(folder: str | Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield every entry in ``folder`` and below, in order, each with its path after ``prefix``.

    Links are not followed, and temporary folders are not entered.

    Raises:
        OSError: a folder cannot be read. Only a missing folder counts as empty.
        CorruptCheckpointError: ``folder`` is a file.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:  # missing, or deleted by another process
        return
    except NotADirectoryError as e:
        raise CorruptCheckpointError(f"{str(folder)!r} is a file, not a folder of checkpoints.") from e
    for entry in entries:
        yield prefix + entry.name, entry
        if entry.is_dir(follow_symlinks=False) and not is_temporary(entry.name):
            yield from _walk(entry.path, f"{prefix}{entry.name}/")


# ── functions for any place ──────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def local_copy(place: Place, path: str, digest: FileDigest | None = None) -> Generator[Path]:
    """Yield the path of a file of ``place`` on this machine, verified by ``digest`` if given.

    A file in a bucket is downloaded, and deleted at the end of the block. Raises as :meth:`Place.verify`.
    """
    if (here := place.path_of(path)) is not None:
        place.size(path)
        if digest is not None:
            verify_file(here, digest)
        yield here
        return
    with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
        here = Path(folder) / PurePosixPath(path).name
        place.fetch(path, here, digest)
        yield here


def set_link(place: Place, link: str, name: str) -> None:
    """Point ``link`` to the checkpoint ``name``. Raises as :meth:`Place.check_link`."""
    with place.pointing({link: name}):
        pass


def check_name(place: Place, name: str) -> None:
    """Check that a checkpoint, or a file in a checkpoint, can have the name ``name`` in ``place``.

    Raises:
        ConfigError: the name breaks a rule, which the message states.
    """
    try:
        new_name(name, on_disk=place.path_of(name) is not None)
    except ValueError as e:
        raise ConfigError(f"{place.uri(name)!r}: {e}. Give another name.") from e
