"""Places of the records of a ``.pt`` file: a zip archive, without compression, for torch and unzip.

The layout of our own archives depends on names and sizes only, so the layout is known before a byte is written. Large
records begin on 4096-byte boundaries, data first, the pickle and the directory last. Archives of other programs are
read after a check of the places in the directory.
"""

from __future__ import annotations

import functools
import struct
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast, final

from composerlite.checkpoint.format.byte_sources import SourceFile
from composerlite.errors import CorruptCheckpointError

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
class ZipRecord(NamedTuple):  # made for each tensor of each save, so creation must be fast
    """A file of the archive.

    Attributes:
        name: path of the file, with the archive's root.
        size: size of the data, in bytes.
        header: bytes of the local header, before the data.
        start: offset of the header in the archive.
        crc: CRC-32 of the data, as the directory says; 0 before the data are written.
    """

    name: str
    size: int
    header: bytes
    start: int
    crc: int = 0

    @property
    def offset(self) -> int:
        """Offset of the data."""
        return self.start + len(self.header)

    @property
    def end(self) -> int:
        """Offset of the end of the data descriptor, in an archive of ours."""
        return self.offset + self.size + (_DESCRIPTOR_64 if self.size >= _MAX_32 else _DESCRIPTOR).size

    def descriptor(self, crc: int) -> bytes:
        """Return the data descriptor: the bytes behind the data."""
        layout = _DESCRIPTOR_64 if self.size >= _MAX_32 else _DESCRIPTOR
        return layout.pack(b"PK\x07\x08", crc, self.size, self.size)

    def directory_entry(self, crc: int) -> bytes:
        """Return the bytes of this record in the central directory."""
        name = self.name.encode()
        wide = [value for value in (self.size, self.size, self.start) if value >= _MAX_32]
        extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, start = min(self.size, _MAX_32), min(self.start, _MAX_32)
        fixed = _CENTRAL.pack(
            b"PK\x01\x02", 45, 45, _FLAGS, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, start
        )
        return fixed + name + extra


@final
class Layout:
    """Records in order, padded to align the data.

    Attributes:
        records: the records so far.
        end: where the last record ends.
        directory_bytes: size of the central directory.
    """

    def __init__(self, sizes: Sequence[tuple[str, int]] = (), *, after: Layout | None = None) -> None:
        self.records: list[ZipRecord] = [] if after is None else list(after.records)
        self.end = 0 if after is None else after.end
        self.directory_bytes = 0 if after is None else after.directory_bytes
        for name, size in sizes:
            self.add(name, size)

    def add(self, name: str, size: int) -> None:
        """Append a record of ``size`` bytes."""
        encoded = f"{ROOT}/{name}".encode()
        extra = struct.pack("<2H2Q", 1, 16, size, size) if size >= _MAX_32 else b""
        # An extra field of an unknown kind fills up to the boundary. Readers skip the field. Its header has four bytes.
        before = self.end + _LOCAL.size + len(encoded) + len(extra) + 4
        padding = -before % (_LARGE_ALIGNMENT if size >= _LARGE_BYTES else _ALIGNMENT)
        extra += struct.pack("<2H", 0x4246, padding) + bytes(padding)
        shown = _MAX_32 if size >= _MAX_32 else 0
        fixed = _LOCAL.pack(b"PK\x03\x04", 45, _FLAGS, 0, 0, 0, 0, shown, shown, len(encoded), len(extra))
        record = ZipRecord(f"{ROOT}/{name}", size, fixed + encoded + extra, self.end)
        self.records.append(record)
        self.end = record.end
        wide = 2 * (size >= _MAX_32) + (record.start >= _MAX_32)
        self.directory_bytes += _CENTRAL.size + len(encoded) + (4 + 8 * wide if wide else 0)

    @property
    def size_bytes(self) -> int:
        """Size of the archive in bytes: the records and the :func:`trailer`."""
        wide = _END_64.size + _LOCATOR_64.size if _is_large(len(self.records), self.directory_bytes, self.end) else 0
        return self.end + self.directory_bytes + wide + _END.size


@functools.lru_cache(maxsize=1)
def data_layout(sizes: tuple[int, ...]) -> Layout:
    """Return the layout of tensors' data, ``data/0`` and so on. The last layout is cached for the next save."""
    return Layout([(f"data/{number}", size) for number, size in enumerate(sizes)])


def trailer(records: Sequence[ZipRecord], crcs: Sequence[int], start: int, comment_bytes: int = 0) -> bytes:
    """Return the central directory at ``start`` and the end of the archive, before a comment of ``comment_bytes``."""
    directory = b"".join(record.directory_entry(crc) for record, crc in zip(records, crcs, strict=True))
    count, size, end = len(records), len(directory), start + len(directory)
    wide = b""
    if _is_large(count, size, start):
        wide = _END_64.pack(b"PK\x06\x06", _END_64.size - 12, 45, 45, 0, 0, count, count, size, start)
        wide += _LOCATOR_64.pack(b"PK\x06\x07", 0, end, 1)
    short = min(count, 0xFFFF)
    tail = _END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, _MAX_32), min(start, _MAX_32), comment_bytes)
    return directory + wide + tail


