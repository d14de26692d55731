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
from typing import NamedTuple, final

import xxhash
from isal import isal_zlib

from composerlite.storage.disk.files import FileDigest, chunk_bytes_for, naming_file, reserve, write_all, write_file
from composerlite.storage.disk.memory import HostMemory, borrow_memory, give_memory_back, move
from composerlite.storage.workers import WorkerPool
from composerlite.types import Closing

_RING_BYTES = 48 << 20
"""Size of the ring: the memory for a file that is not in memory as a whole, divided into windows used in turn."""
_WINDOW_BYTES = 8 << 20  # more windows than threads: all threads and the caller are busy
_WRITERS = 4  # fewer leave the disk idle between two writes
_PIECE_BYTES = 2 << 20  # copied, then hashed while in the cache of the processor
_LARGE_WINDOW_BYTES = 32 << 20
"""Window of memory written without a copy. Large, for few calls: at each call training waits for the interpreter."""
_SMALL_FILE_BYTES = 8 << 20
_FEW_CORES = 2  # training has a core; the other core either hashes or writes

Seal = Callable[[FileDigest, FileDigest | None], bytes]
"""Makes the tail of a file. Called with the digest of the stored bytes, and with that of the bytes before compression;
the latter is ``None`` without compression.
"""


@final
class Digester:
    """Computes the digests of a file and of each chunk of ``chunk_bytes`` while the bytes are written."""

    def __init__(self, chunk_bytes: int) -> None:
        self._whole = xxhash.xxh3_128()
        self._chunk = xxhash.xxh3_64()
        self._chunk_bytes = chunk_bytes
        self._left = chunk_bytes  # of the current chunk
        self._chunks = bytearray()
        self._size = 0

    def update(self, data: memoryview | bytes) -> None:
        """Add the next bytes of the file."""
        view = memoryview(data)
        self._size += len(view)
        self._whole.update(view)
        while view:
            piece, view = view[: self._left], view[self._left :]
            if len(piece) == self._chunk_bytes:
                self._chunks += xxhash.xxh3_64_digest(piece)
                continue
            self._chunk.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._finish_chunk()

    def finish(self) -> FileDigest:
        """Return the digest of all bytes so far."""
        if self._left < self._chunk_bytes:
            self._finish_chunk()
        chunks = base64.b64encode(self._chunks).decode()
        return FileDigest(self._size, self._whole.hexdigest(), self._chunk_bytes, chunks)

    def _finish_chunk(self) -> None:
        self._chunks += self._chunk.digest()
        self._chunk.reset()
        self._left = self._chunk_bytes


class _Window(NamedTuple):
    """A part of the memory to write from: address of the first byte, and a view of all bytes."""

    address: int
    view: memoryview


