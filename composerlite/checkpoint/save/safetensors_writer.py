"""Writing safetensors from all ranks: each tensor is whole in one file, and each file is written by one rank.

Ranks that have parts of a tensor send them to the rank that writes it, some rows at a time, and no tensor is gathered:
docs/adr/0078.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from composerlite import dist
from composerlite.checkpoint.format import WEIGHTS_INDEX
from composerlite.checkpoint.format.safetensors_file import TensorEntry, header_of, laid_out, write_tensor
from composerlite.checkpoint.format.sharded_index import Whole
from composerlite.checkpoint.format.torch_file import StorageCopy
from composerlite.checkpoint.place.directory import LEAST_CHUNK_BYTES, MOST_CHUNKS, SaveHandle, ShardedDirectory
from composerlite.checkpoint.place.place import NewFile
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.save.sharded_plan import Planner, plan_together
from composerlite.errors import ConfigError, SaveError
from composerlite.storage import FileDigest, HostMemory, Sink, chunk_bytes_for
from composerlite.types import StateDict

__all__ = ["LARGEST_FILE_BYTES", "SafetensorsWriter", "most_chunks"]

log = logging.getLogger(__name__)
LARGEST_FILE_BYTES = 5 * 10**9
"""As ``save_pretrained`` cut files for years: every tool and hub takes them."""
_BLOCK_BYTES = 8 << 20
"""Rows of a tensor that are sent and written at once, unless one is larger."""
_CHUNKS_OF_A_TENSOR = 128
"""To read a part of one, about a hundredth of it more is verified; each chunk takes time of its own to verify."""


# ── the layout ───────────────────────────────────────────────────────────────────────────────────────────────────────
class _OwnedShard(NamedTuple):
    """A part of a tensor on a rank, where it begins in the whole and how long it is."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@final
@dataclass(frozen=True)
class _WeightFile:
    """A file to be written: in which round, by which rank."""

    name: str
    owner: int
    turn: int
    tensors: tuple[TensorEntry, ...]


