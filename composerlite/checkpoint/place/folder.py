"""A folder of checkpoints on this machine, or on a disk that it mounts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, final

from composerlite.checkpoint.format import INDEX
from composerlite.checkpoint.place import commit as commits
from composerlite.checkpoint.place.commit import MARKER, SAVING, Commit
from composerlite.checkpoint.place.lease import FileLease, Lease, turn_at
from composerlite.checkpoint.place.place import (
    DELETION,
    Leftover,
    NewFile,
    Parts,
    Place,
    SaveHandle,
    StoredFile,
    by_steps,
    by_total,
)
from composerlite.checkpoint.record.manifest import MANIFESTS, FileRecord, Manifest, record_path
from composerlite.errors import ConfigError, CorruptCheckpointError
from composerlite.storage import (
    FileDigest,
    ParallelReader,
    StagedFile,
    StagedLink,
    StreamWriter,
    WindowRing,
    abandoned_temporaries,
    fsync_folder,
    make_folder,
    read_small_file,
    reserve,
    temporary_name,
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

_SEEN_SECONDS = 20.0
_TURN = timedelta(minutes=10)
"""To wait for the commits of others in the same folder, which rename files and sync directories."""
_BEGUN = re.compile(r"\.(.+)\.json\.tmp-[0-9a-f]+")
"""The manifest of a commit that has not ended."""


@final
class Folder(Place):
    """The checkpoints in the folder ``path``."""

    where = "local"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._locks: dict[SaveHandle, int] = {}
        """The directory of each save that this process has begun or joined, open and locked."""

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
        for record in root.rglob("*.json") if below == MANIFESTS else ():
            if record.is_symlink() or not record.is_file():
                log.warning("left out: %s is no file, and so no manifest", record)
        return {file.path: file for file in _below(root, f"{below}/" if below else "")}

    def exists(self, path: str) -> bool:
        return (self.path / path).is_file()

    def size(self, path: str) -> int:
        return (self.path / path).stat().st_size

    def read(self, path: str) -> bytes:
        is_record = MANIFESTS in path.split("/")  # which is no link
        return read_small_file(self.path / path) if is_record else (self.path / path).read_bytes()

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
            self._wait_until_seen(path)
            make_folder(path.parent)
            with path.open("xb") as created:
                reserve(created.fileno(), file.most_bytes, path)  # beside writes it would take long
        ends: list[Future[FileDigest]] = []
        with WindowRing() as ring:
            for path, file in wanted:
                with StreamWriter(path, file.most_bytes, ring=ring, chunk_bytes=file.chunk_bytes) as sink:
                    file.fill(sink)
                    ends.append(sink.end())
            return [end.result() for end in ends]

    def _wait_until_seen(self, path: Path) -> None:
        """Wait for the directory of the save that ``path`` belongs to, which the first rank has made."""
        deadline = time.monotonic() + _SEEN_SECONDS
        for place in (one for one in path.parents if SAVING.fullmatch(one.name)):
            while not place.is_dir():  # a network file system shows what another machine made some time later
                if time.monotonic() > deadline:
                    raise FileNotFoundError(
                        errno.ENOENT,
                        f"the first rank made this directory {_SEEN_SECONDS:g} s ago, and here it is not: each rank "
                        "writes its part of a sharded checkpoint. Give a folder on a file system that all nodes "
                        "share, or a bucket; or state_dict_type='full', with which rank 0 writes one file. Not here",
                        str(place),
                    )
                time.sleep(0.05)

    def send(self, source: Path, path: str, progress: Callable[[int, int], object] | None = None) -> None:
        Folder(source.parent).write_to(self.path / path, source.name, None, progress)

    def take(self, source: Place, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        source.write_to(self.path / record.path, record.path, record.digest, by_steps(progress))

    def put(self, path: str, data: bytes | Path, *, create_only: bool = False) -> None:
        target = self.path / path
        if isinstance(data, Path):
            data.replace(target)
            fsync_folder(target.parent)
            return
        make_folder(target.parent)
        with StagedFile(target) as staged:
            staged.file.write(data)
            staged.flush()
            if create_only and self._created(staged.temporary, target):
                fsync_folder(target.parent)
            else:
                staged.publish()

    def _created(self, temporary: Path, target: Path) -> bool:
        """Give ``temporary`` the name ``target`` as well, which nothing has; false where a disk knows no such names."""
        try:
            os.link(temporary, target)
        except OSError as e:
            if e.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from e
            return False
        return True

    def delete(self, path: str, *, kept_as: str | None = None) -> None:
        target = self.path / path
        if not self._is_own(target):
            return
        if kept_as is None or not self._renamed(target, self.path / kept_as):
            target.unlink(missing_ok=True)
        if target.name in (MARKER, INDEX) or MANIFESTS in target.relative_to(self.path).parts:
            with contextlib.suppress(FileNotFoundError):  # another process deletes the same, and is ahead
                fsync_folder(target.parent)

    def _renamed(self, path: Path, new: Path) -> bool:
        try:
            path.rename(new)
        except FileNotFoundError:
            return True  # another process deletes the same, and is ahead
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return False  # a full disk may have no room for another name
        return True

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

    @contextlib.contextmanager
    def deleting(self, manifest: Manifest) -> Generator[None]:
        record = self.path / record_path(manifest.name)
        if not self._is_own(record):
            yield
            return
        gone = record.with_name(temporary_name(f"{record.stem}.gone"))
        with commits.held(record):
            commits.remove_manifest(self, record_path(manifest.name), kept_as=str(gone.relative_to(self.path)))
            yield
            commits.end_deletion(self.path, manifest, gone)

    def remove_empty(self, folder: str, *, above: bool = False) -> None:
        path = self.path / folder
        with contextlib.suppress(OSError):  # it holds something else: it stays
            while path != self.path:
                if [inner.name for inner in path.iterdir()] == [MANIFESTS]:
                    (path / MANIFESTS).rmdir()
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

    # ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────

    def release(self, name: str) -> None:
        own = f".{Path(name).name}.saving-"
        for handle in [one for one in self._locks if one.place.startswith(own)]:
            os.close(self._locks.pop(handle))

    def begin(self, name: str, check: Callable[[], bool], *, overwrite: bool) -> SaveHandle:
        commits.check_replaceable(self.path / name)
        while True:
            number = secrets.token_hex(8)
            suffix = f"_{number[:8]}" if overwrite else ""  # in a bucket they come beside the files that they replace
            handle = SaveHandle(f".{Path(name).name}.saving-{number}", suffix)
            if self._begun(name, handle, check):
                return handle

    def join(self, name: str, handle: SaveHandle, check: Callable[[], bool]) -> None:
        try:
            joined = self._begun(name, handle, check)
        except FileExistsError as e:
            raise FileExistsError(
                errno.EEXIST,
                "the nodes had folders of their own when the run began, and now one of them has made this for another. "
                "Start the run again when all nodes see what they are to see. It is there already",
                str((self.path / name).with_name(handle.place)),
            ) from e
        if not joined:
            raise FileNotFoundError(
                errno.ENOENT, "another process has swept what was made for it", str(self.path / name)
            )

    def _begun(self, name: str, handle: SaveHandle, check: Callable[[], bool]) -> bool:
        path = self.path / name
        check()
        make_folder(path.parent)
        commits.settle_dead_saves(self, self.path, name)
        place = path.with_name(handle.place)
        place.mkdir()
        try:
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # swept by another save, which saw it before it could be locked
            return False
        with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():
            self._locks[handle] = lock
            return True
        os.close(lock)  # a sweep was faster than our lock: it takes another name
        return False

    def abandon(self, name: str, handle: SaveHandle) -> None:
        if handle not in self._locks:  # only one process removes what all have written to this disk
            return
        place = (self.path / name).with_name(handle.place)
        try:
            shutil.rmtree(place)
        except FileNotFoundError:
            pass
        except OSError as e:  # it is no checkpoint
            log.warning("%s cannot be removed and is left behind: %s", place, e)
        self.release(name)

    def parts(self, name: str, handle: SaveHandle, deciding: str, data: bytes) -> Parts:
        place = (self.path / name).with_name(handle.place)
        if deciding:
            with (place / deciding).open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for folder, _, _ in os.walk(place):
            fsync_folder(Path(folder))
        return {name: place}

    def commit(self, name: str, parts: Parts, *, overwrite: bool, record: str | None) -> Commit:
        paths = {self.path / path: staged for path, staged in parts.items() if not isinstance(staged, bytes)}
        return _FolderCommit(self, paths, record, overwrite=overwrite)

    def announced(self, name: str | None) -> Iterator[bytes]:
        record = self.path / record_path(name or "*")
        find = record.parent.glob if name else record.parent.rglob
        for path in find(f".{glob.escape(record.name) if name else record.name}.tmp-*"):
            with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
                yield read_small_file(path)

    def between_names(self, name: str) -> Iterator[str]:
        for path in commits.between_names(self.path / name):
            yield str(path.relative_to(self.path))

    # ── links and locks ──────────────────────────────────────────────────────────────────────────────────────────
    def point(self, link: str, name: str | None, *, ahead: bool = False) -> None:
        if name is None:
            (self.path / link).unlink()
        elif not ahead:  # what is left of a commit that was killed says it on a disk
            self.check_link(link)
            with self._staged_link(link, name) as staged:
                staged.publish()

    @contextlib.contextmanager
    def pointing(self, links: Mapping[str, str]) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            staged = [stack.enter_context(self._staged_link(link, name)) for link, name in links.items()]
            yield
            for one in staged:
                one.publish()

    def check_link(self, link: str) -> None:
        super().check_link(link)
        self._check_is_link(self.path / link)

    def _check_is_link(self, path: Path) -> None:
        if self._is_behind_a_link(path) or (os.path.lexists(path) and not path.is_symlink()):
            raise ConfigError(
                f"{str(path)!r} is no link, and the link of this name does not take its place. Move it away, or give "
                "another name (save_latest_filename in the Trainer)."
            )

    def _staged_link(self, link: str, name: str) -> StagedLink:
        """Return the symbolic link ``link`` to ``name``, which replaces one that is there when it is published."""
        self._check_is_link(self.path / link)
        path = self.path / link
        make_folder(path.parent)
        return StagedLink(path, "../" * (len(Path(link).parts) - 1) + name)

    def target_of(self, link: str, *, ahead: bool = False) -> str:
        path = self.path / link
        if ahead or not path.is_symlink():
            raise FileNotFoundError(errno.ENOENT, "there is no such link", str(path))
        return os.path.relpath(path.parent / path.readlink(), self.path)

    def broken_links(self) -> Iterator[tuple[str, str]]:
        for folder in commits.folders(self.path):
            for path in sorted(folder.iterdir()):
                if path.is_symlink() and not path.exists():
                    link = str(path.relative_to(self.path))
                    yield link, self.target_of(link)

    def lock(self, name: str) -> Lease:
        return FileLease(self.path / MANIFESTS / f".{name.replace('/', '%2F')}.lease")

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────
    def in_use(self) -> set[str]:
        used: set[str] = set()
        real = os.path.realpath(self.path)
        for folder, folders, names in os.walk(self.path):
            for path in (Path(folder) / name for name in (*folders, *names)):  # a link to a directory is one of those
                relative = path.relative_to(self.path)
                if path.is_symlink():
                    used.add(os.path.relpath(os.path.realpath(path), real))
                elif MANIFESTS in relative.parts and (begun := _BEGUN.fullmatch(path.name)) is not None:
                    inside = [part for part in relative.parts[:-1] if part != MANIFESTS]
                    used.add("/".join([*inside, begun[1]]))
        return used

    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        found: list[Leftover] = []
        handled: set[Path] = set()  # what is told as something else
        named: set[Path] = set()
        seen = self._swept(everywhere=True)
        for folder, temporary in self._records(seen, everywhere=True):
            one = commits.settlement(Folder(folder), folder, temporary)
            found.append(self._told(folder, one))
            handled |= {temporary, *(folder / path for path in one.gone), *(one.parts or {}).values()}
            named |= {*(one.parts or ())}
        for folder in seen:
            for place in commits.dead_saves(folder):
                match = SAVING.fullmatch(place.name)
                path = place.with_name(match[1] if match else "")
                if not os.path.lexists(path) and path not in named and (new := commits.named_instead(place)):
                    named.add(path)
                    handled.add(new)
                    found.append(
                        Leftover(str(path), "its name was being given to another", _size_bytes(new), is_completed=True)
                    )
                if place not in handled:
                    found.append(Leftover(str(place), "a save that did not end", _size_bytes(place)))
            found += [
                Leftover(str(one), "a file that was not written to its end", _size_bytes(one))
                for one in abandoned_temporaries(folder)
                if one not in handled
            ]
        return found

    def _told(self, folder: Path, one: commits.Settlement) -> Leftover:
        """Return the leftover that ``one`` is, announced in ``folder``: one in this one, or it itself."""
        parts = [] if one.manifest is None or one.parts is None else [record.path for record in one.manifest.here]
        paths = frozenset(str((folder / path).relative_to(self.path)) for path in (*one.gone, *parts))
        if one.manifest is not None and one.parts is not None:
            return Leftover(
                str(folder / one.manifest.name),
                "a commit that did not end",
                sum(record.size_bytes for record in one.manifest.here),
                paths,
                is_completed=True,
            )
        size = _size_bytes(one.temporary) + sum(_size_bytes(folder / path) for path in one.gone)
        if one.manifest is not None and one.is_deletion:
            return Leftover(str(folder / one.manifest.name), DELETION, size, paths)
        return Leftover(str(one.temporary), "a commit that did not end", size, paths)

    def _swept(self, *, everywhere: bool) -> list[Path]:
        """Return the folders to look for leftovers in."""
        if everywhere or not self.path.is_dir():
            return [one for one in commits.folders(self.path) if not any(map(SAVING.fullmatch, one.parts))]
        return [self.path]

    def _records(self, seen: list[Path], *, everywhere: bool) -> Iterator[tuple[Path, Path]]:
        """Yield the announcements of dead processes, each after the folder of it: a run's own folder first."""
        for folder in reversed(seen):
            records = folder / MANIFESTS
            if records.is_dir() and not records.is_symlink():
                for inner in list(commits.folders(records)) if everywhere else [records]:
                    for temporary in abandoned_temporaries(inner):
                        yield folder, temporary

    def recover(self, committed: Mapping[str, str] | None, *, everywhere: bool = True) -> None:
        is_touched = (lambda _: True) if everywhere else _is_of_this_user
        seen = self._swept(everywhere=everywhere)
        kept: set[Path] = set()
        for folder, temporary in self._records(seen, everywhere=everywhere):
            if is_touched(temporary):
                kept.update(commits.settle_record(Folder(folder), folder, temporary, committed))
        for folder in seen:
            for place in filter(is_touched, commits.dead_saves(folder)):
                commits.settle_save(place, kept)
            for temporary in filter(is_touched, abandoned_temporaries(folder)):
                if temporary not in kept:
                    temporary.unlink(missing_ok=True)
                    log.info("removed %s, left by a process that died while it wrote", temporary)

    def sweep(self, older_than: timedelta) -> None:
        self.recover({})

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


