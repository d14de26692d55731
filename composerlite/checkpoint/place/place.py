"""Place: where checkpoints are, a folder of this machine or what a bucket has below a prefix, both seen in one way.

Nothing here imports torch: a listing needs none.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

from composerlite.checkpoint.place.commit import MARKER, OF_RANKS, STEP_MODEL, TRAIN, Commit, remove_manifest
from composerlite.checkpoint.place.lease import Lease
from composerlite.checkpoint.record.manifest import (
    MANIFESTS,
    FileRecord,
    Manifest,
    new_name,
    record_path,
    relative_path,
)
from composerlite.errors import ConfigError, CorruptCheckpointError
from composerlite.storage import verify_file

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource
    from composerlite.storage import FileDigest, Sink

__all__ = [
    "DELETION",
    "Leftover",
    "NewFile",
    "Parts",
    "Place",
    "SaveHandle",
    "StoredFile",
    "by_steps",
    "by_total",
]

log = logging.getLogger(__name__)
DELETION = "a deletion that did not end"
"""What :attr:`Leftover.what` says of it."""
Parts = Mapping[str, Path | bytes]
"""Contents of a commit by the path that each will have: a durable file or directory of this machine, or small bytes."""
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
        size_bytes: of all that goes with it, 0 where that is not known.
        paths: the files of a checkpoint that it decides about, below the place.
        is_completed: it does not go: a checkpoint becomes of it, at ``uri``.
    """

    uri: str
    what: str
    size_bytes: int
    paths: frozenset[str] = frozenset()
    is_completed: bool = False


