"""Plan of a sharded save: assigns each shard to one rank that writes it, and makes the index on the first rank.

DCP's own merging moves and rebuilds an object tree for every part of every tensor on every rank, about 0.1 ms each, in
the first rank. Where there are many parts, the ranks compare a digest of how their tensors are split, and each works
out what it writes (docs/adr/0081). Else columns are sent: parts equal on all ranks are read once, and a rank learns
only which of its items are its to write.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import pickle
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast, final

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from composerlite._torch_compat import local_part
from composerlite.checkpoint.format.sharded_index import KEYS, leaves, value_bytes
from composerlite.checkpoint.format.sharded_layout import ShardLayout, SplitTensor, balanced, split_of
from composerlite.dist import Group, shard_box
from composerlite.errors import SaveError
from composerlite.types import StateDict

__all__ = ["AssignedItems", "KnownPlan", "PackedPlan", "Planner", "merge_plans", "plan_together"]

log = logging.getLogger(__name__)
A = TypeVar("A")
Place = tuple[int, ...] | None
_MOST_PLANS = 4
_MOST_LISTED = 50_000
"""Parts of tensors in an index of DCP, which lists them; with more it is a rule. About 9 MB."""
_MOST_FILES = 4096
"""Data files of a checkpoint, where it has many parts and no more ranks."""
LEAST_FILE_BYTES = 64 << 20
"""Bytes of a data file, where a rank writes several."""


class _Table(NamedTuple):
    """Tensors of the plan's items, by number: name, shape, properties; and the paths of the names."""

    keys: list[str]
    shapes: list[tuple[int, ...] | None]
    properties: list[TensorProperties | None]
    paths: dict[str, Any]


class _Columns(NamedTuple):
    """Some items of a plan.

    Attributes:
        table: a pickled :class:`_Table`: the same bytes on ranks that have parts of the same tensors.
        offsets: where the part of each item begins; ``None`` for what is no tensor.
        sizes: of the parts.
    """

    table: bytes
    offsets: list[Place]
    sizes: list[Place]

    @classmethod
    def of(cls, items: Sequence[WriteItem], paths: dict[str, Any]) -> _Columns:
        tensors = [item.tensor_data for item in items]
        keys = [item.index.fqn for item in items]
        known: dict[Any, TensorProperties] = {}
        table = _Table(
            keys,
            [None if tensor is None else tuple(tensor.size) for tensor in tensors],
            [None if tensor is None else _shared(tensor.properties, known) for tensor in tensors],
            {key: paths[key] for key in [*keys, *(key for key in paths if key.startswith(KEYS))] if key in paths},
        )
        return cls(
            pickle.dumps(table),
            [None if item.index.offset is None else tuple(item.index.offset) for item in items],
            [None if tensor is None else tuple(tensor.chunk.sizes) for tensor in tensors],
        )


def _shared(properties: TensorProperties, known: dict[Any, TensorProperties]) -> TensorProperties:
    key = (
        properties.dtype,
        properties.layout,
        properties.requires_grad,
        properties.memory_format,
        properties.pin_memory,
    )
    return known.setdefault(key, properties)


class PackedPlan(NamedTuple):
    """Items that a rank can write, packed for transport: shards of tensors, and whole values, which may be its own."""

    parts: _Columns
    wholes: _Columns

    @classmethod
    def of(cls, plan: SavePlan) -> PackedPlan:
        """Pack a plan that a planner of DCP made for one rank."""
        parts, wholes = _in_order(plan)
        paths: dict[str, Any] = plan.planner_data or {}
        return cls(_Columns.of(parts, paths), _Columns.of(wholes, paths))


def _in_order(plan: SavePlan) -> tuple[list[WriteItem], list[WriteItem]]:
    parts = [item for item in plan.items if item.type is WriteItemType.SHARD]
    return parts, [item for item in plan.items if item.type is not WriteItemType.SHARD]


class AssignedItems(NamedTuple):
    """Items of its plan that a rank is assigned to write.

    Attributes:
        numbers: of the items, parts before wholes.
        hints: where among the parts of its tensor each is, in the index.
    """

    numbers: list[int]
    hints: list[int | None]

    def of(self, plan: SavePlan) -> SavePlan:
        """The part of ``plan``, which this rank made, that it is to write."""
        parts, wholes = _in_order(plan)
        packed = [*parts, *wholes]
        items: list[WriteItem] = []
        for number, hint in zip(self.numbers, self.hints, strict=True):
            item = packed[number]
            index = item.index if hint is None else dataclasses.replace(item.index, index=hint)
            items.append(dataclasses.replace(item, index=index))
        return dataclasses.replace(plan, items=items)


