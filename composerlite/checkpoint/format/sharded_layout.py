"""The index of a sharded checkpoint of many parts as a rule: how each tensor is split, and not a list of its parts.

Offsets, sizes, writers, files and places of all parts follow from shapes, meshes and splits. What does not, values and
tensors that are not distributed, is listed: in the form of DCP, whose classes the rule is read as, too.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
import json
import math
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, final, overload

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from composerlite.checkpoint.format import SUFFIX
from composerlite.checkpoint.format.sharded_index import Path, StorageInfo, check_index, read_index
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.dist import shard_box
from composerlite.errors import CorruptCheckpointError

__all__ = [
    "Part",
    "ShardLayout",
    "SplitTensor",
    "Splits",
    "balanced",
    "chunks_at",
    "file_name",
    "is_layout",
    "narrowed",
    "read_layout",
    "split_of",
]

_MAGIC = b"composerlite sharded layout 1: for torch.distributed.checkpoint use 'composerlite checkpoint convert'\n"
_MOST_BYTES, _MOST_TIMES = 64 << 20, 64
"""So much an index is unpacked, and so many times its size."""
_MOST_CHUNKS = 1 << 18  # of all files: 3 MB of digests
_MOST_RANKS = 1 << 17
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@final
class Splits(NamedTuple):
    """Splits of tensors over ranks.

    Attributes:
        mesh: its shape; the ranks are in it in row-major order, each once.
        dims: for each dimension of the tensor the dimensions of the mesh that split it, the outermost first. Each cuts
            what it is given into pieces of equal size, rounded up; the last ones may be smaller, or empty.
    """

    mesh: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which all have the same."""
        used = set(itertools.chain(*self.dims))
        return tuple(dim for dim in range(len(self.mesh)) if dim not in used)

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """The part of ``rank`` of a tensor of that shape."""
        return _box(self, tuple(shape), rank)


