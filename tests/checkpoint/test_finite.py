"""Weights that are not finite are found as they are written, and nothing else is taken for them."""

from __future__ import annotations

import ctypes
import io
import math
import zlib
from typing import Any

import pytest
import torch

from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.storage import FileDigest

PIECE = 16 * 32_000
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


class Bytes:
    """A file in memory."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.size_bytes = 0
        self.piece_bytes = PIECE
        self.seconds: dict[str, float] = {}

    def write(self, data: bytes) -> None:
        self.size_bytes += self.file.write(data)

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        data = ctypes.string_at(address, size)
        self.write(data)
        return zlib.crc32(data, crc or 0)

    def finish(self) -> FileDigest:
        raise NotImplementedError

    def __enter__(self) -> Bytes:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def written(contents: dict[str, Any], **watched: torch.Tensor) -> tuple[bytes, str | None]:
    """The file of ``contents``, and the name of the tensor that is not finite."""
    image, sink = TorchImage(contents, watched=watched.items()), Bytes()
    image.write(sink)
    return sink.file.getvalue(), image.not_finite


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_of_many_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    """At the ends of the tensor and of each piece that is looked at, in each type; the file is the same."""
    count = 3 * PIECE // dtype.itemsize + 5
    a_piece = PIECE // dtype.itemsize
    good = torch.ones(count, dtype=dtype)
    assert written({"x": good}, x=good)[1] is None
    for place in (0, 31_999, 32_000, a_piece - 1, a_piece, 2 * a_piece + 17, count - 1):
        bad = good.clone()
        bad[place] = value
        file, found = written({"a": good, "x": bad}, a=good, x=bad)
        assert found == "x", place
        assert written({"a": good, "x": bad}) == (file, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_large_values_are_finite(dtype: torch.dtype) -> None:
    """Their sum is not."""
    largest = torch.full((70_000,), torch.finfo(dtype).max, dtype=dtype)
    assert written({"x": largest}, x=largest)[1] is None
    largest[-1] = math.inf
    assert written({"x": largest}, x=largest)[1] == "x"


def test_memory_that_no_watched_tensor_has_does_not_count() -> None:
    """A weight that is a part of larger memory, with NaN beside it; integers; an empty one; what is not watched."""
    memory = torch.full((40, 50_000), math.nan)
    memory[7] = 1.0
    memory[:, 3] = 2.0
    row, column, numbers, empty = memory[7], memory[:, 3], torch.arange(9), torch.ones(0)
    contents = {"row": row, "column": column, "numbers": numbers, "empty": empty, "nan": torch.tensor(math.nan)}
    assert written(contents, row=row, column=column, numbers=numbers, empty=empty)[1] is None
    memory[39, 3] = -math.inf
    assert written(contents, row=row, column=column)[1] == "column"


def test_what_is_not_in_the_file_is_not_looked_at() -> None:
    """Weights that are left out of a checkpoint do not mark it."""
    assert written({"x": torch.ones(3)}, other=torch.tensor(math.nan))[1] is None


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11
def test_torch_is_not_asked() -> None:
    """Its threads are those of training."""
    numbers = torch.ones(1 << 20)
    image = TorchImage({"x": numbers}, watched=[("x", numbers)])
    with torch.profiler.profile() as profile:
        image.write(Bytes())
    assert [event.name for event in profile.events() if event.name.startswith("aten::")] == []
