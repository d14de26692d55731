"""Writing a large file at the speed of the disk: past the page cache where the file system takes it."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

from isal import isal_zlib

from composerlite.storage.disk.files import Digester, FileDigest, Seal, chunk_bytes_for, open_direct, write_all
from composerlite.storage.disk.memory import HostMemory, borrow_memory, give_memory_back, move
from composerlite.threads import start_threads

_BLOCK_BYTES = 4096  # what O_DIRECT wants sizes and places in the file to be multiples of
_SMALL_FILE_BYTES = 8 << 20
_WINDOW_BYTES = 8 << 20
_LEAST_WINDOW_BYTES = 1 << 20
_RING_WINDOWS = 6
_WRITERS = 4  # fewer leave the disk idle between two writes, and longer where the processors are busy
_PIECE_BYTES = 2 << 20  # copied, then summed
_LARGE_WINDOW_BYTES = 32 << 20
"""Of memory that is not copied again: few calls sum and write it, since training waits for the interpreter at each."""
_FEW_CORES = 2  # training has one, and the one that is left either sums or moves bytes to the disk

RING_BYTES = 48 << 20
"""Memory to write with, where there is none for the whole file."""


class _Window(NamedTuple):
    """A part of the memory, to be filled.

    Attributes:
        number: of it, for :meth:`WindowRing.give`.
        address: of its first byte.
        view: all of it.
    """

    number: int
    address: int
    view: memoryview


@final
class WindowRing:
    """Windows that are filled by the caller and come again once they are written, and the threads that write them.

    Used as a context manager, or until :meth:`close`.

    Args:
        ring_bytes: size of the ring, where there is no ``memory``.
        memory: for all that is written, front to back: no window of it comes again.
        writers: threads, started at the first :meth:`run`; 0: the caller does it.

    Raises:
        OSError: the system has no memory for it.
    """

    def __init__(
        self, ring_bytes: int = RING_BYTES, *, memory: HostMemory | None = None, writers: int = _WRITERS
    ) -> None:
        self._comes_again = memory is None
        self._window_bytes = _LARGE_WINDOW_BYTES if memory is not None else _window_bytes(ring_bytes)
        if memory is None:
            self._memory, self._size = self._borrowed(ring_bytes)
        else:
            self._memory, self._size = memory, memory.size_bytes
        self._writers = writers
        self._threads: list[threading.Thread] | None = None
        self._grown: list[HostMemory] = []  # windows beyond those of the ring
        self._used = 0  # windows of the memory that were filled at least once
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._at_end = contextlib.ExitStack()

    # ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def is_used(self) -> bool:
        """Return true if all windows were filled: the next one has to be waited for."""
        return self._used * self._window_bytes >= self._size

    def take(self, *, may_grow: bool) -> _Window:
        """Return a window that is free; with ``may_grow`` one of new memory rather than wait."""
        if not self.is_used:
            self._used += 1
            return self._window(self._used - 1)
        assert self._comes_again, f"more than the {self._size} bytes that were promised"
        if may_grow:
            try:
                return self._window(self._free.get_nowait())
            except queue.Empty:
                with contextlib.suppress(OSError):  # the system gives no more
                    self._grown.append(HostMemory(self._window_bytes))
                    return self._window(self._size // self._window_bytes + len(self._grown) - 1)
        return self._window(self._free.get())  # it comes back written or not

    def give(self, window: _Window) -> None:
        """Give ``window`` back, which is not used any more: it comes again."""
        self._free.put(window.number)

    def _window(self, number: int) -> _Window:
        start = number * self._window_bytes
        if start >= self._size:
            grown = self._grown[number - self._size // self._window_bytes]
            return _Window(number, grown.address, grown.view(0, self._window_bytes))
        view = self._memory.view(start, min(self._window_bytes, self._size - start))
        return _Window(number, self._memory.address + start, view)

    def _borrowed(self, ring_bytes: int) -> tuple[HostMemory, int]:
        """Memory for the ring and its size; for the smallest that works where the system gives no more."""
        size = max(2, ring_bytes // self._window_bytes) * self._window_bytes
        try:
            return borrow_memory(size), size
        except OSError:
            if self._window_bytes == _LEAST_WINDOW_BYTES:
                raise
        self._window_bytes = _LEAST_WINDOW_BYTES
        return borrow_memory(2 * _LEAST_WINDOW_BYTES), 2 * _LEAST_WINDOW_BYTES

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────
    def run(self, work: Callable[[], object]) -> None:
        """Call ``work``, which raises nothing, in one of the threads, in the order of the calls of this; or here."""
        if self._threads is None:
            self._threads = start_threads(self._run, self._writers, name="checkpoint-writer")
        if self._threads:
            self._work.put(work)
        else:
            work()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def at_end(self, do: Callable[[], object]) -> None:
        """Call ``do`` in :meth:`close`, when no thread runs any more."""
        self._at_end.callback(do)

    def close(self) -> None:
        """Wait until all is done, and give the memory back. May be called twice."""
        for _ in self._threads or ():
            self._work.put(None)
        for thread in self._threads or ():
            thread.join()
        self._threads = []
        self._at_end.close()
        for window in self._grown:
            window.close()
        self._grown = []
        if self._comes_again:
            self._comes_again = False
            give_memory_back(self._memory)

    def __enter__(self) -> WindowRing:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@final
class StreamWriter:
    """Writes one file from front to back: the caller fills windows of memory, threads behind write them out.

    The windows are those of a ring, which bounds the memory, or of a memory that has room for the whole file. All is
    digested on its way. Blocks are written with O_DIRECT where the file system takes it, else through the page cache;
    which one is found by trying. A small file is written through the page cache by the caller. So is, past it, one
    that is in ``memory`` where there are two cores: what is in memory already is written in the background, which would
    lose more to three threads than the file is durable sooner. Used as a context manager: leaving the block without
    :meth:`finish` or :meth:`end` gives the file up and closes it.

    Args:
        path: an existing file, empty.
        size_bytes: what will be written, if known: space is reserved first, so that a full disk is an error at once.
        memory: at least as large as the file. What is appended is put into it at its place in the file; what is there
            already stays where it is. Nothing else may change it until :meth:`finish` returns.
        ring_bytes: size of the ring, where there is no ``memory``.
        chunk_bytes: what each digest of a part is of; ``None``: as :func:`chunk_bytes_for` says.
        writers: threads that write; 0: the caller does. ``None``: four, and the caller where that is said above.
        ring: that of the file before, which is written out while this one is filled; whoever made it closes it, and
            reserves space for its files. ``None``: one of its own, of ``memory`` or ``ring_bytes``, with ``writers``.
        may_grow: rather than wait for a window of the ring, take new memory for one: whoever fills the ring has done so
            after the shorter of writing the file and copying it into new memory. May be set later, too.

    Attributes:
        size_bytes: taken so far.
        piece_bytes: what is taken at once.
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
        ring: WindowRing | None = None,
        may_grow: bool = False,
    ) -> None:
        if memory is not None and memory.size_bytes < size_bytes:
            raise ValueError(f"memory={memory.size_bytes} bytes for a file of {size_bytes}: expected at least as many")
        self.may_grow = may_grow
        self.size_bytes = 0
        self.piece_bytes = _PIECE_BYTES if memory is None else _LARGE_WINDOW_BYTES
        self.seconds = {"hash": 0.0, "write": 0.0, "wait": 0.0, "flush": 0.0}
        self._path = path
        self._digester = Digester(chunk_bytes_for(size_bytes) if chunk_bytes is None else chunk_bytes)
        self._small = size_bytes <= _SMALL_FILE_BYTES
        self._own_ring = ring is None
        self._plain = os.open(path, os.O_WRONLY)
        self._direct: int | None = None
        try:
            if ring is None:
                reserve(self._plain, size_bytes, path)
            if not self._small:
                self._direct = open_direct(path, os.O_WRONLY)
            if ring is None:
                few_cores = len(os.sched_getaffinity(0)) <= _FEW_CORES
                if writers is None:
                    writers = 0 if few_cores and memory is not None else _WRITERS
                ring = WindowRing(_SMALL_FILE_BYTES if self._small else ring_bytes, memory=memory, writers=writers)
        except BaseException:
            self._close_file()
            raise
        self._ring = ring
        ring.at_end(self._close_file)  # no thread writes to it any more
        self._queued = 0
        self._written = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._given_up = False
        self._ending: Future[FileDigest] | None = None
        self._lock = threading.Lock()
        self._window = _Window(0, 0, memoryview(b""))
        self._filled = self._digested = 0

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        left = memoryview(data)
        while left:
            room = self._room()
            piece, left = left[:room], left[room:]
            self._window.view[self._filled : self._filled + len(piece)] = piece
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
        """Wait until everything is written and durable, and return the digest of the file.

        Args:
            seal: as in :meth:`end`.

        Raises:
            OSError: something could not be written.
        """
        digest = self.end(seal).result()
        if self._own_ring:
            self._ring.close()
        return digest

    def end(self, seal: Seal | None = None) -> Future[FileDigest]:
        """Finish in the background, where there are threads; nothing can be appended any more.

        Args:
            seal: makes the tail, which is written behind the body before the file is flushed. Called in the background.

        Returns:
            Digest of the file, once everything is durable; or what :meth:`finish` would raise.

        Raises:
            OSError: something could not be written before.
        """
        self._queue_window()
        self._ending = Future()
        self._run(partial(self._finish, self._ending, self._queued, seal))
        return self._ending

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._given_up = self._ending is None  # if there is anything left to write
        if self._own_ring:
            self._ring.close()

    # ── the caller's side ────────────────────────────────────────────────────────────────────────────────────────
    def _room(self) -> int:
        """Free bytes of the current window; a full one is handed over first, and the next one taken."""
        if self._filled == len(self._window.view):
            self._queue_window()
            self._next_window()
        return len(self._window.view) - self._filled

    def _advance(self, size: int) -> None:
        self._filled += size
        self.size_bytes += size
        if self._filled - self._digested >= self.piece_bytes:
            self._digest()

    def _digest(self) -> None:
        """Digest the bytes appended since the last call: small pieces together, large ones alone."""
        started = time.perf_counter()
        self._digester.update(self._window.view[self._digested : self._filled])
        self._digested = self._filled
        self.seconds["hash"] += time.perf_counter() - started

    def _queue_window(self) -> None:
        """Pass the current window to be written."""
        self._raise_if_failed()
        if not self._filled:
            return
        self._digest()
        self._queued += 1
        self._run(partial(self._write_window, self._window, self.size_bytes - self._filled, self._filled))
        self._filled = self._digested = 0
        self._window = _Window(0, 0, memoryview(b""))
        self._raise_if_failed()

    def _next_window(self) -> None:
        started = time.perf_counter()
        waits = self._ring.is_used
        self._window = self._ring.take(may_grow=self.may_grow)
        if waits:
            self.seconds["wait"] += time.perf_counter() - started
        self._raise_if_failed()

    def _run(self, work: Callable[[], object]) -> None:
        if self._small:
            work()
        else:
            self._ring.run(work)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    # ── the threads behind ───────────────────────────────────────────────────────────────────────────────────────
    def _write_window(self, window: _Window, position: int, size: int) -> None:
        """Write a window and give it back, also where it cannot be written: nobody waits for it for ever."""
        started = time.perf_counter()
        try:
            if self._error is None and not self._given_up:
                self._write_blocks(window.view, position, size)
        except OSError as e:
            self._error = OSError(e.errno, e.strerror, str(self._path))  # raised at the next write, copy or finish
        except BaseException as e:  # noqa: BLE001 - raised there, too: a part of the file is missing
            self._error = e
        finally:
            with self._lock:
                self.seconds["write"] += time.perf_counter() - started
            self._ring.give(window)
            self._written.release()

    def _write_blocks(self, view: memoryview, position: int, size: int) -> None:
        if self._direct is not None:
            try:
                write_all(self._direct, view[: size + -size % _BLOCK_BYTES], position)
                return
            except OSError as e:
                if e.errno != errno.EINVAL:  # opened with O_DIRECT and refused at the write: some file systems do
                    raise
        write_all(self._plain, view[:size], position)

    def _finish(self, ending: Future[FileDigest], windows: int, seal: Seal | None) -> None:
        """Write the tail and flush the file, once its ``windows`` are written."""
        try:
            for _ in range(windows):
                self._written.acquire()
            self._raise_if_failed()
            digest = self._digester.finish()
            tail = b"" if seal is None else seal(digest, None)
            started = time.perf_counter()
            self._flush(tail)
            self.seconds["flush"] = time.perf_counter() - started
        except BaseException as e:  # noqa: BLE001 - raised where the future is asked
            ending.set_exception(e)
        else:
            ending.set_result(digest.with_tail(tail))
        finally:
            self._close_file()

    def _flush(self, tail: bytes) -> None:
        try:
            write_all(self._plain, memoryview(tail), self.size_bytes)
            if not self._small:  # the last block was written whole, or too much reserved
                os.ftruncate(self._plain, self.size_bytes + len(tail))
            os.fsync(self._plain)
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self._path)) from e

    def _close_file(self) -> None:
        descriptors, self._plain, self._direct = (self._plain, self._direct), -1, None
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)


def reserve(descriptor: int, size_bytes: int, path: Path) -> None:
    """Reserve space for a file that :class:`StreamWriter` is to write, unless it is small.

    Args:
        descriptor: of the file, open for writing.
        size_bytes: that it will have.
        path: of it, for the error.

    Raises:
        OSError: there is not as much.
    """
    if size_bytes <= _SMALL_FILE_BYTES:
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as e:
        if e.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return  # the file system cannot reserve: a full disk shows when it is written
        raise OSError(e.errno, f"cannot reserve {size_bytes} bytes: {os.strerror(e.errno or 0)}", str(path)) from e


def _window_bytes(ring_bytes: int) -> int:
    """The size of a ring's windows: more than there are threads, so that all are busy and the caller, too."""
    even = ring_bytes // _RING_WINDOWS // _BLOCK_BYTES * _BLOCK_BYTES
    return min(_WINDOW_BYTES, max(_LEAST_WINDOW_BYTES, even))
