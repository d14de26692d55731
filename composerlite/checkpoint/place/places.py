"""Where checkpoints are: a folder of this machine, or what a bucket has below a prefix, both seen in one way.

For tools, which look at checkpoints that others save and load. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import final

from composerlite.checkpoint.record.manifest import FileRecord

__all__ = ["MANIFESTS", "Leftover", "Place", "StoredFile"]

MANIFESTS = ".manifest"
"""The folder of commit records."""


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
    """What a process that died has left.

    Attributes:
        uri: where it is.
        what: that it is, in words.
        size_bytes: of it, 0 where that is not known.
    """

    uri: str
    what: str
    size_bytes: int


class Place(ABC):
    """A folder of checkpoints or a part of a bucket. Used as a context manager, or until :meth:`close`.

    Paths are relative to it, with slashes. Where a method raises FileNotFoundError there is nothing of that name; every
    other failure of a disk or a store is raised as what it is, and is no absence.
    """

    where: str
    """``'local'`` or ``'remote'``."""

    @abstractmethod
    def uri(self, path: str = "") -> str:
        """Where ``path`` is, or the place itself, as commands take it."""

    @abstractmethod
    def files(self) -> Mapping[str, StoredFile]:
        """Every file, hidden ones too, links not, by path and in order. Of a place that is not there: none."""

    @abstractmethod
    def inside(self, path: str) -> Place:
        """What is below ``path``, until this place is closed."""

    @abstractmethod
    def above(self) -> Iterator[tuple[Place, str]]:
        """The places that this one is in, and what stands there before its paths; until this one is closed."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file ``path``."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The bytes of the small file ``path``; FileNotFoundError."""

    @abstractmethod
    def read_all(self, paths: Iterable[str]) -> Iterator[bytes | None]:
        """The bytes of small files, in their order, several at a time where that is faster; ``None`` if it is gone."""

    @abstractmethod
    def verify(self, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        """Read a file and compare it with its record. ``progress`` is told of each so many bytes.

        Raises:
            CorruptCheckpointError: it has another size or other bytes.
            FileNotFoundError: it is gone.
        """

    @abstractmethod
    def write_to(self, target: Path, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        """Make a file of a checkpoint the local file ``target``, durable and verified. Raises as :meth:`verify`."""

    @abstractmethod
    def lent(self, record: FileRecord) -> contextlib.AbstractContextManager[Path]:
        """A file of a checkpoint, verified, as one of this machine. Raises as :meth:`verify`."""

    @abstractmethod
    def take(self, source: Place, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        """Make a file of a checkpoint in ``source`` one of this place, whole, durable and verified.

        It replaces what has its name. Raises as :meth:`verify`.
        """

    @abstractmethod
    def put(self, path: str, data: bytes, *, create_only: bool) -> None:
        """Write the small file ``path``. With ``create_only``, FileExistsError if there is one."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove the file ``path``, durably. That there is none is fine."""

    @abstractmethod
    def point(self, link: str, name: str) -> None:
        """Make the link ``link`` lead to the checkpoint ``name``."""

    @abstractmethod
    def in_use(self) -> set[str]:
        """Return the names that links lead to, and those of checkpoints whose commit has begun and not ended.

        A process that was killed between a commit and its link has left the link on the checkpoint before.
        """

    @abstractmethod
    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        """What processes have left that died while they wrote.

        On a disk a lock tells which are dead; in a store the parts of uploads that were started ``older_than`` ago are
        taken for theirs.
        """

    @abstractmethod
    def sweep(self, older_than: timedelta) -> None:
        """Remove what :meth:`leftovers` finds. A commit on a disk that had got far enough is completed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections; twice is fine."""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
