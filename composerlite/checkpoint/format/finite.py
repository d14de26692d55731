"""Search for values that are not finite in the tensors of a file, as their bytes are written."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from isal import isal_zlib
from torch import Tensor

from composerlite.storage import Sink

__all__ = ["FiniteCheck"]

_SUMMED_NUMBERS = 32000  # of 32768 and more torch makes a sum with several threads, and training has those
_PIECE_BYTES = 16 * _SUMMED_NUMBERS  # summed, then copied while it is in the cache
_NUMBERS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.complex128: torch.float64,
    torch.complex64: torch.float32,
}
"""The type of the numbers in tensors of a type, where those may be infinite or NaN."""


class _Watched(NamedTuple):
    """A tensor in its storage."""

    name: str
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


@final
class FiniteCheck:
    """Check of the tensors of an image, each in its storage, while the storages are written.

    A sum is finite only if all that was added is. Each piece is summed while it is in the cache, since it is about to
    be copied and digested. The search ends with the first tensor that is found.

    Attributes:
        found: name of a tensor that has a value which is NaN or infinite, as far as it was written.
    """

    def __init__(self) -> None:
        self.found: str | None = None
        self._places: dict[int, list[_Watched]] = {}

    def add(self, number: int, name: str, tensor: Tensor) -> None:
        """Watch ``tensor``, which lies in the storage ``number``."""
        if tensor.dtype in _NUMBERS:
            place = _Watched(name, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
            self._places.setdefault(number, []).append(place)

    def copy(self, number: int, sink: Sink, address: int, size: int) -> int:
        """Copy the storage ``number`` from ``address`` to ``sink``, checking it on the way; the CRC-32 of its bytes."""
        places = self._places.get(number)
        if not places or not size:
            return sink.copy(address, size)
        crc = start = 0
        while places and self.found is None and start < size:
            length = min(_PIECE_BYTES, size - start)
            numbers = _tensor_at(address + start, length, _NUMBERS[places[0].dtype])
            if not _sum_is_finite(numbers) and not bool(numbers.isfinite().all()):
                self.found = _first_not_finite(places, address, size)
                places = []  # it may be in memory that no tensor has: it is looked at once
            crc = isal_zlib.crc32_combine(crc, sink.copy(address + start, length), length)
            start += length
        left = size - start
        return isal_zlib.crc32_combine(crc, sink.copy(address + start, left), left) if left else crc


def _tensor_at(address: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * size_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=size_bytes // dtype.itemsize)


def _sum_is_finite(numbers: Tensor) -> bool:
    """Return true if a sum of ``numbers`` is; one of large numbers may not be although they are."""
    wide = torch.float64 if numbers.dtype is torch.float64 else torch.float32
    return all(math.isfinite(part.sum(dtype=wide).item()) for part in numbers.split(_SUMMED_NUMBERS))


def _first_not_finite(places: Sequence[_Watched], address: int, size: int) -> str | None:
    for place in places:
        whole = _tensor_at(address, size, place.dtype)
        if not bool(whole.as_strided(place.size, place.stride, place.offset).isfinite().all()):
            return place.name
    return None
