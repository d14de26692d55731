"""The index of a folder with weights: what its files say of their tensors, as a sharded directory has it.

Every number in a header is checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast, final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from composerlite.checkpoint.format.safetensors_file import DTYPES
from composerlite.checkpoint.format.sharded_index import StorageInfo, read_index
from composerlite.checkpoint.format.sharded_layout import is_layout, read_layout
from composerlite.checkpoint.format.weight_files import MOST_HEADER_BYTES, is_folder_index
from composerlite.errors import CorruptCheckpointError

__all__ = ["index_of"]

_MOST_DIMENSIONS = 64
_OFFSETS = "DCP_SHARDING_INFO"
"""Where HuggingFaceStorageWriter of torch notes which part of a tensor a file has."""


@final
class _Stored(NamedTuple):
    """A tensor, or a part of one, in a file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    size_bytes: int


def index_of(data: bytes, uri: str) -> Metadata:
    """Read the index of a checkpoint: ``.metadata``, a list of DCP or a rule; or what :mod:`.weight_files` has made.

    Raises:
        CorruptCheckpointError: it is damaged.
        UntrustedCheckpointError: it names what is not known to be safe.
    """
    if is_layout(data):
        return read_layout(data, uri)
    if not is_folder_index(data):
        return read_index(data, uri)
    file = ""
    try:
        told = json.loads(data)
        parts: dict[str, list[_Stored]] = {}
        for file, (size, header) in told["files"].items():
            for name, stored in _tensors(file, size, header).items():
                parts.setdefault(name, []).append(stored)
        for file, tensors in told.get("torch", {}).items():
            for name, dtype, shape, start in tensors:
                parts.setdefault(name, []).append(_of_torch(file, name, dtype, shape, start))
        return _metadata(parts, told["values"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: {file!r} is no file of weights, or damaged: {e}") from e


def _tensors(file: str, size_bytes: int, header: str) -> dict[str, _Stored]:
    """Return the tensors of one file."""
    length = len(header.encode())
    if length > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    entries = json.loads(header, object_pairs_hook=_each_once)
    if not isinstance(entries, dict):
        raise ValueError("its header is no dict")
    told = cast("dict[str, Any]", entries)
    notes = told.pop("__metadata__", None) or {}
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in cast("Any", notes).values()):
        raise ValueError("its __metadata__ is not all text")
    offsets: Any = json.loads(cast("dict[str, str]", notes).get(_OFFSETS, "{}"))
    begin = 8 + length
    found: dict[str, _Stored] = {}
    for name, entry in told.items():
        shape, (first, last) = entry["shape"], entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name!r} has numbers of the type {entry['dtype']!r}, which are not known")
        dtype = DTYPES[entry["dtype"]]
        place: Any = offsets[name]["saved_offsets"] if name in offsets else [0] * len(shape)
        numbers = [*shape, first, last, *place]
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers) or len(place) != len(shape):
            raise ValueError(f"{name!r} has a shape or a place that is none")
        if len(shape) > _MOST_DIMENSIONS or math.prod(shape) * dtype.itemsize != last - first:
            raise ValueError(f"{name!r} of the shape {shape[:8]} in {last - first} bytes")
        found[name] = _Stored(file, dtype, tuple(shape), tuple(place), begin + first, last - first)
    end = begin
    for stored in sorted(found.values(), key=lambda stored: (stored.start, stored.size_bytes)):
        if stored.start != end:
            raise ValueError(f"its tensors overlap or have gaps at byte {end}")
        end += stored.size_bytes
    if end != size_bytes:
        raise ValueError(f"it has {size_bytes} bytes, and its header says {end}")
    return found


def _of_torch(file: str, name: str, dtype: Any, shape: Any, start: Any) -> _Stored:
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(kind, torch.dtype) or not all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, start)):
        raise ValueError(f"{name!r} has a type or a shape that is none")
    return _Stored(file, kind, tuple(shape), (0,) * len(shape), start, math.prod(shape) * kind.itemsize)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _metadata(parts: Mapping[str, list[_Stored]], values: Mapping[str, int]) -> Metadata:
    """Return the index: weights, below ``model`` if there are files of values, and each of these under its name."""
    stored: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    paths: dict[str, Any] = {}
    for name, chunks in parts.items():
        shape = [max(sizes) for sizes in zip(*(_ends(chunk) for chunk in chunks), strict=True)]
        if len({chunk.offsets for chunk in chunks}) < len(chunks) or len({chunk.dtype for chunk in chunks}) > 1:
            raise ValueError(f"{name!r} is in two files")
        if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
            raise ValueError(f"{name!r} of the shape {shape} is not whole")
        key = f"model.{name}"
        paths[key] = ("model", name) if values else (name,)
        listed = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in chunks]
        stored[key] = TensorStorageMetadata(TensorProperties(dtype=chunks[0].dtype), torch.Size(shape), listed)
        for number, chunk in enumerate(chunks):
            index = MetadataIndex(key, torch.Size(chunk.offsets), number)
            places[index] = StorageInfo(chunk.file, chunk.start, chunk.size_bytes)
    for file, size in values.items():
        stored[file], paths[file] = BytesStorageMetadata(), (file,)
        places[MetadataIndex(file)] = StorageInfo(file, 0, size)
    return Metadata(stored, paths, places)


def _ends(chunk: _Stored) -> tuple[int, ...]:
    return tuple(offset + size for offset, size in zip(chunk.offsets, chunk.shape, strict=True))
