"""ParallelReader: reads parts of a large file into memory in several threads, and verifies digests."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import final

import xxhash

from composerlite.errors import CorruptCheckpointError
from composerlite.storage.disk.files import BLOCK_BYTES, FileDigest
from composerlite.storage.disk.memory import address_of, borrow_memory, give_memory_back, memory_at, move
from composerlite.storage.workers import WorkerPool
from composerlite.threads import start_threads
from composerlite.types import Closing, Piece

_FILLED_BYTES = 1 << 20  # size of a read from the page cache, hashed while in the cache of the processor
_MOVED_BYTES = 512 << 10  # size of a piece that is hashed, then moved: libc moves 1 MiB and more in a slower way
_GAP_BYTES = 64 << 10  # to read the bytes of a smaller gap is faster than another read
_CACHESTAT = 451  # number of the system call cachestat, on all processors

_Counts = ctypes.c_uint64 * 5  # pages: in the cache, dirty, being written, evicted, evicted not long ago
_syscall = ctypes.CDLL(None).syscall

UNIT_BYTES = 2 << 20  # size of a read with O_DIRECT, and of a job of a thread unless a chunk is larger
_LOADERS = 4  # threads that wait for the disk; more threads would take the interpreter's lock from the others
_BLOCKS = 4  # number of blocks of UNIT_BYTES loaded ahead, for each thread that verifies

Unit = tuple[int, int]
"""A part of a file: offsets of the beginning and the end."""


def check_targets(targets: Sequence[Piece], name: str, size_bytes: int = sys.maxsize) -> None:
    """Raise CorruptCheckpointError if one of ``targets`` is not in the file ``name`` of ``size_bytes``."""
    for offset, _, size in targets:
        if offset < 0 or size < 0 or offset + size > size_bytes:
            raise CorruptCheckpointError(f"{name!r}: bytes {offset} to {offset + size} do not exist.")


def layers(targets: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Distribute ``targets`` over lists that are sorted and without overlaps in the file. Empty targets are dropped."""
    left = sorted(target for target in targets if target[2])
    while left:
        layer, rest, end = list[Piece](), list[Piece](), 0
        for offset, address, size in left:
            if offset >= end:
                layer.append((offset, address, size))
                end = offset + size
            else:
                rest.append((offset, address, size))
        yield layer
        left = rest


