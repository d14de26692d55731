"""Memory of this machine: taken once and used again, copied without the interpreter's lock, and watched for writes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import queue
import resource
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

from composerlite.threads import start_threads

_HUGE_PAGE_BYTES = 2 << 20
_HUGE_PAGES, _WIPE_ON_FORK, _POPULATE_WRITE = 14, 18, 23  # what madvise(2) can be told
_FAULT_BYTES = 64 << 20
_PIECE_BYTES = 1000 << 10  # from 1 MiB on libc moves memory in a slower way
_SMALL_BYTES = 16 << 10
_WAIT_SECONDS = 600.0
_LEAST_LENT_BYTES = 49 << 20  # what is asked for by default, so that each finds what the other left
_MOST_KEPT_BYTES = 65 << 20  # a load's blocks

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@final
class HostMemory:
    """Memory of this machine, in huge pages where the system has them. It is given back by :meth:`close`.

    Forked processes find it empty. If they inherited it, as the workers of a data loader would, every page of it would
    be copied at its next use.

    Args:
        size_bytes: the least size.

    Attributes:
        address: of its first byte; a multiple of 2 MiB.
        size_bytes: whole pages.

    Raises:
        OSError: the system does not give that much.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self.size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._skipped = -start % _HUGE_PAGE_BYTES
        self.address = start + self._skipped
        for advice in (_HUGE_PAGES, _WIPE_ON_FORK):
            _libc.madvise(self.address, self.size_bytes, advice)  # a kernel that does not know it goes without
        self._lock = threading.Lock()
        self._open = True

    @property
    def is_closed(self) -> bool:
        """Return true if it was given back."""
        return not self._open

    def view(self, offset: int, size: int) -> memoryview:
        """``size`` bytes from ``offset`` on, writable.

        Args:
            offset: in bytes.
            size: in bytes.

        Returns:
            A writable view.
        """
        return memoryview(self._map)[self._skipped + offset : self._skipped + offset + size]

    def fault_in(self, go: threading.Event | None = None) -> None:
        """Touch all pages now: the first use of memory costs most.

        Other threads run meanwhile; :meth:`close` in one of them ends it early. What was in the memory may be lost.
        It continues only while ``go`` is set.
        """
        for offset in range(0, self.size_bytes, _FAULT_BYTES):
            if go is not None:
                go.wait(_WAIT_SECONDS)
            with self._lock:
                if not self._open:
                    return
                _populate(self.address + offset, min(_FAULT_BYTES, self.size_bytes - offset))

    def close(self) -> None:
        """Free the memory, once no view of it is left. Nothing may use the address then. May be called twice."""
        with self._lock:
            if self._open:
                self._open = False
                with contextlib.suppress(BufferError):
                    self._map.close()


