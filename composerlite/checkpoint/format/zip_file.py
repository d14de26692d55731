"""Layout of the records in a ``.pt`` file: a zip archive without compression, for torch and unzip.

The layout of our own archives depends on names and sizes only, so the layout is known before a byte is written. The
data of large records begin on 4096-byte boundaries. Records of tensors come first, the pickle and the directory last.
Archives of other programs are read after a check of the offsets in the directory.
"""

from __future__ import annotations

import functools
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast, final

from composerlite.errors import CorruptCheckpointError

_FOLDER = "archive/"
_LARGE_BYTES = 64 << 10
_LARGE_ALIGNMENT, _ALIGNMENT = 4096, 64
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
# All sizes and offsets have 64 bits, in extra fields: kind, size of the field, size twice, and offset.
_LOCAL_64, _CENTRAL_64 = struct.Struct("<2H2Q"), struct.Struct("<2H3Q")
_END_BYTES = _END_64.size + _LOCATOR_64.size + _END.size
_DESCRIPTOR_64 = struct.Struct("<4sI2Q")
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
        offset: offset of the data in the archive.
        crc: CRC-32 of the data, as the directory says; 0 before the data are written.
    """

    name: str
    size: int
    header: bytes
    start: int
    offset: int
    crc: int = 0

    @property
    def end(self) -> int:
        """Offset of the end of the data descriptor, in an archive of ours."""
        return self.offset + self.size + _DESCRIPTOR_64.size

    @property
    def descriptor(self) -> bytes:
        """The bytes behind the data, in an archive of ours."""
        return _DESCRIPTOR_64.pack(b"PK\x07\x08", self.crc, self.size, self.size)


def laid_out(sizes: Iterable[tuple[str, int]], start: int = 0) -> Iterator[ZipRecord]:
    """Yield the records of an archive of ours, padded to align the data.

    Args:
        sizes: name and size in bytes of each record.
        start: offset of the first record.
    """
    for name, size in sizes:
        encoded = f"{_FOLDER}{name}".encode()
        # An extra field of an unknown kind fills up to the boundary. Readers skip the field. Its header has four bytes.
        before = _LOCAL.size + len(encoded) + _LOCAL_64.size + 4
        padding = -(start + before) % (_LARGE_ALIGNMENT if size >= _LARGE_BYTES else _ALIGNMENT)
        extra = _LOCAL_64.pack(1, 16, size, size) + struct.pack("<2H", 0x4246, padding) + bytes(padding)
        fixed = _LOCAL.pack(b"PK\x03\x04", 45, _FLAGS, 0, 0, 0, 0, _MAX_32, _MAX_32, len(encoded), len(extra))
        header = fixed + encoded + extra
        record = ZipRecord(f"{_FOLDER}{name}", size, header, start, start + len(header))
        yield record
        start = record.end


@functools.lru_cache(maxsize=1)
def _data_records(sizes: tuple[int, ...]) -> tuple[ZipRecord, ...]:
    """Return the records of tensors' data, ``data/0`` and so on. The last records are cached for the next save."""
    return tuple(laid_out((f"data/{number}", size) for number, size in enumerate(sizes)))


def layout(data: tuple[int, ...], small: Iterable[tuple[str, int]]) -> tuple[list[ZipRecord], int]:
    """Return the records of an archive of ours, and the size of the archive in bytes, without the comment.

    Args:
        data: size in bytes of the data of each tensor.
        small: name and size in bytes of each record behind these data.
    """
    first = _data_records(data)
    records = [*first, *laid_out(small, first[-1].end if first else 0)]
    entry_bytes = sum(_CENTRAL.size + len(record.name.encode()) + _CENTRAL_64.size for record in records)
    return records, records[-1].end + entry_bytes + _END_BYTES


def trailer(records: Sequence[ZipRecord], comment_bytes: int = 0) -> bytes:
    """Return the bytes behind the records: the directory and the end, before a comment of ``comment_bytes``."""
    entries: list[bytes] = []
    for name, size, _, start, _, crc in records:
        encoded = name.encode()
        numbers = (len(encoded), _CENTRAL_64.size, 0, 0, 0, 0, _MAX_32)
        entries.append(_CENTRAL.pack(b"PK\x01\x02", 45, 45, _FLAGS, 0, 0, 0, crc, _MAX_32, _MAX_32, *numbers))
        entries += encoded, _CENTRAL_64.pack(1, 24, size, size, start)
    directory, count, begin = b"".join(entries), len(records), records[-1].end
    size = len(directory)
    end = _END_64.pack(b"PK\x06\x06", _END_64.size - 12, 45, 45, 0, 0, count, count, size, begin)
    end += _LOCATOR_64.pack(b"PK\x06\x07", 0, begin + size, 1)
    return directory + end + _END.pack(b"PK\x05\x06", 0, 0, _MAX_16, _MAX_16, _MAX_32, _MAX_32, comment_bytes)


