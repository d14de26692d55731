"""Parts of a sharded checkpoint that ranks read for each other.

Of the ranks that want the same numbers one reads them, and the others get them from it. Parts that lie on the disks of
other nodes are brought to this one before they are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import socket
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, final

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from composerlite import dist
from composerlite.checkpoint.format.sharded_layout import narrowed
from composerlite.checkpoint.load.reader import validate
from composerlite.checkpoint.load.sharded_reader import RemoteFileSystemReader
from composerlite.checkpoint.place.directory import ON_ALL_NODES, ShardedDirectory
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.errors import CheckpointNotFoundError, IncompatibleCheckpointError, bytes_text
from composerlite.types import StateDict

__all__ = ["ReadRequests", "RemoteShardFetcher", "Report", "all_alike"]

log = logging.getLogger(__name__)

_LARGE_BYTES = 32 << 20
"""What is larger is cut: for that it can be shared out evenly."""
_SMALL_BYTES = 64 << 10
"""What is not larger travels together, up to so much:"""
_PARCEL_BYTES = 1 << 20
_NAME_BYTES = 16
Ranking = tuple[int, ...]
Report = dict[Sequence[int], bytes] | None
"""What a rank tells the first one: a digest of what it wants of the parts that other ranks have too, by the ranks that
have them by their placements; ``None`` if those do not say it."""


@final
class _SharedItem(NamedTuple):
    """A part of what several ranks want: an item of the plan, or some rows of it.

    Attributes:
        name: the same on all of these ranks; no two parts have the same.
        place: where it is stored: in which file, and from where on.
        item: this rank's.
        target: its destination on this rank.
    """

    name: bytes
    place: tuple[str, int]
    item: ReadItem
    target: Tensor


@final
class ReadRequests:
    """Requests of this rank to a checkpoint, divided with those that want the same.

    Args:
        plan: what this rank wants.
        planner: has made it.
        place: ranks with the same one read the same files.

    Attributes:
        told: to the first rank, for :func:`all_alike`.
    """

    def __init__(self, plan: LoadPlan, planner: DefaultLoadPlanner, place: str) -> None:
        self._plan = plan
        named = _named(plan.items, planner, place)
        self._parts = {part.name: part for part, _ in named}
        self._groups: dict[Ranking, list[bytes]] = {}
        for part, ranks in named:
            self._groups.setdefault(tuple(ranks or ()), []).append(part.name)
        digests = {_compact(ranks): xxhash.xxh3_128_digest(b"".join(names)) for ranks, names in self._groups.items()}
        self.told: Report = None if () in self._groups else digests

    def divided(self, group: dist.Group, *, are_alike: bool) -> tuple[LoadPlan, Sequence[dist.TensorTransfer]]:
        """Divide the reading: what this rank reads, and what it sends and gets. All of ``group`` call it.

        Args:
            group: the ranks that load together.
            are_alike: what :func:`all_alike` made of the reports of all.
        """
        groups = self._groups if are_alike else self._groups_by_names(group)
        items, transfers = _partitioned(groups, self._parts, group.rank)
        common = {id(self._parts[name].item) for members in groups.values() for name in members}
        own = [item for item in self._plan.items if id(item) not in common]
        return dataclasses.replace(self._plan, items=[*own, *items]), transfers

    def _groups_by_names(self, group: dist.Group) -> dict[Ranking, list[bytes]]:
        """The parts that this rank and others want, by those ranks, found by what each wants: megabytes of names."""
        names = b"".join(self._parts)
        digests = group.gather(xxhash.xxh3_128_digest(names))
        is_first = digests.index(digests[group.rank]) == group.rank
        every = group.gather(names if is_first else b"")  # one for all alike
        known = {digest: theirs for digest, theirs in zip(digests, every, strict=True) if theirs}
        return _groups(self._parts, [known.get(digest, b"") for digest in digests])


def all_alike(reports: Sequence[Report]) -> bool:
    """Return true if on all ranks that have the same parts by their placements the same is wanted of them."""
    digests: dict[Sequence[int], bytes] = {}
    missing: dict[Sequence[int], int] = {}
    for rank, report in enumerate(reports):
        if report is None:
            return False
        for ranks, digest in report.items():
            if rank not in ranks or digests.setdefault(ranks, digest) != digest:
                return False
            missing[ranks] = missing.get(ranks, len(ranks)) - 1
    return not any(missing.values())


def _compact(ranks: Ranking) -> Sequence[int]:
    """The ranks as a range, which takes few bytes for thousands, if they are one."""
    found = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0]) if len(ranks) > 1 else ()
    return found if tuple(found) == ranks else ranks


def _named(
    items: Iterable[ReadItem], planner: DefaultLoadPlanner, place: str
) -> Sequence[tuple[_SharedItem, Sequence[int] | None]]:
    """List the items that other ranks may need, too, with those ranks, if they are known; sorted by their digests.

    Values that are no tensors are left out: they are small. So are tensors of which each rank has another part.
    """
    assert planner.metadata is not None
    found: list[tuple[_SharedItem, Sequence[int] | None]] = []
    known: dict[Any, Sequence[int] | None] = {}
    for item in items:
        if item.type is LoadItemType.BYTE_IO or not math.prod(item.lengths):
            continue
        stored: Any = planner.metadata.storage_data.get(item.storage_index)
        tensor = planner.state_dict[item.dest_index.fqn]
        form = (id(tensor.device_mesh), tensor.placements) if dist.is_distributed_tensor(tensor) else None
        if form not in known:
            known[form] = dist.ranks_with_same_part(tensor)
        ranks = known[form]
        if stored is None or (ranks is not None and len(ranks) == 1):
            continue
        target = planner.resolve_tensor(item).detach()
        index = item.storage_index
        what = (place, index.fqn, index.offset, tuple(item.storage_offsets), tuple(item.lengths), target.dtype)
        name = xxhash.xxh3_128_digest(repr(what).encode())
        found.append((_SharedItem(name, (stored.relative_path, stored.offset), item, target), ranks))
    return sorted(found, key=lambda pair: pair[0].name)


def _groups(mine: Mapping[bytes, _SharedItem], wanted: Sequence[bytes]) -> dict[Ranking, list[bytes]]:
    """Group the items that this rank and others need, by the ranks that need them."""
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


def _partitioned(
    groups: Mapping[Ranking, Sequence[bytes]], mine: Mapping[bytes, _SharedItem], rank: int
) -> tuple[list[ReadItem], list[dist.TensorTransfer]]:
    """Partition the shared items: those that this rank reads, and the transfers that it takes part in."""
    items: list[ReadItem] = []
    transfers: list[tuple[bytes, dist.TensorTransfer]] = []
    for members, names in groups.items():
        parts = [part for name in sorted(names, key=lambda name: mine[name].place) for part in _cut(mine[name])]
        by_reader: dict[int, list[_SharedItem]] = {member: [] for member in members}
        total, done = sum(part.target.nbytes for part in parts), 0
        for part in parts:  # each reads what lies together
            by_reader[members[done * len(members) // total]].append(part)
            done += part.target.nbytes
        items += [part.item for part in by_reader[rank]]
        for reader, its in by_reader.items():
            for parcel in _parcels(its):
                tensors = [part.target for part in parcel]
                transfers.append((parcel[0].name, dist.TensorTransfer(reader, members, tensors)))
    transfers.sort(key=lambda pair: pair[0])
    return items, [transfer for _, transfer in transfers]


def _cut(part: _SharedItem) -> Iterator[_SharedItem]:
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
        yield _SharedItem(name, part.place, item, part.target.narrow(0, start, count))


def _moved(offsets: Sequence[int], rows: int) -> torch.Size:
    return torch.Size((offsets[0] + rows, *offsets[1:]))


def _parcels(parts: Iterable[_SharedItem]) -> Iterator[list[_SharedItem]]:
    """Parcels to be sent at once: each large part, and small ones together."""
    together: list[_SharedItem] = []
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


# ── parts on the disks of other nodes ────────────────────────────────────────────────────────────────────────────────
Ranges = dict[str, list[tuple[int, int]]]
"""By file: where a range begins, and where it ends."""
Node = tuple[int, str]


@final
@dataclass(frozen=True)
class _NodeReport:
    """A rank's report to the others.

    Attributes:
        node: on which it is: its number, which not every launcher gives, and its name.
        has: files of the checkpoint on it.
        lacks: what it needs of the others.
        place: the folder on its node that what is brought goes to.
    """

    node: Node
    has: frozenset[str]
    lacks: Ranges
    place: Path | None


@final
class RemoteShardFetcher:
    """The parts of a checkpoint that this node's disk does not have. Used as a context manager, on every rank.

    Where all files are in one folder there is nothing to do. Else a rank of a node that has a part sends it to one of
    the node that needs it, where it lies in a temporary folder until the block ends; it is verified when it is read.

    Args:
        folder: of the checkpoint.
        reader: of it.
        source: the checkpoint, for messages.

    Attributes:
        are_apart: whether files lie on several disks; the same on every rank.
    """

    def __init__(self, folder: ShardedDirectory, reader: RemoteFileSystemReader, source: str) -> None:
        self._reader = reader
        self._source = source
        self._stack = contextlib.ExitStack()
        self._place: Path | None = None
        self._here = folder.path
        self._folder = folder if folder.path is not None else None
        self._manifest: Manifest | None = None
        self.are_apart = False

    def __enter__(self) -> RemoteShardFetcher:
        group = dist.get_group()
        if group.size > 1 and self._folder is not None:
            folder = self._folder
            self.are_apart = group.from_first(f"finding the disks of {self._source}", lambda: _is_apart(folder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.are_apart and error is None:
            dist.barrier(f"reading {self._source}")  # others of this node read what this rank is about to remove
        self._stack.close()

    def bring_values(self, keys: Iterable[str]) -> None:
        """Fetch the values that are no tensors to rank 0, which reads them. Collective."""
        wanted: StateDict = dict.fromkeys(keys) if dist.get_global_rank() == 0 else {}
        self._bring(wanted)

    def bring_tensors(self, targets: Mapping[str, Tensor]) -> None:
        """Fetch the data of ``targets`` to this rank, which reads them. Collective."""
        self._bring(dict(targets))

    def _bring(self, wanted: StateDict) -> None:
        group = dist.get_group()
        if not self.are_apart:
            return
        assert self._folder is not None
        with group.all_or_none(f"looking for the parts of {self._source}"):
            told = self._told(wanted)
        everyone = group.gather(told)
        assert self._here is not None
        with group.all_or_none(f"looking for the parts of {self._source}"):
            moves = self._moves(everyone)
            for name in {one.name for one in moves if one.source == group.rank}:
                validate(self._here / name)
        with group.all_or_none(f"bringing parts of {self._source} to the nodes that need them"), self._files() as files:
            dist.move(f"bringing parts of {self._source}", moves, files.read, files.write)
        first = _first_of_node(everyone, told.node)
        self._reader.brought = everyone[first].place
        if size := sum(one.size_bytes for one in moves if one.target == group.rank):
            log.info("fetched %s of %s from the disks of other nodes", bytes_text(size), self._source)

    def _told(self, wanted: StateDict) -> _NodeReport:
        assert self._folder is not None
        self._manifest = self._manifest or self._folder.record()
        if self._manifest is None:
            raise CheckpointNotFoundError(
                f"{self._source} is there for rank 0, and has no record in {self._folder.uri!r}"
            )
        has = frozenset(name for name in self._records if self._folder.has(name))
        lacks: Ranges = {}
        for name, begin, end in self._needed(wanted):
            if name not in has:
                lacks.setdefault(name, []).append((begin, end))
        if self._place is None and dist.get_local_rank() == 0:
            self._place = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-")))
        return _NodeReport((dist.get_node_rank(), socket.gethostname()), has, lacks, self._place)

    @property
    def _records(self) -> dict[str, FileRecord]:
        assert self._manifest is not None
        return {record.path.removeprefix(f"{self._manifest.name}/"): record for record in self._manifest.files}

    def _needed(self, wanted: StateDict) -> Iterable[tuple[str, int, int]]:
        """The file and the range of each item that is read for ``wanted``."""
        metadata = self._reader.read_metadata()
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(wanted, narrowed(metadata, wanted), is_coordinator=False)
        for item in planner.create_local_plan().items:
            place = metadata.storage_data[item.storage_index]
            yield place.relative_path, place.offset, place.offset + place.length

    def _moves(self, everyone: Sequence[_NodeReport]) -> list[dist.Move]:
        """List the moves between ranks, the same on every rank: to one rank of each node, from all that have a file."""
        lacks: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for told in everyone:
            for name, ranges in told.lacks.items():
                lacks.setdefault((_first_of_node(everyone, told.node), name), []).extend(ranges)
        moves: list[dist.Move] = []
        for (target, name), ranges in sorted(lacks.items()):
            record = self._records[name]
            holders = [rank for rank, told in enumerate(everyone) if name in told.has]
            if not holders:
                raise self._lost(record)
            for begin, end in _merged(ranges, record):
                moves.append(dist.Move(holders[len(moves) % len(holders)], target, name, begin, end - begin))
        return moves

    def _lost(self, record: FileRecord) -> IncompatibleCheckpointError:
        return IncompatibleCheckpointError(
            f"{self._source}: its file {record.path!r} was saved to the disk of node {record.node} of its run, and no "
            f"rank of this one has it. {ON_ALL_NODES}"
        )

    @contextlib.contextmanager
    def _files(self) -> Generator[_SharedFiles]:
        assert self._here is not None
        with contextlib.ExitStack() as stack:
            sizes = {name: record.size_bytes for name, record in self._records.items()}
            yield _SharedFiles(stack, self._here, self._place, sizes)


@final
class _SharedFiles:
    """The files of a checkpoint, and sparse copies of them that receive the parts that this node needs."""

    def __init__(self, stack: contextlib.ExitStack, here: Path, place: Path | None, sizes: Mapping[str, int]) -> None:
        self._stack = stack
        self._here = here
        self._place = place
        self._sizes = sizes
        self._open: dict[str, int] = {}

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Read bytes of the file on this disk."""
        data = os.pread(self._descriptor(self._here / name, os.O_RDONLY), size, offset)
        if len(data) != size:
            raise OSError(f"{str(self._here / name)!r} ends before byte {offset + size}")
        return data

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Put them where this node finds them."""
        assert self._place is not None
        descriptor = self._descriptor(self._place / name, os.O_WRONLY | os.O_CREAT)
        os.truncate(descriptor, self._sizes[name])
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written

    def _descriptor(self, path: Path, flags: int) -> int:
        if str(path) not in self._open:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = self._open[str(path)] = os.open(path, flags)
            self._stack.callback(os.close, descriptor)
        return self._open[str(path)]


def _is_apart(folder: ShardedDirectory) -> bool:
    manifest = folder.record()
    return manifest is not None and manifest.node is not None


def _first_of_node(everyone: Sequence[_NodeReport], node: Node) -> int:
    """The lowest rank that keeps what is brought to ``node``."""
    return min(rank for rank, told in enumerate(everyone) if told.node == node and told.place is not None)


def _merged(ranges: Iterable[tuple[int, int]], record: FileRecord) -> list[tuple[int, int]]:
    """Ranges as they are verified, by whole chunks, and each byte once."""
    chunk = record.chunk_bytes or max(1, record.size_bytes)
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        begin, end = begin // chunk * chunk, min(-(-end // chunk) * chunk, record.size_bytes)
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
