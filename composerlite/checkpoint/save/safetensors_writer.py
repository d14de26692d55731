"""Writing safetensors from all ranks: each tensor is whole in one file, and each file is written by one rank.

Ranks that have parts of a tensor send some rows at a time to the rank that writes the tensor. No tensor is gathered:
docs/adr/0078.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from composerlite import dist
from composerlite.checkpoint.format import WEIGHTS_INDEX
from composerlite.checkpoint.format.safetensors_file import TensorEntry, header_of, laid_out, write_tensor
from composerlite.checkpoint.format.sharded_index import leaves
from composerlite.checkpoint.format.sharded_layout import StatePiece
from composerlite.checkpoint.format.torch_file import StorageCopy
from composerlite.checkpoint.place.directory import LEAST_CHUNK_BYTES, MOST_CHUNKS, SaveHandle, ShardedDirectory
from composerlite.checkpoint.place.place import NewFile
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.save.sharded_plan import RankState, merge_pieces
from composerlite.errors import ConfigError, SaveError
from composerlite.storage import FileDigest, HostMemory, Sink, chunk_bytes_for
from composerlite.types import StateDict

__all__ = ["LARGEST_FILE_BYTES", "SafetensorsWriter", "most_chunks"]

log = logging.getLogger(__name__)
LARGEST_FILE_BYTES = 5 * 10**9
"""As ``save_pretrained`` cut files for years: every tool and hub takes them."""
_BLOCK_BYTES = 8 << 20
"""Bytes of rows that are sent and written together, unless one row is larger."""
_ROUND_BYTES = 32 << 20
"""Bytes of blocks that a rank receives before they are written."""
_CHUNKS_OF_A_TENSOR = 128
"""To read a part of a tensor, about a hundredth more of the tensor is verified; each chunk takes time to verify."""


# ── rank 0 divides the work ──────────────────────────────────────────────────────────────────────────────────────────
class _TensorPart(NamedTuple):
    """A part of a tensor on a rank: where the part begins in the tensor, and its sizes."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _RowBlock(NamedTuple):
    """Rows of a tensor that the rank ``owner`` writes together.

    Attributes:
        round: of exchanges in which the rows are sent. All ranks make the same rounds.
        start: offset in the file, after the header.
        owner: the rank that writes.
        entry: the tensor.
        first: row. rows: number of rows; 0: the owner has the whole tensor, and writes all of it.
        parts: with some of the rows.
    """

    round: int
    start: int
    owner: int
    entry: TensorEntry
    first: int
    rows: int
    parts: tuple[_TensorPart, ...]

    @property
    def senders(self) -> tuple[_TensorPart, ...]:
        """The parts on other ranks than the owner."""
        return tuple(part for part in self.parts if part.rank != self.owner)


@final
@dataclass
class _Share:
    """Work of a rank.

    Attributes:
        handle: of the save.
        rounds: number of rounds of exchanges.
        files: that the rank writes: name, tensors, first round, and the round after the last.
        blocks: that the rank writes or has a part of, in the order of all.
        index: the content of the index, on rank 0.
    """

    handle: SaveHandle
    rounds: int = 0
    files: list[tuple[str, list[TensorEntry], int, int]] = field(
        default_factory=list[tuple[str, list[TensorEntry], int, int]]
    )
    blocks: list[_RowBlock] = field(default_factory=list[_RowBlock])
    index: bytes = b""


def _divide(tables: Sequence[Sequence[StatePiece]], handle: SaveHandle, largest_bytes: int) -> list[_Share]:
    """Divide the tensors among the ranks, so that all write about as many bytes; a whole tensor goes to its rank."""
    written, _ = merge_pieces(tables)
    entries: dict[str, TensorEntry] = {}
    parts: dict[str, list[_TensorPart]] = {}
    for rank, (pieces, numbers) in enumerate(zip(tables, written, strict=True)):
        for piece in (pieces[number] for number in numbers):
            assert piece.dtype is not None
            assert piece.shape is not None
            entries.setdefault(piece.key, TensorEntry(piece.key, piece.dtype, piece.shape))
            parts.setdefault(piece.key, []).append(_TensorPart(rank, piece.offsets, piece.sizes))
    loads = [0] * len(tables)
    owned: list[list[TensorEntry]] = [[] for _ in tables]
    for entry in sorted(entries.values(), key=lambda entry: (len(parts[entry.name]) > 1, -entry.size_bytes)):
        owner = min({part.rank for part in parts[entry.name]}, key=lambda rank: (loads[rank], rank))
        owned[owner].append(entry)
        loads[owner] += entry.size_bytes
    by_turn = [list(_cut(group, largest_bytes)) for group in owned]
    count = sum(map(len, by_turn))
    shares = [_Share(handle) for _ in tables]
    blocks: list[_RowBlock] = []
    places: dict[str, str] = {}
    rounds = 0
    for turn in range(max(map(len, by_turn), default=0)):  # in each turn a rank writes a file, or none
        end, begun = rounds + 1, list[tuple[int, str, list[TensorEntry]]]()
        for owner, groups in enumerate(by_turn):
            if turn < len(groups):
                number = sum(map(len, by_turn[:owner])) + turn + 1
                order = "" if count == 1 else f"-{number:05}-of-{count:05}"
                begun.append((owner, f"model{order}{handle.suffix}.safetensors", laid_out(groups[turn])))
        for owner, name, tensors in begun:
            own = list(_blocks(tensors, owner, parts, rounds))
            blocks += own
            end = max([end, *(block.round + 1 for block in own)])
            places.update({entry.name: name for entry in tensors})
        for owner, name, tensors in begun:
            shares[owner].files.append((name, tensors, rounds, end))
        rounds = end
    for block in sorted(blocks, key=lambda block: block[:3]):  # all ranks write at the same time
        for rank in {block.owner, *(part.rank for part in block.parts)}:
            shares[rank].blocks.append(block)
    for share in shares:
        share.rounds = rounds
    total = {"total_size": sum(entry.size_bytes for entry in entries.values())}
    shares[0].index = json.dumps({"metadata": total, "weight_map": places}, indent=1, sort_keys=True).encode()
    return shares


