"""The index of a sharded checkpoint of many pieces as a rule: the splits of each tensor, and no list of the parts.

Offsets, sizes, writers, files and places of all parts follow from shapes, meshes and splits. Values and plain tensors
are in an index of DCP beside the rule. A reader gets the classes of DCP, with parts computed on demand.
"""

from __future__ import annotations

import base64
import bisect
import functools
import heapq
import itertools
import json
import math
import operator
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import torch
import xxhash
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.tensor import DTensor

from composerlite.checkpoint.format import SUFFIX
from composerlite.checkpoint.format.sharded_index import Path, StorageInfo, read_index
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.errors import CorruptCheckpointError

_MAGIC = b"composerlite sharded layout 3: for torch.distributed.checkpoint use 'composerlite checkpoint convert'\n"
_MOST_BYTES, _MOST_TIMES = 64 << 20, 64
"""Limit of an unpacked index: this size, plus this multiple of the packed size."""
_MOST_CHUNKS = 1 << 18  # of all files: 3 MB of digests
_MOST_RANKS = 1 << 17
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@final
class Splits(NamedTuple):
    """Splits of tensors over ranks.

    Attributes:
        mesh: shape of the mesh; each rank is in the mesh once, in row-major order.
        dims: for each dimension of the tensor the dimensions of the mesh for the splits, the outermost first. Each
            split cuts a range into pieces of equal size, rounded up; the last pieces may be smaller, or empty.
    """

    mesh: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which all ranks have the same part."""
        used = set(itertools.chain(*self.dims))
        return tuple(dim for dim in range(len(self.mesh)) if dim not in used)

    def replica(self, rank: int) -> int:
        """Return the difference between ``rank`` and the lowest rank with the same part."""
        strides, coordinate = _strides(self.mesh), _coordinate(rank, self.mesh)
        return sum(coordinate[dim] * strides[dim] for dim in self.replicas)

    @functools.lru_cache(4096)  # noqa: B019 - thousands of tensors have few different shapes
    def box(self, shape: tuple[int, ...], rank: int) -> Box:
        """Return the part of ``rank`` of a tensor of this shape: offsets and sizes."""
        coordinate = _coordinate(rank, self.mesh)
        spans = [_span(n, self.mesh, dims, coordinate) for n, dims in zip(shape, self.dims, strict=True)]
        return tuple(start for start, _ in spans), tuple(size for _, size in spans)


def _strides(mesh: Sequence[int]) -> list[int]:
    """Return the difference between neighboring ranks along each dimension of ``mesh``."""
    return [math.prod(mesh[dim + 1 :]) for dim in range(len(mesh))]


def _coordinate(rank: int, mesh: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank // stride % size for stride, size in zip(_strides(mesh), mesh, strict=True))


def _span(length: int, mesh: Sequence[int], dims: Sequence[int], coordinate: Sequence[int]) -> tuple[int, int]:
    """Return start and length of a part along a dimension of a tensor."""
    start = 0
    for dim in dims:
        piece = -(-length // mesh[dim])
        skipped = min(length, piece * coordinate[dim])
        start, length = start + skipped, min(piece, length - skipped)
    return start, length


@functools.lru_cache(64)  # a model has a dozen; few, since an index may be made up to fill memory
def _cuts(length: int, sizes: tuple[int, ...]) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
    """Return start, length and coordinate of all non-empty parts along a dimension, in order."""
    dims = range(len(sizes))
    found = [(*_span(length, sizes, dims, at), at) for at in itertools.product(*map(range, sizes))]
    found = [one for one in found if one[1]]
    return [start for start, _, _ in found], [size for _, size, _ in found], [at for _, _, at in found]


@final
class SplitTensor(NamedTuple):
    """A tensor, distributed over all ranks.

    Attributes:
        path: in the nested state; the key is the path with dots.
        shape: of the whole tensor.
        dtype: of the tensor.
        splits: how the tensor is split.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    splits: Splits

    @property
    def key(self) -> str:
        """Key in the index."""
        return ".".join(map(str, self.path))

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def boxes(self, wanted: Box | None = None) -> Iterator[tuple[Box, int]]:
        """Yield all parts, or the parts with elements in ``wanted``, each with the lowest rank of the part."""
        mesh, dims = self.splits
        cuts = [_cuts(n, tuple(mesh[dim] for dim in of)) for n, of in zip(self.shape, dims, strict=True)]
        strides = _strides(mesh)
        ranges = [range(len(starts)) for starts, _, _ in cuts]
        if wanted is not None:
            ranges = [
                range(max(0, bisect.bisect_right(starts, first) - 1), bisect.bisect_left(starts, first + size))
                for (starts, _, _), first, size in zip(cuts, *wanted, strict=True)
            ]
        for cell in itertools.product(*ranges):
            rank = 0
            for number, (_, _, coordinates), of in zip(cell, cuts, dims, strict=True):
                rank += sum(at * strides[dim] for at, dim in zip(coordinates[number], of, strict=True))
            offsets = tuple(starts[number] for number, (starts, _, _) in zip(cell, cuts, strict=True))
            yield (offsets, tuple(sizes[n] for n, (_, sizes, _) in zip(cell, cuts, strict=True))), rank


