"""Reading parts of a file: which, where in memory they belong, and threads that read them through the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

import xxhash

from composerlite.errors import CorruptCheckpointError
from composerlite.storage.disk.memory import address_of, memory_at, move, move_small

_PIECE_BYTES = 1000 << 10  # read, then summed while it is in the cache; more is moved more slowly
_SMALL_BYTES = 16 << 10  # it is quicker to read a neighbourhood and take such things from there
_CACHESTAT = 451  # number of the system call, on all processors

_Counts = ctypes.c_uint64 * 5  # pages: in the cache, dirty, being written, evicted, evicted not long ago
_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
_syscall.restype = ctypes.c_long

UNIT_BYTES = 8 << 20  # what a thread takes at once
_GAP_BYTES = 64 << 10  # it is quicker to read over such gaps than to begin anew

Unit = tuple[int, int]
"""A part of the file: where it begins and where it ends."""


# ── which parts ──────────────────────────────────────────────────────────────────────────────────────────────────
class Target(NamedTuple):
    """Memory that a part of the file belongs into."""

    offset: int
    address: int
    size: int


def layers(targets: Sequence[tuple[int, int, int]]) -> Iterator[list[Target]]:
    """Cut ``targets`` into lists, in order, of those that do not overlap in the file."""
    left = sorted(Target(*target) for target in targets if target[2])
    while left:
        layer: list[Target] = []
        rest: list[Target] = []
        end = 0
        for target in left:
            if target.offset >= end:
                layer.append(target)
                end = target.offset + target.size
            else:
                rest.append(target)
        yield layer
        left = rest


def touched_chunks(targets: Sequence[Target], chunk_bytes: int, size_bytes: int) -> list[Unit]:
    """The chunks that hold something of ``targets``, which are in order, in units of whole chunks."""
    units: list[Unit] = []
    first, end = 0, 0
    for target in targets:
        chunk, stop = target.offset // chunk_bytes, -(-(target.offset + target.size) // chunk_bytes)
        if chunk > end:
            units += _units(first, end, chunk_bytes, size_bytes)
            first = chunk
        end = max(end, stop)
    return [*units, *_units(first, end, chunk_bytes, size_bytes)]


def runs(targets: Sequence[Target], *, gap_bytes: int = _GAP_BYTES, unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """The parts that hold ``targets``, which are in order, with the small gaps between them, cut into units."""
    units: list[Unit] = []
    start = end = targets[0].offset
    for target in targets:
        if target.offset > end + gap_bytes:
            units += cut(start, end, unit_bytes)
            start = target.offset
        end = target.offset + target.size
    return [*units, *cut(start, end, unit_bytes)]


def cut(start: int, end: int, step: int) -> Iterator[Unit]:
    """``start`` to ``end``, cut at the multiples of ``step``."""
    while start < end:
        stop = min(end, start - start % step + step)
        yield start, stop
        start = stop


def _units(first: int, end: int, chunk_bytes: int, size_bytes: int) -> list[Unit]:
    """The chunks ``first`` to ``end``, as many together as a unit takes, and one at least."""
    most = max(1, UNIT_BYTES // chunk_bytes)
    return [(start * chunk_bytes, min(stop * chunk_bytes, size_bytes)) for start, stop in cut(first, end, most)]


@final
class ReadTargets:
    """Targets in memory for parts of the file. ``targets`` are in order and do not overlap in the file."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._offsets = [target.offset for target in targets]
        self._ends = [target.offset + target.size for target in targets]
        self._addresses = [target.address for target in targets]

    def of(self, start: int, end: int) -> Iterator[tuple[int | None, int]]:
        """Address (``None`` where the bytes belong nowhere) and size of the parts of ``start`` to ``end``, in order."""
        at = bisect_right(self._ends, start)
        while start < end:
            offset = self._offsets[at] if at < len(self._offsets) else end
            if offset >= end:
                yield None, end - start
                return
            if offset > start:
                yield None, offset - start
                start = offset
            stop = min(self._ends[at], end)
            yield self._addresses[at] + start - offset, stop - start
            start, at = stop, at + 1


# ── reading them ─────────────────────────────────────────────────────────────────────────────────────────────────
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


