"""Where the records of a ``.pt`` file of any origin lie, and that they can lie there."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from composerlite.checkpoint.format.zip_layout import ROOT, Layout, trailer
from composerlite.errors import CorruptCheckpointError

__all__ = ["Entry", "entries", "records_root"]

_MOST_RECORDS = 1 << 20
_TAIL_BYTES = 22 + 0xFFFF  # the end of an archive with the longest comment
_MAX_32 = 0xFFFFFFFF

_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_LOCAL = struct.Struct("<4s5H3I2H")
_PAGE_BYTES = 4096
_USUAL_HEADER_BYTES = _PAGE_BYTES + 64  # ours, filled up to the next page, and torch's are shorter
Read = Callable[[int, int], bytes]  # offset, size
Expect = Callable[[int, int], object]
_Listed = tuple[int, int, int]  # offset of the local header, size, CRC-32


class Entry(NamedTuple):
    """One record of the archive.

    Attributes:
        header: where its local header begins.
        header_bytes: the header as it was read: what lies before the data.
        offset: where its data begin.
        size: of its data, in bytes.
        crc: CRC-32 of its data, as the directory says.
    """

    header: int
    header_bytes: bytes
    offset: int
    size: int
    crc: int


def entries(size_bytes: int, read: Read, peek: Read, expect: Expect | None = None) -> dict[str, Entry]:
    """The records of a zip archive of ``size_bytes``, by name.

    ``read`` gives bytes of the directory. ``peek`` gives those of local headers, of which there is one per record: it
    need not verify them if the caller compares ``header_bytes`` later. ``expect`` is told before that which they are:
    they lie all over the file, and a disk that is asked for all of them at once does not take much longer than for one.

    Raises:
        CorruptCheckpointError: no zip archive; or records that are compressed or encrypted, overlap, lie outside of the
            file, have the same name, or are too many.
    """
    start, size, count = _directory(size_bytes, read)
    if not 0 < count <= _MOST_RECORDS or count * _CENTRAL.size > size or start + size > size_bytes:
        raise CorruptCheckpointError(f"its directory claims {count} records in {size} bytes at {start}")
    directory = read(start, size)
    listed = _listed(directory, count)
    ordered = sorted(listed.items(), key=lambda item: item[1][0])
    if (own := _own_entries(ordered, directory, start)) is not None:
        return own
    found: dict[str, Entry] = {}
    end = 0
    if expect is not None:
        for page in {header // _PAGE_BYTES: None for _, (header, *_) in ordered if header < start}:
            expect(page * _PAGE_BYTES, _PAGE_BYTES)
    for name, (header, length, crc) in ordered:
        if header < end or header + _LOCAL.size > start:
            raise CorruptCheckpointError(f"its record {name!r} at {header} lies over another, or outside of the file")
        header_bytes = peek(header, min(_USUAL_HEADER_BYTES, start - header))
        fixed = _LOCAL.unpack_from(header_bytes)
        offset = header + _LOCAL.size + fixed[9] + fixed[10]
        end = offset + length
        if fixed[0] != b"PK\x03\x04" or fixed[3] != 0 or end > start:
            raise CorruptCheckpointError(f"its record {name!r} at {header} is not where the directory says")
        longer = offset - header > len(header_bytes)
        header_bytes = peek(header, offset - header) if longer else header_bytes[: offset - header]
        if header_bytes[_LOCAL.size : _LOCAL.size + fixed[9]] != name.encode():
            raise CorruptCheckpointError(f"its record {name!r} at {header} has another name there")
        found[name] = Entry(header, header_bytes, offset, length, crc)
    return found


def records_root(names: dict[str, Entry]) -> str:
    """The folder of the archive that holds the checkpoint, with a slash.

    Raises:
        CorruptCheckpointError: there is none, or several.
    """
    roots = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise CorruptCheckpointError(f"it is a zip archive with {len(roots)} records '…/data.pkl' and not one")
    return roots[0]


def _directory(size_bytes: int, read: Read) -> tuple[int, int, int]:
    """Where the directory begins, its size in bytes, and how many records it has."""
    tail_start = max(0, size_bytes - _TAIL_BYTES)
    tail = read(tail_start, size_bytes - tail_start)
    place = tail.rfind(b"PK\x05\x06")
    while place >= 0:
        if place + _END.size <= len(tail):
            fields = _END.unpack_from(tail, place)
            if place + _END.size + fields[7] == len(tail):
                break
        place = tail.rfind(b"PK\x05\x06", 0, place)
    else:
        raise CorruptCheckpointError("it does not end as a zip archive does")
    count, size, start = fields[4], fields[5], fields[6]
    locator = place + tail_start - _LOCATOR_64.size
    if locator >= 0:
        mark, _, end_64, _ = _LOCATOR_64.unpack(read(locator, _LOCATOR_64.size))
        if mark == b"PK\x06\x07":
            if end_64 + _END_64.size > locator:
                raise CorruptCheckpointError("the end of its directory lies outside of the file")
            mark, *_, count, size, start = _END_64.unpack(read(end_64, _END_64.size))
            if mark != b"PK\x06\x06":
                raise CorruptCheckpointError("the end of its directory is not where it says")
    return start, size, count


def _listed(directory: bytes, count: int) -> dict[str, _Listed]:
    """What the directory says of each record."""
    listed: dict[str, _Listed] = {}
    place = 0
    for _ in range(count):
        if place + _CENTRAL.size > len(directory):
            raise CorruptCheckpointError(f"its directory ends after {len(listed)} of {count} records")
        fields = _CENTRAL.unpack_from(directory, place)
        mark, flags, method, crc, packed, size = fields[0], fields[3], fields[4], *fields[7:10]
        name_size, extra_size, comment_size, header = *fields[10:13], fields[16]
        place += _CENTRAL.size
        name_bytes = directory[place : place + name_size]
        extra = directory[place + name_size : place + name_size + extra_size]
        place += name_size + extra_size + comment_size
        if mark != b"PK\x01\x02" or place > len(directory):
            raise CorruptCheckpointError(f"its directory is damaged after {len(listed)} of {count} records")
        try:
            name = name_bytes.decode()
        except UnicodeDecodeError as e:
            raise CorruptCheckpointError(f"its directory holds the name {name_bytes[:80]!r}") from e
        size, packed, header = _wide(extra, [size, packed, header], name)
        if method != 0 or packed != size or flags & 1:
            raise CorruptCheckpointError(f"its record {name!r} is compressed or encrypted: torch writes none such")
        if name in listed:
            raise CorruptCheckpointError(f"its directory holds {name!r} twice")
        listed[name] = (header, size, crc)
    return listed


def _own_entries(ordered: Sequence[tuple[str, _Listed]], directory: bytes, start: int) -> dict[str, Entry] | None:
    """The records, if the directory is byte for byte that of our own layout: then the headers are, too.

    They lie all over the file, and are compared when the data are read.
    """
    layout = Layout()
    for name, (header, size, _) in ordered:
        if header != layout.end or header > start or not name.startswith(f"{ROOT}/"):
            return None
        layout.add(name.removeprefix(f"{ROOT}/"), size)
    crcs = [crc for _, (_, _, crc) in ordered]
    if layout.end != start or not trailer(layout.records, crcs, start).startswith(directory):
        return None
    return {
        record.name: Entry(record.offset, record.header, record.data_offset, record.size_bytes, crc)
        for record, crc in zip(layout.records, crcs, strict=True)
    }


def _wide(extra: bytes, values: list[int], name: str) -> list[int]:
    """``values``, with what does not fit 32 bits from the extra field that is for it."""
    if _MAX_32 not in values:
        return values
    place = 0
    while place + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, place)
        if kind == 1:
            wide = extra[place + 4 : place + 4 + size]
            numbers = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
            return [next(numbers, value) if value == _MAX_32 else value for value in values]
        place += 4 + size
    raise CorruptCheckpointError(f"its record {name!r} has no room for its size")