@final
class _FolderCommit(Commit):
    """Files and directories by the paths that they will have, and the path that the manifest will have, or none."""

    def __init__(self, folder: Folder, parts: Mapping[Path, Path], record: str | None, *, overwrite: bool) -> None:
        self._folder = folder
        self._parts = parts
        self._record = record
        self._overwrite = overwrite
        self._intention: StagedFile | None = None
        self._held = contextlib.ExitStack()
        self._taken: dict[Path, Path | None] = {}
        """Where what had a name before is now."""
        self._before: bytes | None = None

    def announce(self, manifest: bytes) -> None:
        assert self._record is not None
        record = self._folder.path / self._record
        make_folder(record.parent)
        intention = self._intention = StagedFile(record)
        intention.file.write(manifest)
        intention.flush()
        for folder in {record.parent, *(temporary.parent for temporary in self._parts.values())}:
            fsync_folder(folder)

    @contextlib.contextmanager
    def turn(self) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            if self._overwrite and self._record is not None:  # else a name is taken at one instant, or not
                try:
                    stack.enter_context(turn_at((self._folder.path / self._record).parent, _TURN))
                except TimeoutError:
                    raise
                except OSError as e:
                    log.debug("no lock on the folder of %s, which two may write at the same time: %s", self._record, e)
            yield

    def take_names(self) -> None:
        if self._record is not None and self._folder.exists(self._record):
            try:
                self._before = (self._folder.path / self._record).read_bytes()  # damaged ones and links, too
            except OSError as e:
                log.warning("replacing a checkpoint whose manifest cannot be read: %s", e)
        self.leave()
        take = commits.take_name if self._overwrite else commits.take_new_name
        for path, temporary in self._parts.items():
            self._held.enter_context(commits.held(path))  # what is replaced is not swept before the commit has ended
            self._taken[path] = take(temporary, path)
        for folder in {path.parent for path in self._parts}:
            fsync_folder(folder)

    def publish(self) -> None:
        if self._intention is not None and self._record is not None:
            commits.write_manifest(self._folder, self._record, self._intention.temporary)

    def undo(self) -> None:
        """The manifest goes first, unless it is that of before: nothing is to be completed."""
        if self._intention is not None and self._record is not None:
            if not self._intention.temporary.exists():
                commits.remove_manifest(self._folder, self._record)
            self._intention.temporary.unlink(missing_ok=True)
        for path, old in self._taken.items():
            if old is None or old != self._parts[path] or not commits.exchange(old, path):
                path.rename(self._parts[path])
                if old is not None:
                    old.rename(path)
        if self._record is not None and self._before is not None and not self._folder.exists(self._record):
            commits.write_manifest(self._folder, self._record, self._before)

    def discard(self) -> None:
        for path, old in self._taken.items():
            if old is not None:
                commits.discard(old, path)

    def leave(self) -> None:
        if self._intention is not None:
            self._intention.leave_behind()

    def close(self, error: BaseException | None) -> None:
        self._held.close()
        intention, self._intention = self._intention, None
        if intention is not None:
            intention.__exit__(None if error is None else type(error), error, None)


def _is_of_this_user(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_uid == os.geteuid()
    return False


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
