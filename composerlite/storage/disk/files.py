"""Files that appear whole and survive a power cut, their temporary names, and digests of their contents."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, final

import xxhash

TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{16}")
"""Names of files and folders that are being written."""
_ABANDONED_SECONDS = 7 * 24 * 3600.0
"""On a file system without locks, a temporary without a change for so long is abandoned."""
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
BLOCK_BYTES = 4096  # O_DIRECT wants offsets and sizes in multiples of this
_SMALLEST_CHUNK_BYTES = 1 << 20
_MOST_CHUNKS = 2048


def temporary_name(name: str, save_id: str = "") -> str:
    """Return the temporary name of the file ``name``.

    Args:
        name: final name of the file.
        save_id: 16 hexadecimal digits; random by default.

    Returns:
        ``.<name>.tmp-<save_id>``.
    """
    return f".{name}.tmp-{save_id or secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Return true if :func:`temporary_name` can return ``name``."""
    return TEMPORARY.fullmatch(name) is not None


def final_name(temporary: str) -> str:
    """Return the ``name`` that :func:`temporary_name` got."""
    return temporary[1:].rpartition(".tmp-")[0]


def open_direct(path: Path, flags: int) -> int | None:
    """Open a file with O_DIRECT; return ``None`` if the file system refuses O_DIRECT."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as e:
        if e.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT):
            return None
        raise


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write ``data`` to a file at byte ``position``."""
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def write_file(path: Path, memory: memoryview, position: int, size: int, *, past_cache: bool = True) -> None:
    """Write to an existing file.

    Args:
        path: of the file.
        memory: begins with the bytes, at an address in whole blocks. The block of the last byte may be written whole.
        position: of the bytes in the file, in whole blocks.
        size: number of bytes.
        past_cache: write with O_DIRECT, unless the file system refuses O_DIRECT: new pages of the cache cost more than
            the disk. False: write through the page cache.
    """
    if past_cache and (direct := open_direct(path, os.O_WRONLY)) is not None:
        with os.fdopen(direct, "wb", buffering=0):
            try:
                write_all(direct, memory[: size + -size % BLOCK_BYTES], position)
                return
            except OSError as e:
                if e.errno != errno.EINVAL:  # some file systems open with O_DIRECT and refuse to write
                    raise
    with path.open("r+b", buffering=0) as file:
        write_all(file.fileno(), memory[:size], position)


def reserve(descriptor: int, size_bytes: int, path: Path) -> None:
    """Reserve space for a file, so that a full disk is found before the first byte is written."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as e:
        if e.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return  # the file system cannot reserve: writing finds a full disk
        raise OSError(e.errno, f"cannot reserve {size_bytes} bytes: {os.strerror(e.errno or 0)}", str(path)) from e


def fsync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        e.filename = str(folder)  # the error of the system names no file
        raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create ``folder`` and missing parents, with durable names.

    Raises:
        FileExistsError: ``folder`` or a parent is a file.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)  # another process may have created the folder
    fsync_folder(folder.parent)


def check_free(path: Path, overwrite: bool) -> None:
    """Raise FileExistsError if ``path`` exists and ``overwrite`` is false."""
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(f"{str(path)!r} exists already: pass overwrite=True to replace it.")


@final
class StagedFile:
    """A file that gets its name when the content is complete and durable.

    Used as a context manager. The bytes go to ``.<name>.tmp-<id>`` in the same folder, locked as long as this process
    lives. :meth:`flush` makes the bytes durable, :meth:`publish` renames the file. Leaving the block unpublished
    removes the temporary. After a kill the temporary stays, and :func:`abandoned_temporaries` finds it.

    Args:
        path: of the file.
        save_id: the id in the temporary name; random by default. FileExistsError if a temporary has this id.

    Attributes:
        path: final path.
        temporary: path of the temporary.
        file: the temporary, open for writing.
    """

    def __init__(self, path: Path, save_id: str = "") -> None:
        self.path = path
        while True:
            self.temporary = self.temporary_of(path, save_id)
            self.file = self.temporary.open("xb")
            if _locked(self.file, self.temporary):
                break
        self._stays = False

    def __enter__(self) -> StagedFile:
        return self

    @staticmethod
    def temporary_of(path: Path, save_id: str) -> Path:
        """Return the temporary path of a file.

        Args:
            path: final path of the file.
            save_id: id of the save.

        Returns:
            The path, beside ``path``.
        """
        return path.with_name(temporary_name(path.name, save_id))

    def flush(self) -> None:
        """Make the bytes durable, under the temporary name."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def leave_behind(self) -> None:
        """Keep the temporary if the file is not published; :func:`abandoned_temporaries` finds it later."""
        self._stays = True

    def publish(self, *, overwrite: bool = True) -> None:
        """Rename to ``path`` and make the name durable. Call after :meth:`flush`.

        Args:
            overwrite: replace the file of that name, atomically.

        Raises:
            FileExistsError: ``path`` exists, and ``overwrite`` is false.
            OSError: the file system refused.
        """
        # The lock is still held: a sweep sees either the lock or no temporary.
        if overwrite:
            self.temporary.replace(self.path)
        elif not _renamed_to_new(self.temporary, self.path):
            os.link(self.temporary, self.path)
            self.temporary.unlink()
        self._stays = True
        fsync_folder(self.path.parent)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(self.temporary)):
            error.filename = str(self.path)  # an error of a write names no file
        if self._stays:
            self.file.close()
            return
        try:
            self.temporary.unlink(missing_ok=True)
        finally:
            with contextlib.suppress(OSError):  # buffered bytes that a full disk refuses are not needed
                self.file.close()