def _populate(address: int, size: int) -> None:
    if _libc.madvise(address, size, _POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:  # that is a kernel before 5.14
        raise OSError(code, f"{os.strerror(code)}: {size} bytes of memory")
    ctypes.memset(address, 0, size)


@final
class WarmMemory:
    """Memory that nobody uses now, for who needs some next.

    The first touch of memory costs more than what is done with it, up to 3 ms per MiB in virtual machines whose host
    takes free pages back: as much as writing it to a fast disk.

    What it does not keep it returns, to be closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: HostMemory | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the free memory, in bytes."""
        free = self._free
        return 0 if free is None else free.size_bytes

    def has(self, size_bytes: int) -> bool:
        """Return true if it has memory of at least ``size_bytes`` bytes."""
        free = self._free
        return free is not None and free.size_bytes >= size_bytes

    def take(self) -> HostMemory | None:
        """Take the kept memory; ``None`` if there is none."""
        with self._lock:
            memory, self._free = self._free, None
        return memory

    def keep(self, memory: HostMemory) -> HostMemory | None:
        """Keep ``memory``, which holds what its last user left in it. Of two pieces the larger one stays."""
        with self._lock:
            smaller, larger = memory, self._free
            if larger is None or larger.size_bytes < smaller.size_bytes:
                smaller, larger = larger, smaller
            self._free = larger
        return smaller


_lent = WarmMemory()


def borrow_memory(size_bytes: int) -> HostMemory:
    """Return memory of at least ``size_bytes``, that a write or a read of a file works with.

    It is the borrower's until :func:`give_memory_back`.
    """
    if (memory := _lent.take()) is not None:
        if memory.size_bytes >= size_bytes:
            return memory
        memory.close()
    try:
        return HostMemory(max(size_bytes, _LEAST_LENT_BYTES))
    except OSError:
        return HostMemory(size_bytes)


def give_memory_back(memory: HostMemory) -> None:
    """Release borrowed memory of up to 65 MiB for other uses. No view of it may be used any more."""
    unwanted = _lent.keep(memory) if memory.size_bytes <= _MOST_KEPT_BYTES else memory
    if unwanted is not None:
        unwanted.close()


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: what is free in the machine, or what its control groups or limits leave.

    ``root`` is where the files of the system are.
    """
    return max(0, min([_free_memory(root), *_left_in_groups(root), *_left_of_addresses(root)]))


def _left_of_addresses(root: Path) -> Iterator[int]:
    """Return the bytes that the process's own limit (ulimit -v) leaves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError):
            yield limit - int((root / "proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def _free_memory(root: Path) -> int:
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_in_groups(root: Path) -> Iterator[int]:
    """Return the bytes that the process's control groups leave, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from _left_in(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left_in(root / "sys/fs/cgroup/memory", path, *names)


def _left_in(mount: Path, path: str, limit: str, used: str, cache: str) -> Iterator[int]:
    """Return the bytes that the group ``path`` and its parents leave. A container sees only its own, as the root."""
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # there is no such group, or no limit: 'max'
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            yield left + _cached_files(folder, cache)
        if folder == mount:
            return


def _cached_files(group: Path, name: str) -> int:
    """Bytes of files in memory, which count as used and which the system gives up first."""
    with contextlib.suppress(OSError):
        for line in (group / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


# ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────
_ALL = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")  # all there can be: nothing is touched by it

move = ctypes.CDLL(None).memmove
"""Copy memory: address to copy to, address to copy from, bytes. Other threads run meanwhile."""

move_small = ctypes.PyDLL(None).memmove
"""The same for few bytes: it is over before another thread could run."""

for _function in (move, move_small):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _function.restype = None


def memory_at(address: int, size: int) -> memoryview:
    """``size`` bytes at ``address``, writable. They must be there as long as the view is used."""
    return _ALL[address : address + size]


def address_of(buffer: bytearray | memoryview) -> int:
    """Return the address of the bytes of ``buffer``, until they move."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


Job = tuple[int, int, int]
"""Address to copy to, address to copy from, bytes."""

Step = tuple[Callable[..., object], tuple[Any, ...]]
"""A function, and what to call it with."""


@final
class Copying:
    """Copies that continue in other threads: see :meth:`Copier.start`.

    Args:
        steps: functions to call and what with, each in one of the threads.
        then: called once when all is copied or has failed, in the last thread that copied.

    Attributes:
        seconds: from the start until everything was copied.
    """

    def __init__(self, steps: Iterable[Step], then: Callable[[], object] = lambda: None) -> None:
        self.seconds = 0.0
        self._started = time.perf_counter()
        self._steps = iter(list(steps))  # a list's iterator gives each element to one thread
        self._then = then
        self._lock = threading.Lock()
        self._running = 0
        self._over = False
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout: float = _WAIT_SECONDS) -> None:
        """Wait until everything is copied, at most ``timeout`` seconds.

        Raises:
            TimeoutError: it is not by then.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"memory is not copied after {timeout} s")
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Copy in this thread too, until everything is copied."""
        self.help()
        self.wait()

    def help(self) -> None:
        """Copy until nothing is left to begin with. Raises nothing."""
        with self._lock:
            self._running += 1
        try:
            for function, arguments in self._steps:
                function(*arguments)
        except BaseException as e:  # noqa: BLE001 - raised by wait
            self._error = e
            self._steps = iter(())  # nobody begins with what is left
        with self._lock:
            self._running -= 1
            is_last = not self._running and not self._over
            self._over |= is_last
        if is_last:
            self.seconds = time.perf_counter() - self._started
            try:
                self._then()
            except BaseException as e:  # noqa: BLE001 - raised by wait
                self._error = self._error or e
            self._done.set()


def _cut(jobs: Iterable[Job]) -> tuple[list[Step], list[Step]]:
    """Pieces for several threads, and jobs that are not worth a change of threads."""
    small: list[Step] = []
    pieces: list[Step] = []
    for job in jobs:
        to, source, size = job
        if size <= _SMALL_BYTES:
            small.append((move_small, job))
        elif size <= _PIECE_BYTES:
            pieces.append((move, job))
        else:
            for at in range(0, size, _PIECE_BYTES):
                pieces.append((move, (to + at, source + at, min(_PIECE_BYTES, size - at))))
    return pieces, small


@final
class Copier:
    """Copies memory with the help of threads of its own, which wait for the next copies.

    Pieces are handed out one by one: a thread that is held up by another program takes fewer of them.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Copying | None] = queue.SimpleQueue()
        count = max(1, min(4, len(os.sched_getaffinity(0))) - 1)  # more do not make memory faster
        self._helpers = start_threads(self._run, count, name="checkpoint-copier")

    @property
    def has_helpers(self) -> bool:
        """True if there are threads for copies in the background."""
        return bool(self._helpers)

    def copy(self, jobs: Iterable[Job]) -> None:
        """Copy memory: for each job the address to copy to, that to copy from, and how many bytes."""
        pieces, small = _cut(jobs)
        copying = Copying([*pieces, *small])
        for _ in self._helpers[: max(0, len(pieces) - 1)]:
            self._queue.put(copying)
        copying.finish()

    def start(self, jobs: Iterable[Job], then: Callable[[], object] = lambda: None) -> Copying:
        """Copy in a background thread; in :meth:`Copying.finish` the caller's thread helps.

        ``then`` is called when everything is copied or that has failed.

        Args:
            jobs: copies to do.
            then: called after the last copy, or when one has failed.

        Returns:
            The copying in progress.
        """
        pieces, small = _cut(jobs)
        copying = Copying([*pieces, *small], then)
        self._queue.put(copying)
        return copying

    def close(self) -> None:
        """Stop the threads when they have finished their copies. May be called twice."""
        for _ in self._helpers:
            self._queue.put(None)
        for helper in self._helpers:
            helper.join()
        self._helpers = []

    def _run(self) -> None:
        while (copying := self._queue.get()) is not None:
            copying.help()


# ── who writes to it ─────────────────────────────────────────────────────────────────────────────────────────────
Pages = tuple[int, int]
"""Address of the first byte, and bytes: both whole pages."""

_SYSCALL = {"x86_64": 323, "aarch64": 282}.get(platform.machine())  # userfaultfd(2)
_USER_MODE_ONLY = 1
_API, _API_IOCTL = 0xAA, 0xC018AA3F
_REGISTER, _UNREGISTER = 0xC020AA00, 0x8010AA01
_REGISTER_WRITES = 2
_WRITES_ASYNC = 1 << 15  # the kernel takes note of a write by itself and lets it happen: Linux 6.7
_PAGEMAP_SCAN, _SCAN_BYTES = 0xC0606610, 96
_PROTECT = 1 | 2  # what matches, and only where writes are taken note of; half the time of userfaultfd's own way
_PROTECT_ALL, _PROTECT_WRITES = 0xC018AA06, 1
_WRITTEN, _OF_A_FILE, _MOVED = 1 << 1, 1 << 2, 1 << 4  # "swapped" is also what is on its way


def whole_pages(address: int, size: int) -> Pages:
    """The pages that lie in this memory as a whole. Those at its ends are shared with what is beside it.

    Args:
        address: of the first byte.
        size: in bytes.

    Returns:
        Address of the first page, and the size of all in bytes.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, max(0, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - start)


@final
class PageWatch:
    """Memory that is watched from :meth:`begin` to :meth:`stop`.

    The pages are write-protected, which costs 30 ns each where they have 4 KiB. The kernel lifts that from each that
    is written to. What is not written to is never noticed; a write costs a microsecond more, so that a watch should
    end before all is written to. Memory that others can write to as well, a file's or shared with another process,
    counts as written to: what they do is not seen.

    Args:
        descriptor: of the kernel's ``userfaultfd``.
        pagemap: descriptor of the process's page map.
        pages: ranges of addresses to watch.
    """

    def __init__(self, descriptor: int, pagemap: int, pages: Sequence[Pages]) -> None:
        self._descriptor, self._pagemap = descriptor, pagemap
        self._pages = pages
        self._registered: list[Pages] = []
        self._lock = threading.Lock()
        self._open = True
        self._written = False

    @classmethod
    def begin(cls, pages: Sequence[Pages]) -> PageWatch | None:
        """Watch ``pages`` from now on; ``None`` where the kernel cannot, or may not.

        Args:
            pages: whole ones, of memory that stays until :meth:`stop`.
        """
        watch = cls._open_for(pages)
        if watch is None:
            return None
        try:
            for start, size in pages:
                _control(watch._descriptor, _REGISTER, struct.pack("QQQQ", start, size, _REGISTER_WRITES, 0))
                watch._registered.append((start, size))
                watch._protect(start, size)
        except OSError:
            watch.stop()
            return None
        except BaseException:
            watch.stop()
            raise
        return watch

    @classmethod
    def _open_for(cls, pages: Sequence[Pages]) -> PageWatch | None:
        if _SYSCALL is None:
            return None
        descriptor = _libc.syscall(_SYSCALL, _USER_MODE_ONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if descriptor < 0:
            return None
        try:
            _control(descriptor, _API_IOCTL, struct.pack("QQQ", _API, _WRITES_ASYNC, 0))
            return cls(descriptor, os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC), pages)
        except OSError:
            os.close(descriptor)
            return None

    def stop(self) -> bool:
        """Watch no longer; whether anything was written to since the beginning. Twice gives the same answer."""
        with self._lock:
            if self._open:
                self._open = False
                try:
                    self._written = len(self._registered) < len(self._pages) or self._look()
                except OSError:
                    self._written = True  # nobody knows
                finally:
                    self._unprotect()
            return self._written

    def _protect(self, start: int, size: int) -> None:
        """Write-protect pages, in the quick way, which leaves out those that the kernel moves just then (Linux 6.18).

        It moves pages to make large ones, and between NUMA nodes. Where it does, userfaultfd's own way is taken.
        """
        found = (ctypes.c_uint64 * 3)()
        self._scan(start, size, _PROTECT, 0, 0, 0, _WRITTEN, 0, _WRITTEN)
        if self._scan(start, size, 0, ctypes.addressof(found), 1, 1, 0, _WRITTEN | _MOVED, _WRITTEN | _MOVED):
            _control(self._descriptor, _PROTECT_ALL, struct.pack("QQQ", start, size, _PROTECT_WRITES))

    def _look(self) -> bool:
        """Return true if anything was written to, or others may have."""
        found = (ctypes.c_uint64 * 3)()
        either = _WRITTEN | _OF_A_FILE
        return any(
            self._scan(start, size, 0, ctypes.addressof(found), 1, 1, 0, either, either) for start, size in self._pages
        )

    def _scan(self, start: int, size: int, flags: int, *wanted: int) -> int:
        """Let the kernel scan pages; return the number of regions that match ``wanted``."""
        found, room, most, mask, any_of, told = wanted
        return _control(
            self._pagemap,
            _PAGEMAP_SCAN,
            struct.pack("12Q", _SCAN_BYTES, flags, start, start + size, 0, found, room, most, 0, mask, any_of, told),
        )

    def _unprotect(self) -> None:
        """Lift the protection of the pages, range by range, since a forked process may have the descriptor, too."""
        for start, size in self._registered:
            _libc.ioctl(self._descriptor, _UNREGISTER, struct.pack("QQ", start, size))
        self._registered = []
        os.close(self._pagemap)
        os.close(self._descriptor)


def _control(descriptor: int, request: int, argument: bytes) -> int:
    result = _libc.ioctl(descriptor, request, ctypes.create_string_buffer(argument, len(argument)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
