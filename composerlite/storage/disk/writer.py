"""StreamWriter: writes large files at the speed of the disk, in threads and with O_DIRECT, and computes digests."""

from __future__ import annotations

import base64
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import final

import xxhash
from isal import isal_zlib

from composerlite.storage.disk.files import FileDigest, chunk_bytes_for, naming_file, reserve, set_direct, write_window
from composerlite.storage.disk.memory import HostMemory, address_of, borrow_memory, give_memory_back, move
from composerlite.storage.disk.reader import cut
from composerlite.storage.workers import WorkerPool
from composerlite.types import Closing

_RING_BYTES = 48 << 20
"""Size of the ring: the memory for a file that is not in memory as a whole, divided into windows used in turn."""
_WINDOW_BYTES = 8 << 20  # more windows than threads: all threads and the caller are busy
_WRITERS = 4  # fewer leave the disk idle between two writes
_PIECE_BYTES = 2 << 20  # size of a copy; the bytes are hashed while in the cache of the processor
_LARGE_WINDOW_BYTES = 32 << 20
"""Size of a window of memory written without a copy. Large, since each write call takes the interpreter's lock."""
_FEW_CORES = 2  # training has a core; the other core either hashes or writes

Seal = Callable[[FileDigest, FileDigest | None], bytes]
"""Function that returns the tail of a file. Arguments: the digest of the stored bytes, and the digest of the bytes
before compression, ``None`` without compression.
"""


@final
class Digester:
    """Computes the digests of a file and of each chunk of ``chunk_bytes`` while the bytes are written."""

    def __init__(self, chunk_bytes: int) -> None:
        self._whole = xxhash.xxh3_128()
        self._chunk = xxhash.xxh3_64()
        self._chunk_bytes = chunk_bytes
        self._chunks = bytearray()
        self._size = 0

    def update(self, data: memoryview | bytes) -> None:
        """Add the next bytes of the file."""
        view, position = memoryview(data), self._size
        self._whole.update(view)
        self._size += len(view)
        for start, end in cut(position, self._size, self._chunk_bytes):
            self._chunk.update(view[start - position : end - position])
            if end % self._chunk_bytes == 0:
                self._chunks += self._chunk.digest()
                self._chunk.reset()

    def finish(self) -> FileDigest:
        """Return the digest of all bytes so far."""
        last = self._chunk.digest() if self._size % self._chunk_bytes else b""
        chunks = base64.b64encode(self._chunks + last).decode()
        return FileDigest(self._size, self._whole.hexdigest(), self._chunk_bytes, chunks)


