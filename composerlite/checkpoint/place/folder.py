"""A folder of checkpoints on this machine, or on a disk that it mounts."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, final

from composerlite.checkpoint.place.commit import commit_file
from composerlite.checkpoint.place.lease import FileLease, Lease, lease_name
from composerlite.checkpoint.place.place import (
    Leftover,
    NewFile,
    Place,
    StoredFile,
    by_steps,
    by_total,
)
from composerlite.checkpoint.record.manifest import FileRecord
from composerlite.errors import ConfigError, CorruptCheckpointError
from composerlite.storage import (
    FileDigest,
    ParallelReader,
    StagedFile,
    StreamWriter,
    WindowRing,
    abandoned_temporaries,
    fsync_folder,
    is_temporary,
    make_folder,
    replace_symlink,
    reserve,
    verify_file,
)

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = ["Folder"]

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_SEEN_SECONDS = 20.0
"""A network file system shows what another machine made some time later."""


@final
class Folder(Place):
    """The checkpoints in the folder ``path``."""

    where = "local"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    # ── where ────────────────────────────────────────────────────────────────────────────────────────────────────
    def uri(self, path: str = "") -> str:
        return str(self.path / path)

    def path_of(self, path: str) -> Path:
        return self.path / path

    def inside(self, path: str) -> Folder:
        return Folder(self.path / path)

    def above(self) -> Iterator[tuple[Folder, str]]:
        folder = self.path.resolve()
        for parent in folder.parents:
            yield Folder(parent), f"{folder.relative_to(parent)}/"

    def check_writable(self) -> None:
        make_folder(self.path)
        with tempfile.TemporaryFile(dir=self.path):
            pass

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def files(self, below: str = "") -> Mapping[str, StoredFile]:
        root = self.path / below
        if below and (root.is_symlink() or (root.exists() and not root.is_dir())):
            log.warning("left out: %s is no folder of this one", root)
            return {}
        return {file.path: file for file in _below(root, f"{below}/" if below else "")}

    def exists(self, path: str) -> bool:
        return (self.path / path).is_file()

    def size(self, path: str) -> int:
        return (self.path / path).stat().st_size

    def read(self, path: str) -> bytes:
        with _no_such_file():
            return (self.path / path).read_bytes()

    def end(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        target = self.path / path
        with _no_such_file():
            descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "there is no file of that name", str(target))
            return status.st_size, os.pread(descriptor, most_bytes, max(0, status.st_size - most_bytes))
        finally:
            os.close(descriptor)

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        return [work(item) for item in items]

    @contextlib.contextmanager
    def opened(self, path: str, digest: FileDigest | None, *, threads: int = 8) -> Generator[ByteSource]:
        with ParallelReader(self.path / path, digest, threads=threads) as reader:
            yield reader

    def verify(self, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        verify_file(self.path / record.path, record.digest, progress)

    def write_to(
        self,
        target: Path,
        path: str,
        digest: FileDigest | None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        make_folder(target.parent)
        with StagedFile(target) as staged:
            with (self.path / path).open("rb", buffering=0) as source:
                shutil.copyfileobj(source, staged.file, 8 << 20)
            staged.flush()
            if digest is not None:
                verify_file(staged.temporary, digest, by_total(digest.size_bytes, progress))
            staged.publish()

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(path.name for path in (self.path / folder).iterdir())
        except FileNotFoundError:
            return []

    def identity(self, paths: Iterable[str]) -> str:
        seen = [(self.path / path).stat() for path in paths]  # NFS shows all machines the same
        return repr([(found.st_ino, found.st_mtime_ns, found.st_ctime_ns) for found in seen])

    def taken(self) -> Iterator[str]:
        folders: set[str] = set()
        for name in self.files():
            if not any(part.startswith(".") for part in name.split("/")):
                yield name
                new = {str(folder) for folder in Path(name).parents[:-1]} - folders
                folders |= new
                yield from new

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def write_all(self, files: Iterable[NewFile]) -> list[FileDigest]:
        wanted = [(self.path / file.path, file) for file in files]
        for path, file in wanted:
            make_folder(path.parent)
            with path.open("xb") as created:
                reserve(created.fileno(), file.most_bytes, path)  # beside writes it would take long
        ends: list[Future[FileDigest]] = []
        with WindowRing() as ring:
            for path, file in wanted:
                with StreamWriter(path, file.most_bytes, ring=ring, chunk_bytes=file.chunk_bytes) as sink:
                    file.fill(sink)
                    ends.append(sink.end())
            digests = [end.result() for end in ends]
        for folder in {path.parent for path, _ in wanted}:
            fsync_folder(folder)  # the files have their names before the file that decides about them
        return digests

    def stage_decider(self, path: str, save_id: str) -> _StagedFileDecider:
        target = self.path / path
        make_folder(target.parent)
        return _StagedFileDecider(target, save_id)

    def wait_until_seen(self, path: str, save_id: str) -> None:
        staged = StagedFile.temporary_of(self.path / path, save_id)
        deadline = time.monotonic() + _SEEN_SECONDS
        while not staged.exists():
            if time.monotonic() > deadline:
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"the first rank made this file {_SEEN_SECONDS:g} s ago, and here it is not: each rank writes its "
                    "part of a sharded checkpoint. Give a folder that all nodes share, or a bucket; or "
                    "state_dict_type='full', with which rank 0 writes one file. Not here",
                    str(staged),
                )
            time.sleep(0.05)

    def send(self, source: Path, path: str, progress: Callable[[int, int], object] | None = None) -> None:
        Folder(source.parent).write_to(self.path / path, source.name, None, progress)

    def take(self, source: Place, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        source.write_to(self.path / record.path, record.path, record.digest, by_steps(progress))

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        target = self.path / path
        make_folder(target.parent)
        with StagedFile(target) as staged:
            staged.file.write(data)
            staged.flush()
            commit_file(staged, overwrite=not create_only)

    def delete(self, path: str, *, durable: bool = False) -> None:
        target = self.path / path
        if not self._is_own(target):
            return
        target.unlink(missing_ok=True)
        if durable:
            with contextlib.suppress(FileNotFoundError):  # another process deletes the same, and is ahead
                fsync_folder(target.parent)

    def _is_own(self, path: Path) -> bool:
        """Return true if ``path`` is a file that lies in the folder itself: no link, nor anything behind one."""
        if self._is_behind_a_link(path):
            log.warning("%s is behind a link and is left alone", path)
            return False
        if path.is_symlink() or (path.exists() and not path.is_file()):
            log.warning("%s is no file and is left alone", path)
            return False
        return path.exists()

    def _is_behind_a_link(self, path: Path) -> bool:
        return any((self.path / parent).is_symlink() for parent in path.relative_to(self.path).parents[:-1])

    def remove_empty(self, folder: str, *, above: bool = False) -> None:
        path = self.path / folder
        with contextlib.suppress(OSError):  # it holds something else: it stays
            while path != self.path:
                path.rmdir()
                if not above:
                    return
                path = path.parent

    def quarantine(self, path: str) -> None:
        target = self.path / path
        if not target.is_dir() or target.is_symlink():
            if not self._is_own(target):
                return
        elif self._is_behind_a_link(target):
            return
        with contextlib.suppress(FileNotFoundError):
            target.rename(self.path / self.damaged_name(path))

    # ── links and locks ──────────────────────────────────────────────────────────────────────────────────────────
    def point(self, link: str, name: str | None) -> None:
        path = self.path / link
        if name is None:
            path.unlink(missing_ok=True)
            return
        self.check_link(link)
        make_folder(path.parent)
        replace_symlink(path, "../" * (len(Path(link).parts) - 1) + name)

    def check_link(self, link: str) -> None:
        super().check_link(link)
        path = self.path / link
        if self._is_behind_a_link(path) or (os.path.lexists(path) and not path.is_symlink()):
            raise ConfigError(
                f"{str(path)!r} is no link, and the link of this name does not take its place. Move it away, or give "
                "another name (save_latest_filename in the Trainer)."
            )

    def target_of(self, link: str) -> str:
        path = self.path / link
        if not path.is_symlink():
            raise FileNotFoundError(errno.ENOENT, "there is no such link", str(path))
        return os.path.relpath(path.parent / path.readlink(), self.path)

    def broken_links(self) -> Iterator[tuple[str, str]]:
        for folder in self._folders():
            for path in sorted(folder.iterdir()):
                if path.is_symlink() and not path.exists():
                    link = str(path.relative_to(self.path))
                    yield link, self.target_of(link)

    def lock(self, name: str) -> Lease:
        return FileLease(self.path / lease_name(name))

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────
    def in_use(self) -> set[str]:
        real = os.path.realpath(self.path)
        links = [path for folder in self._folders() for path in folder.iterdir() if path.is_symlink()]
        return {os.path.relpath(os.path.realpath(path), real) for path in links}

    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        return [
            Leftover(str(path), "a file that was not written to its end", path.lstat().st_size)
            for folder in self._folders()
            for path in abandoned_temporaries(folder)
        ]

    def sweep(self, older_than: timedelta) -> None:
        for folder in self._folders():
            for path in abandoned_temporaries(folder):
                path.unlink(missing_ok=True)
                log.info("removed %s, left by a process that died while it wrote", path)

    def _folders(self) -> list[Path]:
        """Return the place and every folder below it. Links are not followed.

        Raises:
            OSError: a folder cannot be read. What is not seen is not absent.
        """

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # another process deleted it
                raise error

        return sorted(Path(folder) for folder, _, _ in os.walk(self.path, onerror=refuse))

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


@final
class _StagedFileDecider:
    """The deciding file of a directory, under its temporary name: see :class:`StagedDecider`."""

    def __init__(self, path: Path, save_id: str) -> None:
        self._staged = StagedFile(path, save_id)

    def commit(self, data: bytes, *, overwrite: bool) -> None:
        self._staged.file.write(data)
        self._staged.flush()
        commit_file(self._staged, overwrite=overwrite)
        self.close()

    def close(self) -> None:
        self._staged.__exit__(None, None, None)

    def __enter__(self) -> _StagedFileDecider:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def _no_such_file() -> Generator[None]:
    """Raise FileNotFoundError for a path below a file, too."""
    try:
        yield
    except NotADirectoryError as e:
        raise FileNotFoundError(errno.ENOENT, "there is no such file", e.filename) from e


def _below(folder: Path, prefix: str) -> Iterator[StoredFile]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    except NotADirectoryError as e:
        raise CorruptCheckpointError(f"{str(folder)!r} is a file and no folder of checkpoints.") from e
    for entry in entries:
        if entry.is_symlink() or is_temporary(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(folder / entry.name, f"{prefix}{entry.name}/")
        else:
            with contextlib.suppress(FileNotFoundError):  # deleted since
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue  # a pipe or a device
                yield StoredFile(prefix + entry.name, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))