def _cut(entries: Sequence[TensorEntry], largest_bytes: int) -> Iterator[list[TensorEntry]]:
    """Yield the tensors of each file: at most ``largest_bytes``, unless a file has one tensor."""
    group, size = list[TensorEntry](), 0
    for entry in entries:
        if group and size + entry.size_bytes > largest_bytes:
            yield group
            group, size = [], 0
        group.append(entry)
        size += entry.size_bytes
    if group:
        yield group


def _blocks(
    tensors: Sequence[TensorEntry], owner: int, parts: Mapping[str, Sequence[_TensorPart]], first_round: int
) -> Iterator[_RowBlock]:
    """Yield the blocks of a file in their order. A tensor that is whole on the owner is one block."""
    start, received = 0, 0
    for entry in tensors:
        own = tuple(parts[entry.name])
        if own[0].rank == owner and len(own) == 1:
            yield _RowBlock(first_round + received // _ROUND_BYTES, start, owner, entry, 0, 0, own)
        elif entry.size_bytes:
            rows = entry.shape[0]
            row_bytes = entry.size_bytes // rows
            step = max(1, _BLOCK_BYTES // row_bytes)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                inside = tuple(p for p in own if p.offsets[0] < first + count and first < p.offsets[0] + p.sizes[0])
                number = first_round + received // _ROUND_BYTES
                yield _RowBlock(number, start + first * row_bytes, owner, entry, first, count, inside)
                received += count * row_bytes
        start += entry.size_bytes


def most_chunks(size_bytes: int, tensors: int) -> int:
    """Return in how many parts a file is verified at most: as many for each tensor, and one for each MiB at least."""
    return min(MOST_CHUNKS, max(_CHUNKS_OF_A_TENSOR * tensors, size_bytes >> 20))


# ── a rank ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class SafetensorsWriter:
    """Writer of this rank's files of the weights in ``folder``. All ranks create the writer, in the main thread.

    Args:
        contents: makes the state dict of a model; keys of nested dicts are joined by dots. Values are left out.
        folder: the directory.
        overwrite: replace weights in the directory.
        largest_file_bytes: of a file with several tensors.
    """

    gathers = True
    size_bytes = 0
    weights_crc: Sequence[int] = ()

    def __init__(
        self,
        contents: Callable[[], StateDict],
        folder: ShardedDirectory,
        *,
        overwrite: bool,
        largest_file_bytes: int = LARGEST_FILE_BYTES,
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._folder = folder
        self._group = dist.group_of()
        self._rank = self._group.rank
        self._own: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._written: list[tuple[str, FileDigest]] = []
        self._round = 0

        def pieces() -> list[StatePiece]:
            state = RankState(_tensors_of(contents(), folder.uri), self._group)
            for piece in state.pieces:
                tensor = state.data[piece.metadata_index]
                assert isinstance(tensor, Tensor)
                self._own[piece.key, piece.offsets] = tensor
            return state.pieces

        def divide(tables: list[list[StatePiece]]) -> list[_Share]:
            handle = SaveHandle.new(overwrite=overwrite, decider=WEIGHTS_INDEX)
            folder.begin(handle)
            return _divide(tables, handle, largest_file_bytes)

        self._share = self._group.reduce_scatter("planning a save", pieces, divide)

    def storages(self) -> list[StorageCopy]:
        """Return an empty list: nothing is copied before it is written."""
        return []

    def staged_in(self, memory: HostMemory) -> None:
        """Do nothing: see :meth:`storages`."""

    def write(self, memory: HostMemory | None) -> None:
        """Write the files of this rank, and send rows to other ranks. After an error the rank still sends its rows."""
        names = [name for name, *_ in self._share.files]
        failure: BaseException | None = None
        try:
            digests = self._folder.write(self._share.handle, itertools.starmap(self._new_file, self._share.files))
            self._written = list(zip(names, digests, strict=True))
        except BaseException as e:  # noqa: BLE001 - raised below
            failure = e
        try:
            self._exchange_until(self._share.rounds, None)
        except BaseException as e:  # noqa: BLE001 - raised below
            failure = failure or e
        self._own.clear()
        if failure is not None:
            raise failure

    def _new_file(self, name: str, tensors: Sequence[TensorEntry], first: int, end: int) -> NewFile:
        header = header_of(tensors)

        def fill(sink: Sink) -> None:
            self._exchange_until(first, None)
            sink.write(header)
            self._exchange_until(end, sink)

        size = len(header) + sum(entry.size_bytes for entry in tensors)
        return NewFile(name, size, fill, chunk_bytes_for(size, LEAST_CHUNK_BYTES, most_chunks(size, len(tensors))))

    def _exchange_until(self, end: int, sink: Sink | None) -> None:
        """Make the rounds of exchanges before ``end`` that are not made, and write the blocks of this rank to ``sink``.

        With ``sink=None`` the rank only sends and receives.
        """
        while self._round < end:
            number, self._round = self._round, self._round + 1
            blocks = [block for block in self._share.blocks if block.round == number]
            received: dict[_RowBlock, Tensor] = {}
            transfers: list[dist.TensorTransfer] = []
            for block in blocks:
                if block.owner == self._rank and block.rows:
                    memory = torch.empty((block.rows, *block.entry.shape[1:]), dtype=block.entry.dtype)
                    received[block] = memory
                    for part in block.parts:
                        if part.rank == self._rank:
                            _box(memory, block, part).copy_(self._rows(block, part))
                for part in block.senders:
                    ranks = (part.rank, block.owner)
                    if part.rank == self._rank:
                        transfers.append(dist.TensorTransfer(part.rank, ranks, [self._rows(block, part)]))
                    elif block.owner == self._rank:
                        transfers.append(dist.TensorTransfer(part.rank, ranks, [_box(received[block], block, part)]))
            if self._group.exchanges:
                dist.exchange(f"writing {self._folder.uri}", transfers)
            for block in blocks if sink is not None else ():
                if block.owner == self._rank:
                    assert sink is not None
                    own = received.get(block)
                    write_tensor(sink, self._own[block.entry.name, block.parts[0].offsets] if own is None else own)

    def _rows(self, block: _RowBlock, part: _TensorPart) -> Tensor:
        """Return the rows of ``block`` in the part of this rank."""
        first, end = _common(block, part)
        return self._own[block.entry.name, part.offsets].narrow(0, first - part.offsets[0], end - first)

    def finish(self, manifest: Manifest) -> list[tuple[str, FileDigest]]:
        """Return the files that this rank has written. They are durable."""
        return self._written

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Commit on rank 0: write the index with the record."""
        files = {name: (digest, None) for name, digest in itertools.chain.from_iterable(parts)}
        return self._folder.commit(self._share.index, files, manifest)

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the files unless they are committed, or may be. May be called twice."""
        if not may_be_committed:
            self._folder.abandon()


def _tensors_of(state: StateDict, uri: str) -> dict[str, Tensor]:
    """Return the tensors of ``state`` by their keys.

    Raises:
        SaveError: safetensors has no such tensors.
        ConfigError: there are no tensors.
    """
    found: dict[str, Tensor] = {}
    for name, value in leaves(state, as_dcp=True).values.items():
        if not isinstance(value, Tensor):
            log.warning("%s: left out a value that is no tensor: %s", uri, name)
        elif not dist.is_dense(value):
            raise SaveError(
                f"{name!r}: safetensors has no tensors such as {type(value).__name__} of {value.layout}: it takes "
                "dense ones."
            )
        else:
            TensorEntry(name, value.dtype, tuple(value.shape)).check(value.layout)
            found[name] = value
    if not found:
        raise ConfigError(f"{uri!r}: there are no tensors to write: expected the state dict of a model.")
    return found


def _box(memory: Tensor, block: _RowBlock, part: _TensorPart) -> Tensor:
    """Return the place of the rows of ``part`` in the memory of ``block``."""
    first, end = _common(block, part)
    memory = memory.narrow(0, first - block.first, end - first)
    for dim in range(1, memory.dim()):
        memory = memory.narrow(dim, part.offsets[dim], part.sizes[dim])
    return memory


def _common(block: _RowBlock, part: _TensorPart) -> tuple[int, int]:
    """Return the rows that both have: the first, and the end."""
    return max(block.first, part.offsets[0]), min(block.first + block.rows, part.offsets[0] + part.sizes[0])
