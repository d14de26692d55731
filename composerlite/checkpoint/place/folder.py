"""A folder of checkpoints on this machine, or on a mounted disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
from collections.abc import Generator, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, final

from composerlite.checkpoint.place.lease import FileLease, Lease, lease_name
from composerlite.checkpoint.place.place import NewFile, OnBytes, Place, StoredFile
from composerlite.checkpoint.record.record import FileRecord
from composerlite.errors import ConfigError, CorruptCheckpointError
from composerlite.storage import FileDigest, ParallelReader, StagedFile, StreamWriter, make_folder, verify_file
from composerlite.storage.disk.files import abandoned_temporaries, fsync_folder, is_temporary, staged_symlink

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

log = logging.getLogger(__name__)
MOST_SMALL_BYTES = 1 << 30
"""Largest file that is read whole, such as an index."""


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
            log.warning("left out: %s is no folder of this one", root)
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
            raise ConfigError(f"{self.uri(folder)!r} is a file and no directory of a sharded checkpoint.") from e

    def exists(self, path: str) -> bool:
        return (self.path / path).is_file()

    def read(self, path: str) -> bytes:
        size_bytes, data = self.end(path, MOST_SMALL_BYTES)
        if len(data) < size_bytes:
            raise CorruptCheckpointError(f"{self.uri(path)!r} is larger than {MOST_SMALL_BYTES} bytes.")
        return data

    def end(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        target = self.path / path
        try:
            descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
        except NotADirectoryError as e:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(target)) from e
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "there is no file of that name", str(target))
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
    def write(self, files: Iterable[NewFile]) -> list[FileDigest]:
        wanted = [(self.path / file.path, file) for file in files]
        digests: list[FileDigest] = []
        for path, file in wanted:
            make_folder(path.parent)
            path.touch(exist_ok=False)
            with StreamWriter(path, file.most_bytes, chunk_bytes=file.chunk_bytes) as sink:
                file.fill(sink)
                digests.append(sink.finish())
        for folder in {path.parent for path, _ in wanted}:
            fsync_folder(folder)  # the names of data files are durable before the deciding file is written
        return digests

    def put(self, path: str, data: bytes | Path, *, create_only: bool = False, progress: OnBytes = int) -> None:
        _write(self.path / path, data, None, progress, create_only=create_only)

    def delete(self, paths: Iterable[str], *, durable: bool = False, folders: bool = False) -> None:
        targets = [self.path / path for path in paths]
        for target in targets:
            if target.is_symlink() or not target.is_file() or self._is_behind_a_link(target):
                if os.path.lexists(target):
                    log.warning("%s is no file, or is behind a link, and is left alone", target)
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
                f"{str(path)!r} is no link, and the link of this name does not take its place. Move it away, or give "
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
                        log.info("removed %s, left by a process that died while it wrote", path)
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
        OSError: a folder cannot be read. An unreadable folder does not count as empty, a missing folder does.
        CorruptCheckpointError: ``folder`` is a file.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:  # another process deleted it
        return
    except NotADirectoryError as e:
        raise CorruptCheckpointError(f"{str(folder)!r} is a file and no folder of checkpoints.") from e
    for entry in entries:
        yield prefix + entry.name, entry
        if entry.is_dir(follow_symlinks=False) and not is_temporary(entry.name):
            yield from _walk(entry.path, f"{prefix}{entry.name}/")
