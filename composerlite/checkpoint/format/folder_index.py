"""Indexes of checkpoints, in every form: a list by DCP, a rule, or an index made from a folder with weights.

DCP is ``torch.distributed.checkpoint``. A rule computes the entries of the list: see ``sharded_layout``. A folder with
weights gets the index of a sharded directory with the same tensors. All numbers in headers are checked.
"""

from __future__ import annotations

import functools
import json
import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, cast

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp

from composerlite.checkpoint.format.safetensors_file import DTYPES
from composerlite.checkpoint.format.sharded_index import StorageInfo, read_index
from composerlite.checkpoint.format.sharded_layout import LAYOUT_MARK, Count, read_layout
from composerlite.checkpoint.format.torch_reader import TorchFile, untrusted
from composerlite.checkpoint.format.weight_files import MOST_HEADER_BYTES, VALUES, Read, are_safetensors, weight_files
from composerlite.checkpoint.trust.unpickler import RefusedError
from composerlite.errors import CorruptCheckpointError

_MOST_DIMENSIONS = 64
_MARK = b'{"folder": '
_OFFSETS = "DCP_SHARDING_INFO"
"""Key in ``__metadata__`` of a file by torch's HuggingFaceStorageWriter: offsets of parts in their whole tensors."""


class _HeaderEntry(msgspec.Struct):
    """A tensor in the header of a file of safetensors. ``data_offsets`` count bytes from the end of the header."""

    dtype: str
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    data_offsets: tuple[Count, Count]


_Stored = tuple[torch.dtype, dcp.ChunkStorageMetadata, Any]
"""A tensor, or a part of a tensor, in a file: type of the numbers, part, and ``StorageInfo`` of the numbers."""


def index_of(data: bytes, uri: str) -> dcp.Metadata:
    """Read the index of a checkpoint: a list of DCP, a rule, or the result of :func:`folder_index`.

    Raises:
        CorruptCheckpointError: the index is damaged.
        UntrustedCheckpointError: the index names an unknown type.
    """
    if data.startswith(LAYOUT_MARK):
        return read_layout(data, uri)
    return read_index(data.partition(b"\n")[2] if is_folder_index(data) else data, uri)


def is_folder_index(data: bytes) -> bool:
    """Return true for a result of :func:`folder_index`."""
    return data.startswith(_MARK)


