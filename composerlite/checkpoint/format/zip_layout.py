"""Where the records of a ``.pt`` file lie: a zip archive, stored without compression, that torch and unzip read.

The layout depends on names and sizes only, so it is known before a byte is written. Large records begin on 4096-byte
boundaries, data first, the pickle and the directory last.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple, Self, final

__all__ = ["ROOT", "Layout", "Record", "trailer"]

ROOT = "archive"
_LARGE_BYTES = 64 << 10
_LARGE_ALIGNMENT, _ALIGNMENT = 4096, 64
_MAX_32 = 0xFFFFFFFF

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_DESCRIPTOR, _DESCRIPTOR_64 = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
# Sizes and CRC follow the data, as in torch's own files; names are UTF-8.
_FLAGS = 0x0808


@final
class Record(NamedTuple):  # one is made for each tensor of each save
    """One file of the archive.

    Attributes:
        name: its path, with the archive's root.
        size_bytes: of its data.
        header: the local header that stands at ``offset``.
        offset: of the header in the archive.
    """

    name: str
    size_bytes: int
    header: bytes
    offset: int

    @property
    def data_offset(self) -> int:
        """Where its data begin."""
        return self.offset + len(self.header)

    @property
    def end(self) -> int:
        """Where its data descriptor ends."""
        return self.data_offset + self.size_bytes + self._descriptor.size

    @property
    def _descriptor(self) -> struct.Struct:
        return _DESCRIPTOR_64 if self.size_bytes >= _MAX_32 else _DESCRIPTOR

    @property
    def _wide(self) -> list[int]:
        """What does not fit the 32 bits that the central directory has for it."""
        if self.size_bytes < _MAX_32 and self.offset < _MAX_32:
            return []
        return [value for value in (self.size_bytes, self.size_bytes, self.offset) if value >= _MAX_32]

    def descriptor(self, crc: int) -> bytes:
        """What follows the data."""
        return self._descriptor.pack(b"PK\x07\x08", crc, self.size_bytes, self.size_bytes)

    def directory_entry(self, crc: int) -> bytes:
        """What stands in the central directory."""
        name = self.name.encode()
        wide = self._wide
        extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, offset = min(self.size_bytes, _MAX_32), min(self.offset, _MAX_32)
        fixed = _CENTRAL.pack(
            b"PK\x01\x02", 45, 45, _FLAGS, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, offset
        )
        return fixed + name + extra

    @property
    def directory_bytes(self) -> int:
        """The size of :meth:`directory_entry`."""
        wide = self._wide
        return _CENTRAL.size + len(self.name.encode()) + (4 + 8 * len(wide) if wide else 0)


@final
class Layout:
    """Records one after the other, each padded so that its data are aligned.

    Attributes:
        records: so far.
        end: where the last one ends.
        directory_bytes: the size of what stands in the central directory for them.
    """

    def __init__(self, sizes: Sequence[tuple[str, int]] = ()) -> None:
        self.records: list[Record] = []
        self.end = 0
        self.directory_bytes = 0
        for name, size in sizes:
            self.add(name, size)

    @classmethod
    def of_data(cls, sizes: Sequence[int]) -> Self:
        """The layout of tensors' data of these sizes, ``data/0`` and so on: the same at every save of a run."""
        known = _data_layout(tuple(sizes))
        layout = cls()
        layout.records, layout.end, layout.directory_bytes = list(known.records), known.end, known.directory_bytes
        return layout

    def add(self, name: str, size_bytes: int) -> None:
        """One more record, behind the others."""
        record = _record(f"{ROOT}/{name}", size_bytes, self.end)
        self.records.append(record)
        self.end = record.end
        self.directory_bytes += record.directory_bytes

    @property
    def size_bytes(self) -> int:
        """Of the archive: the records and their :func:`trailer`, which does not depend on the data."""
        wide = _END_64.size + _LOCATOR_64.size if _is_large(len(self.records), self.directory_bytes, self.end) else 0
        return self.end + self.directory_bytes + wide + _END.size


@functools.lru_cache(maxsize=1)
def _data_layout(sizes: tuple[int, ...]) -> Layout:
    """The layout of tensors' data. The last one is kept: the next save of a run makes as good as nothing anew."""
    return Layout([(f"data/{number}", size) for number, size in enumerate(sizes)])


def _record(name: str, size: int, offset: int) -> Record:
    encoded = name.encode()
    extra = b""
    if size >= _MAX_32:
        extra = struct.pack("<2H2Q", 1, 16, size, size)
    alignment = _LARGE_ALIGNMENT if size >= _LARGE_BYTES else _ALIGNMENT
    # An extra field of a kind that readers pass over fills up to the boundary; it takes four bytes itself.
    before = offset + _LOCAL.size + len(encoded) + len(extra) + 4
    padding = -before % alignment
    extra += struct.pack("<2H", 0x4246, padding) + bytes(padding)
    shown = _MAX_32 if size >= _MAX_32 else 0
    header = _LOCAL.pack(b"PK\x03\x04", 45, _FLAGS, 0, 0, 0, 0, shown, shown, len(encoded), len(extra))
    return Record(name, size, header + encoded + extra, offset)


def trailer(records: Sequence[Record], crcs: Sequence[int], start: int) -> bytes:
    """The central directory at ``start`` and the end of the archive."""
    directory = b"".join(record.directory_entry(crc) for record, crc in zip(records, crcs, strict=True))
    count, size, end = len(records), len(directory), start + len(directory)
    wide = b""
    if _is_large(count, size, start):
        wide = _END_64.pack(b"PK\x06\x06", _END_64.size - 12, 45, 45, 0, 0, count, count, size, start)
        wide += _LOCATOR_64.pack(b"PK\x06\x07", 0, end, 1)
    short = min(count, 0xFFFF)
    tail = _END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, _MAX_32), min(start, _MAX_32), 0)
    return directory + wide + tail


def _is_large(count: int, size: int, start: int) -> bool:
    """Whether the end of the archive needs its large form."""
    return count >= 0xFFFF or start >= _MAX_32 or size >= _MAX_32