# ── archives of any origin ───────────────────────────────────────────────────────────────────────────────────────────
@final
class SourceFile:
    """The part of the interface of a file that :mod:`tarfile` and :mod:`zipfile` need.

    Args:
        read: called with an offset and a size; returns exactly ``size`` bytes.
        size_bytes: size of the file.
    """

    def __init__(self, read: Callable[[int, int], bytes], size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> None:
        """Set the position to ``offset``, from the end for ``os.SEEK_END``. A negative position becomes 0."""
        self._position = max(0, offset + (self._size_bytes if whence == os.SEEK_END else 0))

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes, or fewer at the end; all remaining bytes if ``size`` is negative."""
        left = max(0, self._size_bytes - self._position)
        size = left if size < 0 else min(size, left)
        data = self._read(self._position, size) if size else b""
        self._position += size
        return data


_TAIL_BYTES = 22 + 0xFFFF  # the end of an archive with the longest comment
_USUAL_HEADER_BYTES = 4096 + 64  # our headers, padded to the next page, and the headers of torch are shorter


def entries(size_bytes: int, read: Callable[[int, int], bytes], *, is_whole: bool) -> dict[str, ZipRecord]:
    """Return the records of a zip archive, by name.

    Args:
        size_bytes: size of the archive.
        read: called with an offset and a size; returns the bytes.
        is_whole: the comment of the archive must be complete; if false, the comment may be missing.

    Raises:
        CorruptCheckpointError: no zip archive; or records are compressed or encrypted, overlap, lie outside of the
            file, or have the same name.
        OSError: ``read`` failed.
    """
    try:
        archive = zipfile.ZipFile(cast("Any", SourceFile(read, size_bytes)), metadata_encoding="utf-8")
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as e:
        if isinstance(e.__context__, OSError):  # zipfile raises BadZipFile if a read fails
            raise e.__context__ from None
        raise CorruptCheckpointError(
            f"it is cut off, or is not a zip archive (the format of torch.save since torch 1.6): {e}"
        ) from e
    tail = read(max(0, size_bytes - _TAIL_BYTES), min(size_bytes, _TAIL_BYTES))
    comment = tail[tail.rfind(b"PK\x05\x06") + _END.size :]
    claimed = int.from_bytes(tail[: len(tail) - len(comment)][-2:], "little")
    if len(comment) != claimed and (comment or is_whole):
        raise CorruptCheckpointError("it is cut off, or has bytes after its end")
    start = archive.start_dir
    ordered = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    if ordered and all(entry.orig_filename.startswith(_FOLDER) for entry in ordered):
        # The headers of our own layout follow from the directory. Reading the headers would touch the whole file, so
        # the headers are compared when the data are read.
        sizes = ((entry.orig_filename.removeprefix(_FOLDER), entry.file_size) for entry in ordered)
        own = [record._replace(crc=entry.CRC) for entry, record in zip(ordered, laid_out(sizes), strict=True)]
        directory = trailer(own)[:-_END_BYTES] if own[-1].end == start else b""
        by_name = {record.name: record for record in own}
        if directory and len(by_name) == len(own) and read(start, len(directory)) == directory:
            return by_name
    found: dict[str, ZipRecord] = {}
    end = 0
    for entry in ordered:
        name, header = entry.orig_filename, entry.header_offset
        if entry.compress_type != 0 or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise CorruptCheckpointError(f"its record {name!r} is compressed or encrypted, which torch never writes")
        if name in found:
            raise CorruptCheckpointError(f"its directory holds {name!r} twice")
        if header < end or header + _LOCAL.size > start:
            raise CorruptCheckpointError(f"its record {name!r} at {header} overlaps another, or the end")
        header_bytes = read(header, min(_USUAL_HEADER_BYTES, start - header))
        fixed = _LOCAL.unpack_from(header_bytes)
        offset = header + _LOCAL.size + fixed[9] + fixed[10]
        end = offset + entry.file_size
        if fixed[0] != b"PK\x03\x04" or fixed[3] != 0 or end > start:
            raise CorruptCheckpointError(f"its record {name!r} at {header} is not at the position in the directory")
        longer = offset - header > len(header_bytes)
        header_bytes = read(header, offset - header) if longer else header_bytes[: offset - header]
        if header_bytes[_LOCAL.size : _LOCAL.size + fixed[9]] != name.encode():
            raise CorruptCheckpointError(f"its record {name!r} at {header} has another name there")
        found[name] = ZipRecord(name, entry.file_size, header_bytes, header, offset, entry.CRC)
    return found