def folder_index(names: Collection[str], size: Callable[[str], int], read: Read, *, only: str | None = None) -> bytes:
    """Make an index of the files of weights in a folder, from the headers, and of the files of other values.

    Args:
        names: names of all files in the folder.
        size: gives the size of a file in bytes.
        read: reads bytes of a file.
        only: index this file of safetensors alone, without other values.

    Returns:
        An index for :func:`index_of`.

    Raises:
        CorruptCheckpointError: there are no weights, or a file is damaged, or is listed and missing.
        UntrustedCheckpointError: a file of torch holds an unknown type.
    """
    files = [only] if only is not None else weight_files(names, size, read)
    if not files:
        raise CorruptCheckpointError("there are no weights in its files.")
    of_torch = only is None and not are_safetensors(names)
    parts: dict[str, list[_Stored]] = {}
    file = ""
    try:
        for file in files:
            tensors = _tensors_of_torch(file, size(file), read) if of_torch else _tensors(file, size(file), read)
            for name, stored in tensors.items():
                parts.setdefault(name, []).append(stored)
        beside = [] if only is not None else sorted(name for name in names if VALUES.fullmatch(name))
        index = _index(parts, {name: size(name) for name in beside})
    except RefusedError as e:
        raise untrusted(repr(file), e) from e
    except (CorruptCheckpointError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise CorruptCheckpointError(f"{file!r} is not a file of weights, or is damaged: {e}") from e
    listed = json.dumps({"folder": sorted((name, size(name)) for name in files)}).encode()
    return listed + b"\n" + pickle.dumps(index)


def _tensors(file: str, size_bytes: int, read: Read) -> dict[str, _Stored]:
    """Return the tensors of a file of safetensors."""
    length = int.from_bytes(read(file, 0, min(8, size_bytes)), "little")
    if length > min(MOST_HEADER_BYTES, size_bytes - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size_bytes}")
    header = msgspec.json.decode(read(file, 8, length), type=dict[str, msgspec.Raw])
    notes = msgspec.json.decode(header.pop("__metadata__", b"null"), type=dict[str, str] | None) or {}
    parts = msgspec.json.decode(notes.get(_OFFSETS, "{}"), type=dict[str, dict[str, tuple[Count, ...]]])
    found: dict[str, _Stored] = {}
    for name, raw in header.items():
        entry = msgspec.json.decode(raw, type=_HeaderEntry)
        if entry.dtype not in DTYPES:
            raise ValueError(f"{name!r} has numbers of the type {entry.dtype!r}, which are unknown")
        dtype, shape, (first, last) = DTYPES[entry.dtype], entry.shape, entry.data_offsets
        offsets = parts[name]["saved_offsets"] if name in parts else (0,) * len(shape)
        if len(offsets) != len(shape) or math.prod(shape) * dtype.itemsize != last - first:
            raise ValueError(f"{name!r} of the shape {shape[:8]} at {offsets[:8]} in {last - first} bytes")
        chunk = dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
        found[name] = dtype, chunk, StorageInfo(file, 8 + length + first, last - first)
    end = 8 + length
    for place in sorted((place for _, _, place in found.values()), key=lambda place: (place.offset, place.length)):
        if place.offset != end:
            raise ValueError(f"its tensors overlap or have gaps at byte {end}")
        end += place.length
    if end != size_bytes:
        raise ValueError(f"it has {size_bytes} bytes, and its header says {end}")
    return found


def _tensors_of_torch(file: str, size_bytes: int, read: Read) -> dict[str, _Stored]:
    """Return the tensors of a state dict that torch has saved, read by the restricted unpickler."""
    source: Any = SimpleNamespace(read=functools.partial(read, file))  # no tensor is read here
    opened = TorchFile(source, size_bytes, map_location="meta", check_sums=True)
    contents, records = opened.contents, {id(one): opened.records[name] for name, one in opened.unread.items()}
    if not isinstance(contents, dict):
        raise ValueError(f"it holds {type(contents).__name__} and not a state dict.")
    found: dict[str, _Stored] = {}
    for key, tensor in cast("dict[Any, Any]", contents).items():
        if type(key) is not str:
            raise ValueError(f"it has a key that is {type(key).__name__}, not the name of a tensor.")
        record = records.get(id(tensor.untyped_storage())) if isinstance(tensor, Tensor) else None
        if record is None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"{key!r} is not a contiguous tensor. If you trust the file, save it again: torch.save({{name: "
                "tensor.contiguous() for name, tensor in model.state_dict().items()}, path)"
            )
        start = record.offset + int(tensor.storage_offset()) * tensor.itemsize
        chunk = dcp.ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)
        found[key] = tensor.dtype, chunk, StorageInfo(file, start, tensor.nbytes)
    return found


def _index(parts: Mapping[str, Sequence[_Stored]], values: Mapping[str, int]) -> dcp.Metadata:
    """Return the index of the weights ``parts``, and of ``values``: files beside the weights, with sizes in bytes.

    Keys of weights begin with ``model``. In the nested state, weights are below ``model`` only if there are values.
    """
    entries: dict[str, Any] = {name: dcp.BytesStorageMetadata() for name in values}
    places: dict[Any, Any] = {dcp.MetadataIndex(name): StorageInfo(name, 0, size) for name, size in values.items()}
    paths: dict[str, Any] = {name: (name,) for name in values}
    properties: dict[torch.dtype, dcp.TensorProperties] = {}  # one object for a dtype: the index is smaller
    for name, stored in parts.items():
        chunks, dtype = [chunk for _, chunk, _ in stored], stored[0][0]
        ends = [[o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks]
        shape = torch.Size(max(sizes) for sizes in zip(*ends, strict=True))
        if len({chunk.offsets for chunk in chunks}) < len(chunks) or any(other is not dtype for other, _, _ in stored):
            raise ValueError(f"{name!r} is in two files")
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
            raise ValueError(f"{name!r} of the shape {tuple(shape)} is not whole")
        key = f"model.{name}"
        of_dtype = properties.setdefault(dtype, dcp.TensorProperties(dtype=dtype))
        entries[key] = dcp.TensorStorageMetadata(of_dtype, shape, chunks)
        paths[key] = ("model", name) if values else (name,)
        places.update({dcp.MetadataIndex(key, chunk.offsets): place for _, chunk, place in stored})
    return dcp.Metadata(entries, paths, places)