def _is_large(count: int, size: int, start: int) -> bool:
    """Check that the end of the archive needs the 64-bit form."""
    return count >= 0xFFFF or start >= _MAX_32 or size >= _MAX_32


# ── archives of any origin ───────────────────────────────────────────────────────────────────────────────────────────
_TAIL_BYTES = 22 + 0xFFFF  # the end of an archive with the longest comment
_USUAL_HEADER_BYTES = 4096 + 64  # ours, filled up to the next page, and torch's are shorter
Read = Callable[[int, int], bytes]  # offset, size


def entries(size_bytes: int, read: Read, peek: Read, *, is_whole: bool) -> dict[str, ZipRecord]:
    """Return the records of a zip archive, by name.

    Args:
        size_bytes: size of the archive.
        read: returns bytes of the directory.
        peek: returns bytes of local headers, possibly unverified. Then the caller compares ``header`` later.
        is_whole: the comment may not be missing.

    Raises:
        CorruptCheckpointError: no zip archive; or records are compressed or encrypted, overlap, lie outside of the
            file, or have the same name.
    """
    try:
        archive = zipfile.ZipFile(cast("Any", SourceFile(read, size_bytes)), metadata_encoding="utf-8")
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as e:
        raise CorruptCheckpointError(f"it does not end as a zip archive does: {e}") from e
    tail = read(max(0, size_bytes - _TAIL_BYTES), min(size_bytes, _TAIL_BYTES))
    comment = tail[tail.rfind(b"PK\x05\x06") + _END.size :]
    claimed = int.from_bytes(tail[: len(tail) - len(comment)][-2:], "little")
    if len(comment) != claimed and (comment or is_whole):
        raise CorruptCheckpointError("it is cut off, or has something behind its end")
    start = archive.start_dir
    ordered = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    if (own := _own_entries(ordered, start, read)) is not None:
        return own
    found: dict[str, ZipRecord] = {}
    end = 0
    for entry in ordered:
        name, header = entry.orig_filename, entry.header_offset
        if entry.compress_type != 0 or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise CorruptCheckpointError(f"its record {name!r} is compressed or encrypted: torch writes none such")
        if name in found:
            raise CorruptCheckpointError(f"its directory holds {name!r} twice")
        if header < end or header + _LOCAL.size > start:
            raise CorruptCheckpointError(f"its record {name!r} at {header} lies over another, or outside of the file")
        header_bytes = peek(header, min(_USUAL_HEADER_BYTES, start - header))
        fixed = _LOCAL.unpack_from(header_bytes)
        offset = header + _LOCAL.size + fixed[9] + fixed[10]
        end = offset + entry.file_size
        if fixed[0] != b"PK\x03\x04" or fixed[3] != 0 or end > start:
            raise CorruptCheckpointError(f"its record {name!r} at {header} is not where the directory says")
        longer = offset - header > len(header_bytes)
        header_bytes = peek(header, offset - header) if longer else header_bytes[: offset - header]
        if header_bytes[_LOCAL.size : _LOCAL.size + fixed[9]] != name.encode():
            raise CorruptCheckpointError(f"its record {name!r} at {header} has another name there")
        found[name] = ZipRecord(name, entry.file_size, header_bytes, header, entry.CRC)
    return found


def records_root(names: dict[str, ZipRecord]) -> str:
    """Return the folder of the checkpoint in the archive, with a slash.

    Raises:
        CorruptCheckpointError: there is none, or several.
    """
    roots = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise CorruptCheckpointError(f"it is a zip archive with {len(roots)} records '…/data.pkl' and not one")
    return roots[0]


def _own_entries(ordered: Sequence[zipfile.ZipInfo], start: int, read: Read) -> dict[str, ZipRecord] | None:
    """Return the records if the directory equals the directory of our own layout; ``None`` for other archives.

    The headers then follow from the directory. Reading the headers would touch the whole file, so the headers are
    compared when the data are read.
    """
    layout = Layout()
    for entry in ordered:
        if entry.header_offset != layout.end or layout.end > start or not entry.orig_filename.startswith(f"{ROOT}/"):
            return None
        layout.add(entry.orig_filename.removeprefix(f"{ROOT}/"), entry.file_size)
    crcs = [entry.CRC for entry in ordered]
    size = layout.directory_bytes
    if layout.end != start or read(start, size) != trailer(layout.records, crcs, start)[:size]:
        return None
    return {record.name: record._replace(crc=crc) for record, crc in zip(layout.records, crcs, strict=True)}