class _Items(NamedTuple):
    """Items that a rank can write, unpacked."""

    keys: list[str]
    shapes: list[tuple[int, ...] | None]
    properties: list[TensorProperties | None]
    offsets: list[Place]
    sizes: list[Place]

    def size_bytes(self, number: int) -> int:
        """Size of an item; one byte for a value that is no tensor, whose size is not known."""
        sizes, properties = self.sizes[number], self.properties[number]
        return 1 if sizes is None or properties is None else math.prod(sizes) * properties.dtype.itemsize


def merge_plans(plans: Sequence[PackedPlan]) -> tuple[list[AssignedItems], Metadata]:
    """Build, on the first rank, the plan of each rank and the index, without the places of the data.

    What several ranks have is written by one of them, so that all write about as many bytes.

    Raises:
        ValueError: the parts of a tensor overlap, or do not make up the whole.
    """
    known: dict[bytes, _Table] = {}
    ranks: list[_Items] = []
    for plan in plans:
        for columns in (plan.parts, plan.wholes):
            if columns.table not in known:
                known[columns.table] = pickle.loads(columns.table)
        first, second = known[plan.parts.table], known[plan.wholes.table]
        ranks.append(
            _Items(
                first.keys + second.keys,
                first.shapes + second.shapes,
                first.properties + second.properties,
                plan.parts.offsets + plan.wholes.offsets,
                plan.parts.sizes + plan.wholes.sizes,
            )
        )
    shares, entries = _index(ranks, _partitioned(ranks))
    paths: dict[str, Any] = {}
    for table in reversed(known.values()):
        paths.update(table.paths)
    metadata = Metadata(entries, planner_data=paths)
    _check(metadata)
    return shares, metadata


def _partitioned(ranks: Sequence[_Items]) -> list[list[int]]:
    """The numbers of the items that each rank writes, in order."""
    first: dict[tuple[str, Place], tuple[int, int]] = {}
    copies: dict[tuple[str, Place], list[tuple[int, int]]] = {}
    for rank, items in enumerate(ranks):
        for number, place in enumerate(zip(items.keys, items.offsets, strict=True)):
            found = first.setdefault(place, (rank, number))
            if found[0] != rank:
                copies.setdefault(place, [found]).append((rank, number))
    if not copies:
        return [list(range(len(items.keys))) for items in ranks]
    loads = [0] * len(ranks)
    written: list[list[int]] = [[] for _ in ranks]
    for place, (rank, number) in first.items():
        if place not in copies:
            written[rank].append(number)
            loads[rank] += ranks[rank].size_bytes(number)
    sized = [(ranks[who[0][0]].size_bytes(who[0][1]), who) for who in copies.values()]
    for size, who in sorted(sized, key=lambda pair: pair[0], reverse=True):
        rank, number = min(who, key=lambda one: (loads[one[0]], one[0]))
        written[rank].append(number)
        loads[rank] += size
    return [sorted(numbers) for numbers in written]


def _index(ranks: Sequence[_Items], written: Sequence[list[int]]) -> tuple[list[AssignedItems], dict[str, Any]]:
    """The shares, and what the index says of each key."""
    entries: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], torch.Size] = {}
    shares: list[AssignedItems] = []

    def shape_of(sizes: tuple[int, ...]) -> torch.Size:  # one object for all that are equal: the index is smaller
        return shapes.get(sizes) or shapes.setdefault(sizes, torch.Size(sizes))

    for items, numbers in zip(ranks, written, strict=True):
        hints: list[int | None] = []
        for number in numbers:
            key, shape, properties = items.keys[number], items.shapes[number], items.properties[number]
            if shape is None or properties is None:
                entries[key] = BytesStorageMetadata()
                hints.append(None)
                continue
            entry = entries.get(key)
            if entry is None:
                entry = entries[key] = TensorStorageMetadata(properties, shape_of(shape), [])
            hints.append(len(entry.chunks))
            offsets, sizes = cast("Any", items.offsets[number]), cast("Any", items.sizes[number])
            entry.chunks.append(ChunkStorageMetadata(shape_of(offsets), shape_of(sizes)))
        shares.append(AssignedItems(numbers, hints))
    return shares, entries


