"""Place: the interface of a folder of this machine, and of the objects of a bucket below a prefix.

Nothing here imports torch, which a listing does not need.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from composerlite.checkpoint.place.lease import Lease
from composerlite.checkpoint.record.naming import new_name, relative_path
from composerlite.checkpoint.record.record import FileRecord
from composerlite.errors import ConfigError
from composerlite.storage import WorkerPool, verify_file

if TYPE_CHECKING:
    from composerlite.checkpoint.format.byte_sources import ByteSource
    from composerlite.storage import FileDigest, StreamWriter

LINK_SUFFIX = ".symlink"
"""Suffix of an object that is a link in a bucket."""
_REQUESTS = 16
"""Number of small objects that are read from a bucket at the same time."""
T = TypeVar("T")
R = TypeVar("R")
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


class Place(ABC):
    """A folder, or the objects of a bucket below a prefix. A context manager; otherwise call :meth:`close`.

    Paths are relative to the place, with slashes. A path with a slash at the beginning starts at the top of the disk or
    the bucket. FileNotFoundError means absence. All other failures of a disk or a store are raised unchanged.
    """

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

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the bytes of a small file, such as an index or a link.

        Raises:
            FileNotFoundError: there is no such file.
            CorruptCheckpointError: the file has more than 1 GiB.
        """

    @abstractmethod
    def end(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Return the size of a file, and its last ``most_bytes`` bytes. Raises FileNotFoundError."""

    def size(self, path: str) -> int:
        """Return the size of a file in bytes. Raises FileNotFoundError."""
        return self.end(path, 0)[0]

    def exists(self, path: str) -> bool:
        """Return true if the file exists."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    @abstractmethod
    def opened(
        self, path: str, digest: FileDigest | None, *, threads: int = 8
    ) -> contextlib.AbstractContextManager[ByteSource]:
        """Open a file. Every read is compared with ``digest``, if given. Raises FileNotFoundError.

        ``threads`` threads read a file on this machine. An object in a bucket may be missing until the first read.
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
    def write(self, files: Iterable[NewFile]) -> list[FileDigest]:
        """Write durable files in order, and return the digests. A file is flushed while the next file is filled."""

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
        """Rename a damaged file or directory to a free name. A bucket has no renames: nothing happens."""

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
            CorruptCheckpointError: a link in a bucket contains no name.
        """

    @abstractmethod
    def links(self) -> Mapping[str, str]:
        """Return the target of each link in the place, also of broken links. Empty text: the link cannot be read."""

    @abstractmethod
    def lock(self, name: str) -> Lease:
        """Return the lease that protects ``name``, a template of checkpoint names or of a link. It is not taken yet."""

    @abstractmethod
    def sweep(self, older_than: timedelta, *, dry_run: bool = False) -> list[StoredFile]:
        """Remove temporary files and unfinished uploads of killed processes, and return them.

        In a folder a lock shows if a process is dead. In a bucket an upload is removed if the upload started
        ``older_than`` ago. With ``dry_run`` nothing is removed.
        """

    def close(self) -> None:
        """Close connections. May be called twice."""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def map_reads(place: Place, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the results of ``work`` for ``items``, in order. ``work`` reads files of ``place``.

    For a bucket, ``work`` runs in up to 16 threads.
    """
    everything = list(items)
    threads = min(_REQUESTS, len(everything)) if place.path_of("") is None else 1
    if threads < 2:
        return [work(item) for item in everything]
    with WorkerPool(threads, name="place") as pool:
        results = [pool.submit(functools.partial(work, item)) for item in everything]
        return [result.result() for result in results]


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
