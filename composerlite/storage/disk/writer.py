"""Write large files at the speed of the disk: a ring of memory, threads that write with O_DIRECT, digests meanwhile."""

from __future__ import annotations

import base64
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, final

import xxhash
from isal import isal_zlib

from composerlite.storage.disk.files import FileDigest, chunk_bytes_for, reserve, write_all, write_file
from composerlite.storage.disk.memory import HostMemory, borrow_memory, give_memory_back, move
from composerlite.storage.workers import WorkerPool

_RING_BYTES = 48 << 20
"""Memory to write with, for a file that is not in memory as a whole."""
_WINDOW_BYTES = 8 << 20  # more windows than threads: all threads and the caller are busy
_WRITERS = 4  # fewer leave the disk idle between two writes
_PIECE_BYTES = 2 << 20  # copied, then hashed while in the cache of the processor
_LARGE_WINDOW_BYTES = 32 << 20
"""Window of memory that is written without a copy. Training waits for the interpreter at each call: calls are few."""
_SMALL_FILE_BYTES = 8 << 20
_FEW_CORES = 2  # training has a core; the other core either hashes or writes

Seal = Callable[[FileDigest, FileDigest | None], bytes]
"""Makes the tail of a file from the digest of the stored bytes, and of the bytes before compression, if any."""


class Sink(Protocol):
    """Takes the bytes of a file in order. Used as a context manager; leaving without :meth:`finish` gives the file up.

    Attributes:
        size_bytes: bytes appended so far.
        piece_bytes: best size of an append.
        seconds: time by activity: ``hash``, ``write``, ``flush`` and others. Complete after :meth:`finish`.
    """

    size_bytes: int
    piece_bytes: int
    seconds: dict[str, float]

    def write(self, data: bytes) -> None:
        """Append ``data``.

        Raises:
            OSError: an earlier append could not be written.
        """
        ...

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``. The memory may change when this returns.

        Args:
            address: of the first byte.
            size: in bytes.
            crc: CRC-32 of the bytes before; ``None``: compute no CRC-32 and return 0.

        Returns:
            CRC-32 of all bytes so far.

        Raises:
            OSError: an earlier append could not be written.
        """
        ...

    def finish(self, seal: Seal | None = None) -> FileDigest:
        """Wait until the file is durable, and return the digest. Nothing can be appended afterwards.

        Args:
            seal: makes the tail of the file from the digest of the bytes before the tail. ``None``: no tail.

        Raises:
            OSError: the file could not be written.
        """
        ...

    def __enter__(self) -> Sink: ...

    def __exit__(self, *exception: object) -> None: ...


@final
class Digester:
    """Digests a file from front to back in one pass: the whole file and each chunk of ``chunk_bytes``."""

    def __init__(self, chunk_bytes: int) -> None:
        self._whole = xxhash.xxh3_128()
        self._chunk = xxhash.xxh3_64()
        self._chunk_bytes = chunk_bytes
        self._left = chunk_bytes  # of the current chunk
        self._chunks = bytearray()
        self._size = 0

    def update(self, data: memoryview | bytes) -> None:
        """Digest the next bytes of the file."""
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
    """A part of the memory to write from: address of the first byte, and all bytes."""

    address: int
    view: memoryview


@final
class StreamWriter:
    """Writes a file from front to back: the caller fills windows of memory, threads write the windows to the disk.

    Windows are written with O_DIRECT, or through the page cache where the file system refuses O_DIRECT. The caller
    alone writes a file of up to 8 MiB; on one or two cores also a file in ``memory``: more threads would cost training
    more than the save gains. Used as a context manager: leaving the block without :meth:`finish` gives the file up.

    Args:
        path: an existing file, empty.
        size_bytes: size of the file, if known. The space is reserved first, so that a full disk is found at once.
        memory: memory for the whole file. Appended bytes are put at their offset in the file, unless the source is
            there already, and written from there. Nobody else may change the memory until :meth:`finish` returns.
            ``None``: a ring of 48 MiB; a written window is used again.
        chunk_bytes: size of the chunks with a digest; ``None``: as :func:`chunk_bytes_for` says.

    Attributes:
        size_bytes: bytes appended so far.
        piece_bytes: best size of an append.
        seconds: time by activity. ``hash``: the caller hashed. ``wait``: the caller waited for a free window.
            ``write``: sum over the threads. ``flush``: fsync.

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
        self._pending: deque[Future[float]] = deque()  # a write of each of the last windows, in order

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        left = memoryview(data)
        while left:
            room = self._room()
            piece, left = left[:room], left[room:]
            self._windows[0].view[self._filled : self._filled + len(piece)] = piece
            self._advance(len(piece))

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``. The memory may change when this returns.

        Args:
            address: of the first byte.
            size: in bytes.
            crc: CRC-32 of the bytes before; ``None``: compute no CRC-32 and return 0.

        Returns:
            CRC-32 of all bytes so far.
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
            seal: makes the tail, which is written before the file is flushed.

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
        try:
            with self._path.open("r+b", buffering=0) as file:
                write_all(file.fileno(), memoryview(tail), self.size_bytes)
                os.ftruncate(file.fileno(), self.size_bytes + len(tail))  # the last block was written whole
                os.fsync(file.fileno())
        except OSError as e:
            e.filename = str(self._path)  # the system names no file
            raise
        self.seconds["flush"] = time.perf_counter() - started
        self._close()
        return digest.with_tail(tail)

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _room(self) -> int:
        """Return the free bytes of the first window; a full window is written, and the next window comes first."""
        if self._filled == len(self._windows[0].view):
            self._write_window()
        return len(self._windows[0].view) - self._filled

    def _advance(self, size: int) -> None:
        self._filled += size
        self.size_bytes += size
        if self._filled - self._digested >= self.piece_bytes:
            self._digest()

    def _digest(self) -> None:
        """Digest the bytes appended since the last call: small pieces together."""
        started = time.perf_counter()
        self._digester.update(self._windows[0].view[self._digested : self._filled])
        self._digested = self._filled
        self.seconds["hash"] += time.perf_counter() - started

    def _write_window(self) -> None:
        """Write the first window in a thread, or here if there are no threads. The next window comes first."""
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
        """Write the first ``size`` bytes of a window, and return the time in seconds."""
        started = time.perf_counter()
        try:
            write_file(self._path, view, position, size, past_cache=self._is_large)
        except OSError as e:
            e.filename = str(self._path)  # the system names no file
            raise
        return time.perf_counter() - started

    def _finish_oldest(self) -> None:
        """Wait for the oldest write, and raise the error of the write."""
        started = time.perf_counter()
        self.seconds["write"] += self._pending.popleft().result()
        self.seconds["wait"] += time.perf_counter() - started

    def _close(self) -> None:
        """Stop the threads, without the writes that have not begun. May be called twice."""
        for future in self._pending:
            future.cancel()
        if self._pool is not None:
            self._pool.close()
        self._pending.clear()
        self._windows.clear()
        if self._borrowed is not None:
            give_memory_back(self._borrowed)
            self._borrowed = None