@final
class StreamWriter(Closing):
    """Writes a file from front to back: the caller fills windows of memory, threads write the windows to the disk.

    Windows are written with O_DIRECT, or through the page cache if the file system refuses O_DIRECT. Files of up to
    8 MiB are written in the calling thread and through the page cache. Files in ``memory`` are also written in the
    calling thread on machines with one or two cores, where threads would slow down training. Used as a context manager.
    Without :meth:`finish` the file stays incomplete, and the caller removes the file.

    Args:
        path: an existing file, empty.
        size_bytes: expected size of the file. Above 8 MiB the space is reserved first, so that a full disk
            is an error before any write.
        memory: memory for the whole file, owned by the caller. The bytes are copied to the same offset as in the file,
            unless ``copy`` gets this address, and are written from there. No other code may change the memory until
            :meth:`finish` returns. ``None``: a ring of 48 MiB, where a window is reused after the write.
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
        self._is_large = size_bytes > _SMALL_FILE_BYTES
        if self._is_large:
            with path.open("r+b") as file:
                reserve(file.fileno(), size_bytes, path)
        self._digester = Digester(chunk_bytes_for(size_bytes) if chunk_bytes is None else chunk_bytes)
        self._borrowed = borrow_memory(_RING_BYTES) if memory is None else None
        if self._borrowed is not None:
            memory, size, window_bytes = self._borrowed, _RING_BYTES, _WINDOW_BYTES
            has_threads = self._is_large
        else:
            assert memory is not None
            size, window_bytes = memory.size_bytes, _LARGE_WINDOW_BYTES
            has_threads = self._is_large and len(os.sched_getaffinity(0)) > _FEW_CORES
        self._windows = deque(
            _Window(memory.address + start, memory.view(start, min(window_bytes, size - start)))
            for start in range(0, size, window_bytes)
        )
        self._filled = self._digested = 0  # bytes of the first window
        self._pool = WorkerPool(_WRITERS, name="checkpoint-writer") if has_threads else None
        self._pending: deque[Future[float]] = deque()  # unfinished writes of windows, the oldest first

    def write(self, data: bytes) -> None:
        """Append ``data``. Raises an OSError if an earlier append could not be written."""
        left = memoryview(data)
        while left:
            room = self._room()
            piece, left = left[:room], left[room:]
            self._windows[0].view[self._filled : self._filled + len(piece)] = piece
            self._advance(len(piece))

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``. The memory may change when this returns.

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
            length = min(size, self._room(), self.piece_bytes)
            window = self._windows[0]
            if address != window.address + self._filled:
                move(window.address + self._filled, address, length)
            if crc is not None:
                started = time.perf_counter()
                crc = isal_zlib.crc32(window.view[self._filled : self._filled + length], crc)
                self.seconds["hash"] += time.perf_counter() - started
            self._advance(length)
            address += length
            size -= length
        return crc or 0

    def finish(self, seal: Seal | None = None) -> FileDigest:
        """Wait until the file is durable, and return the digest. Nothing can be appended afterwards.

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
        with naming_file(self._path), self._path.open("r+b", buffering=0) as file:
            write_all(file.fileno(), memoryview(tail), self.size_bytes)
            os.ftruncate(file.fileno(), self.size_bytes + len(tail))  # the last block was written whole
            os.fsync(file.fileno())
        self.seconds["flush"] = time.perf_counter() - started
        self.close()
        return digest.with_tail(tail)

    def _room(self) -> int:
        """Return the free bytes of the first window. If the window is full, first write it and rotate to the next."""
        if self._filled == len(self._windows[0].view):
            self._write_window()
        return len(self._windows[0].view) - self._filled

    def _advance(self, size: int) -> None:
        """Count ``size`` bytes added to the first window, and digest them when enough have been added."""
        self._filled += size
        self.size_bytes += size
        if self._filled - self._digested >= self.piece_bytes:
            self._digest()

    def _digest(self) -> None:
        """Digest the bytes in the first window added since the last call."""
        started = time.perf_counter()
        self._digester.update(self._windows[0].view[self._digested : self._filled])
        self._digested = self._filled
        self.seconds["hash"] += time.perf_counter() - started

    def _write_window(self) -> None:
        """Write the first window in a thread, or here if there are no threads, and rotate to the next window."""
        self._digest()
        write = partial(self._write, self._windows[0].view, self.size_bytes - self._filled, self._filled)
        self._filled = self._digested = 0
        self._windows.rotate(-1)
        if self._pool is None:
            self.seconds["write"] += write()
            return
        self._pending.append(self._pool.submit(write))
        while self._pending and (self._pending[0].done() or len(self._pending) == len(self._windows)):
            self._finish_oldest()

    def _write(self, view: memoryview, position: int, size: int) -> float:
        """Write the first ``size`` bytes of a window at ``position`` in the file, and return the time in seconds."""
        started = time.perf_counter()
        with naming_file(self._path):
            write_file(self._path, view, position, size, past_cache=self._is_large)
        return time.perf_counter() - started

    def _finish_oldest(self) -> None:
        """Wait for the oldest write, and raise the error of a failed write."""
        started = time.perf_counter()
        self.seconds["write"] += self._pending.popleft().result()
        self.seconds["wait"] += time.perf_counter() - started

    def close(self) -> None:
        """Drop the writes that have not begun, stop the threads and return borrowed memory. May be called twice."""
        for future in self._pending:
            future.cancel()
        if self._pool is not None:
            self._pool.close()
        self._pending.clear()
        self._windows.clear()
        if self._borrowed is not None:
            give_memory_back(self._borrowed)
            self._borrowed = None
