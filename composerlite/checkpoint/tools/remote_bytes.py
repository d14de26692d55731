"""A ``.pt`` file in an object store: what it holds can be told from a few of its bytes."""

from __future__ import annotations

import ctypes
from typing import final

from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = ["HeaderBytes"]

_PAGE_BYTES = 4096
"""What the reader of the directory expects at a time."""


@final
class HeaderBytes:
    """The headers of records, which lie all over the object: asked for at once, where it is known which they are."""

    def __init__(self, source: ByteSource, size_bytes: int) -> None:
        self._source = source
        self._size_bytes = size_bytes
        self._expected: dict[int, int] = {}
        self._pages: dict[int, bytes] = {}

    def expect(self, offset: int, size: int) -> None:
        """These bytes will be asked for."""
        self._expected[offset] = size

    def peek(self, offset: int, size: int) -> bytes:
        """So many bytes, unverified."""
        if self._expected:
            self._read_expected()
        start = offset // _PAGE_BYTES * _PAGE_BYTES
        page = self._pages.get(start, b"")
        if offset + size <= start + len(page):
            return page[offset - start : offset - start + size]
        return self._source.read(offset, size)

    def _read_expected(self) -> None:
        end = self._size_bytes
        wanted = {offset: min(size, end - offset) for offset, size in self._expected.items()}
        self._expected = {}
        memory = bytearray(sum(wanted.values()))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        targets: list[tuple[int, int, int]] = []
        place = 0
        for offset, size in wanted.items():
            targets.append((offset, address + place, size))
            place += size
        self._source.read_into(targets)
        place = 0
        for offset, size in wanted.items():
            self._pages[offset] = bytes(memory[place : place + size])
            place += size