class SaveHandle(NamedTuple):
    """A save of a directory in progress, as all ranks know it.

    Attributes:
        place: the directory that its files go to, beside the one that it will be; in a bucket that one itself.
        suffix: what the names of files need so that they differ from those that are there.
    """

    place: str
    suffix: str


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
    """A folder or a part of a bucket, whose verbs move bytes and names. Used as a context manager, or until ``close``.

    Paths are relative to it, with slashes. Where a method raises FileNotFoundError there is nothing of that name; every
    other failure of a disk or a store is raised as what it is, and is no absence. Small files are those that are read
    whole: manifests, indices, links. What a place has no need of does nothing there: a bucket has no folders and no
    renames, and a folder decides who was first when names are exchanged.
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
        """Yield the names that a new checkpoint would come into conflict with."""

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
    def put(self, path: str, data: bytes | Path, *, create_only: bool = False) -> None:
        """Write the small file ``path`` atomically. With ``create_only``, FileExistsError if there is one.

        ``data`` is what it contains, or a durable file of this machine, which a folder gives the name.
        """

    @abstractmethod
    def delete(self, path: str, *, kept_as: str | None = None) -> None:
        """Remove the file ``path``: what makes a checkpoint exist durably. What is none, or behind a link, stays.

        ``kept_as``: the path of a file that has its content then. Where names cannot be changed it stays where it is.
        """

    @abstractmethod
    def deleting(self, manifest: Manifest) -> contextlib.AbstractContextManager[None]:
        """Within it a checkpoint exists no more, and its files are deleted.

        A kill in it, or an error, leaves what :meth:`recover` completes the deletion with.
        """

    def left_of(self, manifest: Manifest) -> Sequence[str]:
        """Return the files that a deletion which did not end has left of a checkpoint, in the order in which they go.

        What one of its name has that was saved since stays.
        """
        kept, is_step = set[str](), False
        try:
            there = Manifest.from_json(self.read(record_path(manifest.name)), self.uri(record_path(manifest.name)))
            kept = {record.path for record in there.files}
        except FileNotFoundError:
            is_step = manifest.template == STEP_MODEL  # what makes it one goes first, and its files of ranks
        except CorruptCheckpointError as e:
            log.warning("%s: not deleted, since there is another of its name: %s", self.uri(manifest.name), e)
            return ()
        left: list[str] = []
        if is_step:
            left += [MARKER] if self.exists(MARKER) else []
            for path in self.files(TRAIN):
                if (match := OF_RANKS.fullmatch(path)) is not None and int(match[1]) < manifest.world_size:
                    left.append(path)
        return left + [one.path for one in manifest.here if one.path not in kept and self.has(one)]

    def complete_deletion(self, manifest: Manifest, left: Sequence[str]) -> None:
        """Complete the deletion of a checkpoint: of what is ``left`` of it, and of folders in which nothing is."""
        is_step = manifest.template == STEP_MODEL and not self.exists(record_path(manifest.name))
        for path in left:
            if path == MARKER:
                remove_manifest(self, path)
            else:
                self.delete(path)
        for folder in (manifest.name, TRAIN) if is_step else (manifest.name,):
            self.remove_empty(folder)

    def has(self, record: FileRecord) -> bool:
        """Return true if the file of ``record`` is here, as it was saved."""
        try:
            self.verify(record)
        except (FileNotFoundError, CorruptCheckpointError):
            return False
        return True

    def delete_all(self, paths: Iterable[str]) -> None:
        """Remove files, one after the other, and the folders in which nothing is left then."""
        gone = list(paths)
        for path in gone:
            self.delete(path)
        self.remove_emptied(gone)

    def remove_emptied(self, paths: Iterable[str]) -> None:
        """Remove the folders of ``paths``, which are gone, in which nothing is left."""
        for folder in sorted({path.rpartition("/")[0] for path in paths}, key=len, reverse=True):
            if not folder.endswith(MANIFESTS):
                self.remove_empty(folder, above=True)

    def remove_empty(self, folder: str, *, above: bool = False) -> None:
        """Remove ``folder``, and with ``above`` those that it is in, where nothing is left in it."""

    def damaged_name(self, path: str) -> str:
        """Return a path for what is damaged at ``path``: beside it, and nothing has it."""
        folder, slash, last = path.rpartition("/")
        taken = self.names(folder)
        names = (f"{last}.damaged{number}" for number in ("", *(f"-{count}" for count in range(2, len(taken) + 3))))
        return folder + slash + next(name for name in names if name not in taken)

    def quarantine(self, path: str) -> None:
        """Give a damaged file or directory a name that nothing has, where names can be changed."""

    # ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────
    def acquire(self, name: str) -> None:
        """Reserve the name ``name`` for a save of this process, until ``release``. May be called twice.

        Where a commit decides at one instant who was first, that is soon enough, and nothing is held.

        Raises:
            CheckpointExistsError: another process saves it.
        """

    @abstractmethod
    def release(self, name: str) -> None:
        """Release the name, which other processes may save then. May be called twice."""

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
    def begin(self, name: str, check: Callable[[], bool], *, overwrite: bool) -> SaveHandle:
        """Begin a save of the directory ``name``, in one process for all, until ``release`` or ``abandon``.

        What a dead save of it has left is completed or removed. ``check`` says whether anything is there, and raises
        where that may not be.
        """

    def join(self, name: str, handle: SaveHandle, check: Callable[[], bool]) -> None:
        """Take part in a save that another process has begun, for the disk that this one writes to.

        Raises:
            FileExistsError: it is the disk of that process, too.
        """

    @abstractmethod
    def abandon(self, name: str, handle: SaveHandle) -> None:
        """Remove the files of this process, after an error, when no rank writes any more. Raises nothing."""

    @abstractmethod
    def parts(self, name: str, handle: SaveHandle, deciding: str, data: bytes) -> Parts:
        """Files that a commit of the directory ``name`` renames; ``data`` is the content of the file ``deciding``.

        Where that has no name, in a folder, all are written already.
        """

    @abstractmethod
    def commit(self, name: str, parts: Parts, *, overwrite: bool, record: str | None) -> Commit:
        """Return the commit of the checkpoint ``name``, which has not begun.

        Args:
            name: of it.
            parts: what it consists of; what has its name already is left out.
            overwrite: replace what has these names.
            record: path of its manifest; ``None``: a file among the parts makes it a checkpoint.
        """

    @abstractmethod
    def announced(self, name: str | None) -> Iterator[bytes]:
        """Yield the manifests of commits that have begun and not ended: of the checkpoint ``name``, or of all."""

    def between_names(self, name: str) -> Iterator[str]:
        """Yield the temporary paths of the directory ``name`` during its commit, if it is complete there."""
        return iter(())

    # ── links and locks ──────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def point(self, link: str, name: str | None, *, ahead: bool = False) -> None:
        """Make the link ``link`` lead to the checkpoint ``name``; ``None``: remove it.

        Args:
            link: below the place; in a bucket with a slash before it from the top.
            name: of the checkpoint.
            ahead: say only that it is about to, for who looks for the newest after a kill.

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
        if self.exists(record_path(link)):
            raise ConfigError(f"{self.uri(link)!r} is a checkpoint, and no link takes its place. Give another name.")

    @contextlib.contextmanager
    def pointing(self, links: Mapping[str, str]) -> Generator[None]:
        """Make each link lead to its checkpoint when the block has made them exist, as :meth:`point` does."""
        yield
        for link, name in links.items():
            self.point(link, name)

    @abstractmethod
    def target_of(self, link: str, *, ahead: bool = False) -> str:
        """Return the target of ``link``, or the one it is about to get. Raises FileNotFoundError."""

    def links(self) -> Sequence[str]:
        """Return the names of the links of savers, where checkpoints are not listed to find the newest."""
        return ()

    def broken_links(self) -> Iterator[tuple[str, str]]:
        """Yield the links that lead to nothing, and the name that each leads to."""
        return iter(())

    @abstractmethod
    def lock(self, name: str) -> Lease:
        """Return the right of one process at a time to ``name``, a run or a file, which is not taken yet."""

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def in_use(self) -> set[str]:
        """Return the names that links lead to, and those of checkpoints whose commit has begun and not ended.

        A process that was killed between a commit and its link has left the link on the checkpoint before.
        """

    def recover(self, committed: Mapping[str, str] | None, *, everywhere: bool = True) -> None:
        """Complete or remove what dead processes left unfinished. What a live one is writing stays.

        Args:
            committed: of what is prepared here as a part of a checkpoint on the disks of several nodes, what the first
                disk has is completed, and the rest removed: the identities of checkpoints, by name. On the first disk
                there are none. ``None``: it is left as it is.
            everywhere: in the folders in it, too, and what other users have left.
        """

    @abstractmethod
    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        """List leftovers of processes that were killed during a write: just what :meth:`sweep` removes or completes.

        On a disk a lock tells which are dead; in a store the parts of uploads that were started ``older_than`` ago are
        taken for theirs.
        """

    @abstractmethod
    def sweep(self, older_than: timedelta) -> None:
        """Remove the :meth:`leftovers`. A commit on a disk that can be completed is completed."""

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
