"""Transfers from a rank to others: tensors in memory, parts of files, and what one rank of a node reads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast, final

import torch
import torch.distributed
import xxhash

from composerlite.dist.collectives import naming_lost_ranks
from composerlite.dist.env import get_control
from composerlite.dist.store_barrier import Failure
from composerlite.errors import RankError
from composerlite.types import Piece

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

T = TypeVar("T")

_WINDOW_BYTES = 64 << 20
"""Bytes that are on their way at a time."""
_PIECE_BYTES = 8 << 20
"""Bytes of a file that are one transfer."""
_SMALL_BYTES = 64 << 10
"""Pieces up to this size are broadcast together."""
_BACKGROUND_TAG = 1
"""Of what another thread than the main one sends meanwhile."""


@final
class TensorTransfer(NamedTuple):
    """Tensors that go from one rank to others.

    Attributes:
        source: the rank that has the numbers.
        ranks: all that have a part in it, the source among them.
        tensors: this rank's; of the same shapes and dtypes on all of ``ranks``, on any device.
        then: called where they have arrived.
    """

    source: int
    ranks: tuple[int, ...]
    tensors: Sequence[torch.Tensor]
    then: Callable[[], object] | None = None

    @property
    def size_bytes(self) -> int:
        """Size of all its tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)


def exchange(what: str, transfers: Iterable[TensorTransfer], *, in_background: bool = False) -> None:
    """Make all ``transfers``, over the gloo group that training does not use. Every rank calls it.

    A rank gives those in which it has a part. There is one order of all transfers, and each rank gives its own in that.

    Args:
        what: is sent, for messages.
        transfers: what to send and to receive.
        in_background: as for :func:`move`.

    Raises:
        RankError: a rank was lost. LateRankError: not every rank came in time.
    """
    control = get_control()
    ticket = None if in_background else control.barrier.announce(what)
    tag = _BACKGROUND_TAG if in_background else 0
    for window in _windows(transfers, 2 * _PIECE_BYTES if in_background else _WINDOW_BYTES):
        parcels = [_Parcel(transfer, control.barrier.rank) for transfer in window]
        with naming_lost_ranks(what, control.timeout, ticket) as group:
            works = [work for parcel in parcels for work in parcel.start(group, tag)]
            for work in works:
                work.wait(control.timeout)
        for parcel in parcels:
            parcel.unpack()


@final
class Move(NamedTuple):
    """A part of a file that goes from one rank to another."""

    source: int
    target: int
    name: str
    offset: int
    size_bytes: int


def move(
    what: str,
    moves: Sequence[Move],
    read: Callable[[str, int, int], bytes | bytearray],
    write: Callable[[str, int, memoryview], object],
    *,
    in_background: bool = False,
) -> None:
    """Make all ``moves``. Every rank calls it with the same ones.

    Args:
        what: is moved, for messages.
        moves: of which parts.
        read: on the source: returns bytes of a file, given name, offset and size.
        write: on the target: takes them.
        in_background: in a thread of its own, one such call at a time: it is only called by ranks that have a part in
            ``moves``, which may leave out those between other ranks. Two pieces are on their way at a time.

    Raises:
        RankError: a rank was lost.
        Exception: what ``read`` or ``write`` raised on this rank, when all moves are made: others are not kept waiting.
    """
    rank = get_control().barrier.rank
    failures: list[Exception] = []

    def attempt(act: Callable[[], object]) -> None:
        if not failures:
            try:
                act()
            except Exception as e:  # noqa: BLE001 - raised below; zeros are sent, and nobody uses them
                failures.append(e)

    def transfers() -> Iterator[TensorTransfer]:
        for piece in _in_turn(moves) if in_background else _pieces(moves):
            if rank not in (piece.source, piece.target):
                continue
            memory = bytearray(piece.size_bytes)
            if rank == piece.source:
                attempt(lambda p=piece, m=memory: _fill(m, read(p.name, p.offset, p.size_bytes)))
            arrived = functools.partial(write, piece.name, piece.offset, memoryview(memory))
            tensors = [torch.frombuffer(memory, dtype=torch.uint8)]
            yield TensorTransfer(
                piece.source, (piece.source, piece.target), tensors, functools.partial(attempt, arrived)
            )

    exchange(what, transfers(), in_background=in_background)
    if failures:
        raise failures[0]


