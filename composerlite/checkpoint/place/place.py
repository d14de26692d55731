"""Place: a folder of this machine, or the objects of a bucket below a prefix, both seen in one way.

Nothing here imports torch: a listing needs none.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, final

from composerlite.checkpoint.place.lease import Lease
from composerlite.checkpoint.record.manifest import FileRecord, Manifest, new_name, relative_path
from composerlite.errors import ConfigError
from composerlite.storage import verify_file

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource
    from composerlite.storage import FileDigest, Sink

__all__ = ["LINK_SUFFIX", "Leftover", "NewFile", "Place", "StagedDecider", "StoredFile", "by_steps", "by_total"]

log = logging.getLogger(__name__)
LINK_SUFFIX = ".symlink"
"""End of the name of an object that is a link in a bucket."""
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
    """A file or an upload that a killed process has left.

    Attributes:
        uri: where it is.
        what: description of it.
        size_bytes: its size; 0 if that is not known.
    """

    uri: str
    what: str
    size_bytes: int


class StagedDecider(Protocol):
    """The deciding file of a directory, before it has its name. Used as a context manager, which removes what is left.

    In a folder it is an empty temporary file, locked as long as this process lives: the data files with its id are no
    garbage as long as it is there.
    """

    def commit(self, data: bytes, *, overwrite: bool) -> None:
        """Give the file its content and its name, durable, at one instant: the checkpoint exists.

        Raises:
            FileExistsError: there is a file of that name, and ``overwrite`` is false.
        """
        ...

    def close(self) -> None:
        """Remove the temporary file, unless it has its name. May be called twice."""
        ...


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

    Paths are relative to the place, with slashes. FileNotFoundError means that there is no file of that name; every
    other failure of a disk or a store is raised as it is, and is no absence. Methods that read "small files" read them
    whole: indices and links.
    """

    where: str
    """``'local'`` or ``'remote'``."""

    # ── where ────────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def uri(self, path: str = "") -> str:
        """URI or path of ``path``, or of the place itself, as commands take it."""

    @abstractmethod
    def path_of(self, path: str) -> Path | None:
        """Return ``path`` as one of this machine; ``None``: it is elsewhere."""

    @abstractmethod
    def inside(self, path: str) -> Place:
        """Return the place ``path`` in this one, until this one is closed."""

    @abstractmethod
    def above(self) -> Iterator[tuple[Place, str]]:
        """Yield the places that this one is in, and what stands there before its paths; until this one is closed."""

    @abstractmethod
    def check_writable(self) -> None:
        """See that files can be written here. It is made if it is a folder, and otherwise nothing is left of that.

        Raises:
            OSError, ObjectStoreError: they cannot.
        """

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def files(self, below: str = "") -> Mapping[str, StoredFile]:
        """Return every file below ``below``, hidden ones too, links not, by path and in order; none where it is not."""

    def exists(self, path: str) -> bool:
        """Return true if there is a file ``path``."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

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
    def end(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Return the size of the file ``path``, and its last ``most_bytes`` bytes; FileNotFoundError if none."""

    @abstractmethod
    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Results of ``work``, which reads, for each item; computed in parallel where that is faster."""

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
        """Read a file and compare it with its record. ``progress`` is called with each number of bytes.

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

        ``progress`` is called with (bytes received, total).
        """

    @contextlib.contextmanager
    def lent(self, path: str, digest: FileDigest | None = None) -> Generator[Path]:
        """Provide the file ``path``, verified by ``digest``, as a local one. Raises as ``verify`` does."""
        with contextlib.ExitStack() as stack:
            here = self.path_of(path)
            if here is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-"))
                here = Path(folder) / PurePosixPath(path).name
                self.write_to(here, path, digest)
            elif digest is None:
                self.size(path)
            else:
                verify_file(here, digest)
            yield here

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names of all that is directly in ``folder``; none where it is not."""

    @abstractmethod
    def identity(self, paths: Iterable[str]) -> str:
        """Key of the files ``paths`` here: equal for all processes that see the same files, and for no others."""

    @abstractmethod
    def taken(self) -> Iterator[str]:
        """Yield the names that are in the way of a new checkpoint."""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def write(self, path: str, most_bytes: int, fill: Callable[[Sink], object], *, chunk_bytes: int) -> FileDigest:
        """Make a durable file of what ``fill`` gives, at most ``most_bytes``; return what it contains."""
        (digest,) = self.write_all([NewFile(path, most_bytes, fill, chunk_bytes)])
        return digest

    @abstractmethod
    def write_all(self, files: Iterable[NewFile]) -> list[FileDigest]:
        """Make durable files, in their order; return what they contain. One is flushed while the next is filled."""

    @abstractmethod
    def send(self, source: Path, path: str, progress: Callable[[int, int], object] | None = None) -> None:
        """Make the local file ``source`` the file ``path``, whole and durable, in place of what is there."""

    def take(self, source: Place, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        """Make a file of ``source`` one of this place, whole, durable and verified. It replaces what has its name.

        Raises as ``verify``.
        """
        with source.lent(record.path, record.digest) as path:
            self.send(path, record.path, by_steps(progress))

    @abstractmethod
    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """Write the small file ``path`` atomically. With ``create_only``, FileExistsError if there is one."""

    @abstractmethod
    def stage_decider(self, path: str, save_id: str) -> StagedDecider:
        """Prepare the deciding file ``path`` of a directory, which is made.

        Raises:
            FileExistsError: another process of this machine has prepared the same.
        """

    def wait_until_seen(self, path: str, save_id: str) -> None:
        """Wait until this machine sees what :meth:`stage_decider` has prepared on another one.

        Raises:
            FileNotFoundError: it does not: the machines have folders of their own.
        """

    @abstractmethod
    def delete(self, path: str, *, durable: bool = False) -> None:
        """Remove the file ``path``. A missing file is no error; links, and files behind links, stay.

        ``durable``: the file does not come back after a power cut.
        """

    def delete_all(self, paths: Iterable[str]) -> None:
        """Remove files, one after the other, and the folders that are empty then."""
        gone = list(paths)
        for path in gone:
            self.delete(path)
        for folder in sorted({path.rpartition("/")[0] for path in gone}, key=len, reverse=True):
            self.remove_empty(folder, above=True)

    def remove_empty(self, folder: str, *, above: bool = False) -> None:
        """Remove ``folder`` if it is empty, and with ``above`` the folders that it is in, too."""

    def damaged_name(self, path: str) -> str:
        """Return a path for what is damaged at ``path``: beside it, and nothing has it."""
        folder, slash, last = path.rpartition("/")
        taken = self.names(folder)
        names = (f"{last}.damaged{number}" for number in ("", *(f"-{count}" for count in range(2, len(taken) + 3))))
        return folder + slash + next(name for name in names if name not in taken)

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

    @abstractmethod
    def point(self, link: str, name: str | None) -> None:
        """Make the link ``link`` lead to the checkpoint ``name``; ``None``: remove it.

        Args:
            link: below the place; in a bucket with a slash before it from the top.
            name: of the checkpoint.

        Raises:
            ConfigError: see :meth:`check_link`.
        """

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
    def target_of(self, link: str) -> str:
        """Return the target of ``link``. Raises FileNotFoundError."""

    def announce_target(self, link: str, manifest: Manifest) -> None:
        """State that ``link`` is about to lead to the checkpoint of ``manifest``.

        A start after a kill reads it with :meth:`announced_target`. A folder, which is listed anyway, states nothing.
        """

    def announced_target(self, link: str) -> tuple[str, str]:
        """Return the name and the id of the checkpoint that ``link`` is about to lead to, or leads to.

        The checkpoint of that name may have another id: the announced one is not in the place yet.

        Raises:
            FileNotFoundError: nothing was announced.
        """
        raise FileNotFoundError(errno.ENOENT, "nothing was announced of this link", self.uri(link))

    def announced_links(self) -> Sequence[str]:
        """Return the names of all links of which :meth:`announce_target` stated something."""
        return ()

    def broken_links(self) -> Iterator[tuple[str, str]]:
        """Yield the links that lead to nothing, and the name that each leads to."""
        return iter(())

    @abstractmethod
    def lock(self, name: str) -> Lease:
        """Return the lease of the file name ``name``, which may be a template. The lease is not taken yet."""

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def in_use(self) -> set[str]:
        """Return the names that links lead to."""

    @abstractmethod
    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        """List leftovers of killed processes: temporary files and unfinished uploads that :meth:`sweep` removes.

        In a folder a lock tells which process is dead. In a bucket uploads count that were started ``older_than`` ago.
        """

    @abstractmethod
    def sweep(self, older_than: timedelta) -> None:
        """Remove the :meth:`leftovers`."""

    @abstractmethod
    def close(self) -> None:
        """Close connections. May be called twice."""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def by_total(size_bytes: int, progress: Callable[[int, int], object] | None) -> Callable[[int], object]:
    """Callback that adds up numbers of bytes and calls ``progress`` with (bytes so far, ``size_bytes``)."""
    done = 0

    def tell(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, size_bytes)

    return tell


def by_steps(progress: Callable[[int], object]) -> Callable[[int, int], object]:
    """Callback that takes (bytes so far, total) and calls ``progress`` with the bytes since its last call."""
    told = 0

    def tell(done: int, _: int) -> None:
        nonlocal told
        progress(done - told)
        told = done

    return tell
