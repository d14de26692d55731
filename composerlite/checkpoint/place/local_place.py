"""A folder of checkpoints on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import final

from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import SAVING, dead_saves
from composerlite.checkpoint.place.places import MANIFESTS, Leftover, Place, StoredFile
from composerlite.checkpoint.record.manifest import FileRecord
from composerlite.errors import CorruptCheckpointError
from composerlite.storage import StagedFile, abandoned_temporaries, fsync_folder, make_folder, verify_file

__all__ = ["LocalPlace"]

_UNFINISHED = re.compile(r"\..+\.(?:tmp-[0-9a-f]{16}|saving-[0-9a-f]{16}(?:-old|-failed)?)")
"""Files and folders that are being written, or whose writer died."""

_BEGUN = re.compile(r"\.(.+)\.json\.tmp-[0-9a-f]+")
"""The manifest of a commit that has not ended."""


@final
class LocalPlace(Place):
    """The checkpoints in ``folder``."""

    where = "local"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def uri(self, path: str = "") -> str:
        return str(self.folder / path)

    def path_of(self, path: str) -> Path:
        """The file ``path``."""
        return self.folder / path

    def files(self) -> Mapping[str, StoredFile]:
        return {file.path: file for file in _below(self.folder, "")}

    def inside(self, path: str) -> LocalPlace:
        return LocalPlace(self.folder / path)

    def above(self) -> Iterator[tuple[LocalPlace, str]]:
        folder = self.folder.resolve()
        for parent in folder.parents:
            yield LocalPlace(parent), f"{folder.relative_to(parent)}/"

    def exists(self, path: str) -> bool:
        return (self.folder / path).is_file()

    def read(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    def read_all(self, paths: Iterable[str]) -> Iterator[bytes | None]:
        for path in paths:
            try:
                yield self.read(path)
            except FileNotFoundError:
                yield None

    def verify(self, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        verify_file(self.folder / record.path, record.digest, progress)

    def write_to(self, target: Path, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        make_folder(target.parent)
        with StagedFile(target) as staged:
            with (self.folder / record.path).open("rb", buffering=0) as source:
                shutil.copyfileobj(source, staged.file, 8 << 20)
            staged.flush()
            verify_file(staged.temporary, record.digest, progress)
            staged.publish()

    @contextlib.contextmanager
    def lent(self, record: FileRecord) -> Generator[Path]:
        self.verify(record)
        yield self.folder / record.path

    def take(self, source: Place, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        source.write_to(self.folder / record.path, record, progress)

    def put(self, path: str, data: bytes, *, create_only: bool) -> None:
        target = self.folder / path
        make_folder(target.parent)
        with StagedFile(target) as staged:
            staged.file.write(data)
            staged.flush()
            if create_only:
                os.link(staged.temporary, target)
                fsync_folder(target.parent)
            else:
                staged.publish()

    def remove(self, path: str) -> None:
        target = self.folder / path
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
            while folder != self.folder:
                if [path.name for path in folder.iterdir()] == [MANIFESTS]:
                    (folder / MANIFESTS).rmdir()
                folder.rmdir()
                folder = folder.parent

    def point(self, link: str, name: str) -> None:
        Catalog(self.folder).point_latest(link, name)

    def in_use(self) -> set[str]:
        used: set[str] = set()
        for folder, _, names in os.walk(self.folder):
            for path in (Path(folder) / name for name in names):
                relative = path.relative_to(self.folder)
                if path.is_symlink():
                    used.add(os.path.relpath(path.parent / path.readlink(), self.folder))
                elif MANIFESTS in relative.parts and (begun := _BEGUN.fullmatch(path.name)) is not None:
                    inside = [part for part in relative.parts[:-1] if part != MANIFESTS]
                    used.add("/".join([*inside, begun[1]]))
        return used

    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        found: list[Leftover] = []
        for folder, subfolders, _ in os.walk(self.folder):
            path = Path(folder)
            if (saving := SAVING.fullmatch(path.name)) is not None:
                subfolders.clear()
                if path in dead_saves(path.parent, saving[1]):
                    found.append(Leftover(str(path), "a save that did not end", _size_bytes(path)))
                continue
            what = "a file that was not written to its end"
            if MANIFESTS in path.relative_to(self.folder).parts:
                what = "a commit that did not end: completed if its data are whole"
            found += [Leftover(str(one), what, _size_bytes(one)) for one in abandoned_temporaries(path)]
        return found

    def sweep(self, older_than: timedelta) -> None:
        Catalog(self.folder).recover()

    def close(self) -> None:
        """There is nothing to let go of."""


def _size_bytes(path: Path) -> int:
    """Of a file, or of all in a folder; of what is gone meanwhile: nothing."""
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