def split_of(path: Path, tensor: DTensor) -> SplitTensor | None:
    """Return the splits of ``tensor``; ``None`` for splits of another kind."""
    mesh, dims = tensor.device_mesh, [list[int]() for _ in tensor.shape]
    inner: list[tuple[int, int]] = []
    for number, placement in enumerate(tensor.placements):
        dim: Any = getattr(placement, "dim", None)
        if dim is None:
            if not placement.is_replicate():
                return None
        elif hasattr(placement, "split_factor"):  # later dimensions of the mesh split first
            inner.append((dim, number))
        else:
            dims[dim].append(number)
    for dim, number in inner:
        dims[dim].append(number)
    if not tensor.numel():
        return None
    splits = Splits(tuple(mesh.shape), tuple(map(tuple, dims)))
    return SplitTensor(path, tuple(tensor.shape), tensor.dtype, splits)


@final
class StatePiece(NamedTuple):
    """A tensor, a part of a tensor or a value, for a rank to write.

    Attributes:
        key: in the index.
        shape: of the whole tensor; ``None`` for a value.
        dtype: of the tensor.
        offsets: where the part begins in the tensor, by dimension.
        sizes: of the part, by dimension.
    """

    key: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the numbers; 1 for a value, since a rank knows only the size of its own value."""
        return 1 if self.dtype is None else math.prod(self.sizes) * self.dtype.itemsize

    @property
    def metadata_index(self) -> dcp.MetadataIndex:
        """Key and offsets, as DCP identifies the piece."""
        return dcp.MetadataIndex(self.key, None if self.shape is None else torch.Size(self.offsets))


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide items of these sizes, by number, into ``count`` groups of about the same size: the largest first."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for number in sorted(range(len(sizes)), key=lambda number: sizes[number], reverse=True):
        load, group = loads[0]
        groups[group].append(number)
        heapq.heapreplace(loads, (load + sizes[number], group))
    return groups


@functools.lru_cache(4096)
def item_place(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Return offset of the numbers and bytes of a tensor's item in a data file, as this version writes the item."""
    image = TorchImage(cast("Any", torch.empty(sizes, dtype=dtype)))
    return image.storages()[0].offset, image.size_bytes


