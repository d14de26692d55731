"""Memory of this machine: allocation and reuse of large buffers, free memory, and copies in several threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import final

from composerlite.threads import start_threads

_HUGE_PAGE_BYTES = 2 << 20
_HUGE_PAGES, _WIPE_ON_FORK, _POPULATE_WRITE = 14, 18, 23  # advice for madvise(2)
_PIECE_BYTES = 1000 << 10  # from 1 MiB on libc moves memory in a slower way
_SMALL_BYTES = 16 << 10  # smaller copies hold the interpreter's lock
_MOST_COPIERS, _PIECES_EACH = 4, 8  # more threads copy no faster; a thread does not pay for fewer than 8 pieces
_LEAST_LENT_BYTES = 49 << 20  # enough for the 48 MiB of StreamWriter: a save can use the memory of an earlier load
_MOST_KEPT_BYTES = 65 << 20  # as needed by ParallelReader with 16 threads

_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For control groups of version 2, then version 1: folder, files with limit and used memory, name of cached files."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@final
class HostMemory:
    """Zeroed memory of this machine, in huge pages if the system has some. The owner calls :meth:`close`.

    Forked processes, such as workers of a data loader, see zeros. If a child inherited the pages, the system would copy
    the pages at the next use.

    Args:
        size_bytes: smallest size, in bytes.

    Attributes:
        address: address of the first byte; a multiple of 2 MiB.
        size_bytes: size in bytes, rounded up to whole pages.

    Raises:
        OSError: the system has less memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self.size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._skipped = -start % _HUGE_PAGE_BYTES
        self.address = start + self._skipped
        for advice in (_HUGE_PAGES, _WIPE_ON_FORK):
            _libc.madvise(self.address, self.size_bytes, advice)  # an old kernel ignores the advice

    def view(self, offset: int, size: int) -> memoryview:
        """Return a writable view.

        Args:
            offset: offset of the first byte of the view, in bytes.
            size: in bytes.

        Returns:
            A writable view of ``size`` bytes.
        """
        return memoryview(self._map)[self._skipped + offset : self._skipped + offset + size]

    def fault_in(self, offset: int, size: int) -> None:
        """Make the system provide the pages of a range now instead of at the first use.

        Other threads run meanwhile. Zeros may replace the content of the range.

        Args:
            offset: offset of the range in bytes, a multiple of the page size.
            size: in bytes.

        Raises:
            OSError: the system has less memory.
        """
        if _libc.madvise(self.address + offset, size, _POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # EINVAL: a kernel before 5.14
            raise OSError(code, f"{os.strerror(code)}: {size} bytes of memory")
        ctypes.memset(self.address + offset, 0, size)

    def close(self) -> None:
        """Free the memory when no view is left. Do not use the address afterwards. May be called twice."""
        with contextlib.suppress(BufferError):
            self._map.close()


_kept: list[HostMemory] = []
"""Unused memory for the next borrower. New pages are expensive: if the host of a virtual machine reclaims free pages,
the first access takes up to 3 ms per MiB, as long as a write of 1 MiB to a fast disk.
"""


def borrow_memory(size_bytes: int) -> HostMemory:
    """Lend memory of at least ``size_bytes``, with undefined content, until :func:`give_memory_back`."""
    with contextlib.suppress(IndexError):  # another thread may have borrowed the kept memory
        memory = _kept.pop()
        if memory.size_bytes >= size_bytes:
            return memory
        memory.close()
    return HostMemory(max(size_bytes, _LEAST_LENT_BYTES))


def give_memory_back(memory: HostMemory) -> None:
    """Give borrowed memory back. Use no view of the memory afterwards.

    One memory of up to 65 MiB is kept for the next borrower.
    """
    if _kept or memory.size_bytes > _MOST_KEPT_BYTES:
        memory.close()
    else:
        _kept.append(memory)


def available_memory(root: Path = Path("/")) -> int:
    """Return the free memory for this process in bytes, by the machine and by the control groups of the process.

    Args:
        root: folder with ``proc`` and ``sys``.

    Returns:
        The smallest of the free memory of the machine and of each control group, at least 0. If the machine does not
        report free memory, half of all memory counts as free.
    """
    free = _number_in(root / "proc/meminfo", "MemAvailable")
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if free is None else free << 10
    return max(0, min([free, *_left_in_groups(root)]))


def _number_in(file: Path, name: str) -> int | None:
    """Return the number after ``name`` in a file with a name and a number in each line; ``None`` if there is none."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:?\s+(\d+)", file.read_text(), re.MULTILINE):
            return int(found[1])
    return None


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group of the process with a limit, in both versions of control groups.

    The parents of a group are included. In a container the mount may be the container's own group, and the path of the
    group may not exist below the mount.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                mount, limit, used, cache = _GROUPS[1 if controllers else 0]
                group = root / mount / path.strip("/")
                for folder in (group, *group.parents):
                    with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ('max')
                        cached = _number_in(folder / "memory.stat", cache) or 0  # the system frees cached files first
                        yield cached + int((folder / limit).read_text()) - int((folder / used).read_text())


# ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────
_ALL = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")  # the address space; no byte is accessed

_move_large = ctypes.CDLL(None).memmove  # other threads run meanwhile
_move_small = ctypes.PyDLL(None).memmove  # holds the interpreter's lock: to wait for the lock would take longer
for _function in (_move_large, _move_small):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _function.restype = None

Copy = tuple[int, int, int]
"""Destination address, source address, number of bytes."""


def move(to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes from the address ``source`` to the address ``to``. Other threads run during a large copy."""
    (_move_large if size >= _SMALL_BYTES else _move_small)(to, source, size)


def memory_at(address: int, size: int) -> memoryview:
    """Return a writable view of ``size`` bytes at ``address``. The memory must outlive the view."""
    return _ALL[address : address + size]


def address_of(buffer: bytes | bytearray | memoryview) -> int:
    """Return the address of the bytes of ``buffer``, valid while the caller holds ``buffer`` and does not resize it."""
    if isinstance(buffer, bytes):
        return ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def copy_memory(copies: Iterable[Copy]) -> None:
    """Copy memory in up to four threads, including the calling thread. Returns when all copies are done.

    Each thread copies one piece after the other, so a thread on a busy core copies fewer pieces.

    Args:
        copies: destination address, source address and number of bytes of each copy.
    """
    small: list[Copy] = []
    pieces: list[Copy] = []
    for to, source, size in copies:
        if size < _SMALL_BYTES:
            small.append((to, source, size))
            continue
        for at in range(0, size, _PIECE_BYTES):
            pieces.append((to + at, source + at, min(_PIECE_BYTES, size - at)))
    left = iter(pieces)  # the iterator of a list gives each piece to one thread

    def work() -> None:
        for piece in left:
            _move_large(*piece)

    helpers = min(_MOST_COPIERS, len(os.sched_getaffinity(0)), len(pieces) // _PIECES_EACH) - 1
    threads = start_threads(work, helpers, name="checkpoint-copier") if helpers > 0 else []
    try:
        work()
        for copy in small:
            _move_small(*copy)
    finally:
        for _ in left:  # after an interrupt: no thread begins another piece
            pass
        for thread in threads:
            thread.join()
