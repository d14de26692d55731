"""Place: a folder of this machine, or the objects of a bucket below a prefix, both seen in one way.

Nothing here imports torch: a listing needs none.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar, final

from composerlite.checkpoint.place.lease import Lease
from composerlite.checkpoint.record.manifest import FileRecord, new_name, relative_path
from composerlite.errors import ConfigError
from composerlite.storage import WorkerPool, verify_file

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource
    from composerlite.storage import FileDigest, Sink

__all__ = ["LINK_SUFFIX", "NewFile", "OnBytes", "Place", "StoredFile"]

LINK_SUFFIX = ".symlink"
"""End of the name of an object that is a link in a bucket."""
T = TypeVar("T")
R = TypeVar("R")
OnBytes = Callable[[int], object]
"""Called with each number of bytes."""


@final
@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file or an object.

    Attributes:
        path: below the place.
        size_bytes: of it.
        modified_at: when it was written, where that is known.
    """

    path: str
    size_bytes: int
    modified_at: datetime | None


class NewFile(NamedTuple):
    """A file to be written.

    Attributes:
        path: of it.
        most_bytes: that it will have at most.
        fill: gives what it contains.
        chunk_bytes: what is verified at once.
    """

    path: str
    most_bytes: int
    fill: Callable[[Sink], object]
    chunk_bytes: int