class _RowBlock(NamedTuple):
    """Rows of a tensor, or all of it, which a rank writes to its file at once.

    ``rows`` of 0: all of it, which the owner has.
    """

    turn: int
    start: int
    owner: int
    entry: TensorEntry
    first: int
    rows: int
    parts: tuple[_OwnedShard, ...]

    @property
    def senders(self) -> tuple[_OwnedShard, ...]:
        """The parts on other ranks than the one that writes."""
        return tuple(part for part in self.parts if part.rank != self.owner)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows."""
        return (self.rows, *self.entry.shape[1:])


@final
@dataclass
class _Share:
    """A rank's share of the work.

    Attributes:
        claim: of the directory.
        turns: rounds of files that there are; in each a rank writes one or none.
        files: those of this rank.
        blocks: those that it writes or has a part of, in the order of all.
        index: the content of the index, on the first rank.
    """

    claim: SaveHandle
    turns: int
    files: list[_WeightFile] = field(default_factory=list[_WeightFile])
    blocks: list[_RowBlock] = field(default_factory=list[_RowBlock])
    index: bytes = b""


_Key = tuple[str, tuple[int, ...]]
"""The name of a tensor, and where a part of it begins."""
Table = list[tuple[TensorEntry, _OwnedShard]]


def _shares(tables: Sequence[Table], claim: SaveHandle, largest_bytes: int, suffix: str) -> list[_Share]:
    """Divide the tensors among the ranks: about as many bytes for each, a whole tensor to a rank that has it."""
    entries: dict[str, TensorEntry] = {}
    parts: dict[str, list[_OwnedShard]] = {}
    for entry, part in itertools.chain.from_iterable(tables):
        entries.setdefault(entry.name, entry)
        if 0 not in part.sizes or not entry.size_bytes:
            parts.setdefault(entry.name, []).append(part)
    loads = [0] * len(tables)
    owners: dict[str, int] = {}
    for entry in sorted(entries.values(), key=lambda entry: (len(parts[entry.name]) > 1, -entry.size_bytes)):
        ranks = {part.rank for part in parts[entry.name]}
        owner = owners[entry.name] = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[owner] += entry.size_bytes
    files = _files(entries, owners, largest_bytes, suffix)
    shares = [_Share(claim, 1 + max((file.turn for file in files), default=-1)) for _ in tables]
    blocks: list[_RowBlock] = []
    for file in files:
        shares[file.owner].files.append(file)
        start = 0
        for entry in file.tensors:
            blocks += _blocks(file, start, entry, parts[entry.name])
            start += entry.size_bytes
    for block in sorted(blocks, key=lambda block: block[:3]):  # all ranks write at the same time
        for rank in {block.owner, *(part.rank for part in block.parts)}:
            shares[rank].blocks.append(block)
    places = {entry.name: file.name for file in files for entry in file.tensors}
    total = {"total_size": sum(entry.size_bytes for entry in entries.values())}
    shares[0].index = json.dumps({"metadata": total, "weight_map": places}, indent=1, sort_keys=True).encode()
    return shares


def _files(
    entries: dict[str, TensorEntry], owners: dict[str, int], largest_bytes: int, suffix: str
) -> list[_WeightFile]:
    groups: list[tuple[int, int, list[TensorEntry]]] = []
    for owner in sorted(set(owners.values())):
        group, size, turn = list[TensorEntry](), 0, 0
        for entry in (entry for entry in entries.values() if owners[entry.name] == owner):
            if group and size + entry.size_bytes > largest_bytes:
                groups.append((owner, turn, group))
                group, size, turn = [], 0, turn + 1
            group.append(entry)
            size += entry.size_bytes
        groups.append((owner, turn, group))
    one = len(groups) == 1
    return [
        _WeightFile(
            f"model{'' if one else f'-{number:05}-of-{len(groups):05}'}{suffix}.safetensors",
            owner,
            turn,
            tuple(laid_out(group)),
        )
        for number, (owner, turn, group) in enumerate(groups, 1)
    ]


def _blocks(file: _WeightFile, start: int, entry: TensorEntry, parts: Sequence[_OwnedShard]) -> Iterator[_RowBlock]:
    """The tensor in blocks of rows; one that is whole on the rank that writes it is one."""
    if len(parts) == 1 and parts[0].rank == file.owner:
        yield _RowBlock(file.turn, start, file.owner, entry, 0, 0, tuple(parts))
        return
    if not entry.size_bytes:
        return
    rows = entry.shape[0]
    row_bytes = entry.size_bytes // rows
    step = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        inside = tuple(p for p in parts if p.offsets[0] < first + count and first < p.offsets[0] + p.sizes[0])
        yield _RowBlock(file.turn, start + first * row_bytes, file.owner, entry, first, count, inside)


def most_chunks(size_bytes: int, tensors: int) -> int:
    """Return in how many parts a file is verified at most: as many for each tensor, and one for each MiB at least."""
    return min(MOST_CHUNKS, max(_CHUNKS_OF_A_TENSOR * tensors, size_bytes >> 20))


# ── a rank ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class SafetensorsWriter:
    """Writer of this rank's files of the weights in ``folder``. All ranks make it together, in the main thread.

    Args:
        contents: makes the state dict of a model; dicts in it are joined by dots. What is no tensor is left out.
        folder: the directory.
        overwrite: replace what is there.
        largest_file_bytes: of a file with several tensors.
    """

    def __init__(
        self,
        contents: Callable[[], StateDict],
        folder: ShardedDirectory,
        *,
        overwrite: bool,
        largest_file_bytes: int = LARGEST_FILE_BYTES,
    ) -> None:
        self.gathers = True
        self.size_bytes = 0
        self.seconds: dict[str, float] = {}
        self.weights_crc: Sequence[int] = ()
        self._folder = folder
        self._group = dist.group_of()
        self._rank = self._group.rank
        self._planner = Planner(of_run=False)
        self._own: dict[_Key, Tensor] = {}
        self._written: list[tuple[str, FileDigest]] = []
        self._turn = 0

        def local_plan() -> SavePlan:
            self._planner.set_up_planner(contents(), StorageMeta(), self._group.is_first)
            plan = self._planner.create_local_plan()
            items = [item for item in plan.items if self._is_written(item)]
            if not items:
                raise ConfigError(f"{folder.uri!r}: there are no tensors to write: expected the state dict of a model.")
            return dataclasses.replace(plan, items=items)

        known, _ = plan_together(self._group, self._planner, local_plan, lambda count: [None] * count, reuse=False)

        def divided(tables: list[Table]) -> list[_Share]:
            claim = SaveHandle.new(overwrite=overwrite, decider=WEIGHTS_INDEX)
            folder.begin(claim)
            return _shares(tables, claim, largest_file_bytes, claim.suffix)

        self._share = self._group.reduce_scatter("planning a save", lambda: self._table(known.final), divided)

    def _is_written(self, item: WriteItem) -> bool:
        """Return true for a tensor that the format has; SaveError for another."""
        name = item.index.fqn
        value: Any = self._planner.state_dict[name]
        if isinstance(value, Whole):
            raise SaveError(
                f"{name!r}: safetensors has no tensors such as {type(value.tensor).__name__} of "
                f"{value.tensor.layout}: it takes dense ones."
            )
        if isinstance(value, Tensor):
            TensorEntry(name, value.dtype, tuple(value.shape)).check(value.layout)
            return True
        log.warning("%s: left out what is no tensor: %s", self._folder.uri, name)
        return False

    def _table(self, plan: SavePlan) -> Table:
        """The parts that this rank has, and gives."""
        self._planner.find_tensors(plan.items)
        table: Table = []
        for item in plan.items:
            told = item.tensor_data
            assert told is not None
            part = _OwnedShard(self._rank, tuple(told.chunk.offsets), tuple(told.chunk.sizes))
            table.append((TensorEntry(item.index.fqn, told.properties.dtype, tuple(told.size)), part))
            self._own[item.index.fqn, part.offsets] = self._planner.tensors[item.index]
        return table

    def storages(self) -> list[StorageCopy]:
        """Return an empty list: nothing is copied before it is written."""
        return []

    def staged_in(self, memory: HostMemory) -> None:
        """Do nothing: see :meth:`storages`."""

    def write(self, memory: HostMemory | None) -> None:
        """Write the files of this rank, and send to others what they write. What fails keeps no other rank waiting."""
        names = [file.name for file in self._share.files]
        failure: BaseException | None = None
        try:
            digests = self._folder.write(self._share.claim, map(self._new_file, self._share.files))
            self._written = list(zip(names, digests, strict=True))
        except BaseException as e:  # noqa: BLE001 - raised below
            failure = e
        try:
            self._exchange_before(self._share.turns)
        except BaseException as e:  # noqa: BLE001 - raised below
            failure = failure or e
        self._own.clear()
        self._planner.forget()
        if failure is not None:
            raise failure

    def _new_file(self, file: _WeightFile) -> NewFile:
        header = header_of(file.tensors)

        def fill(sink: Sink) -> None:
            self._exchange_before(file.turn)
            sink.write(header)
            self._exchange(sink)

        size = len(header) + sum(entry.size_bytes for entry in file.tensors)
        chunk_bytes = chunk_bytes_for(size, LEAST_CHUNK_BYTES, most_chunks(size, len(file.tensors)))
        return NewFile(file.name, size, fill, chunk_bytes)

    def _exchange_before(self, turn: int) -> None:
        """Make the transfers of all rounds before ``turn``, in which this rank has no file, or has failed."""
        failure: BaseException | None = None
        while self._turn < turn:
            try:
                self._exchange(None)
            except BaseException as e:  # noqa: BLE001 - raised below
                failure = failure or e
        if failure is not None:
            raise failure

    def _exchange(self, sink: Sink | None) -> None:
        """Make the transfers of the next round, and write the blocks of this rank's file in their order.

        Without ``sink`` nothing is written: what others send is received all the same.
        """
        turn, self._turn = self._turn, self._turn + 1
        mine = [block for block in self._share.blocks if block.turn == turn]
        output = _Output(self._own, [block for block in mine if block.owner == self._rank], sink)
        output.drain()
        if self._group.exchanges:
            dist.exchange(f"writing {self._folder.uri}", self._transfers(mine, output))
        output.drain()
        if output.failure is not None:
            raise output.failure

    def _transfers(self, blocks: Sequence[_RowBlock], output: _Output) -> Iterator[dist.TensorTransfer]:
        for block in blocks:
            for part in block.senders:
                ends = (part.rank, block.owner)
                if part.rank == self._rank:
                    yield dist.TensorTransfer(part.rank, ends, [_rows(self._own, block, part)])
                elif block.owner == self._rank:
                    arrived = functools.partial(output.arrived, block, part)
                    yield dist.TensorTransfer(part.rank, ends, [output.place(block, part)], arrived)

    def finish(self, manifest: Manifest) -> list[tuple[str, FileDigest]]:
        """Return the files that this rank has written, which are durable."""
        return self._written

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Commit on rank 0: write the index with the record."""
        files = {name: (digest, None) for name, digest in itertools.chain.from_iterable(parts)}
        return self._folder.commit(self._share.index, files, manifest)

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the files unless they are committed, or may be. May be called twice."""
        if not may_be_committed:
            self._folder.abandon()


@final
class _Output:
    """The file of a rank as it is written: blocks in their order, each once all its parts are there."""

    def __init__(self, own: Mapping[_Key, Tensor], blocks: Iterable[_RowBlock], sink: Sink | None) -> None:
        self.failure: Exception | None = None
        self._own = own
        self._waiting = deque(blocks)
        self._sink = sink
        self._open: dict[_RowBlock, tuple[Tensor, list[_OwnedShard]]] = {}

    def place(self, block: _RowBlock, part: _OwnedShard) -> Tensor:
        """Return memory for the rows of ``part`` in ``block``."""
        if block not in self._open:
            memory = torch.empty(block.shape, dtype=block.entry.dtype)
            self._open[block] = memory, list(block.senders)
            for own in block.parts:
                if own.rank == block.owner:
                    _box(memory, block, own).copy_(_rows(self._own, block, own))
        return _box(self._open[block][0], block, part)

    def arrived(self, block: _RowBlock, part: _OwnedShard) -> None:
        """Take note of a part that has come."""
        self._open[block][1].remove(part)
        self.drain()

    def drain(self) -> None:
        """Write the blocks that are complete; after a failure none: other ranks are not kept waiting."""
        while self._waiting:
            block = self._waiting[0]
            if block.senders and (block not in self._open or self._open[block][1]):
                return
            self._waiting.popleft()
            memory = self._open.pop(block)[0] if block.senders else None
            if self._sink is None or self.failure is not None:
                continue
            try:
                tensor = self._own[block.entry.name, block.parts[0].offsets] if memory is None else memory
                write_tensor(self._sink, tensor)
            except Exception as e:  # noqa: BLE001 - raised when all transfers are made
                self.failure = e


def _rows(own: Mapping[_Key, Tensor], block: _RowBlock, part: _OwnedShard) -> Tensor:
    """The rows of ``block`` that ``part`` has, on the rank that has it."""
    first, end = _common(block, part)
    return own[block.entry.name, part.offsets].narrow(0, first - part.offsets[0], end - first)


def _box(memory: Tensor, block: _RowBlock, part: _OwnedShard) -> Tensor:
    """The place of those rows in the memory of ``block``."""
    first, end = _common(block, part)
    memory = memory.narrow(0, first - block.first, end - first)
    for dim in range(1, memory.dim()):
        memory = memory.narrow(dim, part.offsets[dim], part.sizes[dim])
    return memory


def _common(block: _RowBlock, part: _OwnedShard) -> tuple[int, int]:
    """The rows that both have: the first, and the end."""
    return max(block.first, part.offsets[0]), min(block.first + block.rows, part.offsets[0] + part.sizes[0])