# ── checking ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _check(metadata: Metadata) -> None:
    """Raise if parts of a tensor overlap, or do not make up the whole. What lies in a row is seen at a glance.

    Raises:
        ValueError: for the first such tensor.
    """
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and not _is_row(entry):
            found = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
            if sum(math.prod(chunk.sizes) for chunk in found) != math.prod(entry.size):
                raise ValueError(f"the ranks do not have the parts of one state: those of {key!r} have another size")
            if _overlap(found):
                raise ValueError(f"the ranks do not have the parts of one state: those of {key!r} overlap")


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return true if two of the parts overlap.

    Each is compared with those that overlap in one dimension: that in which the parts have the most different offsets.
    """
    if len(chunks) < 2:
        return False
    if not chunks[0].sizes:
        return True
    along = max(range(len(chunks[0].sizes)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        active = [one for one in active if one.offsets[along] + one.sizes[along] > chunk.offsets[along]]
        if any(_share(one, chunk) for one in active):
            return True
        active.append(chunk)
    return False


def _share(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> bool:
    spans = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(first < other + its and other < first + size for first, size, other, its in spans)


def _is_row(entry: TensorStorageMetadata) -> bool:
    """Return true if the parts are whole in all dimensions but the first, and consecutive there."""
    if not entry.size:
        return len(entry.chunks) == 1
    rest, end = entry.size[1:], 0
    for chunk in entry.chunks:
        if chunk.offsets[0] != end or chunk.sizes[1:] != rest or any(chunk.offsets[1:]):
            return False
        end += chunk.sizes[0]
    return end == entry.size[0]


# ── one rank ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class Planner(DefaultSavePlanner):
    """Plans as DCP does, but for tensors where DCP does not look, and pickles values when the plan is made.

    Args:
        of_run: what is not distributed is taken from the first rank, since ranks may differ in it, but for the
            generators, of which each rank has its own; and what holds no tensor is one value. Otherwise what several
            ranks have is written by any of them, and all dicts are taken apart, as DCP does.

    Attributes:
        tensors: what this rank writes; those of the plan, or copies of them.
    """

    def __init__(self, *, of_run: bool) -> None:
        super().__init__(dedup_save_to_lowest_rank=False)
        self.tensors: dict[MetadataIndex, Tensor] = {}
        self._of_run = of_run
        self._values: dict[str, bytes | SaveError] = {}

    def set_up_planner(
        self, state_dict: StateDict, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        found = leaves(state_dict, as_dcp=not self._of_run)
        self.state_dict, self.mappings = found.values, found.paths
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        others = {key: value for key, value in self.state_dict.items() if not _is_plainly_split(value)}
        made = {item.index.fqn: [item] for item in self._items_of_split()}
        for item in create_default_local_save_plan(others, self.is_coordinator).items:
            made.setdefault(item.index.fqn, []).append(item)
        plan = SavePlan([item for key in self.state_dict for item in made.get(key, ())], planner_data=self.mappings)
        if self._of_run and not self.is_coordinator:
            items = [item for item in plan.items if self._is_of_this_rank(item)]
            names = {item.index.fqn for item in items}
            paths = {name: path for name, path in self.mappings.items() if name in names}
            plan = dataclasses.replace(plan, items=items, planner_data=paths)
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                self._values[item.index.fqn] = self._pickled(item.index.fqn)
        self.plan = plan
        return plan

    def _items_of_split(self) -> Iterator[WriteItem]:
        """Yield the items that DCP makes of distributed tensors; parts of one form share all but their key."""
        known: dict[Any, TensorWriteData] = {}
        for key, tensor in self.state_dict.items():
            if not _is_plainly_split(tensor):
                continue
            local, (offsets, sizes) = local_part(tensor), shard_box(tensor)
            form = tensor.shape, offsets, sizes, tensor.dtype, tensor.requires_grad, local.is_pinned()
            data = known.get(form)
            if data is None:
                properties = TensorProperties.create_from_tensor(local)
                properties.requires_grad = tensor.requires_grad
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = known[form] = TensorWriteData(chunk, properties, tensor.size())
            yield WriteItem(MetadataIndex(key, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def _pickled(self, name: str) -> bytes | SaveError:
        try:
            return value_bytes(self.state_dict[name], name, must_load=not self._of_run)
        except SaveError as e:
            if self._of_run:
                raise
            return e  # for the writing, of which the ranks say who has failed

    def layout(self, plan: SavePlan, group: Group, files: int) -> ShardLayout | None:
        """The rule by which all ranks split the tensors of ``plan``, as far as this rank can tell.

        Args:
            plan: what this rank has. group: the ranks that save together. files: most files of a rank.

        Returns:
            The rule; ``None`` if there are few parts, or tensors that no rule covers.
        """
        split = [item for item in plan.items if self._is_split(item)]
        if len(split) * group.size <= _MOST_LISTED:
            return None
        tensors: list[SplitTensor] = []
        orders: dict[int, bool] = {}
        for item in split:
            tensor = self.state_dict[item.index.fqn]
            mesh = tensor.device_mesh
            if id(mesh) not in orders:
                orders[id(mesh)] = mesh.mesh.flatten().tolist() == list(range(group.size))
            found = split_of(self.mappings[item.index.fqn], tensor) if orders[id(mesh)] else None
            if found is None or not _is_as_split(item, found, group.rank):
                log.debug("the tensor %s is split in a way that no rule covers: listing all parts", item.index.fqn)
                return None
            tensors.append(found)
        files = max(1, min(files, _MOST_FILES // group.size))
        tensors.sort(key=lambda tensor: tensor.key)
        return ShardLayout(group.size, tensors, files=files, least_bytes=LEAST_FILE_BYTES)

    def listed(self, plan: SavePlan, group: Group) -> tuple[SavePlan, bytes]:
        """Select the items that no rule covers and this rank writes; and what must be equal on all ranks for that."""
        items = [item for item in plan.items if not self._is_split(item)]
        if self._of_run:
            return dataclasses.replace(plan, items=items), b""
        sizes = [_size_bytes(item) for item in items]
        own = balanced(sizes, group.size)[group.rank]
        common = PackedPlan.of(dataclasses.replace(plan, items=items))
        return dataclasses.replace(plan, items=[items[number] for number in sorted(own)]), pickle.dumps(common)

    def _is_split(self, item: WriteItem) -> bool:
        value = self.state_dict[item.index.fqn]
        return isinstance(value, DTensor) and value.numel() > 0

    def _is_of_this_rank(self, item: WriteItem) -> bool:
        name = item.index.fqn
        return isinstance(self.state_dict[name], DTensor) or self.mappings[name][0] == "rng"

    def find_tensors(self, items: Sequence[WriteItem]) -> None:
        """Find the tensors that are to be written."""
        for item in items:
            if item.type is not WriteItemType.BYTE_IO:
                tensor: Tensor = self.lookup_object(item.index).detach()
                self.tensors[item.index] = tensor.resolve_conj().resolve_neg()  # copies keep memory, and no such marks

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            value = self._values[write_item.index.fqn]
            if isinstance(value, SaveError):
                raise value
            return io.BytesIO(value)
        return self.tensors[write_item.index]

    def forget(self) -> None:
        """Release everything that was to be written."""
        self.tensors, self._values, self.state_dict = {}, {}, {}


def _is_plainly_split(value: Any) -> TypeGuard[DTensor]:
    """Return true if this rank has a strided part of ``value``, of a class that knows nothing of checkpoints itself."""
    if not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is None:
        return False
    local = local_part(value)
    return type(local) in (Tensor, nn.Parameter) and local.layout is torch.strided


def _size_bytes(item: WriteItem) -> int:
    tensor = item.tensor_data
    return 1 if tensor is None else math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize


def _is_as_split(item: WriteItem, split: SplitTensor, rank: int) -> bool:
    assert item.tensor_data is not None
    offsets, sizes = split.splits.box(split.shape, rank)
    own = item.tensor_data.chunk
    return tuple(own.sizes) == sizes and (tuple(own.offsets) == offsets or not math.prod(sizes))


# ── all ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
@dataclass(frozen=True)
class KnownPlan:
    """A plan that all ranks have made together.

    Attributes:
        name: of it, the same on every rank.
        count: of the ranks.
        local: what this rank wanted to write.
        final: what it writes, without what others write already.
        metadata: of the whole, on the first rank; of what is listed, where there is a layout.
        layout: the rule that the tensors follow which are not listed.
    """

    name: str
    count: int
    local: SavePlan
    final: SavePlan
    metadata: Metadata | None
    layout: ShardLayout | None


_known: list[KnownPlan] = []  # the newest last
_known_lock = threading.Lock()


def plan_together(
    group: Group,
    planner: Planner,
    local_plan: Callable[[], SavePlan],
    assign: Callable[[int], list[A]],
    *,
    reuse: bool,
    files: int = 1,
) -> tuple[KnownPlan, A]:
    """Plan a save with the other ranks, in the main thread.

    Args:
        group: the ranks that save together.
        planner: of this rank.
        local_plan: makes with it what this rank wants to write. If it fails on a rank, all raise that.
        assign: called on the first rank with the number of ranks when there is a plan; returns an assignment for each.
        reuse: use the plan of an earlier save if on no rank a key, shape, type or placement differs.
        files: that a rank writes at the same time.
    """
    local: list[SavePlan] = []

    def kept() -> SavePlan:
        if not local:
            local.append(local_plan())
        return local[0]

    made = _plan_again(group, kept, assign) if reuse else None
    if made is None:
        made = _plan_by_rule(group, planner, kept, assign, files) or _plan_listed(group, kept, assign)
        if reuse:
            with _known_lock:
                _known.append(made[0])
                del _known[:-_MOST_PLANS]
    return made


class _Proposal(NamedTuple):
    """Proposal of a rank to the first one.

    Attributes:
        digest: of the rule that it follows; empty: it follows none.
        plan: what is listed.
    """

    digest: str
    plan: PackedPlan


def _plan_by_rule(
    group: Group, planner: Planner, local_plan: Callable[[], SavePlan], assign: Callable[[int], list[A]], files: int
) -> tuple[KnownPlan, A] | None:
    """The plan where all ranks follow one rule, or none does; ``None`` where they have to be asked for lists."""
    own: list[tuple[ShardLayout | None, SavePlan]] = []
    found: list[Metadata] = []

    def each() -> _Proposal:
        plan = local_plan()
        layout = planner.layout(plan, group, files)
        if layout is None:
            own.append((None, plan))
            return _Proposal("", PackedPlan.of(plan))
        listed, common = planner.listed(plan, group)
        own.append((layout, listed))
        return _Proposal(layout.digest + xxhash.xxh3_128_hexdigest(common), PackedPlan.of(listed))

    def first(proposals: list[_Proposal]) -> list[tuple[str, AssignedItems, A] | None]:
        if len({one.digest for one in proposals}) > 1:
            return [None] * len(proposals)
        return [*_merged([one.plan for one in proposals], found, assign)]

    made = group.reduce_scatter("planning a save", each, first)
    if made is None:
        return None
    (layout, listed), plan = own[0], local_plan()
    name, share, assigned = made
    final = share.of(listed)
    if layout is not None:
        mine = {part.metadata_index for part in layout.parts(group.rank)}
        final = dataclasses.replace(plan, items=[*final.items, *(item for item in plan.items if item.index in mine)])
    return KnownPlan(name, group.size, plan, final, found[0] if found else None, layout), assigned


def _plan_listed(
    group: Group, local_plan: Callable[[], SavePlan], assign: Callable[[int], list[A]]
) -> tuple[KnownPlan, A]:
    """The plan of ranks that follow no common rule."""
    found: list[Metadata] = []
    name, share, assigned = group.reduce_scatter(
        "planning a save", lambda: PackedPlan.of(local_plan()), lambda plans: _merged(plans, found, assign)
    )
    plan = local_plan()
    return KnownPlan(name, group.size, plan, share.of(plan), found[0] if found else None, None), assigned


def _merged(
    plans: list[PackedPlan], found: list[Metadata], assign: Callable[[int], list[A]]
) -> list[tuple[str, AssignedItems, A]]:
    shares, metadata = merge_plans(plans)
    found.append(metadata)
    name = secrets.token_hex(8)
    return [(name, share, one) for share, one in zip(shares, assign(len(plans)), strict=True)]


def _plan_again(
    group: Group, local_plan: Callable[[], SavePlan], assign: Callable[[int], list[A]]
) -> tuple[KnownPlan, A] | None:
    """The plan that all ranks know already for what they want to write; ``None`` if there is none."""
    matching: dict[str, KnownPlan] = {}

    def each() -> tuple[str, ...]:
        plan = local_plan()
        with _known_lock:
            candidates = [known for known in _known if known.count == group.size and known.local == plan]
        matching.update({known.name: known for known in candidates if known.metadata is not None or not group.is_first})
        return tuple(matching)

    def first(names: list[tuple[str, ...]]) -> list[tuple[str, A] | None]:
        name = min(set(names[0]).intersection(*names), default=None)
        if name is None:
            return [None] * len(names)
        return [(name, one) for one in assign(len(names))]

    if (assigned := group.reduce_scatter("comparing a save with the one before", each, first)) is None:
        return None
    name, one = assigned
    log.debug("reusing plan %s", name)
    return matching[name], one
