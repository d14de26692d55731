"""The safetensors format: types of numbers, and the header for tensors of known shapes and types.

A file begins with the length of its header, then the header in JSON, then the numbers of all tensors in order,
without gaps (huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from composerlite.errors import SaveError
from composerlite.storage import StreamWriter

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


@final
class TensorEntry(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: key of the tensor.
        dtype: type of the numbers.
        shape: size of each dimension.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the numbers, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self, layout: torch.layout) -> None:
        """Check that the format supports the tensor.

        Raises:
            SaveError: the format does not support the type or the layout.
        """
        if self.dtype not in _NAMES or layout is not torch.strided:
            raise SaveError(
                f"{self.name!r}: safetensors has no tensors of {self.dtype}, {layout}. It takes dense ones of "
                f"{', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in _NAMES))}."
            )


def laid_out(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Return ``entries`` in the order of a file: types with the most bytes first, so all numbers are aligned."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def header_of(entries: Sequence[TensorEntry]) -> bytes:
    """Return the header of a file with ``entries`` in this order."""
    told: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.size_bytes
        told[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    header = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def write_tensor(sink: StreamWriter, tensor: Tensor) -> None:
    """Append the numbers of ``tensor`` to a file."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    sink.copy(plain.data_ptr(), plain.nbytes, crc=None)
