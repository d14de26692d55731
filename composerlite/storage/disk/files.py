"""Files: how they appear whole and survive a power cut, sinks that take their bytes, and digests of what they hold."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Protocol, final

import xxhash

TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{16}")
"""Names of files and folders that are not written to their end."""
_ABANDONED_SECONDS = 7 * 24 * 3600.0
"""A temporary without a change for so long has no writer, where no lock can tell."""
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_SMALLEST_CHUNK_BYTES = 1 << 20
_MOST_CHUNKS = 2048


def temporary_name(name: str, save_id: str = "") -> str:
    """Return the temporary name of the file ``name``.

    Args:
        name: of the file once it is complete.
        save_id: 16 hexadecimal digits; random ones by default.

    Returns:
        ``.<name>.tmp-<save_id>``.
    """
    return f".{name}.tmp-{save_id or secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Return true if ``name`` is one that :func:`temporary_name` gives."""
    return TEMPORARY.fullmatch(name) is not None


def open_direct(path: Path, flags: int) -> int | None:
    """Open a file past the page cache; ``None`` where the file system has no such thing."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as e:
        if e.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT):
            return None
        raise


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write ``data`` to a file from ``position`` on."""
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def fsync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(folder)) from e  # the system's own names no file
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and those above it that are not there, and make their names durable."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if _is_no_folder(folder):
            raise
    fsync_folder(folder.parent)


def _is_no_folder(path: Path) -> bool:
    """Return true if something else lies there. A folder that another process has just made may be gone by now."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return path.is_symlink()  # to nothing


@final
class StagedFile:
    """A file that has its name only when it is whole and durable.

    Used as a context manager. The bytes go to ``.<name>.tmp-<id>`` in the same folder, which is locked as long as this
    process lives. :meth:`flush` makes them durable, :meth:`publish` gives them the name. Leaving the block unpublished
    removes the temporary; after a kill it stays, and :func:`abandoned_temporaries` finds it.

    Args:
        path: of the file.
        save_id: the id in the temporary name; empty: a new one. FileExistsError if a temporary file has it.
    """

    def __init__(self, path: Path, save_id: str = "") -> None:
        self.path = path
        self.temporary, self.file = _create_locked(path, save_id)
        self._published = False
        self._stays = False

    def __enter__(self) -> StagedFile:
        return self

    @staticmethod
    def temporary_of(path: Path, save_id: str) -> Path:
        """Return the temporary path of a file.

        Args:
            path: of the file once it is published.
            save_id: of the save that writes it.

        Returns:
            The path, beside ``path``.
        """
        return path.with_name(temporary_name(path.name, save_id))

    def flush(self) -> None:
        """Make the bytes durable, under the temporary name."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def leave_behind(self) -> None:
        """Keep the temporary file if it is not published, for :func:`abandoned_temporaries` to find."""
        self._stays = True

    def publish(self, *, overwrite: bool = True) -> None:
        """Rename to ``path`` and make the name durable. Call after :meth:`flush`.

        Args:
            overwrite: replace the file of that name, at the same instant.

        Raises:
            FileExistsError: there is a file of that name, and ``overwrite`` is false.
            OSError: the file system refused.
        """
        # The lock is still held: whoever looks for abandoned files sees either the lock or no temporary.
        if overwrite:
            self.temporary.replace(self.path)
        elif not _renamed_to_new(self.temporary, self.path):
            os.link(self.temporary, self.path)
            self.temporary.unlink()
        self._published = True
        fsync_folder(self.path.parent)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(self.temporary)):
            error.filename = str(self.path)  # a write that fails does not say of which file
        if self._published or self._stays:
            self.file.close()
            return
        try:
            self.temporary.unlink(missing_ok=True)
        finally:
            with contextlib.suppress(OSError):  # what a full disk did not take is thrown away: no second error
                self.file.close()


def _renamed_to_new(temporary: Path, path: Path) -> bool:
    """Rename ``temporary`` to ``path``, which nothing may have; return false if the file system cannot do so."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    sys.audit("os.rename", str(temporary), str(path), -1, -1)
    if rename(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(temporary), None, str(path))


@final
class HardlinkPin:
    """Second name of a file, which keeps its content until :meth:`remove`, even if the first is removed.

    The name is that of a temporary, locked as long as this process lives: :func:`abandoned_temporaries` finds it after
    a kill. Where the file system has no second names it is a copy.

    Args:
        path: of the file.
        folder: where the name is to be, on the same disk; ``None``: in the same folder.

    Attributes:
        path: the name.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        while True:
            self.path = (folder or path.parent) / temporary_name(path.name)
            try:
                os.link(path, self.path)
            except FileExistsError:
                continue
            except OSError as e:
                if e.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
                    raise
                try:
                    shutil.copyfile(path, self.path)
                except BaseException:
                    self.path.unlink(missing_ok=True)
                    raise
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:  # a sweep was faster than our lock: take another name
                continue
            with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if self.path.exists():
                return
            self._file.close()

    def remove(self) -> None:
        """Remove the second name of the file. May be called twice."""
        self.path.unlink(missing_ok=True)
        self._file.close()


