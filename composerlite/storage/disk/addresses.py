"""Memory by its address, as ctypes gives it."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["address_of", "memory_at", "move", "move_small"]

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
    """Where the bytes of ``buffer`` are, until they move."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
