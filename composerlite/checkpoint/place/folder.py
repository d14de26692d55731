"""A folder of checkpoints on this machine, or on a disk that it mounts."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, final

from composerlite.checkpoint.place.commit import SAVING, dead_saves, recover
from composerlite.checkpoint.place.lease import FileLease, Lease
from composerlite.checkpoint.place.place import MANIFESTS, Leftover, Place, StoredFile, by_steps
from composerlite.checkpoint.record.manifest import FileRecord
from composerlite.errors import CorruptCheckpointError
from composerlite.storage import (
    FileDigest,
    ParallelReader,
    StagedFile,
    StagedLink,
    abandoned_temporaries,
    fsync_folder,
    make_folder,
    read_small_file,
    verify_file,
)

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = ["Folder"]

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_UNFINISHED = re.compile(r"\..+\.(?:tmp-[0-9a-f]{16}|saving-[0-9a-f]{16}(?:-old|-failed)?)")
"""Files and folders that are being written, or whose writer died."""

_BEGUN = re.compile(r"\.(.+)\.json\.tmp-[0-9a-f]+")
"""The manifest of a commit that has not ended."""


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
        return read_small_file(self.path / path)

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
                verify_file(staged.temporary, digest, _by_total(digest.size_bytes, progress))
            staged.publish()

    @contextlib.contextmanager
    def lent(self, path: str, digest: FileDigest | None = None) -> Generator[Path]:
        if digest is not None:
            verify_file(self.path / path, digest)
        elif not self.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / path))
        yield self.path / path

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def take(self, source: Place, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        source.write_to(self.path / record.path, record.path, record.digest, by_steps(progress))

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        target = self.path / path
        make_folder(target.parent)
        with StagedFile(target) as staged:
            staged.file.write(data)
            staged.flush()
            if create_only:
                os.link(staged.temporary, target)
                fsync_folder(target.parent)
            else:
                staged.publish()

    def delete(self, path: str) -> None:
        target = self.path / path
        try:
            target.unlink()
        except FileNotFoundError:
            return
        fsync_folder(target.parent)
        if target.parent.name != MANIFESTS:
            self._remove_empty(target.parent)

    def _remove_empty(self, folder: Path) -> None:
        """Remove ``folder`` and those above it that hold nothing, or nothing but an empty folder of records."""
        with contextlib.suppress(OSError):  # it holds something else: it stays
            while folder != self.path:
                if [path.name for path in folder.iterdir()] == [MANIFESTS]:
                    (folder / MANIFESTS).rmdir()
                folder.rmdir()
                folder = folder.parent

    def point(self, link: str, name: str) -> None:
        with self.staged_link(link, name) as staged:
            staged.publish()

    def staged_link(self, link: str, name: str) -> StagedLink:
        """Return the symbolic link ``link`` to ``name``, which replaces the one that is there when it is published."""
        path = self.path / link
        make_folder(path.parent)
        up = "../" * (len(Path(link).parts) - 1)
        return StagedLink(path, up + name)

    def lock(self, name: str) -> Lease:
        return FileLease(self.path / MANIFESTS / f".{name.replace('/', '%2F')}.lease")

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────
    def in_use(self) -> set[str]:
        used: set[str] = set()
        for folder, _, names in os.walk(self.path):
            for path in (Path(folder) / name for name in names):
                relative = path.relative_to(self.path)
                if path.is_symlink():
                    used.add(os.path.relpath(path.parent / path.readlink(), self.path))
                elif MANIFESTS in relative.parts and (begun := _BEGUN.fullmatch(path.name)) is not None:
                    inside = [part for part in relative.parts[:-1] if part != MANIFESTS]
                    used.add("/".join([*inside, begun[1]]))
        return used

    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        found: list[Leftover] = []
        for folder, subfolders, _ in os.walk(self.path):
            path = Path(folder)
            if (saving := SAVING.fullmatch(path.name)) is not None:
                subfolders.clear()
                if path in dead_saves(path.parent, saving[1]):
                    found.append(Leftover(str(path), "a save that did not end", _size_bytes(path)))
                continue
            what = "a file that was not written to its end"
            if MANIFESTS in path.relative_to(self.path).parts:
                what = "a commit that did not end: completed if its data are whole"
            found += [Leftover(str(one), what, _size_bytes(one)) for one in abandoned_temporaries(path)]
        return found

    def sweep(self, older_than: timedelta) -> None:
        recover(self.path)

    def close(self) -> None:
        """There is nothing to let go of."""


def _by_total(size_bytes: int, progress: Callable[[int, int], object] | None) -> Callable[[int], object]:
    """Return what is told of each so many bytes, and tells ``progress`` how many of how many that makes."""
    done = 0

    def tell(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, size_bytes)

    return tell


def _size_bytes(path: Path) -> int:
    """Return the size of a file, or of all in a folder; of what is gone meanwhile: nothing."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            return sum(_size_bytes(inner) for inner in path.iterdir())
        return path.lstat().st_size
    return 0


def _below(folder: Path, prefix: str) -> Iterator[StoredFile]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    except NotADirectoryError as e:
        raise CorruptCheckpointError(f"{str(folder)!r} is a file and no folder of checkpoints.") from e
    for entry in entries:
        if entry.is_symlink() or _UNFINISHED.fullmatch(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(folder / entry.name, f"{prefix}{entry.name}/")
        else:
            with contextlib.suppress(FileNotFoundError):  # deleted since
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue  # a pipe or a device
                yield StoredFile(prefix + entry.name, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))
