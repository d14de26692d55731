"""Reading items of a sharded checkpoint: only the bytes that are wanted, near ones together, straight into place."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor

from composerlite.checkpoint.format.stored_item import (
    ItemBytes,
    StoredTensor,
    item_contents,
    predicted,
    runs_of,
    stored_tensor,
)
from composerlite.checkpoint.format.torch_reader import ByteSource, Piece
from composerlite.errors import CorruptCheckpointError

__all__ = ["Box", "Item", "read_items"]

_SMALL_BYTES = 256 << 10
"""An item up to this size is read as a whole."""
_PROBE_BYTES = 4096
_LEAST_RUN_BYTES = 64 << 10
_BATCH_BYTES = 128 << 20


class Box(Protocol):
    """A part of a stored tensor, and where it goes."""

    offsets: Sequence[int]
    lengths: Sequence[int]

    def target(self) -> Tensor:
        """The tensor, of the shape of the box, that it goes to."""
        ...

    def done(self, target: Tensor) -> None:
        """Is called when the target is filled."""
        ...


@dataclass
class Item:
    """What is wanted of one item of a file.

    Attributes:
        name: of it, for messages.
        offset: where it begins in the file.
        size_bytes: of it.
        shape: of the tensor in it; ``None``: it holds something else.
        dtype: of the tensor.
        boxes: what is wanted of the tensor.
        take_bytes: takes the bytes of what is no tensor.
    """

    name: str
    offset: int
    size_bytes: int
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    boxes: list[Box] = field(default_factory=list[Box])
    take_bytes: list[Callable[[bytes], object]] = field(default_factory=list[Callable[[bytes], object]])


def read_items(
    source: ByteSource, items: Iterable[Item], *, ours: bool, progress: Callable[[int], object] = int
) -> None:
    """Read what is wanted of ``items`` of one file.

    Args:
        source: the file.
        items: in any order.
        ours: whether this package has written the file: then it is known where numbers lie before a byte is read.
        progress: is told of each so many bytes read.

    Raises:
        CorruptCheckpointError: the bytes are not those that were saved, or no tensors of that shape.
        RefusedError: an item names something that is not known to be safe.
    """
    for batch in _batches(sorted(items, key=lambda item: item.offset)):
        readings = [_Reading(source, item, ours) for item in batch]
        while readings:
            pieces = [piece for reading in readings for piece in reading.wanted()]
            if pieces:
                source.read_into(pieces, progress)
            readings = [reading for reading in readings if not reading.advance()]


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    """As many items at a time as the memory for them takes, which most large ones do not need."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.size_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@final
class _Part:
    """A part of an item that is read to memory of our own."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.data = bytearray(size)

    def piece(self, offset: int) -> Piece:
        address = ctypes.addressof((ctypes.c_char * len(self.data)).from_buffer(self.data))
        return offset + self.start, address, len(self.data)


@final
class _Reading:
    """One item on its way: what is to be read next, until all is there.

    An item of ours is read at once, its frame beside its numbers. A foreign one first shows its beginning and its end.
    What does not hold what was expected, or is of a rarer kind, is read as a whole.
    """

    def __init__(self, source: ByteSource, item: Item, ours: bool) -> None:
        self._source = source
        self._item = item
        self._whole = item.shape is None or item.size_bytes <= _SMALL_BYTES
        self._frame: list[_Part] = []
        self._expected: StoredTensor | None = None
        self._filled: list[_Filled] = []
        if self._whole:
            self._frame = [_Part(0, item.size_bytes)]
        elif ours and item.shape is not None and item.dtype is not None:
            self._expect(*predicted(item.shape, item.dtype))
        else:
            self._frame = [_Part(0, _PROBE_BYTES), _Part(item.size_bytes - _PROBE_BYTES, _PROBE_BYTES)]

    def _expect(self, stored: StoredTensor, end: int) -> None:
        size = self._item.size_bytes
        if not stored.start < end < size or size - end > _SMALL_BYTES:
            self._whole, self._frame = True, [_Part(0, size)]
            return
        self._frame = [_Part(0, stored.start), _Part(end, size - end)]
        self._fill(stored)

    def _fill(self, stored: StoredTensor) -> None:
        self._expected = stored
        self._filled = [_Filled(box, stored) for box in self._item.boxes]

    def wanted(self) -> Iterator[Piece]:
        """What is to be read before :meth:`advance` is called."""
        offset = self._item.offset
        for part in self._frame:
            yield part.piece(offset)
        for filled in self._filled:
            for start, address, size in filled.pieces():
                yield offset + start, address, size

    def advance(self) -> bool:
        """Use what was read; whether that was all."""
        if self._whole:
            self._use_whole(self._frame[0].data)
            return True
        if self._frame:
            parts = [(part.start, part.data) for part in self._frame]
            found = stored_tensor(ItemBytes(self._source, self._item.offset, self._item.size_bytes, parts))
            self._frame = []
            if found is None or (found.shape, found.dtype) != (self._item.shape, self._item.dtype):
                self._filled, self._whole, self._frame = [], True, [_Part(0, self._item.size_bytes)]
                return False
            if found != self._expected:
                self._fill(found)
                return False
        for filled in self._filled:
            filled.end()
        return True

    def _use_whole(self, data: bytearray) -> None:
        for take in self._item.take_bytes:
            take(bytes(data))
        if not self._item.boxes:
            return
        contents: Any = item_contents(data)
        if not isinstance(contents, Tensor) or tuple(contents.shape) != self._item.shape:
            raise CorruptCheckpointError(f"{self._item.name!r} is not the tensor that the index says")
        for box in self._item.boxes:
            part = contents
            for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = box.target()
            target.copy_(part)
            box.done(target)


@final
class _Filled:
    """A box and the memory that its numbers are read to: the target's own where that can be."""

    def __init__(self, box: Box, stored: StoredTensor) -> None:
        self._box = box
        self._stored = stored
        self._target = box.target()
        item_bytes = stored.dtype.itemsize
        self._runs = list(runs_of(stored.shape, box.offsets, box.lengths))
        count = sum(count for _, count in self._runs)
        self._span = (self._runs[0][0], self._runs[-1][0] + self._runs[-1][1]) if self._runs else (0, 0)
        short = len(self._runs) > 1 and self._runs[0][1] * item_bytes < _LEAST_RUN_BYTES
        if short:  # it is quicker to read over what lies between
            self._runs = [(self._span[0], self._span[1] - self._span[0])]
        direct = not short and _takes_bytes(self._target, stored.dtype, count)
        self._scratch = None if direct else torch.empty(sum(n for _, n in self._runs), dtype=stored.dtype)

    def pieces(self) -> Iterator[Piece]:
        item_bytes = self._stored.dtype.itemsize
        address = (self._target if self._scratch is None else self._scratch).data_ptr()
        for start, count in self._runs:
            yield self._stored.start + start * item_bytes, address, count * item_bytes
            address += count * item_bytes

    def end(self) -> None:
        if self._scratch is not None and self._runs:
            lengths = list(self._box.lengths)
            if math.prod(lengths) == self._scratch.numel():
                box = self._scratch.view(lengths)
            else:
                strides = [math.prod(self._stored.shape[dim + 1 :]) for dim in range(len(lengths))]
                box = self._scratch.as_strided(lengths, strides)
            self._target.copy_(box)
        self._box.done(self._target)


def _takes_bytes(target: Tensor, dtype: torch.dtype, count: int) -> bool:
    return (
        type(target) is Tensor
        and target.device.type == "cpu"
        and target.dtype is dtype
        and target.layout is torch.strided
        and target.is_contiguous()
        and target.numel() == count
        and not (target.is_conj() or target.is_neg())
    )