@final
class ShardLayout:
    """The rule of a state on some ranks.

    Args:
        ranks: number of ranks.
        tensors: all distributed tensors, in the order of their keys.
        files: most files of a rank.
        least_bytes: of a file, if a rank has several.
        item_bytes: bytes of parts in a file, by sizes and dtype; ``None``: the bytes of this version.
    """

    def __init__(
        self,
        ranks: int,
        tensors: Sequence[SplitTensor],
        *,
        files: int,
        least_bytes: int,
        item_bytes: Mapping[tuple[tuple[int, ...], torch.dtype], int] | None = None,
    ) -> None:
        self.ranks = ranks
        self.tensors = {tensor.key: tensor for tensor in tensors}
        self._files = files
        self._least_bytes = least_bytes
        self._item_bytes = item_bytes
        self._replicas = self._writers()
        self._kept: dict[int, list[list[StatePiece]]] = {}

    def _writers(self) -> dict[str, int]:
        """Choose a replica to write each tensor: the number to add to the lowest rank with a part."""
        by_splits: dict[Splits, list[SplitTensor]] = {}
        for tensor in self.tensors.values():
            by_splits.setdefault(tensor.splits, []).append(tensor)
        found: dict[str, int] = {}
        for splits, tensors in by_splits.items():
            strides, sizes = _strides(splits.mesh), [splits.mesh[dim] for dim in splits.replicas]
            groups = balanced([tensor.size_bytes for tensor in tensors], math.prod(sizes))
            for number, group in enumerate(groups):
                added = sum(map(operator.mul, _coordinate(number, sizes), [strides[dim] for dim in splits.replicas]))
                found.update({tensors[one].key: added for one in group})
        return found

    @property
    def digest(self) -> str:
        """Equal on ranks with the same rule."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self._rule()).encode())

    @property
    def most_chunks(self) -> int:
        """Most chunks of a file with a digest: a single record contains the digests of all files."""
        return max(1, _MOST_CHUNKS // (self.ranks * self._files))

    def parts(self, rank: int) -> Iterator[StatePiece]:
        """Yield the parts to write on ``rank``, in the order of keys."""
        for key, tensor in self.tensors.items():
            if tensor.splits.replica(rank) == self._replicas[key]:
                offsets, sizes = tensor.splits.box(tensor.shape, rank)
                if math.prod(sizes):
                    yield StatePiece(key, tensor.shape, tensor.dtype, offsets, sizes)

    def files(self, rank: int) -> list[list[StatePiece]]:
        """Return the parts in each file of ``rank``, in order. Listed pieces come at the end of the last file."""
        if rank not in self._kept:
            parts = list(self.parts(rank))
            total = sum(part.size_bytes for part in parts)
            count = max(1, min(self._files, len(parts), -(-total // self._least_bytes)))
            groups = balanced([part.size_bytes for part in parts], count)
            self._kept[rank] = [[parts[number] for number in group] for group in groups]
        return self._kept[rank]

    def places(self, rank: int, suffix: str) -> Iterator[tuple[StatePiece, Any]]:
        """Yield the parts of ``rank`` and the place of each. ``suffix``: of the names of files."""
        for number, parts in enumerate(self.files(rank)):
            name, at = file_name(rank, number, suffix), 0
            for part in parts:
                size = self._size_of(part.sizes, part.dtype)
                yield part, StorageInfo(name, at, size)
                at += size

    def _size_of(self, sizes: tuple[int, ...], dtype: Any) -> int:
        return item_place(sizes, dtype)[1] if self._item_bytes is None else self._item_bytes[sizes, dtype]

    def writer(self, tensor: SplitTensor, lowest: int) -> int:
        """Return the writer of a part of ``tensor``; ``lowest`` is the lowest rank with the part."""
        return lowest + self._replicas[tensor.key]

    def _rule(self) -> dict[str, Any]:
        splits = {one: number for number, one in enumerate(dict.fromkeys(t.splits for t in self.tensors.values()))}
        return {
            "ranks": self.ranks,
            "files": self._files,
            "least_bytes": self._least_bytes,
            "splits": list(splits),
            "tensors": [[t.path, t.shape, _dtype_name(t.dtype), splits[t.splits]] for t in self.tensors.values()],
        }

    def pack(self, listed: dcp.Metadata, suffix: str) -> bytes:
        """Return the index as bytes: this rule, and the index ``listed`` of all other pieces."""
        forms: dict[tuple[tuple[int, ...], torch.dtype], None] = {}
        for shape, dtype, (mesh, dims) in dict.fromkeys((t.shape, t.dtype, t.splits) for t in self.tensors.values()):
            cuts = [_cuts(n, tuple(mesh[dim] for dim in of)) for n, of in zip(shape, dims, strict=True)]
            lengths = [dict.fromkeys(sizes) for _, sizes, _ in cuts]
            forms.update(dict.fromkeys((sizes, dtype) for sizes in itertools.product(*lengths)))
        items = [[sizes, _dtype_name(dtype), self._size_of(sizes, dtype)] for sizes, dtype in forms]
        index = {"rule": self._rule(), "suffix": suffix, "items": items}
        index["listed"] = base64.b64encode(pickle.dumps(listed)).decode()
        return _MAGIC + zlib.compress(json.dumps(index, separators=(",", ":")).encode(), 1)


def file_name(rank: int, number: int, suffix: str) -> str:
    """Return the name of a data file, in the form of DCP. ``suffix``: of the save."""
    return f"__{rank}_{number}{suffix}{SUFFIX}"


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def is_layout(data: bytes) -> bool:
    """Return true if the index ``data`` is a rule."""
    return data.startswith(_MAGIC)


def read_layout(data: bytes, uri: str) -> dcp.Metadata:
    """Read a rule.

    Raises:
        CorruptCheckpointError: the index is damaged.
        UntrustedCheckpointError: the index of other pieces names an unknown type.
    """
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(data[len(_MAGIC) :], _MOST_BYTES + _MOST_TIMES * len(data))
        if not stream.eof or stream.unused_data:
            raise ValueError("it ends before its end, or after it")
        index = json.loads(text)
        suffix = index["suffix"]
        if type(suffix) is not str or not suffix.isascii() or set(suffix) & {"/", "\0"}:
            raise ValueError(f"files named {suffix!r}")
        layout = _layout_of(index["rule"], index["items"])
        listed = read_index(base64.b64decode(index["listed"]), uri)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError, zlib.error) as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: its index is damaged: {e}") from e
    split = {
        key: dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=t.dtype), torch.Size(t.shape), cast("Any", _Chunks(t))
        )
        for key, t in layout.tensors.items()
    }
    paths = {**(listed.planner_data or {}), **{key: t.path for key, t in layout.tensors.items()}}
    places: Any = _Places(layout, suffix, listed.storage_data)
    return dcp.Metadata({**split, **listed.state_dict_metadata}, paths, places)


def _layout_of(rule: Any, items: Any) -> ShardLayout:
    """Return the rule in an index, checked."""
    ranks = _whole(rule["ranks"], 1, _MOST_RANKS)
    splits: list[Splits] = []
    for mesh, dims in rule["splits"]:
        found = Splits(tuple(_whole(size, 1) for size in mesh), tuple(tuple(map(int, of)) for of in dims))
        used = list(itertools.chain(*found.dims))
        is_split = len(set(used)) == len(used) and set(used) <= set(range(len(found.mesh)))
        if math.prod(found.mesh) != ranks or not is_split:
            raise ValueError(f"splits {dims} over {mesh} of {ranks} ranks")
        splits.append(found)
    tensors: list[SplitTensor] = []
    for path, shape, name, number in rule["tensors"]:
        sizes = tuple(_whole(size, 1) for size in shape)
        how = splits[_whole(number, 0, len(splits) - 1)]
        if len(how.dims) != len(sizes) or not path or not all(type(step) in (str, int) for step in path):
            raise ValueError(f"a tensor at {path!r} of {len(sizes)} dimensions is split in {len(how.dims)}")
        tensors.append(SplitTensor(tuple(path), sizes, _dtype_of(name), how))
    if len({tensor.key for tensor in tensors}) != len(tensors):
        raise ValueError("two tensors with one key")
    known = {(tuple(_whole(n, 1) for n in sizes), _dtype_of(name)): _whole(size, 1) for sizes, name, size in items}
    files, least_bytes = _whole(rule["files"], 1), _whole(rule["least_bytes"], 1)
    return ShardLayout(ranks, tensors, files=files, least_bytes=least_bytes, item_bytes=known)


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"numbers of the type {name!r}, which are not known")
    return dtype


def _whole(number: Any, least: int, most: int = 1 << 62) -> int:
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"{number!r}, where a whole number of at least {least} belongs")
    return number


@final
class _Chunks(Sequence[dcp.ChunkStorageMetadata]):
    """The parts of a tensor, as DCP lists the parts."""

    def __init__(self, tensor: SplitTensor) -> None:
        self.tensor = tensor

    def overlapping(self, wanted: Box | None) -> list[dcp.ChunkStorageMetadata]:
        """Return the parts with elements in ``wanted``; ``None``: all parts."""
        boxes = (box for box, _ in self.tensor.boxes(wanted))
        return [dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]

    @functools.cached_property
    def _all(self) -> list[dcp.ChunkStorageMetadata]:
        return self.overlapping(None)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: Any) -> Any:
        return self._all[number]


@final
class _Places(Mapping[dcp.MetadataIndex, Any]):
    """Places of pieces, by key and offsets: from the rule, or from the list of other places."""

    def __init__(self, layout: ShardLayout, suffix: str, listed: Mapping[dcp.MetadataIndex, Any]) -> None:
        self.layout = layout
        self._suffix = suffix
        self._listed = listed
        self._of: dict[int, dict[dcp.MetadataIndex, Any]] = {}

    def _of_rank(self, rank: int) -> dict[dcp.MetadataIndex, Any]:
        if rank not in self._of:
            self._of[rank] = {part.metadata_index: place for part, place in self.layout.places(rank, self._suffix)}
        return self._of[rank]

    def __getitem__(self, index: dcp.MetadataIndex) -> Any:
        if (listed := self._listed.get(index)) is not None:
            return listed
        tensor = self.layout.tensors[index.fqn]
        for _, lowest in tensor.boxes((tuple(index.offset or ()), (1,) * len(tensor.shape))):
            return self._of_rank(self.layout.writer(tensor, lowest))[index]
        raise KeyError(index)

    def __iter__(self) -> Iterator[dcp.MetadataIndex]:
        yield from self._listed
        for rank in range(self.layout.ranks):
            yield from (index for index in self._of_rank(rank) if index not in self._listed)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def chunks_at(stored: dcp.TensorStorageMetadata, wanted: Box) -> Sequence[dcp.ChunkStorageMetadata]:
    """Return parts of a tensor: with a rule only the parts with elements in ``wanted``, otherwise all parts."""
    chunks: Any = stored.chunks
    return chunks.overlapping(wanted) if isinstance(chunks, _Chunks) else chunks