def check_free(path: Path, overwrite: bool) -> None:
    """Raise FileExistsError if something has the name ``path`` and may not be replaced."""
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(f"{str(path)!r} exists already: pass overwrite=True to replace it.")


@contextlib.contextmanager
def atomic_write(path: Path) -> Generator[IO[bytes]]:
    """Write the file ``path`` so that it is there whole and durable, or as it was before."""
    with StagedFile(path) as staged:
        yield staged.file
        staged.flush()
        staged.publish()


def _create_locked(path: Path, save_id: str) -> tuple[Path, IO[bytes]]:
    """A new temporary beside ``path``, open and locked. The lock lives as long as this process holds the file open."""
    while True:
        temporary = path.with_name(temporary_name(path.name, save_id))
        file = temporary.open("xb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks (some network ones): nobody can prove this temporary dead, so none is swept.
            return temporary, file
        with contextlib.suppress(FileNotFoundError):  # a sweep was faster than our lock: take another name
            if temporary.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return temporary, file
        file.close()


def abandoned_temporaries(folder: Path) -> Iterator[Path]:
    """The temporaries that dead processes left in ``folder``, each locked while the caller looks at it.

    A temporary whose writer lives is locked by it and is left out. Where the file system has no locks nothing can be
    proven dead: there a temporary counts that nobody has changed for a week.
    """
    if not folder.is_dir():
        return
    for temporary in [path for path in sorted(folder.iterdir()) if TEMPORARY.fullmatch(path.name)]:
        if temporary.is_symlink():
            yield temporary  # made and renamed in two system calls: one that is still here was left behind
            continue
        with is_abandoned(temporary) as dead:
            if dead and temporary.is_file():
                yield temporary


@contextlib.contextmanager
def is_abandoned(path: Path) -> Generator[bool]:
    """Tell if the writer of a temporary file or folder is dead; it is locked meanwhile. False for anything else.

    A week without a change proves it where there are no locks: a link to a file, and all in a folder, count as well.
    """
    try:
        if not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISDIR(mode):
            yield False  # a pipe, for one: to open it would wait for its other end
            return
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):  # its writer has just published it; or it is another user's
        yield False
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        except OSError:
            yield time.time() - _last_change(path) > _ABANDONED_SECONDS
        else:
            yield True
    finally:
        os.close(file)


def _last_change(path: Path) -> float:
    """Return the time of the last change to a file, or to a folder and its contents."""
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    changes = [time.time()]
    with contextlib.suppress(FileNotFoundError):  # somebody is at work there: now
        changes = [max(one.lstat().st_ctime, one.lstat().st_mtime) for one in found]
    return max(changes)


@final
class StagedLink:
    """A symbolic link under a temporary name beside ``link``, until :meth:`publish`. Used as a context manager.

    There is no moment without a link. Leaving the block unpublished removes the temporary.

    Args:
        link: its name. target: what it leads to, relative to its folder.
    """

    def __init__(self, link: Path, target: str) -> None:
        self._link, self._target = link, target
        self._temporary: Path | None = self._make()

    def _make(self) -> Path:
        temporary = self._link.with_name(temporary_name(self._link.name))
        temporary.symlink_to(self._target)
        return temporary

    def publish(self) -> None:
        """Rename it to its name, replacing what is there, and make that durable."""
        while self._temporary is not None:
            try:
                self._temporary.replace(self._link)
            except FileNotFoundError:  # a link cannot be locked: another process took ours for abandoned
                self._temporary = self._make()
            else:
                self._temporary = None
        fsync_folder(self._link.parent)

    def __enter__(self) -> StagedLink:
        return self

    def __exit__(self, *exception: object) -> None:
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def replace_symlink(link: Path, target: str) -> None:
    """Point ``link`` to ``target`` (relative to its folder) without a moment in which there is no link.

    Args:
        link: path of the link.
        target: relative to the folder of the link.
    """
    with StagedLink(link, target) as staged:
        staged.publish()