def _coordinate(rank: int, mesh: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(mesh):
        rank, at = divmod(rank, size)
        found.append(at)
    return tuple(reversed(found))


def _span(length: int, mesh: Sequence[int], dims: Sequence[int], coordinate: Sequence[int]) -> tuple[int, int]:
    """Start and length of a part along one dimension of a tensor."""
    start = 0
    for dim in dims:
        piece = -(-length // mesh[dim])
        skipped = min(length, piece * coordinate[dim])
        start, length = start + skipped, min(piece, length - skipped)
    return start, length


@functools.lru_cache(4096)  # of thousands of tensors few have a form of their own
def _box(splits: Splits, shape: tuple[int, ...], rank: int) -> Box:
    coordinate = _coordinate(rank, splits.mesh)
    spans = [_span(n, splits.mesh, dims, coordinate) for n, dims in zip(shape, splits.dims, strict=True)]
    return tuple(start for start, _ in spans), tuple(size for _, size in spans)


@functools.lru_cache(64)  # a model has a dozen; of an index that somebody made up they fill no memory
def _cuts(length: int, sizes: tuple[int, ...]) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
    """Start, length and coordinate of all parts along one dimension that are not empty, in order."""
    dims = range(len(sizes))
    found = [(*_span(length, sizes, dims, at), at) for at in itertools.product(*map(range, sizes))]
    found = [one for one in found if one[1]]
    return [start for start, _, _ in found], [size for _, size, _ in found], [at for _, _, at in found]


def _lengths(length: int, sizes: Sequence[int]) -> list[int]:
    """The different lengths of parts along one dimension that are not empty, in order, without the parts."""
    found = {length}
    for size in sizes:
        found = {one for whole in found for one in (-(-whole // size), whole % -(-whole // size)) if one}
    return sorted(found)


@final
class SplitTensor(NamedTuple):
    """A tensor that is distributed over all ranks.

    Attributes:
        path: of it in the nested state; its key is that with dots.
        shape: of the whole.
        dtype: of its numbers.
        splits: how it is.
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
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize

    def boxes(self, wanted: Box | None = None) -> Iterator[tuple[Box, int]]:
        """Yield the parts, those that overlap with ``wanted``, and the lowest rank that has each."""
        mesh, dims = self.splits
        cuts = [_cuts(n, tuple(mesh[dim] for dim in of)) for n, of in zip(self.shape, dims, strict=True)]
        strides = [math.prod(mesh[dim + 1 :]) for dim in range(len(mesh))]
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
    """Return the splits of ``tensor``; ``None`` if it is split in another way."""
    mesh, dims = tensor.device_mesh, [list[int]() for _ in tensor.shape]
    inner: list[tuple[int, int]] = []
    for number, placement in enumerate(tensor.placements):
        dim: Any = getattr(placement, "dim", None)
        if dim is None:
            if not placement.is_replicate():
                return None
        elif hasattr(placement, "split_factor"):  # what later dimensions of the mesh have split before
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
class Part(NamedTuple):
    """A part of a tensor, as its rank writes it."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def metadata_index(self) -> MetadataIndex:
        """Key of it, as DCP has it."""
        return MetadataIndex(self.key, torch.Size(self.offsets))


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide numbered things of these sizes into ``count`` groups of about the same size: the larger ones first."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for number in sorted(range(len(sizes)), key=lambda number: sizes[number], reverse=True):
        load, group = loads[0]
        groups[group].append(number)
        heapq.heapreplace(loads, (load + sizes[number], group))
    return groups


@functools.lru_cache(4096)
def _item_bytes(sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor as an item of a file."""
    return TorchImage(cast("Any", torch.empty(sizes, dtype=dtype))).size_bytes


@final
class ShardLayout:
    """The rule of one state on some ranks.

    Args:
        ranks: number of them.
        tensors: all that are distributed, in the order of their keys.
        files: most files of a rank.
        least_bytes: of a file, where a rank has several.
        item_bytes: bytes that parts take in a file, by sizes and dtype; ``None``: as this version writes them.
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
        self._kept: dict[int, list[list[Part]]] = {}

    def _writers(self) -> dict[str, int]:
        """Choose the replica that writes each tensor: what is added to the lowest rank that has a part of it."""
        by_splits: dict[Splits, list[SplitTensor]] = {}
        for tensor in self.tensors.values():
            by_splits.setdefault(tensor.splits, []).append(tensor)
        found: dict[str, int] = {}
        for (mesh, dims), tensors in by_splits.items():
            replicas = Splits(mesh, dims).replicas
            strides = [math.prod(mesh[dim + 1 :]) for dim in replicas]
            sizes = [mesh[dim] for dim in replicas]
            groups = balanced([tensor.size_bytes for tensor in tensors], math.prod(sizes))
            for number, group in enumerate(groups):
                added = sum(at * stride for at, stride in zip(_coordinate(number, sizes), strides, strict=True))
                found.update({tensors[one].key: added for one in group})
        return found

    @property
    def digest(self) -> str:
        """The same on ranks that have the same rule."""
        return xxhash.xxh3_128_hexdigest(self._text())

    @property
    def most_chunks(self) -> int:
        """Most parts in which a file is verified: the digests of all are in one manifest."""
        return max(1, _MOST_CHUNKS // (self.ranks * self._files))

    def parts(self, rank: int) -> Iterator[Part]:
        """Yield the parts that ``rank`` writes, in the order of keys."""
        for key, tensor in self.tensors.items():
            coordinate = _coordinate(rank, tensor.splits.mesh)
            replica = [coordinate[dim] for dim in tensor.splits.replicas]
            if replica == [_coordinate(self._replicas[key], tensor.splits.mesh)[dim] for dim in tensor.splits.replicas]:
                offsets, sizes = tensor.splits.box(tensor.shape, rank)
                if math.prod(sizes):
                    yield Part(key, offsets, sizes, tensor.dtype)

    def files(self, rank: int) -> list[list[Part]]:
        """The parts in each file of ``rank``, in order. What is listed comes after those of the last file."""
        if rank not in self._kept:
            parts = list(self.parts(rank))
            total = sum(part.size_bytes for part in parts)
            count = max(1, min(self._files, len(parts), -(-total // self._least_bytes)))
            groups = balanced([part.size_bytes for part in parts], count)
            self._kept[rank] = [[parts[number] for number in group] for group in groups]
        return self._kept[rank]

    def places(self, rank: int, suffix: str) -> Iterator[tuple[Part, Any]]:
        """Yield the parts of ``rank`` and where each is."""
        for number, parts in enumerate(self.files(rank)):
            name, at = file_name(rank, number, suffix), 0
            for part in parts:
                size = self.item_bytes(part)
                yield part, StorageInfo(name, at, size)
                at += size

    def item_bytes(self, part: Part) -> int:
        """Bytes that a part takes in its file."""
        if self._item_bytes is None:
            return _item_bytes(part.sizes, part.dtype)
        return self._item_bytes[part.sizes, part.dtype]

    def kinds(self) -> list[Part]:
        """One part of each form that there is."""
        found: dict[Any, Part] = {}
        forms = dict.fromkeys((tensor.shape, tensor.dtype, tensor.splits) for tensor in self.tensors.values())
        for shape, dtype, (mesh, dims) in forms:
            lengths = [_lengths(n, tuple(mesh[dim] for dim in of)) for n, of in zip(shape, dims, strict=True)]
            for sizes in itertools.product(*lengths):
                found[sizes, dtype] = Part("", (), sizes, dtype)
        return list(found.values())

    def writer(self, tensor: SplitTensor, lowest: int) -> int:
        """The rank that writes the part of ``tensor`` that ``lowest`` is the lowest rank to have."""
        return lowest + self._replicas[tensor.key]

    # ── as bytes ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _text(self) -> bytes:
        splits = {one: number for number, one in enumerate(dict.fromkeys(t.splits for t in self.tensors.values()))}
        told = {
            "ranks": self.ranks,
            "files": self._files,
            "least_bytes": self._least_bytes,
            "splits": list(splits),
            "tensors": [[t.path, t.shape, _dtype_name(t.dtype), splits[t.splits]] for t in self.tensors.values()],
        }
        return json.dumps(told, separators=(",", ":")).encode()

    def pack(self, listed: Metadata, suffix: str) -> bytes:
        """The index: this rule, and ``listed``, what does not follow from it."""
        items = [[part.sizes, _dtype_name(part.dtype), self.item_bytes(part)] for part in self.kinds()]
        rows, listed = _whole_tensors(listed)
        head = json.dumps({"suffix": suffix, "items": items, "whole": rows}, separators=(",", ":")).encode()
        texts = [self._text(), head, pickle.dumps(listed)]
        lengths = b"".join(len(text).to_bytes(8, "big") for text in texts)
        return _MAGIC + zlib.compress(lengths + b"".join(texts), 1)


def _whole_tensors(listed: Metadata) -> tuple[list[list[Any]], Metadata]:
    """Rows of the tensors that are stored whole, as the generators of each rank are, and the rest of what is listed.

    Of thousands of ranks rows are read much faster than objects in a pickle.
    """
    rows: list[list[Any]] = []
    known = functools.cache(_whole_tensor)
    entries, places, paths = (
        dict(listed.state_dict_metadata),
        dict(listed.storage_data),
        dict(listed.planner_data or {}),
    )
    for key, stored in listed.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            shape, dtype = tuple(stored.size), stored.properties.dtype
            index, path = MetadataIndex(key, torch.Size([0] * len(shape))), paths.get(key, ())
            place: Any = places.get(index)
            if ".".join(map(str, path)) == key and place is not None and stored == known(shape, dtype):
                row = [path, shape, _dtype_name(dtype), place.relative_path, place.offset, place.length]
                if place == StorageInfo(*row[3:]):
                    rows.append(row)
                    del entries[key], places[index], paths[key]
    return rows, dataclasses.replace(listed, state_dict_metadata=entries, storage_data=places, planner_data=paths)


def _whole_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> TensorStorageMetadata:
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])


def file_name(rank: int, number: int, suffix: str) -> str:
    """Name of a data file, as DCP has it; ``suffix`` is that of one save."""
    return f"__{rank}_{number}{suffix}{SUFFIX}"


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def is_layout(data: bytes) -> bool:
    """Return true if the index ``data`` is a rule."""
    return data.startswith(_MAGIC)


def read_layout(data: bytes, uri: str) -> Metadata:
    """Read an index that is a rule; its parts and places are worked out when they are asked for.

    Raises:
        CorruptCheckpointError: it is damaged.
        UntrustedCheckpointError: it names what is not known to be safe.
    """
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(data[len(_MAGIC) :], _MOST_BYTES + _MOST_TIMES * len(data))
        if not stream.eof or stream.unused_data:
            raise ValueError("it ends before its end, or after it")
        lengths = [int.from_bytes(text[at : at + 8], "big") for at in (0, 8, 16)]
        if sum(lengths) + 24 != len(text):
            raise ValueError(f"{len(text)} bytes with parts of {lengths}")
        texts = [text[24 + sum(lengths[:n]) : 24 + sum(lengths[: n + 1])] for n in range(3)]
        head = json.loads(texts[1])
        layout, suffix = _layout_of(json.loads(texts[0]), head)
        whole = _whole_of(head.get("whole", []))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, zlib.error) as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: its index is damaged: {e}") from e
    listed = read_index(texts[2], uri)
    split = {
        key: TensorStorageMetadata(TensorProperties(dtype=t.dtype), torch.Size(t.shape), cast("Any", _Chunks(t)))
        for key, t in layout.tensors.items()
    }
    paths = {
        **(listed.planner_data or {}),
        **whole.planner_data,
        **{key: t.path for key, t in layout.tensors.items()},
    }
    places: Any = _Places(layout, suffix, {**listed.storage_data, **whole.storage_data})
    entries = {**split, **whole.state_dict_metadata, **listed.state_dict_metadata}
    return Metadata(entries, paths, places, listed.storage_meta)


def _whole_of(rows: Any) -> Metadata:
    """Parse the rows of a list."""
    found, known = Metadata({}, {}, {}), functools.cache(_whole_tensor)
    for path, shape, name, file, offset, length in rows:
        key = ".".join(map(str, _path_of(path)))
        stored = known(tuple(_whole(size, 0) for size in shape), _dtype_of(name))
        found.state_dict_metadata[key] = stored
        found.storage_data[MetadataIndex(key, stored.chunks[0].offsets)] = StorageInfo(file, offset, length)
        found.planner_data[key] = tuple(path)
    check_index(found)
    return found


def _layout_of(told: Any, head: Any) -> tuple[ShardLayout, str]:
    """The rule of what was read, every number of which can be."""
    ranks, suffix = _whole(told["ranks"], 1, _MOST_RANKS), head["suffix"]
    if type(suffix) is not str or set(suffix) & {"/", "\0"}:
        raise ValueError(f"files named {suffix!r}")
    splits = [_splits_of(mesh, dims, ranks) for mesh, dims in told["splits"]]
    tensors: list[SplitTensor] = []
    for path, shape, name, number in told["tensors"]:
        sizes = tuple(_whole(size, 1) for size in shape)
        how = splits[_whole(number, 0, len(splits) - 1)]
        if len(how.dims) != len(sizes):
            raise ValueError(f"{path!r} of {len(sizes)} dimensions is split in {len(how.dims)}")
        tensors.append(SplitTensor(_path_of(path), sizes, _dtype_of(name), how))
    if len({tensor.key for tensor in tensors}) != len(tensors):
        raise ValueError("two tensors with one key")
    items = {
        (tuple(_whole(size, 1) for size in sizes), _dtype_of(name)): _whole(size, 1)
        for sizes, name, size in head["items"]
    }
    files, least_bytes = _whole(told["files"], 1), _whole(told["least_bytes"], 1)
    layout = ShardLayout(ranks, tensors, files=files, least_bytes=least_bytes, item_bytes=items)
    if strange := [part for part in layout.kinds() if (part.sizes, part.dtype) not in items]:
        raise ValueError(f"no size of parts of {strange[0].sizes} of {strange[0].dtype}")
    return layout, suffix


def _path_of(path: Any) -> Path:
    if not path or not all(type(step) in (str, int) for step in path):
        raise ValueError(f"a tensor at {path!r}")
    return tuple(path)


def _splits_of(mesh: Any, dims: Any, ranks: int) -> Splits:
    found = Splits(tuple(_whole(size, 1) for size in mesh), tuple(tuple(map(int, of)) for of in dims))
    used = list(itertools.chain(*found.dims))
    if math.prod(found.mesh) != ranks or len(set(used)) != len(used) or not set(used) <= set(range(len(found.mesh))):
        raise ValueError(f"splits {dims} over {mesh} of {ranks} ranks")
    return found


def _dtype_name(dtype: torch.dtype) -> str:
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
class _Chunks(Sequence[ChunkStorageMetadata]):
    """The parts of a tensor, as DCP lists them."""

    def __init__(self, tensor: SplitTensor) -> None:
        self.tensor = tensor

    def overlapping(self, wanted: Box | None) -> list[ChunkStorageMetadata]:
        """Return the parts that overlap with ``wanted``."""
        return [_chunk(box) for box, _ in self.tensor.boxes(wanted)]

    @functools.cached_property
    def _all(self) -> list[ChunkStorageMetadata]:
        return self.overlapping(None)

    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, number: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, number: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, number: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        return self._all[number]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(cast("Sequence[Any]", other))

    __hash__ = None  # type: ignore[assignment]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))


@final
class _Places(Mapping[MetadataIndex, Any]):
    """Places of parts: what is listed, and what follows from the rule."""

    def __init__(self, layout: ShardLayout, suffix: str, listed: Mapping[MetadataIndex, Any]) -> None:
        self.layout = layout
        self._suffix = suffix
        self._listed = listed
        self._of: dict[int, dict[MetadataIndex, Any]] = {}

    def _of_rank(self, rank: int) -> dict[MetadataIndex, Any]:
        if rank not in self._of:
            self._of[rank] = {part.metadata_index: place for part, place in self.layout.places(rank, self._suffix)}
        return self._of[rank]

    def __getitem__(self, index: MetadataIndex) -> Any:
        if (listed := self._listed.get(index)) is not None:
            return listed
        tensor = self.layout.tensors[index.fqn]
        for _, lowest in tensor.boxes((tuple(index.offset or ()), (1,) * len(tensor.shape))):
            return self._of_rank(self.layout.writer(tensor, lowest))[index]
        raise KeyError(index)

    def __iter__(self) -> Iterator[MetadataIndex]:
        yield from self._listed
        for rank in range(self.layout.ranks):
            yield from (index for index in self._of_rank(rank) if index not in self._listed)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def chunks_at(stored: TensorStorageMetadata, wanted: Box) -> Sequence[ChunkStorageMetadata]:
    """The parts of a tensor, where they follow from a rule only those that overlap with ``wanted``."""
    chunks: Any = stored.chunks
    return chunks.overlapping(wanted) if isinstance(chunks, _Chunks) else chunks


def narrowed(metadata: Metadata, wanted: Mapping[str, Any]) -> Metadata:
    """``metadata`` with only those parts, where they follow from a rule, that this rank needs to fill ``wanted``."""
    found: dict[str, Any] = dict(metadata.state_dict_metadata)
    for key, value in wanted.items():
        stored = found.get(key)
        if isinstance(stored, TensorStorageMetadata) and isinstance(value, Tensor) and value.shape == stored.size:
            box = shard_box(value) if isinstance(value, DTensor) else ((0,) * value.dim(), tuple(value.shape))
            chunks = chunks_at(stored, box) if math.prod(box[1]) else []
            found[key] = TensorStorageMetadata(stored.properties, stored.size, list(chunks))
    return Metadata(found, metadata.planner_data, metadata.storage_data, metadata.storage_meta)