def _fill(memory: bytearray, data: bytes | bytearray) -> None:
    memoryview(memory)[:] = data  # of another size: raises


def _in_turn(moves: Sequence[Move]) -> list[Move]:
    """Cut ``moves`` into pieces and order these so that all moves advance together."""
    pieces = [(number, one.source, one) for move in moves for number, one in enumerate(_pieces([move]))]
    return [one for *_, one in sorted(pieces)]


def _pieces(moves: Sequence[Move]) -> Iterator[Move]:
    for one in moves:
        for start in range(0, one.size_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, one.size_bytes - start)
            yield one._replace(offset=one.offset + start, size_bytes=size)


def _windows(transfers: Iterable[TensorTransfer], most_bytes: int) -> Iterator[list[TensorTransfer]]:
    """Yield windows of transfers that fit in ``most_bytes``, each with at least one.

    Ranks need not have the same windows: of all transfers that are not done, the first is in those of all its ranks.
    """
    window: list[TensorTransfer] = []
    size = 0
    for transfer in transfers:
        if window and size + transfer.size_bytes > most_bytes:
            yield window
            window, size = [], 0
        window.append(transfer)
        size += transfer.size_bytes
    if window:
        yield window


@final
class _Parcel:
    """The ``bytes`` of a transfer on one rank: those of its tensor, or, where they are several or elsewhere, a copy."""

    def __init__(self, transfer: TensorTransfer, rank: int) -> None:
        self._transfer = transfer
        self._rank = rank
        first, *others = transfer.tensors
        self._is_copy = bool(others) or not _lies_plainly(first)
        if not self._is_copy:
            self.bytes = _bytes_of(first)
        elif rank == transfer.source:
            self.bytes = torch.cat([_bytes_of(_plain(tensor)) for tensor in transfer.tensors])
        else:
            self.bytes = torch.empty(transfer.size_bytes, dtype=torch.uint8)

    def start(self, group: ProcessGroup, tag: int) -> Iterator[Work]:
        """Begin to send, or to receive."""
        source = self._transfer.source
        if self._rank != source:
            yield cast("Work", torch.distributed.irecv(self.bytes, source, group=group, tag=tag))
            return
        for rank in self._transfer.ranks:
            if rank != source:
                yield cast("Work", torch.distributed.isend(self.bytes, rank, group=group, tag=tag))

    def unpack(self) -> None:
        """Copy the received data to the tensors, and call ``then``."""
        if self._rank == self._transfer.source:
            return
        if self._is_copy:
            self._fill()
        if self._transfer.then is not None:
            self._transfer.then()

    def _fill(self) -> None:
        parts = self.bytes.split([tensor.nbytes for tensor in self._transfer.tensors])
        for tensor, part in zip(self._transfer.tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a clone begins where its dtype may


def _lies_plainly(tensor: torch.Tensor) -> bool:
    """Return true if its numbers lie in host memory one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy, whose numbers lie so."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


@final
class NodeBroadcast:
    """Ranks of which one, the source, has what all need. All call the same methods in the same order.

    What fails on the source is raised on all of them.

    Attributes:
        is_source: whether this rank is the source.
    """

    def __init__(self, what: str, group: ProcessGroup, source: int, rank: int, ticket: int) -> None:
        self.is_source = rank == source
        self._what = what
        self._group = group
        self._source = source
        self._rank = rank
        self._ticket = ticket
        self._timeout = get_control().timeout

    def object(self, make: Callable[[], T]) -> T:
        """Broadcast the result of ``make``, which is called on the source only."""
        box: list[bytes | None] = [None]
        value: T | None = None
        failure: Exception | None = None
        if self.is_source:
            try:
                value = make()
                box = [pickle.dumps((True, value))]
            except Exception as e:  # noqa: BLE001 - raised below, when the others know
                failure = e
                box = [pickle.dumps((False, Failure.of(e, self._source)))]
        with naming_lost_ranks(self._what, self._timeout, self._ticket):
            torch.distributed.broadcast_object_list(box, src=self._source, group=self._group)
        if failure is not None:
            raise failure
        if self.is_source:
            return cast("T", value)
        good, received = pickle.loads(cast("bytes", box[0]))
        if not good:
            raise received.exception()
        return received

    def fill(self, pieces: Sequence[Piece], read: Callable[[Sequence[Piece]], object]) -> None:
        """Fill memory on every rank: the source calls ``read``, which fills its own, a part of ``pieces`` at a time.

        Args:
            pieces: of the same offsets and sizes on every rank; the addresses are the rank's own.
            read: fills memory.

        Raises:
            RankError: a rank wants other pieces than another.
        """
        self._agree(pieces)
        for batch in _batches(pieces):
            self.object(lambda batch=batch: read(batch) and None)
            self._send(batch)

    def _agree(self, pieces: Sequence[Piece]) -> None:
        text = repr([(offset, size) for offset, _, size in pieces]).encode()
        mine = torch.tensor([xxhash.xxh3_64_intdigest(text) >> 1])
        all_of = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(self._group))]
        with naming_lost_ranks(self._what, self._timeout, self._ticket):
            work = torch.distributed.all_gather(all_of, mine, group=self._group, async_op=True)
            cast("Work", work).wait(self._timeout)
        if any(int(other) != int(mine) for other in all_of):
            ranks = torch.distributed.get_process_group_ranks(self._group)
            other = [rank for rank, theirs in zip(ranks, all_of, strict=True) if int(theirs) != int(all_of[0])]
            raise RankError(f"{self._what}: rank {ranks[0]} needs other parts of it than these ranks: {other}", other)

    def _send(self, batch: Sequence[Piece]) -> None:
        small = [piece for piece in batch if piece[2] <= _SMALL_BYTES]
        for pieces in [small, *([piece] for piece in batch if piece[2] > _SMALL_BYTES)]:
            if pieces:
                transfer = TensorTransfer(self._source, (), [_memory(address, size) for _, address, size in pieces])
                parcel = _Parcel(transfer, self._rank)
                with naming_lost_ranks(self._what, self._timeout, self._ticket):
                    work = torch.distributed.broadcast(parcel.bytes, self._source, group=self._group, async_op=True)
                    cast("Work", work).wait(self._timeout)
                parcel.unpack()


@contextlib.contextmanager
def node_broadcast(what: str, sources: Sequence[int]) -> Generator[NodeBroadcast]:
    """The way from a source to this rank, for as long as the block lasts. Every rank enters with the same ``sources``.

    Args:
        what: is spread, for messages.
        sources: the rank from which each rank gets it, in the order of ranks; a source gets it from itself.

    Yields:
        The broadcast.
    """
    control = get_control()
    rank = control.barrier.rank
    source = sources[rank]
    members = [number for number, its in enumerate(sources) if its == source]
    ticket = control.barrier.announce(what)
    if len(members) == len(sources):
        yield NodeBroadcast(what, control.group, source, rank, ticket)
        return
    with naming_lost_ranks(what, control.timeout, ticket):
        group = torch.distributed.new_group(
            members, timeout=control.timeout, backend="gloo", use_local_synchronization=True
        )
    assert isinstance(group, torch.distributed.ProcessGroup)
    try:
        yield NodeBroadcast(what, group, source, rank, ticket)
    finally:
        torch.distributed.destroy_process_group(group)


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield batches of pieces of at most ``_WINDOW_BYTES``; large pieces are cut."""
    batch: list[Piece] = []
    left = _WINDOW_BYTES
    for offset, address, size in pieces:
        done = 0
        while done < size:
            count = min(size - done, left)
            batch.append((offset + done, address + done, count))
            done += count
            left -= count
            if left == 0:
                yield batch
                batch, left = [], _WINDOW_BYTES
    if batch:
        yield batch


def _memory(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
