"""One item of a sharded checkpoint, a ``.pt`` file inside another file: where the numbers of its tensor lie."""

from __future__ import annotations

import functools
import io
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from composerlite.checkpoint.format.torch_reader import ByteSource, FileSource, TorchFile
from composerlite.checkpoint.format.zip_directory import Entry, entries, records_root
from composerlite.checkpoint.format.zip_layout import Layout
from composerlite.checkpoint.trust.trusted import StorageKind
from composerlite.checkpoint.trust.unpickler import RestrictedUnpickler
from composerlite.errors import CorruptCheckpointError

__all__ = ["ItemBytes", "StoredTensor", "item_contents", "predicted", "runs_of", "stored_tensor"]

_MOST_PICKLE_BYTES = 1 << 20
_MOST_RUNS = 4096


class StoredTensor(NamedTuple):
    """A tensor whose numbers lie in a file, in row-major order.

    Attributes:
        shape: of it.
        dtype: of it.
        start: where its numbers begin in the item.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


@functools.lru_cache(1024)
def predicted(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StoredTensor, int]:
    """How this package lays a tensor out in an item, and where what follows its numbers begins."""
    (record,) = Layout([("data/0", math.prod(shape) * dtype.itemsize)]).records
    return StoredTensor(shape, dtype, record.data_offset), record.data_offset + record.size_bytes


@final
class ItemBytes:
    """The bytes of an item, of which some parts were read before.

    Args:
        source: the file.
        offset: where in it the item begins.
        size_bytes: of the item.
        parts: where a part begins in the item, and its bytes.
    """

    def __init__(
        self, source: ByteSource, offset: int, size_bytes: int, parts: Sequence[tuple[int, bytearray]]
    ) -> None:
        self._source = source
        self._offset = offset
        self._parts = parts
        self.size_bytes = size_bytes

    def read(self, offset: int, size: int) -> bytes:
        """Exactly so many bytes. Of the end, where the directory is looked for, those that were read, after zeros."""
        for start, data in self._parts:
            if start <= offset and offset + size <= start + len(data):
                return bytes(data[offset - start : offset - start + size])
            if start + len(data) == self.size_bytes == offset + size:
                return bytes(start - offset) + bytes(data)
        if offset < 0 or size < 0 or offset + size > self.size_bytes:
            raise CorruptCheckpointError(
                f"an item of {self.size_bytes} bytes has none from {offset} to {offset + size}"
            )
        return self._source.read(self._offset + offset, size)


@final
class _Places:
    """Storages without bytes, and the records that have these."""

    def __init__(self, records: dict[str, Entry]) -> None:
        self.known: dict[str, tuple[torch.UntypedStorage, Entry]] = {}
        self._records = records

    def storage(self, identity: Any) -> torch.storage.TypedStorage:
        mark, kind, key, _, count = identity
        record = self._records.get(f"data/{key}")
        if mark != "storage" or not isinstance(kind, StorageKind) or type(key) is not str or record is None:
            raise ValueError("a storage in a form that torch does not write")
        if type(count) is not int or count * kind.dtype.itemsize != record.size:
            raise ValueError(f"the storage {key!r} of {count!r} × {kind.dtype} in {record.size} bytes")
        if key not in self.known:
            self.known[key] = torch.UntypedStorage(record.size, device="meta"), record
        return torch.storage.TypedStorage(wrap_storage=self.known[key][0], dtype=kind.dtype, _internal=True)

    def read_now(self) -> None:
        raise ValueError("a tensor of a class of the user's")


def stored_tensor(item: ItemBytes) -> StoredTensor | None:
    """The tensor that the item holds, its numbers unread; ``None`` if it is of a rarer kind than row-major.

    Raises:
        CorruptCheckpointError: it is no torch file.
        RefusedError: it names something that is not known to be safe.
    """
    listed = entries(item.size_bytes, item.read, item.read)
    root = records_root(listed)
    records = {name.removeprefix(root): entry for name, entry in listed.items() if name.startswith(root)}
    pickled, order = records["data.pkl"], records.get("byteorder")
    if pickled.size > _MOST_PICKLE_BYTES:
        return None
    if order is not None and item.read(order.offset, order.size) != sys.byteorder.encode():
        return None
    places = _Places(records)
    try:
        contents = RestrictedUnpickler(item.read(pickled.offset, pickled.size), places).load()
    except ValueError:
        return None  # read as a whole it says what is wrong, or is a kind that can be read so only
    if type(contents) not in (Tensor, nn.Parameter) or contents.layout is not torch.strided or len(places.known) != 1:
        return None
    if not contents.is_contiguous() or contents.is_conj() or contents.is_neg() or contents.is_quantized:
        return None
    ((_, record),) = places.known.values()
    return StoredTensor(
        tuple(contents.shape), contents.dtype, record.offset + contents.storage_offset() * contents.itemsize
    )


def item_contents(data: bytes | bytearray) -> Any:
    """What an item holds that was read as a whole.

    Raises:
        CorruptCheckpointError: it is no torch file, or its own checksums say that it is damaged.
        RefusedError: it names something that is not known to be safe.
    """
    source = FileSource(io.BytesIO(data))
    file = TorchFile(source, len(data), peek=source.read, check_sums=True)
    file.read()
    return file.contents


def runs_of(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The parts of a row-major tensor that make up a box in it, in order: first element and number of elements.

    Raises:
        CorruptCheckpointError: the box is not in the tensor.
    """
    if (
        len(shape) != len(offsets)
        or len(shape) != len(lengths)
        or any(o < 0 or n < 0 or o + n > size for size, o, n in zip(shape, offsets, lengths, strict=True))
    ):
        raise CorruptCheckpointError(f"there is no part {list(lengths)} at {list(offsets)} in the shape {list(shape)}")
    if 0 in lengths:
        return
    inner = len(shape)  # the dimensions from here on are wanted whole
    while inner > 0 and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if inner == 0:
        yield 0, math.prod(shape)
        return
    count = lengths[inner - 1] * strides[inner - 1]
    first = offsets[inner - 1] * strides[inner - 1]
    outer = [range(offsets[dim], offsets[dim] + lengths[dim]) for dim in range(inner - 1)]
    for place in _each(outer):
        yield first + sum(at * strides[dim] for dim, at in enumerate(place)), count


def _each(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    if not ranges:
        yield ()
        return
    for at in ranges[0]:
        for rest in _each(ranges[1:]):
            yield (at, *rest)
