"""Atomic and durable files, temporary names of files, and digests of files."""

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
from io import FileIO
from pathlib import Path
from typing import IO, final

import xxhash

from composerlite.errors import CorruptCheckpointError

TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{16}")
"""Names of files, folders and links before they get their final names."""
_ABANDONED_SECONDS = 7 * 24 * 3600.0
"""On a file system without locks, a temporary file without a change for this time is abandoned."""
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
BLOCK_BYTES = 4096  # enough for O_DIRECT on all disks: offsets in files, sizes and addresses are multiples
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
    """Return the final name of a file with the name ``temporary``, the inverse of :func:`temporary_name`."""
    return temporary[1:].rpartition(".tmp-")[0]


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write ``data`` to a file at byte ``position``."""
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def set_direct(file: FileIO, direct: bool) -> None:
    """Turn O_DIRECT on or off for an open file.

    With O_DIRECT, writes skip the page cache: new pages of the cache take longer than the disk. The setting stays as
    before if the file system refuses the change.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


def write_window(file: FileIO, memory: memoryview, position: int, size: int) -> None:
    """Write the first ``size`` bytes of ``memory`` to an open file.

    The size is rounded up to whole blocks if ``memory`` is long enough. So the caller truncates the file afterwards.

    Args:
        file: the file. :func:`set_direct` turns O_DIRECT on and off.
        memory: bytes to write. With O_DIRECT, the address is a multiple of ``BLOCK_BYTES``.
        position: offset of the bytes in the file; with O_DIRECT a multiple of ``BLOCK_BYTES``.
        size: number of bytes.
    """
    try:
        write_all(file.fileno(), memory[: size + -size % BLOCK_BYTES], position)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some file systems accept O_DIRECT and refuse to write
            raise
        set_direct(file, False)
        write_all(file.fileno(), memory[:size], position)


def reserve(descriptor: int, size_bytes: int, path: Path) -> None:
    """Make a file ``size_bytes`` long and reserve the space, so that a full disk is an error before the first write.

    ``path`` is for the message of the OSError. Does nothing if the file system cannot reserve space.
    """
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as e:
        if e.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return  # a full disk is an error of a later write
        raise OSError(e.errno, f"cannot reserve {size_bytes} bytes: {os.strerror(e.errno or 0)}", str(path)) from e


@contextlib.contextmanager
def naming_file(path: Path) -> Generator[None]:
    """Add ``path`` to an OSError of the block, since the system's error has no file name."""
    try:
        yield
    except OSError as e:
        e.filename = str(path)
        raise


def fsync_folder(folder: Path) -> None:
    """Make new, renamed and removed names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming_file(folder):
            os.fsync(descriptor)
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


@final
class StagedFile:
    """A file that gets its name when the content is complete and durable.

    Used as a context manager. Write to :attr:`file`, a temporary file ``.<name>.tmp-<id>`` in the same folder, locked
    while open. Then :meth:`flush` makes the bytes durable, and :meth:`publish` renames the file. The end of the block
    removes an unpublished temporary file. After a kill the file stays for :func:`abandoned_temporaries`.

    Args:
        path: final path of the file.
        save_id: id in the temporary name, 16 hexadecimal digits; random by default.

    Attributes:
        path: final path.
        temporary: path of the temporary file.
        file: the temporary file, open for writing.
        stays: true keeps the temporary file at the end of the block, for :func:`abandoned_temporaries`.

    Raises:
        FileExistsError: there is a temporary file with ``save_id``.
    """

    def __init__(self, path: Path, save_id: str = "") -> None:
        self.path = path
        while True:
            self.temporary = path.with_name(temporary_name(path.name, save_id))
            self.file = self.temporary.open("xb")
            with contextlib.suppress(OSError):  # without locks, abandoned_temporaries yields the file after a week
                fcntl.flock(self.file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # another process removed the file before the lock was taken
                if os.path.samestat(self.temporary.stat(), os.fstat(self.file.fileno())):
                    break
            self.file.close()
        self.stays = False

    def __enter__(self) -> StagedFile:
        return self

    def flush(self) -> None:
        """Make the bytes durable, under the temporary name."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def publish(self, *, overwrite: bool = True) -> None:
        """Rename the temporary file to :attr:`path` and make the name durable. Call after :meth:`flush`.

        Args:
            overwrite: replace an existing file, atomically.

        Raises:
            FileExistsError: ``path`` exists, and ``overwrite`` is false.
            OSError: the rename failed, or ``overwrite`` is false and the file system can neither rename without
                replacement nor make hard links.
        """
        # The lock is still held: abandoned_temporaries finds either a locked file or none.
        if overwrite:
            self.temporary.replace(self.path)
        elif not _renamed_to_new(self.temporary, self.path):
            os.link(self.temporary, self.path)
            self.temporary.unlink()
        self.stays = True
        fsync_folder(self.path.parent)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(self.temporary)):
            error.filename = str(self.path)  # the error of a write has no file name
        if self.stays:
            self.file.close()
            return
        self.temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # buffered bytes that a full disk refuses are not needed
            self.file.close()


