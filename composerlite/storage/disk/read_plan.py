"""Which parts of a file are read for what is wanted of it, and where in memory they belong."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

__all__ = ["UNIT_BYTES", "Places", "Target", "Unit", "all_chunks", "apart", "cut", "runs", "touched_chunks"]

UNIT_BYTES = 8 << 20  # what a thread takes at once
_GAP_BYTES = 64 << 10  # it is quicker to read over such gaps than to begin anew

Unit = tuple[int, int]
"""A part of the file: where it begins and where it ends."""


class Target(NamedTuple):
    """Where in memory a part of the file belongs."""

    offset: int
    address: int
    size: int


def apart(targets: Sequence[Target]) -> tuple[list[Target], list[Target]]:
    """Of targets in order: some that do not overlap in the file, and the rest."""
    chosen: list[Target] = []
    rest: list[Target] = []
    end = 0
    for target in targets:
        if target.offset >= end:
            chosen.append(target)
            end = target.offset + target.size
        else:
            rest.append(target)
    return chosen, rest


def all_chunks(chunk_bytes: int, size_bytes: int) -> list[Unit]:
    """The whole file in units of whole chunks."""
    return _units(0, -(-size_bytes // chunk_bytes), chunk_bytes, size_bytes)


def touched_chunks(targets: Sequence[Target], chunk_bytes: int, size_bytes: int) -> list[Unit]:
    """The chunks that hold something of ``targets``, which are in order, in units of whole chunks."""
    units: list[Unit] = []
    first, end = 0, 0
    for target in targets:
        chunk, stop = target.offset // chunk_bytes, -(-(target.offset + target.size) // chunk_bytes)
        if chunk > end:
            units += _units(first, end, chunk_bytes, size_bytes)
            first = chunk
        end = max(end, stop)
    return [*units, *_units(first, end, chunk_bytes, size_bytes)]


def runs(targets: Sequence[Target], *, gap_bytes: int = _GAP_BYTES, unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """The parts that hold ``targets``, which are in order, with the small gaps between them, cut into units."""
    units: list[Unit] = []
    start = end = targets[0].offset
    for target in targets:
        if target.offset > end + gap_bytes:
            units += cut(start, end, unit_bytes)
            start = target.offset
        end = target.offset + target.size
    return [*units, *cut(start, end, unit_bytes)]


def cut(start: int, end: int, step: int) -> Iterator[Unit]:
    """``start`` to ``end``, cut at the multiples of ``step``."""
    while start < end:
        stop = min(end, start - start % step + step)
        yield start, stop
        start = stop


def _units(first: int, end: int, chunk_bytes: int, size_bytes: int) -> list[Unit]:
    """The chunks ``first`` to ``end``, as many together as a unit takes, and one at least."""
    most = max(1, UNIT_BYTES // chunk_bytes)
    return [(start * chunk_bytes, min(stop * chunk_bytes, size_bytes)) for start, stop in cut(first, end, most)]


@final
class Places:
    """Which memory belongs to which part of the file. ``targets`` are in order and do not overlap in the file."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._offsets = [target.offset for target in targets]
        self._ends = [target.offset + target.size for target in targets]
        self._addresses = [target.address for target in targets]

    def of(self, start: int, end: int) -> Iterator[tuple[int | None, int]]:
        """Address (``None`` where the bytes belong nowhere) and size of the parts of ``start`` to ``end``, in order."""
        at = bisect_right(self._ends, start)
        while start < end:
            offset = self._offsets[at] if at < len(self._offsets) else end
            if offset >= end:
                yield None, end - start
                return
            if offset > start:
                yield None, offset - start
                start = offset
            stop = min(self._ends[at], end)
            yield self._addresses[at] + start - offset, stop - start
            start, at = stop, at + 1
