"""Compact index of a sharded checkpoint of many pieces: a rule with the splits of each tensor, not a list of parts.

Offsets, sizes, writers, files and places of all parts follow from shapes, meshes and splits. Values and plain tensors
are in an index of DCP (``torch.distributed.checkpoint``) beside the rule. A reader gets the classes of DCP, with parts
computed on demand.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
import math
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, cast, final

import msgspec
import torch
import xxhash
from msgspec import Meta
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.tensor import DTensor

from composerlite.checkpoint.format import SUFFIX
from composerlite.checkpoint.format.sharded_index import Path, StorageInfo, read_index
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.errors import CorruptCheckpointError

LAYOUT_MARK = b"composerlite sharded layout 5: for torch.distributed.checkpoint use 'composerlite checkpoint convert'\n"
"""The first bytes of an index that is a rule."""
_MOST_BYTES, _MOST_TIMES = 64 << 20, 64
"""Limit of an unpacked index: this size, plus this multiple of the packed size."""
MOST_CHUNKS = 1 << 15
"""Largest number of chunks with a digest in a file. The digests of all chunks are in one record."""
_MOST_CHUNKS_BY_RULE = 1 << 18  # in the files of all ranks together: 3 MB of digests
_MOST_RANKS = 1 << 17
_MOST_DIMS = 64  # of a tensor, as in torch, and of a mesh
_Positive = Annotated[int, Meta(ge=1, le=2**62 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**62 - 1)]
"""A whole number in a file."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A region of a tensor: offsets and sizes, by dimension."""
Cut = tuple[int, int, int]
"""A part along one dimension of a tensor: start, length, and a number of ranks. The sum of these numbers over all
dimensions is the lowest rank with the part.
"""
Part = tuple[dcp.ChunkStorageMetadata, int]
"""A part of a tensor, and the lowest rank with the part."""
T = TypeVar("T")
Splits = tuple[tuple[int, int], ...]
"""For each mesh dimension that splits a tensor dimension: size, and stride (difference between neighboring ranks)."""


@functools.lru_cache(4096)  # thousands of tensors have few different lengths
def _cut(length: int, splits: Splits, rank: int) -> Cut:
    """Return the part of ``rank`` along a dimension of a tensor. The part may be empty."""
    start = lowest = 0
    for count, stride in splits:
        at, piece = rank // stride % count, -(-length // count)
        start, length = start + min(length, piece * at), max(0, min(piece, length - piece * at))
        lowest += at * stride
    return start, length, lowest


@functools.lru_cache(64)  # a model has a dozen; a small cache, since a forged index could fill memory
def _cuts(length: int, splits: Splits) -> list[Cut]:
    """Return all parts along a dimension of a tensor, in order."""
    ranks = itertools.product(*(range(0, count * stride, stride) for count, stride in splits))
    return [_cut(length, splits, sum(rank)) for rank in ranks]


def _joined(cell: Sequence[Cut]) -> Part:
    """Return the part with the cut ``cell[d]`` along each dimension ``d``."""
    starts, sizes, ranks = zip(*cell, strict=True) if cell else ((), (), ())
    return dcp.ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes)), sum(ranks)