class Place(ABC):
    """A folder, or the objects of a bucket below a prefix. Used as a context manager, or until :meth:`close`.

    Paths are relative to the place, with slashes; a path with a slash before it is from the top of the disk or the
    bucket. FileNotFoundError means that there is no file of that name; every other failure of a disk or a store is
    raised as it is, and is no absence.
    """

    where: ClassVar[str]
    """``'local'`` or ``'remote'``."""
    readers: ClassVar[int]
    """Small files that are best read at the same time."""

    # ── where ────────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def uri(self, path: str = "") -> str:
        """URI or path of ``path``, or of the place itself, as commands take it."""

    @abstractmethod
    def path_of(self, path: str) -> Path | None:
        """Return ``path`` as one of this machine; ``None``: it is elsewhere."""

    @property
    @abstractmethod
    def top(self) -> PurePosixPath:
        """Path of the place itself from the top of the disk or the bucket, with a slash before it."""

    @abstractmethod
    def inside(self, path: str) -> Place:
        """Return the place ``path`` in this one, until this one is closed."""

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def files(self, below: str = "") -> Mapping[str, StoredFile]:
        """Return every file below ``below``, hidden ones too, links not, by path and in order; none where it is not."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names of all that is directly in ``folder``; none where it is not.

        Some stores list folders whose objects are gone.
        """

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of the file ``path`` in bytes; FileNotFoundError."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the bytes of the small file ``path``, as of an index or a link; FileNotFoundError.

        Raises:
            CorruptCheckpointError: it is too large to be one of the small ones.
        """

    @abstractmethod
    def end(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Return the size of the file ``path``, and its last ``most_bytes`` bytes; FileNotFoundError if none."""

    @abstractmethod
    def opened(
        self, path: str, digest: FileDigest | None, *, threads: int = 8
    ) -> contextlib.AbstractContextManager[ByteSource]:
        """Open the file ``path``: what is read of it is compared with ``digest`` as it passes; FileNotFoundError."""

    @abstractmethod
    def verify(self, record: FileRecord, progress: OnBytes = int) -> None:
        """Read a file and compare it with its record.

        Raises:
            CorruptCheckpointError: it has another size or other bytes.
            FileNotFoundError: it is gone.
        """

    @abstractmethod
    def fetch(
        self, path: str, target: Path, digest: FileDigest | None, progress: OnBytes = int, *, create_only: bool = False
    ) -> None:
        """Make ``path`` the local file ``target``, durable, and verified by ``digest``. Raises as ``verify``.

        With ``create_only``, FileExistsError if there is a file.
        """

    def exists(self, path: str) -> bool:
        """Return true if there is a file ``path``."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Results of ``work``, which reads, for each item; computed in parallel where that is faster."""
        everything = list(items)
        if min(self.readers, len(everything)) < 2:
            return [work(item) for item in everything]
        with WorkerPool(min(self.readers, len(everything)), name="place") as pool:
            doing = [pool.submit(functools.partial(work, item)) for item in everything]
            return [done.result() for done in doing]

    @contextlib.contextmanager
    def lent(self, path: str, digest: FileDigest | None = None) -> Generator[Path]:
        """Provide the file ``path``, verified by ``digest``, as a local one. Raises as ``verify`` does."""
        if (here := self.path_of(path)) is not None:
            self.size(path)
            if digest is not None:
                verify_file(here, digest)
            yield here
            return
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            here = Path(folder) / PurePosixPath(path).name
            self.fetch(path, here, digest)
            yield here

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def write(self, files: Iterable[NewFile]) -> list[FileDigest]:
        """Make durable files, in their order; return what they contain. One is flushed while the next is filled."""

    @abstractmethod
    def put(self, path: str, data: bytes | Path, *, create_only: bool = False, progress: OnBytes = int) -> None:
        """Make ``path`` a file of these bytes, or of those of a local file, whole and durable, at one instant.

        It replaces what is there. With ``create_only``, FileExistsError if there is a file.
        """

    def take(self, source: Place, record: FileRecord, progress: OnBytes = int, *, create_only: bool = False) -> None:
        """Make a file of ``source`` one of this place, whole, durable and verified. It replaces what has its name.

        Raises as ``verify``; with ``create_only``, FileExistsError if there is a file of that name.
        """
        if (here := self.path_of(record.path)) is not None:
            source.fetch(record.path, here, record.digest, progress, create_only=create_only)
            return
        with source.lent(record.path, record.digest) as path:
            self.put(record.path, path, create_only=create_only, progress=progress)

    @abstractmethod
    def delete(self, paths: Iterable[str], *, durable: bool = False, folders: bool = False) -> None:
        """Remove files, one after the other. A missing file is no error; links, and files behind links, stay.

        Args:
            paths: of the files.
            durable: none of them comes back after a power cut.
            folders: remove the folders that are empty then, too.
        """

    @abstractmethod
    def quarantine(self, path: str) -> None:
        """Give a damaged file or directory a name that nothing has, where names can be changed."""

    # ── names, links and locks ───────────────────────────────────────────────────────────────────────────────────
    def check_name(self, name: str) -> None:
        """See that a checkpoint, or a file in one, can be saved as ``name``, and found again.

        Raises:
            ConfigError: it cannot; names the rule.
        """
        try:
            new_name(name, on_disk=self.where == "local")
        except ValueError as e:
            raise ConfigError(f"{self.uri(name)!r}: {e}. Give another name.") from e

    def check_link(self, link: str) -> None:
        """See that the link ``link``, below the place, can be made: it replaces a link and nothing else.

        Raises:
            ConfigError: it leads out of the place, or something else has this name.
        """
        try:
            relative_path(link)
        except ValueError as e:
            raise ConfigError(f"link {link!r}: {e}. Give a name below {self.uri()}, such as 'latest-rank0.pt'.") from e

    @abstractmethod
    def pointing(self, links: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
        """Make each link lead to the checkpoint of its name at the end of the block. Raises as :meth:`check_link`.

        A disk without room for them fails before the block.
        """

    def point(self, link: str, name: str) -> None:
        """Make ``link`` lead to the checkpoint ``name``. Raises as :meth:`check_link`."""
        with self.pointing({link: name}):
            pass

    @abstractmethod
    def target_of(self, link: str) -> str:
        """Return the target of ``link``. Raises FileNotFoundError."""

    @abstractmethod
    def links(self) -> Mapping[str, str]:
        """Return the target of each link in the place, be it there or not."""

    @abstractmethod
    def lock(self, name: str) -> Lease:
        """Return the lease of the names ``name``."""

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def sweep(self, older_than: timedelta, *, dry_run: bool = False) -> list[StoredFile]:
        """Remove leftovers of killed processes, temporary files and unfinished uploads; return what they were.

        In a folder a lock tells which process is dead. In a bucket uploads count that were started ``older_than`` ago.
        """

    def close(self) -> None:
        """Close connections. May be called twice."""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