# ── what is in a file ────────────────────────────────────────────────────────────────────────────────────────────
@final
@dataclass(frozen=True, slots=True)
class FileDigest:
    """Digest of a file, and of each chunk of the file.

    Attributes:
        size_bytes: size of the whole file.
        xxh3_128: digest of the file without its tail, in hexadecimal.
        chunk_bytes: size of a chunk; the last chunk is shorter. 0: there are no digests of chunks.
        chunks: XXH3-64 of each chunk, 8 bytes each, big-endian, in base 64.
        tail_bytes: size of the end of the file, which contains the digest and is not covered by it.
        tail_xxh3_128: digest of that end, in hexadecimal.
    """

    size_bytes: int
    xxh3_128: str
    chunk_bytes: int = 0
    chunks: str = ""
    tail_bytes: int = 0
    tail_xxh3_128: str = ""

    @property
    def body_bytes(self) -> int:
        """Size of the bytes that the digest covers."""
        return self.size_bytes - self.tail_bytes

    def with_tail(self, tail: bytes) -> FileDigest:
        """Return the digest of the file after ``tail`` was appended to its body."""
        size, digest = self.body_bytes + len(tail), xxhash.xxh3_128_hexdigest(tail) if tail else ""
        return replace(self, size_bytes=size, tail_bytes=len(tail), tail_xxh3_128=digest)

    def chunk_digests(self) -> list[bytes]:
        """The 8 bytes of each chunk.

        Raises:
            ValueError: they are not those of a file of this size.
        """
        if not self.chunk_bytes:
            return []
        digests = base64.b64decode(self.chunks, validate=True)
        if self.chunk_bytes < 0 or len(digests) != 8 * -(-self.body_bytes // self.chunk_bytes):
            raise ValueError(f"{len(digests)} bytes of digests for {self.body_bytes} bytes of {self.chunk_bytes} each")
        return [digests[at : at + 8] for at in range(0, len(digests), 8)]


def chunk_bytes_for(size_bytes: int, least: int = _SMALLEST_CHUNK_BYTES, most_chunks: int = _MOST_CHUNKS) -> int:
    """The size of a chunk, of which a file has a digest each.

    Args:
        size_bytes: that the file has at most.
        least: size of a chunk of a small file.
        most_chunks: that a file may have: those of a large one are larger.

    Returns:
        Size in bytes.
    """
    chunk_bytes = least
    while size_bytes > chunk_bytes * most_chunks:
        chunk_bytes *= 2
    return chunk_bytes


@final
class Digester:
    """Digests a file from front to back, the whole and every chunk of ``chunk_bytes``, in one pass."""

    def __init__(self, chunk_bytes: int) -> None:
        self._whole = xxhash.xxh3_128()
        self._chunk = xxhash.xxh3_64()
        self._chunk_bytes = chunk_bytes
        self._left = chunk_bytes
        self._chunks = bytearray()
        self._size = 0

    def update(self, data: memoryview | bytes) -> None:
        """Digest the bytes that come next."""
        view = memoryview(data)
        self._size += len(view)
        while view:
            chunk = self._chunk_bytes
            if self._left == chunk <= len(view):  # whole ones are summed at once
                size = len(view) // chunk * chunk
                self._whole.update(view[:size])
                for at in range(0, size, chunk):
                    self._chunks += xxhash.xxh3_64_digest(view[at : at + chunk])
                view = view[size:]
                continue
            piece = view[: self._left]
            self._whole.update(piece)
            self._chunk.update(piece)
            self._left -= len(piece)
            view = view[len(piece) :]
            if not self._left:
                self._finish_chunk()

    def finish(self) -> FileDigest:
        """The digests of all that came."""
        if self._left < self._chunk_bytes:
            self._finish_chunk()
        chunks = base64.b64encode(self._chunks).decode()
        return FileDigest(self._size, self._whole.hexdigest(), self._chunk_bytes, chunks)

    def _finish_chunk(self) -> None:
        self._chunks += self._chunk.digest()
        self._chunk.reset()
        self._left = self._chunk_bytes


Seal = Callable[[FileDigest, FileDigest | None], bytes]
"""Makes the tail of a file from the digest of the bytes as stored, and of the bytes inside if they are compressed."""


class Sink(Protocol):
    """Takes the bytes of one file in order. Used as a context manager: leaving it without :meth:`finish` gives up.

    Attributes:
        size_bytes: taken so far.
        piece_bytes: what is best appended at once.
        seconds: spent by name, ``hash``, ``write`` and ``flush`` among them. Complete after :meth:`finish`.
    """

    size_bytes: int
    piece_bytes: int
    seconds: dict[str, float]

    def write(self, data: bytes) -> None:
        """Append ``data``.

        Raises:
            OSError: what came before could not be written.
        """
        ...

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``; their CRC-32. The memory may change when this returns.

        Args:
            address: of the first byte.
            size: in bytes.
            crc: of the bytes before them; ``None``: it is not wanted, and 0 is returned.

        Returns:
            CRC-32 of the bytes, those before included.

        Raises:
            OSError: what came before could not be written.
        """
        ...

    def finish(self, seal: Seal | None = None) -> FileDigest:
        """Wait until everything is durable, and return the digest of the file. Nothing can be appended any more.

        Args:
            seal: makes the tail of the file from the digest of the bytes before the tail. ``None``: no tail.

        Raises:
            OSError: something could not be written.
        """
        ...

    def __enter__(self) -> Sink: ...

    def __exit__(self, *exception: object) -> None: ...