def _renamed_to_new(temporary: Path, path: Path) -> bool:
    """Rename ``temporary`` to ``path`` unless ``path`` exists; return false if the file system cannot do that."""
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


@contextlib.contextmanager
def atomic_write(path: Path) -> Generator[IO[bytes]]:
    """Write the file ``path``: after the block the file is complete and durable; after an error unchanged."""
    with StagedFile(path) as staged:
        yield staged.file
        staged.flush()
        staged.publish()


@contextlib.contextmanager
def pinned_file(path: Path, folder: Path) -> Generator[Path]:
    """Give a file a second name (a hard link) during the block, so that the content stays if the first is removed.

    The second name is a locked temporary: :func:`abandoned_temporaries` finds this name after a kill.

    Args:
        path: of the file.
        folder: folder of the second name, on the same disk.

    Yields:
        The second name.

    Raises:
        OSError: the file does not exist, or the file system has no hard links.
    """
    pin = folder / temporary_name(path.name)
    os.link(path, pin)
    try:
        with pin.open("rb") as file:
            with contextlib.suppress(OSError):  # a writer of the file in this process may hold a lock
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield pin
    finally:
        pin.unlink(missing_ok=True)


def _locked(file: IO[bytes], temporary: Path) -> bool:
    """Lock a new temporary until ``file`` is closed; close ``file`` and return false if a sweep was faster."""
    with contextlib.suppress(OSError):  # on a file system without locks a sweep waits for a week
        fcntl.flock(file, fcntl.LOCK_EX)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(temporary.stat(), os.fstat(file.fileno())):
            return True
    file.close()
    return False


def abandoned_temporaries(folder: Path) -> Iterator[Path]:
    """Yield the temporaries that dead processes left in ``folder``, each locked until the next is asked for.

    Where the file system has no locks, a temporary counts that was not changed for a week.
    """
    if not folder.is_dir():
        return
    for temporary in [path for path in sorted(folder.iterdir()) if is_temporary(path.name)]:
        if temporary.is_symlink():
            yield temporary  # a living process renames the link at once
        elif temporary.is_file():
            try:
                descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW)
            except (FileNotFoundError, PermissionError):  # published a moment ago, or owned by another user
                continue
            try:
                if _is_abandoned(descriptor):
                    yield temporary
            finally:
                os.close(descriptor)


def _is_abandoned(descriptor: int) -> bool:
    """Return true if the writer of a temporary is dead, and lock the temporary."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(descriptor).st_ctime > _ABANDONED_SECONDS
    return True


@contextlib.contextmanager
def staged_symlink(link: Path, target: str) -> Generator[None]:
    """Point ``link`` to ``target`` when the block ends, durable; there is no moment without a link.

    The new link is made before the block, under a temporary name, so that a full disk is an error before the block. If
    the block raises, ``link`` stays as before.

    Args:
        link: path of the link.
        target: relative to the folder of the link.
    """
    temporary = link.with_name(temporary_name(link.name))
    temporary.symlink_to(target)
    try:
        yield
        _move_link(temporary, link, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _move_link(temporary: Path, link: Path, target: str) -> None:
    while True:
        try:
            temporary.replace(link)
            break
        except FileNotFoundError:  # a link cannot be locked: a sweep removed the link
            temporary.symlink_to(target)
    fsync_folder(link.parent)


def replace_symlink(link: Path, target: str) -> None:
    """Point ``link`` to ``target``, as :func:`staged_symlink` does.

    Args:
        link: path of the link.
        target: path of the target, relative to the folder of the link.
    """
    with staged_symlink(link, target):
        pass


@final
@dataclass(frozen=True, slots=True)
class FileDigest:
    """Digest of a file, and of each chunk of the file.

    Attributes:
        size_bytes: size of the whole file.
        xxh3_128: digest of the file without the tail, in hexadecimal.
        chunk_bytes: size of a chunk; the last chunk is shorter. 0: there are no digests of chunks.
        chunks: XXH3-64 of each chunk, 8 bytes each, big-endian, in base 64.
        tail_bytes: size of the end of the file, where the digest is stored; the digest does not cover the tail.
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
        """Return the digest of the file after ``tail`` was appended to the body."""
        size, digest = self.body_bytes + len(tail), xxhash.xxh3_128_hexdigest(tail) if tail else ""
        return replace(self, size_bytes=size, tail_bytes=len(tail), tail_xxh3_128=digest)

    def chunk_digests(self) -> list[bytes]:
        """Return the 8 bytes of the digest of each chunk; empty if there are no digests of chunks.

        Raises:
            ValueError: the number of digests does not fit the size of the file.
        """
        if not self.chunk_bytes:
            return []
        digests = base64.b64decode(self.chunks, validate=True)
        if self.chunk_bytes < 0 or len(digests) != 8 * -(-self.body_bytes // self.chunk_bytes):
            raise ValueError(f"{len(digests)} bytes of digests for {self.body_bytes} bytes of {self.chunk_bytes} each")
        return [digests[at : at + 8] for at in range(0, len(digests), 8)]


def chunk_bytes_for(size_bytes: int, least: int = _SMALLEST_CHUNK_BYTES, most_chunks: int = _MOST_CHUNKS) -> int:
    """Return the size of the chunks of a file, each of which has a digest.

    Args:
        size_bytes: largest possible size of the file.
        least: size of a chunk of a small file, in bytes.
        most_chunks: largest number of chunks: a large file has larger chunks.

    Returns:
        Size in bytes.
    """
    chunk_bytes = least
    while size_bytes > chunk_bytes * most_chunks:
        chunk_bytes *= 2
    return chunk_bytes