def units_of(
    targets: Sequence[Piece],
    *,
    chunk_bytes: int = 1,
    size_bytes: int = sys.maxsize,
    gap_bytes: int = 0,
    unit_bytes: int = UNIT_BYTES,
) -> list[Unit]:
    """Return the parts of a file to read for ``targets``, each a job of one thread.

    Args:
        targets: sorted, not overlapping.
        chunk_bytes: units consist of whole chunks of this size.
        size_bytes: size of the file, where the last chunk ends.
        gap_bytes: also read gaps between targets of up to this size.
        unit_bytes: size of a unit, unless a chunk is larger.

    Returns:
        Units in order.
    """
    spans: list[Unit] = []
    for offset, _, size in targets:
        start = offset // chunk_bytes * chunk_bytes
        end = -(-(offset + size) // chunk_bytes) * chunk_bytes
        if spans and start <= spans[-1][1] + gap_bytes:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    step = max(1, unit_bytes // chunk_bytes) * chunk_bytes
    return [unit for start, end in spans for unit in cut(start, min(end, size_bytes), step)]


def cut(start: int, end: int, step: int) -> Iterator[Unit]:
    """Yield ``start`` to ``end`` in parts, cut at the multiples of ``step``."""
    while start < end:
        stop = min(end, start - start % step + step)
        yield start, stop
        start = stop


@final
class ReadTargets:
    """Finds the targets for parts of a file. ``targets`` must be sorted and not overlap in the file."""

    def __init__(self, targets: Sequence[Piece]) -> None:
        self._targets = targets
        self._ends = [offset + size for offset, _, size in targets]

    def of(self, start: int, end: int) -> Iterator[tuple[int | None, int]]:
        """Divide ``start`` to ``end`` into parts with and without a target. Yield (address or ``None``, size) each."""
        at = bisect_right(self._ends, start)
        while start < end:
            offset, address, _ = self._targets[at] if at < len(self._targets) else (end, 0, 0)
            if offset >= end:
                yield None, end - start
                return
            if offset > start:
                yield None, offset - start
                start = offset
            stop = min(self._ends[at], end)
            yield address + start - offset, stop - start
            start, at = stop, at + 1


def put(places: ReadTargets, data: bytes | memoryview, start: int) -> None:
    """Copy ``data``, the bytes from ``start`` on in the file, to the targets."""
    source = address_of(data)
    for address, size in places.of(start, start + len(data)):
        if address is not None:
            move(address, source, size)
        source += size


def read_bytes(read_into: Callable[[Sequence[Piece]], object], offset: int, size: int) -> bytes:
    """Return ``size`` bytes from ``offset`` on, read by ``read_into`` of a file or object."""
    data = bytearray(max(0, size))
    read_into([(offset, address_of(data) if data else 0, size)])
    return bytes(data)


@final
class ParallelReader(Closing):
    """Reads parts of a file. Used as a context manager, or until :meth:`close`.

    With a digest, every chunk with a requested byte is read as a whole and verified. If the digest has no chunks, the
    file is a single chunk. Cached bytes are read from the page cache, other bytes with O_DIRECT if the file system
    allows O_DIRECT. With O_DIRECT up to four more threads only load, since a verifying thread leaves the disk idle.

    Args:
        path: the file.
        digest: expected digest, see :class:`FileDigest`; ``None``: nothing is verified.
        threads: number of threads that read or verify, the calling thread included.

    Attributes:
        size_bytes: size of the file, without the tail if there is a digest.
        verified: numbers of the chunks read and verified so far.

    Raises:
        CorruptCheckpointError: not a file, or the size or the tail differs from ``digest``.
        OSError: the file does not exist or cannot be read.
    """

    def __init__(self, path: Path, digest: FileDigest | None = None, *, threads: int = 2) -> None:
        self._path = path
        self._threads = threads
        self.verified: set[int] = set()
        self._buffered = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # O_NONBLOCK: opening a pipe must not wait
        self._direct: int | None = None
        try:
            self.size_bytes = self._check_size(digest)
            self._chunk_bytes, self._chunks = 1, list[str]()
            if digest is not None:
                self._chunk_bytes = digest.chunk_bytes or max(1, self.size_bytes)
                self._chunks = digest.chunk_digests(str(path)) if digest.chunk_bytes else [digest.xxh3_128]
            self._hash = xxhash.xxh3_64 if digest is None or digest.chunk_bytes else xxhash.xxh3_128
            with contextlib.suppress(OSError):  # no O_DIRECT in the file system, or no /proc: the page cache is used
                # This path opens the same file even after a rename.
                self._direct = os.open(f"/proc/self/fd/{self._buffered}", os.O_RDONLY | os.O_DIRECT)
        except BaseException:
            self.close()
            raise

    def _check_size(self, digest: FileDigest | None) -> int:
        """Return the size without the tail, after checks of the size and of the tail."""
        status = os.fstat(self._buffered)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError(f"{str(self._path)!r} is not a file.")
        if digest is None:
            return status.st_size
        if digest.size_bytes != status.st_size:
            raise CorruptCheckpointError(
                f"{str(self._path)!r} has {status.st_size} bytes and was saved with {digest.size_bytes}."
            )
        if digest.tail_bytes:
            tail = os.pread(self._buffered, digest.tail_bytes, digest.body_bytes)
            if xxhash.xxh3_128_hexdigest(tail) != digest.tail_xxh3_128:
                raise CorruptCheckpointError(f"the record of {str(self._path)!r} is not the saved record.")
        return digest.body_bytes

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes from ``offset`` to ``offset + size``.

        Args:
            offset: in bytes.
            size: in bytes.

        Returns:
            The bytes.

        Raises:
            CorruptCheckpointError: the file is shorter, or the bytes are not the saved bytes.
        """
        check_targets([(offset, 0, size)], str(self._path), self.size_bytes)
        return read_bytes(self.read_into, offset, size)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Read parts of the file into memory.

        Args:
            targets: offset in the file, address in memory and number of bytes of each part, in any order. The memory
                must exist until this returns.
            progress: called in this thread with numbers of bytes read. The sum may exceed the sizes of the targets.

        Raises:
            CorruptCheckpointError: the file is shorter, or the bytes are not the saved bytes; the message says
                where. Wrong bytes may be in memory.
        """
        check_targets(targets, str(self._path), self.size_bytes)
        for layer in layers(targets):
            self._run(ReadTargets(layer), layer, progress)

    def verify(self, progress: Callable[[int], object] = int, skip: Container[int] = ()) -> None:
        """Read and verify all chunks. Without a digest there are no chunks, and nothing is read.

        Args:
            progress: called in this thread with numbers of bytes read.
            skip: numbers of chunks to leave out, as in :attr:`verified`.

        Raises:
            CorruptCheckpointError: the bytes are not the saved bytes; the message says where.
        """
        step = self._chunk_bytes
        chunks = [(number * step, 0, step) for number in range(len(self._chunks)) if number not in skip]
        self._run(ReadTargets([]), chunks, progress)

    def close(self) -> None:
        """Close the file. May be called twice."""
        descriptors, self._buffered, self._direct = (self._buffered, self._direct), -1, None
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)

    def _run(self, places: ReadTargets, wanted: Sequence[Piece], progress: Callable[[int], object]) -> None:
        """Read and verify the units of ``wanted`` in several threads, this thread included, and fill ``places``."""
        gap_bytes = 0 if self._chunks else _GAP_BYTES
        units = units_of(wanted, chunk_bytes=self._chunk_bytes, size_bytes=self.size_bytes, gap_bytes=gap_bytes)
        if not units:
            return
        # O_DIRECT pays unless most of the range is in the page cache.
        is_cached = self._direct is None or cached_share(self._buffered, units[0][0], units[-1][1]) >= 0.9
        # This thread loads a single unit without help.
        loaders = None if is_cached else WorkerPool(min(_LOADERS, len(units) - 1), name="checkpoint-loader")
        count = min(len(units), self._threads)
        blocks_each = 1 if loaders is None else _BLOCKS
        room = UNIT_BYTES + 2 * BLOCK_BYTES
        memory = borrow_memory(count * blocks_each * room)
        blocks = [memory.view(number * room, room) for number in range(count * blocks_each)]
        left = iter(units)  # the iterator of a list gives each unit to a single thread
        done: deque[int] = deque()
        errors: list[BaseException] = []

        def work(progress: Callable[[int], object] | None = None) -> None:
            own = [blocks.pop() for _ in range(blocks_each)]
            try:
                if loaders is None:
                    sizes = self._read_cached(places, left, own[0])
                else:
                    sizes = self._read_ahead(places, left, own, loaders)
                for size in sizes:
                    done.append(size)
                    while progress is not None and done:
                        progress(done.popleft())
                    if errors:
                        return
            except BaseException as e:  # noqa: BLE001 - raised below
                errors.append(e)

        threads: list[threading.Thread] = []
        try:
            for _ in range(count - 1):
                threads += start_threads(work, 1, name="checkpoint-reader")
            work(progress)
        finally:
            for thread in threads:  # no thread may fill memory after the return, even after a second Ctrl-C
                while thread.is_alive():
                    try:
                        thread.join()
                    except KeyboardInterrupt as e:
                        errors.append(e)
            blocks.clear()
            if loaders is not None:
                loaders.close()
        if errors:
            raise errors[0]
        give_memory_back(memory)  # not after an interrupt: a thread may still fill the memory
        for size in done:
            progress(size)
        if self._chunks:
            for start, end in units:
                self.verified.update(range(start // self._chunk_bytes, -(-end // self._chunk_bytes)))

    def _read_cached(self, places: ReadTargets, units: Iterator[Unit], block: memoryview) -> Iterator[int]:
        """Read ``units`` through the page cache, verify the chunks, and fill the targets. Yield the size of each part.

        Args:
            places: the targets.
            units: shared with other threads.
            block: memory of this thread, for parts with several targets or none.
        """
        digest = self._hash()
        for start, end in units:
            for at, stop in cut(start, end, _FILLED_BYTES):
                address, size = next(places.of(at, stop))
                is_in_place = address is not None and size == stop - at
                data = memory_at(address, size) if address is not None and is_in_place else block[: stop - at]
                self._fill(data, at)
                self._verify(digest, data, at)
                if not is_in_place:
                    put(places, data, at)
                yield stop - at

    def _read_ahead(
        self, places: ReadTargets, units: Iterator[Unit], blocks: Sequence[memoryview], loaders: WorkerPool
    ) -> Iterator[int]:
        """Verify ``units`` that ``loaders`` read into ``blocks``, and fill the targets. Yield the size of each part.

        Args:
            places: the targets.
            units: shared with other threads.
            blocks: memory of this thread; loaded ahead, so that the disk is busy while this thread verifies.
            loaders: threads that read.
        """
        digest, free = self._hash(), list(blocks)
        parts = (part for start, end in units for part in cut(start, end, UNIT_BYTES))
        loads: deque[tuple[Unit, memoryview, Future[memoryview]]] = deque()
        while True:
            while free and (part := next(parts, None)):
                loads.append((part, free[-1], loaders.submit(partial(self._load, free.pop(), *part))))
            if not loads:
                return
            (start, end), block, load = loads.popleft()
            data = load.result()
            for at, stop in cut(start, end, _MOVED_BYTES):
                piece = data[at - start : stop - start]
                self._verify(digest, piece, at)
                put(places, piece, at)
            free.append(block)
            yield end - start

    def _load(self, block: memoryview, start: int, end: int) -> memoryview:
        """Read a part of the file into ``block``, with O_DIRECT unless cached, and return the view of the part."""
        before = start % BLOCK_BYTES
        size = before + end - start
        count = 0
        if self._direct is not None and cached_share(self._buffered, start, end) < 0.5:
            try:
                count = os.preadv(self._direct, [block[: size + -size % BLOCK_BYTES]], start - before)
            except OSError as e:
                if e.errno != errno.EINVAL:  # some file systems open with O_DIRECT and refuse to read
                    raise
        if count < size:
            self._fill(block[count:size], start - before + count)
        return block[before:size]

    def _fill(self, view: memoryview, position: int) -> None:
        """Fill ``view`` with the bytes from ``position`` on, through the page cache."""
        while view:
            count = os.preadv(self._buffered, [view], position)
            if not count:
                end = os.fstat(self._buffered).st_size
                raise CorruptCheckpointError(
                    f"{str(self._path)!r} ends at byte {end}: it became shorter while it was read."
                )
            view, position = view[count:], position + count

    def _verify(self, digest: xxhash.xxh3_64 | xxhash.xxh3_128, data: memoryview, position: int) -> None:
        """Add ``data``, the bytes from ``position`` on, to ``digest``. Compare and reset at the end of each chunk."""
        for start, end in cut(position, position + len(data), self._chunk_bytes) if self._chunks else ():
            digest.update(data[start - position : end - position])
            number = start // self._chunk_bytes
            first, last = number * self._chunk_bytes, min((number + 1) * self._chunk_bytes, self.size_bytes)
            if end < last:
                continue  # the next bytes continue the chunk
            if digest.hexdigest() != self._chunks[number]:
                raise CorruptCheckpointError(
                    f"the bytes of {str(self._path)!r} differ from the saved bytes between {first} and {last}."
                )
            digest.reset()


def cached_share(descriptor: int, start: int, end: int) -> float:
    """Return the share of a part of a file that is cached, from 0 to 1; 1 if the system does not report the share.

    The part begins at the offset ``start`` and ends before ``end``, which is greater.
    """
    counts = _Counts()
    extent = (ctypes.c_uint64 * 2)(start, end - start)
    if _syscall(_CACHESTAT, descriptor, ctypes.byref(extent), ctypes.byref(counts), 0) == 0:
        return counts[0] / (-(-end // mmap.PAGESIZE) - start // mmap.PAGESIZE)
    try:  # Linux before 6.5: check only the byte in the middle
        os.preadv(descriptor, [bytearray(1)], (start + end) // 2, os.RWF_NOWAIT)
    except OSError as e:
        return 0.0 if isinstance(e, BlockingIOError) else 1.0  # other errors: not reported
    return 1.0


def verify_file(
    path: Path, digest: FileDigest, progress: Callable[[int], object] = int, skip: Container[int] = ()
) -> None:
    """Compare the file ``path`` with ``digest``.

    Args:
        path: path of the file.
        digest: expected size and hashes.
        progress: called with numbers of bytes read.
        skip: numbers of chunks verified before, as in :attr:`ParallelReader.verified`.

    Raises:
        CorruptCheckpointError: the size or the bytes differ.
        OSError: the file does not exist or cannot be read.
    """
    with ParallelReader(path, digest) as reader:
        reader.verify(progress, skip)
