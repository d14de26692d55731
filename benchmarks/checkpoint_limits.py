"""What the machine can do with the bytes of a checkpoint: the limits that saves and resumes are measured against.

Every probe moves the same bytes as a checkpoint of the same tensors and nothing else: no names, no digests, no commit.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Limits", "forget_cached", "make_cached"]

_BLOCK_BYTES = 16 << 20
_THREADS = 2
_READ_SHAPES = [(_BLOCK_BYTES, _THREADS), (_BLOCK_BYTES // 4, 2 * _THREADS)]  # bytes at once, threads


class Limits:
    """The probes, for a state of ``tensors`` and files in ``folder``. Each returns the seconds that it took.

    Args:
        tensors: of the state. :meth:`page_cache_read` overwrites them.
        folder: on the disk that is measured; its file system must take O_DIRECT.

    Attributes:
        state_bytes: of all tensors.
    """

    def __init__(self, tensors: Sequence[Tensor], folder: Path) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        sizes = [tensor.nbytes for tensor in tensors]
        self.state_bytes = sum(sizes)
        ends = list(itertools.accumulate(-(-size // 64) * 64 for size in sizes))
        self._offsets = [0, *ends[:-1]]
        self._file_bytes = -(-ends[-1] // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = _memory(self._file_bytes)
        self._copies = [
            torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
            for tensor, offset in zip(self._tensors, self._offsets, strict=True)
        ]
        self._bounce = [_memory(_BLOCK_BYTES) for _ in range(_THREADS)]
        self._path = folder / "limits.bin"
        self._best_ways: dict[str, int] = {}

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────
    def memcpy(self, *, times: int = 3) -> float:
        """Every tensor into memory that was touched before, with one or two threads, torch's or Python's.

        ``times=1`` after a pause: the host of a virtual machine may have unmapped idle memory, and the first copy into
        such memory takes up to twice as long.
        """
        ways = [partial(self._copy, 1), partial(self._copy, _THREADS), self._move_all]
        return self._in_best_way("memcpy", ways, times=times)

    def _in_best_way(
        self, probe: str, ways: Sequence[Callable[[], object]], *, ready: Callable[[], object] = int, times: int = 1
    ) -> float:
        """The median of ``times`` runs of the best of ``ways``: which that is, the first call finds out.

        The best of many runs would be ahead of the one run that it is set against by the machine's spread alone.
        """

        def run(way: Callable[[], object]) -> float:
            ready()
            return _seconds(way)

        if probe not in self._best_ways:
            seconds = [min(run(way) for _ in range(3)) for way in ways]
            self._best_ways[probe] = seconds.index(min(seconds))
        return statistics.median(run(ways[self._best_ways[probe]]) for _ in range(times))

    def _copy(self, threads: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor)
        torch.set_num_threads(before)

    def _move_all(self) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._move, [range(part, len(self._tensors), _THREADS) for part in range(_THREADS)]))

    def _move(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            source = self._tensors[number]
            ctypes.memmove(self._copies[number].data_ptr(), source.data_ptr(), source.nbytes)

    def clone(self) -> float:
        """Every tensor into memory that is allocated for it, as ``copy.deepcopy`` of a state dict does."""
        return _seconds(lambda: [tensor.clone() for tensor in self._tensors])

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def disk_write(self) -> float:
        """Past the page cache, from memory that was touched before, until it is durable."""
        view = memoryview(self._memory)

        def write(file: int, offset: int, _: int) -> None:
            _all_written(file, view[offset : offset + _BLOCK_BYTES][: self._file_bytes - offset], offset)

        seconds = self._write(write, os.O_DIRECT, threads=_THREADS)
        self._path.unlink()
        return seconds

    def bounce(self) -> float:
        """The same through one small buffer, one thread: copy, write, copy, write."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        to = ctypes.addressof(ctypes.c_char.from_buffer(self._bounce[0]))
        view = memoryview(self._bounce[0])

        def write(file: int, offset: int, _: int) -> None:
            size = min(_BLOCK_BYTES, self._file_bytes - offset)
            ctypes.memmove(to, address + offset, size)
            _all_written(file, view[:size], offset)

        seconds = self._write(write, os.O_DIRECT, threads=1)
        self._path.unlink()
        return seconds

    def buffered_write(self) -> float:
        """Into the page cache, then fsync. Leaves the file to the probes that read."""
        view = memoryview(self._memory)

        def write(file: int, offset: int, _: int) -> None:
            _all_written(file, view[offset : offset + _BLOCK_BYTES][: self._file_bytes - offset], offset)

        return self._write(write, 0, threads=1)

    def _write(self, write: Callable[[int, int, int], None], flags: int, *, threads: int) -> float:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
        try:
            start = time.perf_counter()
            os.posix_fallocate(file, 0, self._file_bytes)
            _in_blocks(file, self._file_bytes, write, _BLOCK_BYTES, threads)
            os.fsync(file)
            return time.perf_counter() - start
        finally:
            os.close(file)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def page_cache_read(self, path: Path | None = None) -> float:
        """The file ``path``, or all files below it, from the page cache into the tensors of the state, with one or two
        threads; ``None``: that of :meth:`buffered_write`.

        A checkpoint is set against a reading of its own files: where on the disk and in memory the bytes happen to lie
        makes one file of the same size up to a tenth slower than another. It is read as by the first to read it after
        it was cached: for the second the system has less to note.
        """
        files = self._opened(path, 0)
        jobs = self._into_tensors(files)

        def read(jobs: Sequence[tuple[int, int, memoryview]]) -> None:
            for file, offset, view in jobs:
                _all_read(file, view, offset)

        halves = [jobs[part::_THREADS] for part in range(_THREADS)]
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                ways = [partial(read, jobs), lambda: list(pool.map(read, halves))]
                ready = partial(make_cached, path or self._path)
                return self._in_best_way("page_cache_read", ways, ready=ready)
        finally:
            _close(files)

    def _into_tensors(self, files: Sequence[tuple[int, int]]) -> list[tuple[int, int, memoryview]]:
        """File, offset and memory: the bytes of all files, one after the other, in the tensors' memory."""
        jobs: list[tuple[int, int, memoryview]] = []
        left = iter(files)
        file = size = at = 0
        for tensor in self._tensors:
            view = tensor.view(-1).numpy().data.cast("B")
            while view:
                if at == size:
                    (file, size), at = next(left), 0
                jobs.append((file, at, view[: size - at]))
                view, at = view[size - at :], min(size, at + len(view))
        return jobs

    def disk_read(self, path: Path | None = None) -> float:
        """The same files past the page cache into small buffers, in one of two shapes."""
        forget_cached(path or self._path)
        files = self._opened(path, os.O_DIRECT)
        try:
            return self._in_best_way("disk_read", [partial(self._read_direct, files, *shape) for shape in _READ_SHAPES])
        finally:
            _close(files)

    def _read_direct(self, files: Sequence[tuple[int, int]], block_bytes: int, threads: int) -> None:
        per_buffer = threads // _THREADS
        views = [
            memoryview(self._bounce[thread // per_buffer])[thread % per_buffer * block_bytes :][:block_bytes]
            for thread in range(threads)
        ]
        for file, size in files:

            def read(file: int, offset: int, thread: int, size: int = size) -> None:
                wanted = min(block_bytes, size - offset)
                _all_read(file, views[thread][: wanted + -wanted % mmap.PAGESIZE], offset, wanted)

            _in_blocks(file, size, read, block_bytes, threads)

    def _opened(self, path: Path | None, flags: int) -> list[tuple[int, int]]:
        """Descriptor and size of each file."""
        opened = [os.open(file, os.O_RDONLY | flags) for file in _files(path or self._path)]
        return [(descriptor, os.fstat(descriptor).st_size) for descriptor in opened]

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def make_cached(path: Path) -> None:
    """Have the page cache hold the file ``path``, or all files below it, as one reading from front to back leaves it.

    What parts of a file were cached before decides in how large pages the rest is, and so how fast it is read.
    """
    forget_cached(path)
    buffer = bytearray(1 << 20)
    for file in _files(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def forget_cached(path: Path) -> None:
    """Drop the file ``path``, or all files below it, from the page cache."""
    for file in _files(path):
        with file.open("rb", buffering=0) as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(path: Path) -> Iterator[Path]:
    yield from (file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def _memory(size: int) -> mmap.mmap:
    """Memory of whole pages, huge ones where there are any, that has been written to."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, size)
    return memory


def _in_blocks(file: int, size: int, do: Callable[[int, int, int], None], block_bytes: int, threads: int) -> None:
    """``do(file, offset, thread)`` for every block, each taken by the first of ``threads`` that is free."""
    offsets = iter(range(0, size, block_bytes))  # a range's iterator gives each offset to one thread

    def work(thread: int) -> None:
        for offset in offsets:
            do(file, offset, thread)

    if threads == 1:
        work(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def _all_written(file: int, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def _all_read(file: int, view: memoryview, offset: int, wanted: int | None = None) -> None:
    """Fill ``view``; the last block of a file gives ``wanted`` bytes of it."""
    left = len(view) if wanted is None else wanted
    while left > 0:
        done = os.preadv(file, [view], offset)
        assert done, "the file is shorter than it was"
        view, offset, left = view[done:], offset + done, left - done


def _close(files: Sequence[tuple[int, int]]) -> None:
    for descriptor, _ in files:
        os.close(descriptor)


def _seconds(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start
