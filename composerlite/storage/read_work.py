"""The threads of a :class:`~composerlite.storage.ParallelReader`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

import xxhash

from composerlite.errors import CorruptCheckpointError
from composerlite.storage.addresses import address_of, memory_at, move, move_small
from composerlite.storage.memory import HostMemory
from composerlite.storage.read_plan import UNIT_BYTES, Places, Unit, cut

__all__ = ["OpenFile", "Work", "cached_share"]

_PIECE_BYTES = 512 << 10  # read, then summed while it is in the cache
_SMALL_BYTES = 16 << 10  # it is quicker to read a neighbourhood and take such things from there
_BLOCK = 4096  # what O_DIRECT wants sizes and places in the file to be multiples of
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
class Work:
    """Units of a file that several threads read, each taking the next one.

    Attributes:
        stopped: threads end after the unit they are at.
    """

    def __init__(self, file: OpenFile, places: Places, units: Sequence[Unit]) -> None:
        self.stopped = False
        self._file = file
        self._places = places
        self._units = iter(units)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._read = self._told = 0

    def run(self, progress: Callable[[int], object] | None = None) -> None:
        """Read units until none is left; ``progress`` is told of what all threads read. Raises nothing."""
        reader = _UnitReader(self._file, self._places)
        try:
            for unit in self._units:
                if self.stopped:
                    return
                reader.read(*unit)
                with self._lock:
                    self._read += unit[1] - unit[0]
                if progress is not None:
                    self._tell(progress)
        except BaseException as e:  # noqa: BLE001 - raised by end
            self._error = self._error or e
            self.stopped = True
        finally:
            reader.close()

    def end(self, progress: Callable[[int], object]) -> None:
        """After all threads have ended: raise what went wrong in one of them."""
        if self._error is not None:
            raise self._error
        self._tell(progress)

    def _tell(self, progress: Callable[[int], object]) -> None:
        with self._lock:
            new, self._told = self._read - self._told, self._read
        if new:
            progress(new)


@final
class _UnitReader:
    """Reads units in one thread, with memory of its own for what does not go straight into place."""

    def __init__(self, file: OpenFile, places: Places) -> None:
        self._file = file
        self._places = places
        self._digest = xxhash.xxh3_64()
        self._aside = bytearray(_PIECE_BYTES)
        self._aside_view, self._aside_address = memoryview(self._aside), address_of(self._aside)
        self._block: HostMemory | None = None

    def read(self, start: int, end: int) -> None:
        """Read a unit, which begins and ends with a chunk where chunks are verified."""
        direct = self._file.direct
        past_cache = direct is not None and cached_share(self._file.buffered, start, end) < 0.5
        for block_start in range(start, end, UNIT_BYTES):
            block_end = min(end, block_start + UNIT_BYTES)
            block = self._load(direct, block_start, block_end) if past_cache and direct is not None else None
            for piece_start, piece_end in self._pieces(block_start, block_end):
                if block is None:
                    self._read_into_place(piece_start, piece_end)
                else:
                    at = piece_start - block_start
                    self._take(block[at : at + piece_end - piece_start], piece_start, piece_end)

    def close(self) -> None:
        """Give the memory back."""
        if self._block is not None:
            self._block.close()

    def _pieces(self, start: int, end: int) -> Iterator[Unit]:
        for chunk_start, chunk_end in cut(start, end, self._file.chunk_bytes or UNIT_BYTES):
            for at in range(chunk_start, chunk_end, _PIECE_BYTES):
                yield at, min(chunk_end, at + _PIECE_BYTES)

    def _read_into_place(self, start: int, end: int) -> None:
        """Read a piece through the page cache: large things into place, the rest aside and from there."""
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
        self._verify(views, start, end)
        for job in moves:
            move_small(*job)

    def _load(self, direct: int, start: int, end: int) -> memoryview | None:
        """Read a block past the page cache; ``None`` where the file system refuses after all."""
        if self._block is None:
            self._block = HostMemory(UNIT_BYTES + 2 * _BLOCK)
        before = start % _BLOCK
        size = before + end - start
        view, got = self._block.view(0, size + -size % _BLOCK), 0
        while got < size:
            try:
                count = os.preadv(direct, [view[got:]], start - before + got)
            except OSError as e:
                if e.errno == errno.EINVAL:
                    return None
                raise
            if not count:
                raise _ends_at(self._file, start - before + got)
            got += count
        return view[before:size]

    def _take(self, data: memoryview, start: int, end: int) -> None:
        """Put a piece that was loaded into place."""
        self._verify([data], start, end)
        source = address_of(data)
        for address, size in self._places.of(start, end):
            if address is not None:
                (move if size >= _SMALL_BYTES else move_small)(address, source, size)
            source += size

    def _verify(self, views: Sequence[memoryview], start: int, end: int) -> None:
        """Sum the piece ``start`` to ``end``, and compare at the end of a chunk."""
        file = self._file
        if not file.chunk_bytes:
            return
        for view in views:
            self._digest.update(view)
        if end % file.chunk_bytes and end != file.size_bytes:
            return
        number = start // file.chunk_bytes
        if self._digest.digest() != file.chunks[number]:
            raise CorruptCheckpointError(
                f"the bytes of {str(file.path)!r} are not those that were saved: those from "
                f"{number * file.chunk_bytes} to {end} differ."
            )
        self._digest.reset()


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
            raise _ends_at(file, start)
        start += count
        views = _after(views, count)


def _ends_at(file: OpenFile, position: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{str(file.path)!r} ends at byte {position}: it became shorter as it was read.")


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``views`` when ``count`` bytes are filled."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if count else views
