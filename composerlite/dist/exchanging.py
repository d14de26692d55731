"""What one rank has and others need: tensors in memory, and parts of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
from typing import TYPE_CHECKING, NamedTuple, cast, final

import torch
import torch.distributed

from composerlite.dist.collectives import _gloo  # pyright: ignore[reportPrivateUsage] - of this package
from composerlite.dist.env import get_control

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["Move", "Transfer", "exchange", "move"]

_WINDOW_BYTES = 64 << 20
"""What is on its way at a time."""
_PIECE_BYTES = 8 << 20
"""How much of a file is one transfer."""


@final
class Transfer(NamedTuple):
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
        """Of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def exchange(what: str, transfers: Iterable[Transfer]) -> None:
    """Make all ``transfers``, over the gloo group that training does not use. Every rank calls it.

    A rank gives those in which it has a part. There is one order of all transfers, and each rank gives its own in that.

    Args:
        what: is sent, for messages.
        transfers: what to send and to receive.

    Raises:
        RankError: a rank was lost. LateRankError: not every rank came in time.
    """
    control = get_control()
    ticket = control.meetings.pass_by(what)
    for window in _windows(transfers):
        parcels = [_Parcel(transfer, control.meetings.rank) for transfer in window]
        with _gloo(what, control.timeout, ticket) as group:
            works = [work for parcel in parcels for work in parcel.start(group)]
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
) -> None:
    """Make all ``moves``, in order. Every rank calls it with the same ones.

    Args:
        what: is moved, for messages.
        moves: of which parts.
        read: on the source: so many bytes of a file, from an offset.
        write: on the target: takes them.

    Raises:
        RankError: a rank was lost.
        Exception: what ``read`` or ``write`` raised on this rank, when all moves are made: others are not kept waiting.
    """
    rank = get_control().meetings.rank
    failures: list[Exception] = []

    def attempt(act: Callable[[], object]) -> None:
        if not failures:
            try:
                act()
            except Exception as e:  # noqa: BLE001 - raised below; zeros are sent, and nobody uses them
                failures.append(e)

    def transfers() -> Iterator[Transfer]:
        for piece in _pieces(moves):
            if rank not in (piece.source, piece.target):
                continue
            memory = bytearray(piece.size_bytes)
            if rank == piece.source:
                attempt(lambda p=piece, m=memory: _fill(m, read(p.name, p.offset, p.size_bytes)))
            arrived = functools.partial(write, piece.name, piece.offset, memoryview(memory))
            tensors = [torch.frombuffer(memory, dtype=torch.uint8)]
            yield Transfer(piece.source, (piece.source, piece.target), tensors, functools.partial(attempt, arrived))

    exchange(what, transfers())
    if failures:
        raise failures[0]


def _fill(memory: bytearray, data: bytes | bytearray) -> None:
    memoryview(memory)[:] = data  # of another size: raises


def _pieces(moves: Sequence[Move]) -> Iterator[Move]:
    for one in moves:
        for start in range(0, one.size_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, one.size_bytes - start)
            yield one._replace(offset=one.offset + start, size_bytes=size)


def _windows(transfers: Iterable[Transfer]) -> Iterator[list[Transfer]]:
    """As many at a time as go up to so many bytes, and one at least.

    Ranks need not have the same windows: of all transfers that are not done, the first is in those of all its ranks.
    """
    window: list[Transfer] = []
    size = 0
    for transfer in transfers:
        if window and size + transfer.size_bytes > _WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append(transfer)
        size += transfer.size_bytes
    if window:
        yield window


@final
class _Parcel:
    """The bytes of a transfer on one rank: those of its tensor, or, where they are several or elsewhere, a copy."""

    def __init__(self, transfer: Transfer, rank: int) -> None:
        self._transfer = transfer
        self._rank = rank
        first, *others = transfer.tensors
        self._is_copy = bool(others) or not _lies_plainly(first)
        if not self._is_copy:
            self._bytes = _bytes_of(first)
        elif rank == transfer.source:
            self._bytes = torch.cat([_bytes_of(_plain(tensor)) for tensor in transfer.tensors])
        else:
            self._bytes = torch.empty(transfer.size_bytes, dtype=torch.uint8)

    def start(self, group: ProcessGroup) -> Iterator[Work]:
        """Begin to send, or to receive."""
        source = self._transfer.source
        if self._rank != source:
            yield cast("Work", torch.distributed.irecv(self._bytes, source, group=group))
            return
        for rank in self._transfer.ranks:
            if rank != source:
                yield cast("Work", torch.distributed.isend(self._bytes, rank, group=group))

    def unpack(self) -> None:
        """Put what came into the tensors, and say that it is there."""
        if self._rank == self._transfer.source:
            return
        if self._is_copy:
            self._fill()
        if self._transfer.then is not None:
            self._transfer.then()

    def _fill(self) -> None:
        parts = self._bytes.split([tensor.nbytes for tensor in self._transfer.tensors])
        for tensor, part in zip(self._transfer.tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a clone begins where its dtype may


def _lies_plainly(tensor: torch.Tensor) -> bool:
    """Whether its numbers lie in host memory one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy, whose numbers lie so."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
