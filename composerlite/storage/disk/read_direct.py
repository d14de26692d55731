"""Reading a file past the page cache: some threads wait for the disk, one puts what comes into place."""

from __future__ import annotations

import errno
import os
import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import xxhash

from composerlite.storage.disk.memory import borrow_memory, give_memory_back
from composerlite.storage.disk.read_work import (
    UNIT_BYTES,
    OpenFile,
    ReadTargets,
    Unit,
    Work,
    cached_share,
    ends_at,
    pieces,
    put,
    verify,
)

_ALIGNMENT = 4096  # what O_DIRECT wants sizes and places in the file to be multiples of


class PrefetchDepth(NamedTuple):
    """Amount of data that is read ahead of the thread that copies it to its targets.

    Attributes:
        loaders: threads that wait for the disk.
        block_bytes: what each asks it for at once.
        blocks: in memory at a time.
        hot: the memory that was used last is used next, or else that which was used longest ago.
    """

    loaders: int
    block_bytes: int
    blocks: int
    hot: bool = True


SHALLOW_PREFETCH = PrefetchDepth(loaders=1, block_bytes=2 << 20, blocks=3)
"""So little that a fast disk is just busy: blocks are still in the processor's cache when they are put into place."""

WIDE_PREFETCH = PrefetchDepth(loaders=1, block_bytes=2 << 20, blocks=16, hot=False)
"""Equally near, but with more memory in turn than the processor's cache holds."""


def deep_prefetch(loaders: int) -> PrefetchDepth:
    """Enough for a disk that is slow to answer; each loads a block while another of its own is put into place."""
    return PrefetchDepth(loaders, UNIT_BYTES, 2 * loaders)


class _Block(NamedTuple):
    """A part of the file in memory: the number of its block, and the digest of the chunk that it continues."""

    number: int
    data: memoryview
    start: int
    digest: xxhash.xxh3_64


@final
class DirectWork(Work):
    """Units of a file that ``loaders`` threads load, and that the caller verifies and puts into place.

    A thread that asks for the interpreter's lock between two steps may wait for it as long as for the disk, so those
    that wait for the disk do nothing else. A loader that finds no free block helps the caller, who is the slower one
    then. What is in the page cache already is taken from there.

    Attributes:
        helpers: how many threads are to call :meth:`help`; set to those that do before :meth:`run`.
    """

    def __init__(self, file: OpenFile, places: ReadTargets, units: Sequence[Unit], depth: PrefetchDepth) -> None:
        super().__init__(file, places, units)
        self.helpers = min(len(units), depth.loaders) if len(units) > 1 else 0
        self._all = units
        self._block_bytes = depth.block_bytes
        self._room_bytes = depth.block_bytes + 2 * _ALIGNMENT
        # A chunk in more than one block is digested block by block: by one thread, in the order of its loading.
        chunk_bytes = file.chunk_bytes
        self._any_order = (
            not chunk_bytes or depth.block_bytes % chunk_bytes == 0 or (chunk_bytes <= UNIT_BYTES <= depth.block_bytes)
        )
        self._untouched = depth.blocks  # the first use of memory takes long, whatever the disk does
        self._made = self._begun = self._ended = time.perf_counter()
        self._waited_seconds = 0.0
        self._memory = borrow_memory(depth.blocks * self._room_bytes)
        self._free: queue.Queue[int] = queue.LifoQueue() if depth.hot else queue.Queue()
        self._full: queue.SimpleQueue[_Block | None] = queue.SimpleQueue()
        for number in range(depth.blocks):
            self._free.put(number)

    def help(self) -> None:
        """Load units until none is left. Raises nothing."""
        try:
            for unit in self._units:
                self._load_unit(*unit)
                if self.stopped:
                    return
        except BaseException as e:  # noqa: BLE001 - raised by end
            self.fail(e)
        finally:
            self._full.put(None)

    def run(self, progress: Callable[[int], object]) -> None:
        """Process the loaded blocks; ``progress`` is called with their sizes. Raises nothing."""
        try:
            if not self.helpers:
                self.help()
            running = max(1, self.helpers)
            while running:
                block = self._next()
                if block is None:
                    running -= 1
                    continue
                if not self.stopped:
                    self._place(block)
                    self.tell(progress)
                self._free.put(block.number)
        except BaseException as e:  # noqa: BLE001 - raised by end
            self.stop(e)

    @property
    def bytes_per_s(self) -> float:
        """Speed of reading, from when the work was made."""
        return sum(end - start for start, end in self._all) / (self._ended - self._made)

    @property
    def waited_share(self) -> float:
        """Fraction of the time of :meth:`run` that it waited for the disk, from 0 to 1."""
        seconds = self._ended - self._begun
        return self._waited_seconds / seconds if seconds > 0 else 0.0

    def stop(self, error: BaseException) -> None:
        """Stop the threads that load."""
        self.fail(error)
        for number in range(self.helpers):
            self._free.put(number)  # who waits for a block sees that it is over

    def close(self) -> None:
        """Give the memory back, after all threads have ended."""
        give_memory_back(self._memory)

    def _next(self) -> _Block | None:
        """Return a block that is loaded; ``None``: one of them has ended."""
        start = time.perf_counter()
        block = self._full.get()
        self._ended = time.perf_counter()
        if self._untouched:
            self._untouched -= 1
            self._begun = self._ended
        else:
            self._waited_seconds += self._ended - start
        return block

    def _load_unit(self, start: int, end: int) -> None:
        """Load a unit, which begins and ends with a chunk where chunks are verified."""
        digest = xxhash.xxh3_64()
        cached = cached_share(self._file.buffered, start, end) >= 0.5
        for at in range(start, end, self._block_bytes):
            number = self._free_block()
            if self.stopped:
                return
            data = self._load(number, at, min(end, at + self._block_bytes), cached=cached)
            if self._any_order:
                digest = xxhash.xxh3_64()
            self._full.put(_Block(number, data, at, digest))

    def _free_block(self) -> int:
        """The number of a block that nobody uses. If there is none, one is put into place, or it is waited for."""
        if self._free.empty() and (self._any_order or not self.helpers):
            try:
                block = self._full.get_nowait()
            except queue.Empty:
                return self._free.get()  # the caller has just taken it
            if block is not None:
                self._place(block)
                return block.number
            self._full.put(None)
        return self._free.get()

    def _load(self, number: int, start: int, end: int, *, cached: bool) -> memoryview:
        file = self._file
        descriptor = file.buffered if cached or file.direct is None else file.direct
        before = start % _ALIGNMENT
        size = before + end - start
        view, got = self._memory.view(number * self._room_bytes, size + -size % _ALIGNMENT), 0
        while got < size:
            try:
                count = os.preadv(descriptor, [view[got:]], start - before + got)
            except OSError as e:
                if e.errno != errno.EINVAL or descriptor == file.buffered:
                    raise
                descriptor = file.buffered  # some file systems refuse only here, all in the middle of a block
                continue
            if not count:
                raise ends_at(file, start - before + got)
            got += count
        return view[before:size]

    def _place(self, block: _Block) -> None:
        """Verify a block and move it to where it belongs."""
        for start, end in pieces(self._file, block.start, block.start + len(block.data)):
            data = block.data[start - block.start : end - block.start]
            verify(self._file, block.digest, [data], start, end)
            put(self._places, data, start)
        self.add(len(block.data))
