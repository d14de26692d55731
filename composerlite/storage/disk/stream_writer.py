"""Writing a large file at the speed of the disk: past the page cache where the file system takes it."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from pathlib import Path
from typing import NamedTuple, final

from isal import isal_zlib

from composerlite.storage.disk.files import Digester, FileDigest, chunk_bytes_for, open_direct, write_all
from composerlite.storage.disk.memory import HostMemory, borrow_memory, give_memory_back, move
from composerlite.storage.workers import start_threads

_BLOCK_BYTES = 4096  # what O_DIRECT wants sizes and places in the file to be multiples of
_SMALL_FILE_BYTES = 8 << 20
_WINDOW_BYTES = 8 << 20
_LEAST_WINDOW_BYTES = 1 << 20
_RING_WINDOWS = 6
_PIECE_BYTES = 512 << 10  # copied, then summed while it is in the cache
_WRITERS = 4  # fewer leave the disk idle between two writes, and longer where the processors are busy
_FEW_CORES = 2  # training has one, and the one that is left either sums or moves bytes to the disk

RING_BYTES = 48 << 20
"""Memory to write with, where there is none for the whole file."""


class _Window(NamedTuple):
    """A part of the file that is in memory and is to be written."""

    number: int
    view: memoryview
    position: int
    size: int


@final
class StreamWriter:
    """Writes one file from front to back: the caller fills windows of memory, threads behind write them out.

    The windows are those of a ring, which bounds the memory, or of a memory that has room for the whole file. All is
    digested on its way. Blocks are written with O_DIRECT where the file system takes it, else through the page cache;
    which one is found by trying. A small file is written through the page cache by the caller. So is, past it, one
    that is in ``memory`` where there are two cores: what is in memory already is written in the background, which would
    lose more to three threads than the file is durable sooner. Used as a context manager: leaving the block without
    :meth:`finish` ends the threads and closes the file.

    Args:
        path: an existing file, empty.
        size_bytes: what will be written, if known: space is reserved first, so that a full disk is an error at once.
        memory: at least as large as the file. What is appended is put into it at its place in the file; what is there
            already stays where it is. Nothing else may change it until :meth:`finish` returns.
        ring_bytes: size of the ring, where there is no ``memory``.
        chunk_bytes: what each digest of a part is of; ``None``: as :func:`chunk_bytes_for` says.
        writers: threads that write; 0: the caller does. ``None``: four, and the caller where that is said above.
        may_grow: rather than wait for a window of the ring, take new memory for one: whoever fills the ring has done so
            after the shorter of writing the file and copying it into new memory. May be set later, too.

    Attributes:
        size_bytes: taken so far.
        seconds: by name. ``hash``: the caller summed. ``wait``: the caller waited for a window of the ring. ``write``:
            what the threads took to write, together. ``flush``: from the last write until the file was durable.

    Raises:
        OSError: the space cannot be reserved.
    """

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        *,
        memory: HostMemory | None = None,
        ring_bytes: int = RING_BYTES,
        chunk_bytes: int | None = None,
        writers: int | None = None,
        may_grow: bool = False,
    ) -> None:
        if memory is not None and memory.size_bytes < size_bytes:
            raise ValueError(f"memory={memory.size_bytes} bytes for a file of {size_bytes}: expected at least as many")
        self.may_grow = may_grow
        self.size_bytes = 0
        self.seconds = {"hash": 0.0, "write": 0.0, "wait": 0.0, "flush": 0.0}
        self._path = path
        self._digester = Digester(chunk_bytes_for(size_bytes) if chunk_bytes is None else chunk_bytes)
        self._small = size_bytes <= _SMALL_FILE_BYTES
        self._window_bytes = _WINDOW_BYTES if memory is not None or self._small else _ring_window(ring_bytes)
        self._plain = os.open(path, os.O_WRONLY)
        self._direct: int | None = None
        try:
            if not self._small:
                _reserve(self._plain, size_bytes, path)
                self._direct = open_direct(path, os.O_WRONLY)
            if memory is None:
                self._memory, self._memory_bytes = self._borrow_ring(ring_bytes)
            else:
                self._memory, self._memory_bytes = memory, memory.size_bytes
        except BaseException:
            self._close_file()
            raise
        self._borrowed = memory is None
        self._grown: list[HostMemory] = []  # windows beyond those of the ring
        self._used = 0  # windows of the memory that were filled at least once
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[_Window | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._next_window()
        if writers is None:
            few_cores = len(os.sched_getaffinity(0)) <= _FEW_CORES
            writers = 0 if few_cores and memory is not None else _WRITERS
        self._threads = [] if self._small else start_threads(self._run, writers, name="checkpoint-writer")

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        left = memoryview(data)
        while left:
            room = self._room()
            piece, left = left[:room], left[room:]
            self._view[self._filled : self._filled + len(piece)] = piece
            self._advance(len(piece))

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``; their CRC-32. The memory may change when this returns.

        Args:
            address: of the first byte.
            size: in bytes.
            crc: of the bytes before them; ``None``: it is not wanted, and 0 is returned.

        Returns:
            CRC-32 of the bytes, those before included.
        """
        while size:
            length = min(size, self._room(), _PIECE_BYTES)
            if address != self._address + self._filled:
                move(self._address + self._filled, address, length)
            if crc is not None:
                started = time.perf_counter()
                crc = isal_zlib.crc32(self._view[self._filled : self._filled + length], crc)
                self.seconds["hash"] += time.perf_counter() - started
            self._advance(length)
            address += length
            size -= length
        return crc or 0

    def finish(self) -> FileDigest:
        """Wait until everything is written and durable; what the file contains.

        Raises:
            OSError: something could not be written.
        """
        self._queue_window()
        self._stop_threads()
        self._raise_if_failed()
        started = time.perf_counter()
        try:
            if not self._small:
                os.ftruncate(self._plain, self.size_bytes)  # the last block was written whole, or too much reserved
            os.fsync(self._plain)
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self._path)) from e
        self.seconds["flush"] = time.perf_counter() - started
        self._close()
        return self._digester.finish()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    # ── the caller's side ────────────────────────────────────────────────────────────────────────────────────────
    def _room(self) -> int:
        """Free bytes of the current window; a full one is handed over first, and the next one taken."""
        if self._filled == len(self._view):
            self._queue_window()
            self._next_window()
        return len(self._view) - self._filled

    def _advance(self, size: int) -> None:
        self._filled += size
        self.size_bytes += size
        if self._filled - self._digested >= _PIECE_BYTES:
            self._digest()

    def _digest(self) -> None:
        """Digest the bytes appended since the last call: small pieces together, large ones alone."""
        started = time.perf_counter()
        self._digester.update(self._view[self._digested : self._filled])
        self._digested = self._filled
        self.seconds["hash"] += time.perf_counter() - started

    def _queue_window(self) -> None:
        """Pass the current window to be written."""
        self._raise_if_failed()
        if not self._filled:
            return
        self._digest()
        window = _Window(self._number, self._view, self.size_bytes - self._filled, self._filled)
        if self._threads:
            self._full.put(window)
        else:
            self._write_window(window)
            self._raise_if_failed()

    def _next_window(self) -> None:
        start = self._used * self._window_bytes
        if start < self._memory_bytes:
            self._number = self._used
            self._used += 1
        else:
            assert self._borrowed, f"more than the {self._memory_bytes} bytes that were promised"
            started = time.perf_counter()
            self._number = self._free_window()
            self.seconds["wait"] += time.perf_counter() - started
            self._raise_if_failed()
        self._filled = self._digested = 0
        start = self._number * self._window_bytes
        if start >= self._memory_bytes:
            window = self._grown[self._number - self._memory_bytes // self._window_bytes]
            self._address, self._view = window.address, window.view(0, self._window_bytes)
            return
        self._address = self._memory.address + start
        self._view = self._memory.view(start, min(self._window_bytes, self._memory_bytes - start))

    def _free_window(self) -> int:
        """The number of a window that was written, or of a new one."""
        if self.may_grow:
            try:
                return self._free.get_nowait()
            except queue.Empty:
                with contextlib.suppress(OSError):
                    self._grown.append(HostMemory(self._window_bytes))
                    return self._memory_bytes // self._window_bytes + len(self._grown) - 1
            self.may_grow = False  # the system gives no more
        return self._free.get()  # it comes back written or not

    def _borrow_ring(self, ring_bytes: int) -> tuple[HostMemory, int]:
        """Memory for the ring and its size; for the smallest that works where the system gives no more."""
        size = self._ring_bytes(ring_bytes)
        try:
            return borrow_memory(size), size
        except OSError:
            if self._small or self._window_bytes <= _LEAST_WINDOW_BYTES:
                raise
        self._window_bytes = _LEAST_WINDOW_BYTES
        size = self._ring_bytes(0)
        return borrow_memory(size), size

    def _ring_bytes(self, ring_bytes: int) -> int:
        return self._window_bytes if self._small else max(2, ring_bytes // self._window_bytes) * self._window_bytes

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    # ── the threads behind ───────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        while (window := self._full.get()) is not None:
            self._write_window(window)

    def _write_window(self, window: _Window) -> None:
        """Write a window and give it back, also where it cannot be written: nobody waits for it for ever."""
        started = time.perf_counter()
        try:
            if self._error is None and not self._given_up:
                self._write_blocks(window)
        except OSError as e:
            self._error = OSError(e.errno, e.strerror, str(self._path))  # raised at the next write, copy or finish
        except BaseException as e:  # noqa: BLE001 - raised there, too: a part of the file is missing
            self._error = e
        finally:
            with self._lock:
                self.seconds["write"] += time.perf_counter() - started
            self._free.put(window.number)

    def _write_blocks(self, window: _Window) -> None:
        _, view, position, size = window
        if self._direct is not None:
            try:
                write_all(self._direct, view[: size + -size % _BLOCK_BYTES], position)
                return
            except OSError as e:
                if e.errno != errno.EINVAL:  # opened with O_DIRECT and refused at the write: some file systems do
                    raise
        write_all(self._plain, view[:size], position)

    def _stop_threads(self) -> None:
        for _ in self._threads:
            self._full.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _close(self) -> None:
        self._given_up = True  # if there is anything left to write
        self._stop_threads()
        self._close_file()
        self._view = memoryview(b"")
        for window in self._grown:
            window.close()
        self._grown = []
        if self._borrowed:
            self._borrowed = False
            give_memory_back(self._memory)

    def _close_file(self) -> None:
        descriptors, self._plain, self._direct = (self._plain, self._direct), -1, None
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)


def _ring_window(ring_bytes: int) -> int:
    """The size of a ring's windows: more than there are threads, so that all are busy and the caller, too."""
    even = ring_bytes // _RING_WINDOWS // _BLOCK_BYTES * _BLOCK_BYTES
    return min(_WINDOW_BYTES, max(_LEAST_WINDOW_BYTES, even))


def _reserve(descriptor: int, size: int, path: Path) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as e:
        if e.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return  # the file system cannot reserve: a full disk shows when it is written
        raise OSError(e.errno, f"cannot reserve {size} bytes: {os.strerror(e.errno or 0)}", str(path)) from e