def _renamed_to_new(temporary: Path, path: Path) -> bool:
    """Rename ``temporary`` to ``path`` unless ``path`` exists; return false if the file system cannot do that.

    A hard link would need room on a full disk, so that the commit could fail on one node of several.
    """
    rename = ctypes.CDLL(None, use_errno=True).renameat2
    sys.audit("os.rename", str(temporary), str(path), -1, -1)
    if rename(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(temporary), None, str(path))


@contextlib.contextmanager
def atomic_write(path: Path) -> Generator[IO[bytes]]:
    """Replace the file ``path`` by the bytes written in the block, durably. After an error the file is unchanged."""
    with StagedFile(path) as staged:
        yield staged.file
        staged.flush()
        staged.publish()


@contextlib.contextmanager
def pinned_file(path: Path, folder: Path) -> Generator[Path]:
    """Give a file a second name (a hard link) during the block, so that the content outlives the first name.

    The second name is a temporary name and locked: :func:`abandoned_temporaries` yields the name after a kill.

    Args:
        path: path of the file.
        folder: folder of the second name, on the same disk.

    Yields:
        Path with the second name.

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


def abandoned_temporaries(folder: Path) -> Iterator[Path]:
    """Yield the temporary files and links of killed processes in ``folder``, for the caller to remove.

    Each file is locked until the caller requests the next. If the file system has no locks, yields the temporary files
    without a change for a week. Yields all temporary links: :func:`staged_symlink` makes a removed link again.
    """
    if not folder.is_dir():
        return
    for temporary in [path for path in sorted(folder.iterdir()) if is_temporary(path.name)]:
        if temporary.is_symlink():
            yield temporary  # a link cannot be locked
        elif temporary.is_file():
            # Errors: published a moment ago, or owned by another user. NFS locks only files that are open for writing.
            with contextlib.suppress(FileNotFoundError, PermissionError), temporary.open("r+b") as file:
                if _is_abandoned(file):
                    yield temporary


def _is_abandoned(file: IO[bytes]) -> bool:
    """Return true if no process writes the temporary file, and lock the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(file.fileno()).st_ctime > _ABANDONED_SECONDS
    return True


@contextlib.contextmanager
def staged_symlink(link: Path, target: str) -> Generator[None]:
    """Point ``link`` to ``target`` at the end of the block, atomically and durably.

    The new link is made before the block, under a temporary name, so that a full disk is an error before the block. If
    the block raises, ``link`` stays as before.

    Args:
        link: path of the link.
        target: path of the target, relative to the folder of the link.
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
    """Rename the temporary link to ``link``, durably. Make the temporary link again if another process removed it."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            temporary.replace(link)
            break
        temporary.symlink_to(target)  # removed as abandoned: a link cannot be locked
    fsync_folder(link.parent)


@final
@dataclass(frozen=True, slots=True)
class FileDigest:
    """Digest of a file, and of each chunk of the file.

    Attributes:
        size_bytes: size of the whole file.
        xxh3_128: XXH3-128 of the file without the tail, in hexadecimal.
        chunk_bytes: size of a chunk; the last chunk is shorter. 0: there are no digests of chunks.
        chunks: XXH3-64 of each chunk of the file without the tail: 8 bytes each, big-endian, in base 64.
        tail_bytes: size of the tail, the end of the file, where the digest of the rest is stored; 0: no tail.
        tail_xxh3_128: XXH3-128 of the tail, in hexadecimal; empty without a tail.
    """

    size_bytes: int
    xxh3_128: str
    chunk_bytes: int = 0
    chunks: str = ""
    tail_bytes: int = 0
    tail_xxh3_128: str = ""

    @property
    def body_bytes(self) -> int:
        """Size of the file without the tail, in bytes."""
        return self.size_bytes - self.tail_bytes

    def with_tail(self, tail: bytes) -> FileDigest:
        """Return the digest of the file with ``tail`` as the tail, in place of an earlier tail."""
        size, digest = self.body_bytes + len(tail), xxhash.xxh3_128_hexdigest(tail) if tail else ""
        return replace(self, size_bytes=size, tail_bytes=len(tail), tail_xxh3_128=digest)

    def chunk_digests(self, name: str) -> list[str]:
        """Return the XXH3-64 of each chunk, in hexadecimal. Empty if there are no digests of chunks.

        Args:
            name: name of the file, for the error.

        Raises:
            CorruptCheckpointError: the number of digests does not fit the size of the file.
        """
        if not self.chunk_bytes:
            return []
        with contextlib.suppress(ValueError):  # not base 64
            digests = base64.b64decode(self.chunks, validate=True)
            if self.chunk_bytes > 0 and len(digests) == 8 * -(-self.body_bytes // self.chunk_bytes):
                return [digests[at : at + 8].hex() for at in range(0, len(digests), 8)]
        raise CorruptCheckpointError(
            f"the digests of {name!r} do not fit a file: {self.body_bytes} bytes in chunks of {self.chunk_bytes}."
        )


def chunk_bytes_for(size_bytes: int, least: int = _SMALLEST_CHUNK_BYTES, most_chunks: int = _MOST_CHUNKS) -> int:
    """Return the size of the chunks of a file, for a :class:`FileDigest`.

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
