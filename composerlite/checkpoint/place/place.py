"""Place: where checkpoints are, a folder of this machine or what a bucket has below a prefix, both seen in one way.

Nothing here imports torch: a listing needs none.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, final

from composerlite.checkpoint.place.lease import Lease
from composerlite.checkpoint.record.manifest import FileRecord

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource
    from composerlite.storage import FileDigest

__all__ = ["MANIFESTS", "Leftover", "Place", "StoredFile", "by_steps"]

MANIFESTS = ".manifest"
"""The folder of manifests."""
T = TypeVar("T")
R = TypeVar("R")


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


@final
@dataclass(frozen=True, slots=True)
class Leftover:
    """A file, a folder or an upload that a process has left that died.

    Attributes:
        uri: where it is.
        what: that it is, in words.
        size_bytes: of it, 0 where that is not known.
    """

    uri: str
    what: str
    size_bytes: int


class Place(ABC):
    """A folder or a part of a bucket, whose verbs move bytes and names. Used as a context manager, or until ``close``.

    Paths are relative to it, with slashes. Where a method raises FileNotFoundError there is nothing of that name; every
    other failure of a disk or a store is raised as what it is, and is no absence. Small files are those that are read
    whole: manifests, indices, links.
    """

    where: str
    """``'local'`` or ``'remote'``."""

    # ── where ────────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def uri(self, path: str = "") -> str:
        """Return where ``path`` is, or the place itself, as commands take it."""

    @abstractmethod
    def path_of(self, path: str) -> Path | None:
        """Return ``path`` as one of this machine; ``None``: it is elsewhere."""

    @abstractmethod
    def inside(self, path: str) -> Place:
        """Return the place ``path`` in this one, until this one is closed."""

    @abstractmethod
    def above(self) -> Iterator[tuple[Place, str]]:
        """Yield the places that this one is in, and what stands there before its paths; until this one is closed."""

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def files(self, below: str = "") -> Mapping[str, StoredFile]:
        """Return every file below ``below``, hidden ones too, links not, by path and in order; none where it is not."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether there is a file ``path``."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of the file ``path`` in bytes; FileNotFoundError."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the bytes of the small file ``path``; FileNotFoundError.

        Raises:
            CorruptCheckpointError: it is no file, or too large to be one of the small ones.
        """

    @abstractmethod
    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return what ``work``, which reads, gives for each item; several at a time where that is faster."""

    def read_all(self, paths: Iterable[str]) -> list[bytes | None]:
        """Return the bytes of small files, in their order; ``None`` for one that is gone."""

        def read(path: str) -> bytes | None:
            with contextlib.suppress(FileNotFoundError):
                return self.read(path)
            return None

        return self.each(read, paths)

    @abstractmethod
    def opened(
        self, path: str, digest: FileDigest | None, *, threads: int = 8
    ) -> contextlib.AbstractContextManager[ByteSource]:
        """Open the file ``path``: what is read of it is compared with ``digest`` as it passes; FileNotFoundError."""

    @abstractmethod
    def verify(self, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        """Read a file and compare it with its record. ``progress`` is told of each so many bytes.

        Raises:
            CorruptCheckpointError: it has another size or other bytes.
            FileNotFoundError: it is gone.
        """

    @abstractmethod
    def write_to(
        self,
        target: Path,
        path: str,
        digest: FileDigest | None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Make the file ``path`` the local file ``target``, durable, and verified by ``digest``. Raises as ``verify``.

        ``progress`` is told how many bytes of how many have come.
        """

    @abstractmethod
    def lent(self, path: str, digest: FileDigest | None = None) -> contextlib.AbstractContextManager[Path]:
        """Return the file ``path``, verified by ``digest``, as one of this machine. Raises as ``verify``."""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def take(self, source: Place, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        """Make a file of ``source`` one of this place, whole, durable and verified. It replaces what has its name.

        Raises as ``verify``.
        """

    @abstractmethod
    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """Write the small file ``path``, whole or not at all. With ``create_only``, FileExistsError if there is one."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove the file ``path``, and the folders that hold nothing else. That there is none is fine."""

    @abstractmethod
    def point(self, link: str, name: str) -> None:
        """Make the link ``link`` lead to the checkpoint ``name``."""

    @abstractmethod
    def lock(self, name: str) -> Lease:
        """Return the right of one process at a time to ``name``, a run or a file, which is not taken yet."""

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def in_use(self) -> set[str]:
        """Return the names that links lead to, and those of checkpoints whose commit has begun and not ended.

        A process that was killed between a commit and its link has left the link on the checkpoint before.
        """

    @abstractmethod
    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        """Return what processes have left that died while they wrote.

        On a disk a lock tells which are dead; in a store the parts of uploads that were started ``older_than`` ago are
        taken for theirs.
        """

    @abstractmethod
    def sweep(self, older_than: timedelta) -> None:
        """Remove what ``leftovers`` finds. A commit on a disk that had got far enough is completed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections; twice is fine."""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def by_steps(progress: Callable[[int], object]) -> Callable[[int, int], object]:
    """Return what is told how many bytes of how many have come, and tells ``progress`` how many that is more."""
    told = 0

    def tell(done: int, _: int) -> None:
        nonlocal told
        progress(done - told)
        told = done

    return tell
