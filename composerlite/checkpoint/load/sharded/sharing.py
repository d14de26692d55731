"""Of the ranks that want the same numbers of a sharded checkpoint one reads them, and the others get them from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from composerlite import dist

__all__ = ["Told", "Wishes"]

_LARGE_BYTES = 32 << 20
"""What is larger is cut: for that it can be shared out evenly."""
_SMALL_BYTES = 64 << 10
"""What is not larger travels together, up to so much:"""
_PARCEL_BYTES = 1 << 20
_NAME_BYTES = 16
_FEW_NAMES = 256
Ranking = tuple[int, ...]


@final
class _Part(NamedTuple):
    """A part of what several ranks want: an item of the plan, or some rows of it.

    Attributes:
        name: the same on all of these ranks; no two parts have the same.
        place: where it is stored: in which file, and from where on.
        item: this rank's.
        target: where it goes on this rank.
    """

    name: bytes
    place: tuple[str, int]
    item: ReadItem
    target: Tensor


@final
class Told(NamedTuple):
    """What a rank tells the others of its wishes.

    Attributes:
        digest: of the names of what it wants; empty if there is nothing that others could want, too.
        names: these, where they are few.
    """

    digest: bytes
    names: bytes


@final
class Wishes:
    """What this rank wants of a checkpoint, and divides with those that want the same.

    Args:
        plan: what this rank wants.
        planner: has made it.
        place: ranks with the same one read the same files.

    Attributes:
        told: is for the other ranks.
    """

    def __init__(self, plan: LoadPlan, planner: DefaultLoadPlanner, place: str) -> None:
        self._plan = plan
        self._parts = dict(_named(plan.items, planner, place))
        self._names = b"".join(self._parts)
        digest = xxhash.xxh3_128_digest(self._names) if self._parts else b""
        self.told = Told(digest, self._names if len(self._parts) <= _FEW_NAMES else b"")

    def divided(self, group: dist.Group, told: Sequence[Told]) -> tuple[LoadPlan, Sequence[dist.Transfer]]:
        """What this rank reads, and what it sends then to others and gets from them. All of ``group`` call it.

        Args:
            group: the ranks that load together.
            told: by each of them.
        """
        names = {one.digest: one.names for one in told if one.digest}
        if not all(names.values()):
            is_first = [one.digest for one in told].index(self.told.digest) == group.rank
            every = group.gather(self._names if is_first else b"")  # one for all alike
            names |= {one.digest: theirs for one, theirs in zip(told, every, strict=True) if theirs}
        groups = _groups(self._parts, [names.get(one.digest, b"") for one in told])
        items, transfers = _dealt(groups, self._parts, group.rank)
        common = {id(self._parts[name].item) for members in groups.values() for name in members}
        own = [item for item in self._plan.items if id(item) not in common]
        return dataclasses.replace(self._plan, items=[*own, *items]), transfers


def _named(items: Iterable[ReadItem], planner: DefaultLoadPlanner, place: str) -> Sequence[tuple[bytes, _Part]]:
    """What other ranks may want too, by a name that says what it is; in the order of names.

    Nothing that is no tensor: it is small. Nor that of which each rank has another part.
    """
    assert planner.metadata is not None
    found: list[tuple[bytes, _Part]] = []
    for item in items:
        if item.type is LoadItemType.BYTE_IO or not math.prod(item.lengths):
            continue
        stored: Any = planner.metadata.storage_data.get(item.storage_index)
        if stored is None or not dist.has_copies(planner.state_dict[item.dest_index.fqn]):
            continue
        target = planner.resolve_tensor(item).detach()
        what = (place, item.storage_index, tuple(item.storage_offsets), tuple(item.lengths), target.dtype)
        name = xxhash.xxh3_128_digest(repr(what).encode())
        found.append((name, _Part(name, (stored.relative_path, stored.offset), item, target)))
    return sorted(found, key=lambda pair: pair[0])


def _groups(mine: Mapping[bytes, _Part], wanted: Sequence[bytes]) -> dict[Ranking, list[bytes]]:
    """By the ranks that want it what this rank wants and others, too."""
    common: dict[bytes, set[bytes]] = {}
    members: dict[bytes, list[int]] = {}
    for rank, names in enumerate(wanted):
        if names not in common:
            common[names] = mine.keys() & {names[i : i + _NAME_BYTES] for i in range(0, len(names), _NAME_BYTES)}
        for name in common[names]:
            members.setdefault(name, []).append(rank)
    groups: dict[Ranking, list[bytes]] = {}
    for name in mine:
        if len(members[name]) > 1:
            groups.setdefault(tuple(members[name]), []).append(name)
    return groups


def _dealt(
    groups: Mapping[Ranking, Sequence[bytes]], mine: Mapping[bytes, _Part], rank: int
) -> tuple[list[ReadItem], list[dist.Transfer]]:
    """What this rank reads for others, and all transfers that it has a part in."""
    items: list[ReadItem] = []
    transfers: list[tuple[bytes, dist.Transfer]] = []
    for members, names in groups.items():
        parts = [part for name in sorted(names, key=lambda name: mine[name].place) for part in _cut(mine[name])]
        by_reader: dict[int, list[_Part]] = {member: [] for member in members}
        total, done = sum(part.target.nbytes for part in parts), 0
        for part in parts:  # each reads what lies together
            by_reader[members[done * len(members) // total]].append(part)
            done += part.target.nbytes
        items += [part.item for part in by_reader[rank]]
        for reader, its in by_reader.items():
            for parcel in _parcels(its):
                tensors = [part.target for part in parcel]
                transfers.append((parcel[0].name, dist.Transfer(reader, members, tensors)))
    transfers.sort(key=lambda pair: pair[0])
    return items, [transfer for _, transfer in transfers]


def _cut(part: _Part) -> Iterator[_Part]:
    """The part in pieces of rows, none of them large if its rows are not."""
    rows = part.target.shape[0] if part.target.dim() else 1
    most = max(1, _LARGE_BYTES * rows // part.target.nbytes)
    if rows <= most:
        yield part
        return
    for start in range(0, rows, most):
        count = min(most, rows - start)
        item = dataclasses.replace(
            part.item,
            dest_offsets=_moved(part.item.dest_offsets, start),
            storage_offsets=_moved(part.item.storage_offsets, start),
            lengths=torch.Size((count, *part.item.lengths[1:])),
        )
        name = part.name + start.to_bytes(8, "big")
        yield _Part(name, part.place, item, part.target.narrow(0, start, count))


def _moved(offsets: Sequence[int], rows: int) -> torch.Size:
    return torch.Size((offsets[0] + rows, *offsets[1:]))


def _parcels(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """What is sent at once: each large part, and small ones together."""
    together: list[_Part] = []
    size = 0
    for part in parts:
        if part.target.nbytes > _SMALL_BYTES:
            yield [part]
            continue
        together.append(part)
        size += part.target.nbytes
        if size >= _PARCEL_BYTES:
            yield together
            together, size = [], 0
    if together:
        yield together
