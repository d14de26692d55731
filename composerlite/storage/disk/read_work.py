"""The threads of a :class:`~composerlite.storage.ParallelReader`, where the bytes are in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

import xxhash

from composerlite.errors import CorruptCheckpointError
from composerlite.storage.disk.addresses import address_of, memory_at, move, move_small
from composerlite.storage.disk.read_plan import UNIT_BYTES, Places, Unit, cut

__all__ = ["OpenFile", "Tally", "Work", "cached_share", "ends_at", "pieces", "put", "verify"]

_PIECE_BYTES = 1000 << 10  # read, then summed while it is in the cache; more is moved more slowly
_SMALL_BYTES = 16 << 10  # it is quicker to read a neighbourhood and take such things from there
_CACHESTAT = 451  # number of the system call, on all processors

_Counts = ctypes.c_uint64 * 5  # pages: in the cache, dirty, being written, evicted, evicted not long ago
_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
_syscall.restype = ctypes.c_long


class OpenFile(NamedTuple):
    """A file that is open for reading.

    Attributes:
        path: for messages.
        size_bytes: when it was opened.
        buffered: descriptor that reads through the page cache.
        direct: one that reads past it, where the file system has that.
        chunk_bytes: size of a chunk; 0 where nothing is verified.
        chunks: the XXH3-64 of each.
    """

    path: Path
    size_bytes: int
    buffered: int
    direct: int | None
    chunk_bytes: int
    chunks: Sequence[bytes]


@final
class Tally:
    """What the threads that read have come to, together.

    Attributes:
        stopped: threads end after the part they are at.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._read = self._told = 0

    def add(self, size: int) -> None:
        """So many bytes are in place."""
        with self._lock:
            self._read += size

    def fail(self, error: BaseException) -> None:
        """Have all threads stop. The first error is raised by :meth:`end`."""
        self._error = self._error or error
        self.stopped = True

    def tell(self, progress: Callable[[int], object]) -> None:
        """Tell of what was read since the last time."""
        with self._lock:
            new, self._told = self._read - self._told, self._read
        if new:
            progress(new)

    def end(self, progress: Callable[[int], object]) -> None:
        """After all threads have ended: raise what went wrong in one of them."""
        if self._error is not None:
            raise self._error
        self.tell(progress)


@final
class Work:
    """Units of a file that several threads read through the page cache, each taking the next one."""

    def __init__(self, file: OpenFile, places: Places, units: Sequence[Unit]) -> None:
        self.tally = Tally()
        self._file = file
        self._places = places
        self._units = iter(units)

    def help(self) -> None:
        """Read units until none is left. Raises nothing."""
        self.run(None)

    def run(self, progress: Callable[[int], object] | None) -> None:
        """The same; ``progress`` is told of what all threads read."""
        tally = self.tally
        try:
            reader = _UnitReader(self._file, self._places)
            for unit in self._units:
                if tally.stopped:
                    return
                reader.read(*unit)
                tally.add(unit[1] - unit[0])
                if progress is not None:
                    tally.tell(progress)
        except BaseException as e:  # noqa: BLE001 - raised by the tally's end
            tally.fail(e)

    def stop(self, error: BaseException) -> None:
        """Have all threads end."""
        self.tally.fail(error)

    def close(self) -> None:
        """There is nothing to give back."""


@final
class _UnitReader:
    """Reads units in one thread, with memory of its own for what does not go straight into place."""

    def __init__(self, file: OpenFile, places: Places) -> None:
        self._file = file
        self._places = places
        self._aside = bytearray(_PIECE_BYTES)
        self._aside_view, self._aside_address = memoryview(self._aside), address_of(self._aside)

    def read(self, start: int, end: int) -> None:
        """Read a unit, which begins and ends with a chunk where chunks are verified: large things into place, the rest
        aside and from there.
        """
        digest = xxhash.xxh3_64()
        for piece_start, piece_end in pieces(self._file, start, end):
            self._read_piece(digest, piece_start, piece_end)

    def _read_piece(self, digest: xxhash.xxh3_64, start: int, end: int) -> None:
        views: list[memoryview] = []
        moves: list[tuple[int, int, int]] = []
        aside, last = 0, -1  # how much lies aside; where the last view begins if it lies aside
        for address, size in self._places.of(start, end):
            if address is not None and size >= _SMALL_BYTES:
                views.append(memory_at(address, size))
                last = -1
                continue
            if address is not None:
                moves.append((address, self._aside_address + aside, size))
            if last >= 0:
                views[-1] = self._aside_view[last : aside + size]
            else:
                views.append(self._aside_view[aside : aside + size])
                last = aside
            aside += size
        _read_all(self._file, views, start, end)
        verify(self._file, digest, views, start, end)
        for job in moves:
            move_small(*job)


def pieces(file: OpenFile, start: int, end: int) -> Iterator[Unit]:
    """``start`` to ``end`` in pieces that fit the processor's cache and end where a chunk does."""
    for chunk_start, chunk_end in cut(start, end, file.chunk_bytes or UNIT_BYTES):
        for at in range(chunk_start, chunk_end, _PIECE_BYTES):
            yield at, min(chunk_end, at + _PIECE_BYTES)


def verify(file: OpenFile, digest: xxhash.xxh3_64, views: Sequence[memoryview], start: int, end: int) -> None:
    """Sum the piece ``start`` to ``end``, and compare at the end of a chunk."""
    if not file.chunk_bytes:
        return
    for view in views:
        digest.update(view)
    if end % file.chunk_bytes and end != file.size_bytes:
        return
    number = start // file.chunk_bytes
    if digest.digest() != file.chunks[number]:
        raise CorruptCheckpointError(
            f"the bytes of {str(file.path)!r} are not those that were saved: those from "
            f"{number * file.chunk_bytes} to {end} differ."
        )
    digest.reset()


def put(places: Places, data: memoryview, start: int) -> None:
    """Move ``data``, which begins at ``start`` in the file, to where they belong."""
    source = address_of(data)
    for address, size in places.of(start, start + len(data)):
        if address is not None:
            (move if size >= _SMALL_BYTES else move_small)(address, source, size)
        source += size


def cached_share(descriptor: int, start: int, end: int) -> float:
    """How much of a part of a file is in the page cache, from 0 to 1; 1 where the system does not tell."""
    counts = _Counts()
    extent = (ctypes.c_uint64 * 2)(start, end - start)
    if start >= end or _syscall(_CACHESTAT, descriptor, ctypes.byref(extent), ctypes.byref(counts), 0) != 0:
        return 1.0
    pages = -(-end // mmap.PAGESIZE) - start // mmap.PAGESIZE
    return counts[0] / pages


def _read_all(file: OpenFile, views: list[memoryview], start: int, end: int) -> None:
    """Fill ``views``, which are to hold ``start`` to ``end``, through the page cache."""
    while start < end:
        count = os.preadv(file.buffered, views, start)
        if not count:
            raise ends_at(file, start)
        start += count
        views = _after(views, count)


def ends_at(file: OpenFile, position: int) -> CorruptCheckpointError:
    """The error for a file that has less than it had when it was opened."""
    return CorruptCheckpointError(f"{str(file.path)!r} ends at byte {position}: it became shorter as it was read.")


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``views`` when ``count`` bytes are filled."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if count else views