@final
class StreamWriter(Closing):
    """Writes a file from front to back: the caller fills windows of memory, threads write the windows to the disk.

    Windows are written with O_DIRECT, or through the page cache if the file system refuses O_DIRECT. Files in
    ``memory`` are written in the calling thread on machines with one or two cores, where threads would slow down
    training. Use as a context manager. Without :meth:`finish` the file stays incomplete, and the caller removes the
    file.

    Args:
        path: an existing file, empty.
        size_bytes: expected size of the file. The space is reserved first, so that a full disk is an error before any
            write.
        memory: memory for the whole file, owned by the caller; the file is written from there. :meth:`copy` copies the
            bytes to the same offset as in the file, unless already there. No other code may change the memory until
            :meth:`finish` or :meth:`close` returns. ``None``: a ring of 48 MiB, where a window is reused after the
            write.
        chunk_bytes: size of the chunks with a digest; ``None``: the result of :func:`chunk_bytes_for`.

    Attributes:
        size_bytes: bytes appended so far.
        piece_bytes: best size of an append.
        seconds: seconds by activity. ``hash``: hashes in the calling thread. ``wait``: waits of the calling thread for
            writes. ``write``: writes, the sum over all threads. ``flush``: fsync.

    Raises:
        ValueError: ``memory`` is smaller than ``size_bytes``.
        OSError: the file does not exist, the space cannot be reserved, or the system has no memory for the ring.
    """

    def __init__(
        self, path: Path, size_bytes: int, *, memory: HostMemory | None = None, chunk_bytes: int | None = None
    ) -> None:
        if memory is not None and memory.size_bytes < size_bytes:
            raise ValueError(f"memory={memory.size_bytes} bytes for a file of {size_bytes}: expected at least as many")
        self.size_bytes = 0
        self.piece_bytes = _PIECE_BYTES if memory is None else _LARGE_WINDOW_BYTES
        self.seconds = {"hash": 0.0, "write": 0.0, "wait": 0.0, "flush": 0.0}
        self._path = path
        with path.open("r+b") as file:
            reserve(file.fileno(), size_bytes, path)
        self._digester = Digester(chunk_bytes_for(size_bytes) if chunk_bytes is None else chunk_bytes)
        self._is_borrowed = memory is None
        self._memory = borrow_memory(_RING_BYTES) if memory is None else memory
        size, step = (_RING_BYTES, _WINDOW_BYTES) if memory is None else (memory.size_bytes, _LARGE_WINDOW_BYTES)
        threads = _WRITERS if memory is None or len(os.sched_getaffinity(0)) > _FEW_CORES else 0
        self._windows = deque(self._memory.view(start, end - start) for start, end in cut(0, size, step))
        self._filled = self._digested = 0  # bytes filled and bytes digested in the first window
        self._pool = WorkerPool(threads, name="checkpoint-writer")
        self._pending: deque[Future[float]] = deque()  # unfinished writes of windows, the oldest first
        self._file = path.open("r+b", buffering=0)
        set_direct(self._file, True)

    def write(self, data: bytes) -> None:
        """Append ``data``. Raises an OSError if an earlier append could not be written."""
        self.copy(address_of(data), len(data), crc=None)

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes at ``address``. The bytes may change after the call if not in ``memory``.

        Args:
            address: address of the first byte.
            size: in bytes.
            crc: CRC-32 of the bytes before; ``None``: compute no CRC-32 and return 0.

        Returns:
            CRC-32 of the bytes before and these bytes.

        Raises:
            OSError: an earlier append could not be written.
        """
        while size:
            if self._filled == len(self._windows[0]):
                self._write_window()
            window, start = self._windows[0], self._filled
            length = min(size, len(window) - start, self.piece_bytes)
            target = address_of(window) + start
            if address != target:
                move(target, address, length)
            if crc is not None:
                started = time.perf_counter()
                crc = isal_zlib.crc32(window[start : start + length], crc)
                self.seconds["hash"] += time.perf_counter() - started
            self._filled += length
            self.size_bytes += length
            if self._filled - self._digested >= self.piece_bytes:
                self._digest()
            address += length
            size -= length
        return crc or 0

    def finish(self, seal: Seal | None = None) -> FileDigest:
        """Write the rest, wait until the file is durable, close the file, and return the digest.

        Args:
            seal: called for the tail, with ``None`` as the second argument. The tail is written before the fsync.

        Raises:
            OSError: the file could not be written.
        """
        if self._filled:
            self._write_window()
        while self._pending:
            self._finish_oldest()
        digest = self._digester.finish()
        tail = b"" if seal is None else seal(digest, None)
        started = time.perf_counter()
        with naming_file(self._path):
            set_direct(self._file, False)
            write_window(self._file, memoryview(tail), self.size_bytes, len(tail))
            os.ftruncate(self._file.fileno(), self.size_bytes + len(tail))  # the last block was written whole
            os.fsync(self._file.fileno())
        self.seconds["flush"] = time.perf_counter() - started
        self.close()
        return digest.with_tail(tail)

    def _digest(self) -> None:
        """Digest the bytes in the first window added since the last call."""
        started = time.perf_counter()
        self._digester.update(self._windows[0][self._digested : self._filled])
        self._digested = self._filled
        self.seconds["hash"] += time.perf_counter() - started

    def _write_window(self) -> None:
        """Submit the first window to the pool, and rotate to the next window. Waits until the next window is free."""
        self._digest()
        write = partial(self._write, self._windows[0], self.size_bytes - self._filled, self._filled)
        self._filled = self._digested = 0
        self._windows.rotate(-1)
        self._pending.append(self._pool.submit(write))
        while self._pending and (self._pending[0].done() or len(self._pending) == len(self._windows)):
            self._finish_oldest()

    def _write(self, view: memoryview, position: int, size: int) -> float:
        """Write the first ``size`` bytes of a window at ``position`` in the file, and return the time in seconds."""
        started = time.perf_counter()
        with naming_file(self._path):
            write_window(self._file, view, position, size)
        return time.perf_counter() - started

    def _finish_oldest(self) -> None:
        """Wait for the oldest write, and raise the error of a failed write."""
        started = time.perf_counter()
        self.seconds["write"] += self._pending.popleft().result()
        self.seconds["wait"] += time.perf_counter() - started

    def close(self) -> None:
        """Drop the writes that have not begun, wait for the others, close the file and return borrowed memory.

        May be called twice.
        """
        for future in self._pending:
            future.cancel()
        self._pool.close()
        self._file.close()
        self._pending.clear()
        self._windows.clear()
        if self._is_borrowed:
            give_memory_back(self._memory)
            self._is_borrowed = False
