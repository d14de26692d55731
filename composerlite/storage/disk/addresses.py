"""Memory by its address: moving it, and seeing if anybody has written to it since a moment."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
import threading
from collections.abc import Sequence
from typing import final

__all__ = ["PageWatch", "Pages", "address_of", "memory_at", "move", "move_small", "whole_pages"]

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
_WRITTEN, _OF_A_FILE = 1 << 1, 1 << 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p]


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
    """Memory that is watched from :meth:`begin` to :meth:`end`.

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
            pages: whole ones, of memory that stays until :meth:`end`.
        """
        watch = cls._open_for(pages)
        if watch is None:
            return None
        try:
            for start, size in pages:
                _control(watch._descriptor, _REGISTER, struct.pack("QQQQ", start, size, _REGISTER_WRITES, 0))
                watch._registered.append((start, size))
                watch._scan(start, size, _PROTECT, 0, 0, 0, _WRITTEN, 0, _WRITTEN)
        except OSError:
            watch.end()
            return None
        except BaseException:
            watch.end()
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

    def end(self) -> bool:
        """Watch no longer; whether anything was written to since the beginning. Twice gives the same answer."""
        with self._lock:
            if self._open:
                self._open = False
                try:
                    self._written = len(self._registered) < len(self._pages) or self._look()
                except OSError:
                    self._written = True  # nobody knows
                finally:
                    self._let_go()
            return self._written

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

    def _let_go(self) -> None:
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