class Work(ABC):
    """Units of a file that are read by several threads, each taking the next one.

    Attributes:
        helpers: number of threads that call :meth:`help` beside the caller of :meth:`run`.
        stopped: threads end after the part they are at.
    """

    helpers = 0

    def __init__(self, file: OpenFile, places: ReadTargets, units: Sequence[Unit]) -> None:
        self.stopped = False
        self._file = file
        self._places = places
        self._units = iter(units)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._read = self._told = 0

    @abstractmethod
    def help(self) -> None:
        """Read units until none is left. Raises nothing."""

    @abstractmethod
    def run(self, progress: Callable[[int], object]) -> None:
        """Do the caller's part; ``progress`` is called with the bytes read by all threads. Raises nothing."""

    def add(self, size: int) -> None:
        """Count bytes that are in place."""
        with self._lock:
            self._read += size

    def tell(self, progress: Callable[[int], object]) -> None:
        """Tell of what was read since the last time."""
        with self._lock:
            new, self._told = self._read - self._told, self._read
        if new:
            progress(new)

    def fail(self, error: BaseException) -> None:
        """Stop all threads. :meth:`finish` raises the first error."""
        self._error = self._error or error
        self.stopped = True

    def stop(self, error: BaseException) -> None:
        """Stop all threads, waiting ones included."""
        self.fail(error)

    def close(self) -> None:
        """Give back what was borrowed, after all threads have ended."""

    def finish(self, progress: Callable[[int], object]) -> None:
        """Raise the first error of a thread, once all have ended."""
        if self._error is not None:
            raise self._error
        self.tell(progress)


@final
class CachedWork(Work):
    """Units that are read through the page cache, by the caller as by the other threads."""

    def help(self) -> None:
        self.run(None)

    def run(self, progress: Callable[[int], object] | None) -> None:
        try:
            reader = _UnitReader(self._file, self._places)
            for unit in self._units:
                if self.stopped:
                    return
                reader.read(*unit)
                self.add(unit[1] - unit[0])
                if progress is not None:
                    self.tell(progress)
        except BaseException as e:  # noqa: BLE001 - raised by end
            self.fail(e)


@final
class _UnitReader:
    """Reads units in one thread, with memory of its own for what does not go straight into place."""

    def __init__(self, file: OpenFile, places: ReadTargets) -> None:
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
    """``start`` to ``end`` in pieces that fit the processor's cache: of one chunk, or of several whole ones."""
    if 0 < file.chunk_bytes <= _PIECE_BYTES:
        yield from cut(start, end, _PIECE_BYTES // file.chunk_bytes * file.chunk_bytes)
        return
    for chunk_start, chunk_end in cut(start, end, file.chunk_bytes or UNIT_BYTES):
        for at in range(chunk_start, chunk_end, _PIECE_BYTES):
            yield at, min(chunk_end, at + _PIECE_BYTES)


def verify(file: OpenFile, digest: xxhash.xxh3_64, views: Sequence[memoryview], start: int, end: int) -> None:
    """Sum the piece ``start`` to ``end``, which is in ``views``, and compare at the end of each chunk."""
    if not file.chunk_bytes:
        return
    position = start
    for view in views:
        at = 0
        while at < len(view):
            number = position // file.chunk_bytes
            first, last = number * file.chunk_bytes, min((number + 1) * file.chunk_bytes, file.size_bytes)
            count = min(len(view) - at, last - position)
            part = view[at : at + count]
            at, position = at + count, position + count
            if count == last - first:
                found = xxhash.xxh3_64_digest(part)
            else:
                digest.update(part)
                if position < last:
                    continue
                found = digest.digest()
                digest.reset()
            if found != file.chunks[number]:
                raise CorruptCheckpointError(
                    f"the bytes of {str(file.path)!r} are not those that were saved: those from {first} to {last} "
                    "differ."
                )


def put(places: ReadTargets, data: memoryview, start: int) -> None:
    """Move ``data``, which begins at ``start`` in the file, to where they belong."""
    source = address_of(data)
    for address, size in places.of(start, start + len(data)):
        if address is not None:
            (move if size >= _SMALL_BYTES else move_small)(address, source, size)
        source += size


def cached_share(descriptor: int, start: int, end: int) -> float:
    """Return the share of a part of a file that is in the page cache, from 0 to 1; 1 where the system does not tell."""
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
    """Return the rest of ``views`` when ``count`` bytes are filled."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if count else views
