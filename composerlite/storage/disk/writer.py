"""Write large files at the speed of the disk: a ring of memory, threads that write with O_DIRECT, digests meanwhile."""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import NamedTuple, Protocol, final

import xxhash
from isal import isal_zlib

from composerlite.storage.disk.files import (
    FileDigest,
    chunk_bytes_for,
    reserve,
    write_all,
    write_file,
)
from composerlite.storage.disk.memory import HostMemory, borrow_memory, give_memory_back, move
from composerlite.threads import start_threads

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
    more than the save gains. Used as a context manager: leaving
    the block without :meth:`finish` gives the file up and closes it.

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
        OSError: the space cannot be reserved, or the system has no memory for the ring.
    """

    def __init__(
        self, path: Path, size_bytes: int, *, memory: HostMemory | None = None, chunk_bytes: int | None = None
    ) -> None:
        if memory is not None and memory.size_bytes < size_bytes:
            raise ValueError(f"memory={memory.size_bytes} bytes for a file of {size_bytes}: expected at least as many")
        self._path = path
        self._is_large = size_bytes > _SMALL_FILE_BYTES
        self.size_bytes = 0
        self.piece_bytes = _PIECE_BYTES if memory is None else _LARGE_WINDOW_BYTES
        self.seconds = {"hash": 0.0, "write": 0.0, "wait": 0.0, "flush": 0.0}
        self._lock = threading.Lock()
        self._digester = Digester(chunk_bytes_for(size_bytes) if chunk_bytes is None else chunk_bytes)
        self._error: BaseException | None = None
        self._window = _Window(0, memoryview(b""))
        self._filled = self._digested = 0  # bytes of the window
        self._free: queue.SimpleQueue[_Window] = queue.SimpleQueue()
        self._queued: queue.SimpleQueue[tuple[_Window, int, int] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        with contextlib.ExitStack() as stack:
            writers = 0
            if self._is_large:
                writers = _WRITERS
                with path.open("r+b") as file:
                    reserve(file.fileno(), size_bytes, path)
            if memory is None:
                memory, size, window_bytes = borrow_memory(_RING_BYTES), _RING_BYTES, _WINDOW_BYTES
                stack.callback(give_memory_back, memory)
            else:
                size, window_bytes = memory.size_bytes, _LARGE_WINDOW_BYTES
                writers = 0 if len(os.sched_getaffinity(0)) <= _FEW_CORES else writers
            for start in range(0, size, window_bytes):
                view = memory.view(start, min(window_bytes, size - start))
                self._free.put(_Window(memory.address + start, view))
            self._threads = start_threads(self._write_queued, writers, name="checkpoint-writer")
            self._cleanup = stack.pop_all()

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        left = memoryview(data)
        while left:
            room = self._room()
            piece, left = left[:room], left[room:]
            self._window.view[self._filled : self._filled + len(piece)] = piece
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
            if address != self._window.address + self._filled:
                move(self._window.address + self._filled, address, length)
            if crc is not None:
                started = time.perf_counter()
                crc = isal_zlib.crc32(self._window.view[self._filled : self._filled + length], crc)
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
        self._queue_window()
        self._join_threads()
        if self._error is not None:
            raise self._error
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
        self._cleanup.close()
        return digest.with_tail(tail)

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._error = self._error or CancelledError()  # without finish: queued windows are not written
        self._join_threads()
        self._cleanup.close()

    def _room(self) -> int:
        """Return the free bytes of the current window; a full window is queued and the next window taken."""
        if self._error is not None:
            raise self._error
        if self._filled == len(self._window.view):
            self._queue_window()
            started = time.perf_counter()
            self._window = self._free.get()
            self.seconds["wait"] += time.perf_counter() - started
        return len(self._window.view) - self._filled

    def _advance(self, size: int) -> None:
        self._filled += size
        self.size_bytes += size
        if self._filled - self._digested >= self.piece_bytes:
            self._digest()

    def _digest(self) -> None:
        """Digest the bytes appended since the last call: small pieces together."""
        started = time.perf_counter()
        self._digester.update(self._window.view[self._digested : self._filled])
        self._digested = self._filled
        self.seconds["hash"] += time.perf_counter() - started

    def _queue_window(self) -> None:
        """Pass the current window to the threads, or write the window here if there are no threads."""
        if self._filled:
            self._digest()
            job = self._window, self.size_bytes - self._filled, self._filled
            self._window, self._filled, self._digested = _Window(0, memoryview(b"")), 0, 0
            if self._threads:
                self._queued.put(job)
            else:
                self._write_window(*job)

    def _write_queued(self) -> None:
        """Write queued windows until the queue ends, in each thread."""
        while (job := self._queued.get()) is not None:
            self._write_window(*job)

    def _write_window(self, window: _Window, position: int, size: int) -> None:
        """Write a window and free the window. The next call of the caller raises an error of this."""
        started = time.perf_counter()
        try:
            if self._error is None:
                write_file(self._path, window.view, position, size, past_cache=self._is_large)
        except BaseException as e:  # noqa: BLE001 - raised by write, copy or finish
            if isinstance(e, OSError):
                e.filename = str(self._path)  # the system names no file
            self._error = e
        finally:
            with self._lock:
                self.seconds["write"] += time.perf_counter() - started
            self._free.put(window)  # even after an error: the caller may wait for a window

    def _join_threads(self) -> None:
        """Wait until the queued windows are written. May be called twice."""
        for _ in self._threads:
            self._queued.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._free = queue.SimpleQueue()  # no view of the memory is left