@final
class SplitTensor(NamedTuple):
    """A tensor, distributed over all ranks.

    Attributes:
        path: in the nested state; the key is the path with dots.
        shape: of the whole tensor.
        dtype: of the tensor.
        mesh: shape of the mesh; each rank is in the mesh once, in row-major order.
        dims: for each dimension of the tensor the mesh dimensions that split the dimension, the outermost first. Each
            split cuts a range into pieces of equal size, rounded up; the last pieces may be smaller, or empty.
    """

    path: Annotated[tuple[str | int, ...], Meta(min_length=1)]
    shape: Annotated[tuple[_Positive, ...], Meta(max_length=_MOST_DIMS)]
    dtype: torch.dtype
    mesh: Annotated[tuple[_Positive, ...], Meta(max_length=_MOST_DIMS)]
    dims: tuple[tuple[Count, ...], ...]

    @property
    def key(self) -> str:
        """Key in the index."""
        return ".".join(map(str, self.path))

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Size of each dimension of the mesh, and the difference between neighboring ranks along the dimension."""
        return [(size, math.prod(self.mesh[dim + 1 :])) for dim, size in enumerate(self.mesh)]

    def splits(self) -> list[tuple[int, Splits]]:
        """Return the length and the splits of each dimension."""
        steps = self.steps
        return [(n, tuple(steps[dim] for dim in of)) for n, of in zip(self.shape, self.dims, strict=True)]

    def cuts(self) -> list[list[Cut]]:
        """Return all parts along each dimension."""
        return [_cuts(length, splits) for length, splits in self.splits()]

    def piece(self, rank: int) -> tuple[StatePiece, int]:
        """Return the part of ``rank``, perhaps without elements, and the lowest rank with this part."""
        chunk, lowest = _joined([_cut(length, splits, rank) for length, splits in self.splits()])
        return StatePiece(self.key, self.shape, self.dtype, chunk.offsets, chunk.sizes), lowest

    def parts(self, wanted: Box | None = None) -> Iterator[Part]:
        """Yield all parts with elements; with ``wanted`` only the parts with elements in ``wanted``."""
        found = self.cuts()
        for dim, (first, size) in enumerate(zip(*wanted, strict=True) if wanted is not None else ()):
            begin = bisect.bisect_right(found[dim], first, key=lambda cut: cut[0]) - 1
            end = bisect.bisect_left(found[dim], first + size, key=lambda cut: cut[0])
            found[dim] = found[dim][max(0, begin) : end]
        yield from map(_joined, itertools.product(*([cut for cut in cuts if cut[1]] for cuts in found)))


def split_of(path: Path, tensor: DTensor) -> SplitTensor | None:
    """Return the splits of ``tensor``; ``None`` if a placement neither splits a dimension nor replicates."""
    dims: list[list[int]] = [[] for _ in tensor.shape]
    # A placement with a split factor comes last, to split the pieces of all other placements, also of placements
    # on later mesh dimensions.
    for number, placement in sorted(enumerate(tensor.placements), key=lambda one: hasattr(one[1], "split_factor")):
        dim: Any = getattr(placement, "dim", None)
        if dim is not None:
            dims[dim].append(number)
        elif not placement.is_replicate():
            return None
    return SplitTensor(
        path, tuple(tensor.shape), tensor.dtype, tuple(tensor.device_mesh.shape), tuple(map(tuple, dims))
    )


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
        """Bytes of the numbers; 1 for a value, since the size of a value is known only on the rank with the value."""
        return 1 if self.dtype is None else math.prod(self.sizes) * self.dtype.itemsize

    @property
    def metadata_index(self) -> dcp.MetadataIndex:
        """Key and offsets, as DCP identifies the piece."""
        return dcp.MetadataIndex(self.key, None if self.shape is None else torch.Size(self.offsets))


def balanced(items: Iterable[T], size_of: Callable[[T], int], count: int) -> list[list[T]]:
    """Divide ``items`` into ``count`` groups of about the same size. The largest items are assigned first."""
    groups: list[list[T]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for item in sorted(items, key=size_of, reverse=True):
        load, group = loads[0]
        groups[group].append(item)
        heapq.heapreplace(loads, (load + size_of(item), group))
    return groups


@functools.lru_cache(4096)
def item_place(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Return the offset of the numbers in a tensor's item, and the bytes of the item, as this version writes items."""
    image = TorchImage(cast("Any", torch.empty(sizes, dtype=dtype)))
    return image.storages[0].offset, image.size_bytes


@final
@dataclass(frozen=True)
class ShardLayout:
    """The rule: the splits of all distributed tensors of a state. Stored in the index as JSON.

    Attributes:
        ranks: number of ranks.
        tensors: all distributed tensors, in the order of their keys.
        items: for all parts of the same sizes and dtype: sizes, dtype, and bytes of such a part in a file. Empty: the
            bytes follow from :func:`item_place`.

    Raises:
        ValueError: the splits of a tensor do not fit the tensor, or the ranks.
    """

    ranks: Annotated[int, Meta(ge=1, le=_MOST_RANKS)]
    tensors: tuple[SplitTensor, ...]
    items: tuple[tuple[tuple[_Positive, ...], torch.dtype, _Positive], ...] = ()

    def __post_init__(self) -> None:
        for _, shape, _, mesh, dims in self.tensors:
            used = list(itertools.chain(*dims))
            is_split = len(dims) == len(shape) and len(set(used)) == len(used) and max(used, default=-1) < len(mesh)
            if math.prod(mesh) != self.ranks or not is_split:
                raise ValueError(f"splits {dims} of {len(shape)} dimensions over {mesh} of {self.ranks} ranks")
        if len(self.by_key) != len(self.tensors):
            raise ValueError("two tensors with one key")

    @functools.cached_property
    def by_key(self) -> dict[str, SplitTensor]:
        """The tensors by key."""
        return {tensor.key: tensor for tensor in self.tensors}

    @functools.cached_property
    def writers(self) -> dict[str, int]:
        """The writing replica of each tensor, by key: the number plus the lowest rank with a part is the writer."""
        alike: dict[Any, list[SplitTensor]] = {}
        for tensor in self.tensors:
            alike.setdefault((tensor.mesh, tensor.dims), []).append(tensor)
        found: dict[str, int] = {}
        for tensors in alike.values():
            split = set(itertools.chain(*tensors[0].dims))
            steps = [range(0, n * step, step) for dim, (n, step) in enumerate(tensors[0].steps) if dim not in split]
            replicas = list(map(sum, itertools.product(*steps)))
            groups = balanced(tensors, lambda tensor: math.prod(tensor.shape) * tensor.dtype.itemsize, len(replicas))
            for added, group in zip(replicas, groups, strict=True):
                found.update({tensor.key: added for tensor in group})
        return found

    def digest(self, listed: Sequence[StatePiece]) -> str:
        """Return a digest that is equal on ranks with the same rule and the same other pieces ``listed``."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode((self, listed), enc_hook=_dtype_name))

    @property
    def most_chunks(self) -> int:
        """Largest number of chunks with a digest in a file: a single record contains the digests of all files."""
        return max(1, _MOST_CHUNKS_BY_RULE // self.ranks)

    def pieces(self, rank: int) -> list[StatePiece]:
        """Return the parts in the file of ``rank``, in order. Pieces outside of the rule are at the end of the file."""
        parts = (tensor.piece(rank) for tensor in self.tensors)
        return [one for one, lowest in parts if lowest + self.writers[one.key] == rank and one.size_bytes]

    def places(self, rank: int, suffix: str) -> dict[dcp.MetadataIndex, Any]:
        """Return the place of each part of ``rank``. ``suffix``: of the names of files."""
        found: dict[dcp.MetadataIndex, Any] = {}
        listed: dict[Any, int] = {(sizes, dtype): size for sizes, dtype, size in self.items}
        name, at = file_name(rank, 0, suffix), 0
        for part in self.pieces(rank):
            size = listed[part.sizes, part.dtype] if listed else item_place(part.sizes, part.dtype)[1]
            found[part.metadata_index] = StorageInfo(name, at, size)
            at += size
        return found

    def pack(self, listed: dcp.Metadata, suffix: str) -> bytes:
        """Return the index as bytes: this rule, and the index ``listed`` of all other pieces."""
        forms: dict[tuple[tuple[int, ...], torch.dtype], None] = {}
        for tensor in dict.fromkeys(tensor._replace(path=()) for tensor in self.tensors):
            lengths = [dict.fromkeys(size for _, size, _ in cuts if size) for cuts in tensor.cuts()]
            forms.update(dict.fromkeys((sizes, tensor.dtype) for sizes in itertools.product(*lengths)))
        items = tuple((sizes, dtype, item_place(sizes, dtype)[1]) for sizes, dtype in forms)
        index = (dataclasses.replace(self, items=items), suffix, pickle.dumps(listed))
        return LAYOUT_MARK + zlib.compress(msgspec.json.encode(index, enc_hook=_dtype_name), 1)


_Index = tuple[ShardLayout, Annotated[str, Meta(pattern=r"^[ -.0-~]*\Z", max_length=64)], bytes]
"""The rule, the suffix of the names of files, and an index of DCP of other pieces."""


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _dtype_of(_: type, name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"numbers of the type {name!r}, which are unknown")
    return dtype


def file_name(rank: int, number: int, suffix: str) -> str:
    """Return the name of a data file, in the form of DCP. ``suffix``: of the save."""
    return f"__{rank}_{number}{suffix}{SUFFIX}"


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def read_layout(data: bytes, uri: str) -> dcp.Metadata:
    """Return the index in ``data``, bytes of :meth:`ShardLayout.pack`, with the classes of DCP.

    Raises:
        CorruptCheckpointError: the index is damaged.
        UntrustedCheckpointError: the index of other pieces names an unknown type.
    """
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(data[len(LAYOUT_MARK) :], _MOST_BYTES + _MOST_TIMES * len(data))
        if not stream.eof or stream.unused_data:
            raise ValueError("it has the wrong length")
        layout, suffix, pickled = msgspec.json.decode(text, type=_Index, dec_hook=_dtype_of)
        listed = read_index(pickled, uri)
    except (ValueError, RecursionError, MemoryError, zlib.error) as e:  # errors of msgspec are ValueErrors
        raise CorruptCheckpointError(f"checkpoint {uri!r}: its index is damaged: {e}") from e
    entries, paths = dict(listed.state_dict_metadata), dict(listed.planner_data or {})
    for key, tensor in layout.by_key.items():
        entries.setdefault(key, _SplitEntry(tensor))
        paths[key] = tensor.path
    places: Any = _Places(layout, suffix, listed.storage_data)
    return dcp.Metadata(entries, paths, places)


@final
class _SplitEntry(dcp.TensorStorageMetadata):
    """The entry of a tensor in an index of DCP, with the list of the parts made on demand."""

    def __init__(self, tensor: SplitTensor) -> None:
        self.tensor = tensor
        self.properties, self.size = dcp.TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape)

    @functools.cached_property
    def chunks(self) -> list[dcp.ChunkStorageMetadata]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [chunk for chunk, _ in self.tensor.parts()]


@final
class _Places(Mapping[dcp.MetadataIndex, Any]):
    """Places of pieces, by key and offsets: from the rule, or from the list of other places."""

    def __init__(self, layout: ShardLayout, suffix: str, listed: Mapping[dcp.MetadataIndex, Any]) -> None:
        self._layout = layout
        self._listed = listed
        self._of_rank = functools.cache(lambda rank: layout.places(rank, suffix))

    def __getitem__(self, index: dcp.MetadataIndex) -> Any:
        if (listed := self._listed.get(index)) is not None:
            return listed
        tensor = self._layout.by_key[index.fqn]
        for _, lowest in tensor.parts((tuple(index.offset or ()), (1,) * len(tensor.shape))):
            return self._of_rank(lowest + self._layout.writers[tensor.key])[index]
        raise KeyError(index)

    def __iter__(self) -> Iterator[dcp.MetadataIndex]:
        yield from self._listed
        for rank in range(self._layout.ranks):
            yield from (index for index in self._of_rank(rank) if index not in self._listed)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def chunks_at(stored: dcp.TensorStorageMetadata, wanted: Box) -> Sequence[dcp.ChunkStorageMetadata]:
    """Return parts of a tensor: with a rule only the parts with elements in ``wanted``, otherwise all parts."""
    if isinstance(stored, _SplitEntry):
        return [chunk for chunk, _ in stored.tensor.parts(wanted)]
    return stored.chunks
