"""What one rank reads, on its way to the others: objects, and bytes straight into memory."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar, cast, final

import torch
import torch.distributed
import xxhash

from composerlite.dist.collectives import _gloo  # pyright: ignore[reportPrivateUsage] - of this package
from composerlite.dist.env import get_control
from composerlite.dist.meetings import Failure
from composerlite.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["Spread", "spreading"]

T = TypeVar("T")
Piece = tuple[int, int, int]  # offset in a file, address in memory, bytes
_BATCH_BYTES = 64 << 20
"""What is on its way at a time."""
_SMALL_BYTES = 64 << 10
"""Pieces up to this size travel together."""


@final
class Spread:
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
        self._ticket = ticket
        self._timeout = get_control().timeout

    def object(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on the source; it is called nowhere else."""
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
        with _gloo(self._what, self._timeout, self._ticket):
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
        with _gloo(self._what, self._timeout, self._ticket):
            work = torch.distributed.all_gather(all_of, mine, group=self._group, async_op=True)
            cast("Work", work).wait(self._timeout)
        if any(int(other) != int(mine) for other in all_of):
            ranks = torch.distributed.get_process_group_ranks(self._group)
            other = [rank for rank, theirs in zip(ranks, all_of, strict=True) if int(theirs) != int(all_of[0])]
            raise RankError(f"{self._what}: rank {ranks[0]} needs other parts of it than these ranks: {other}", other)

    def _send(self, batch: Sequence[Piece]) -> None:
        small = [(address, size) for _, address, size in batch if size <= _SMALL_BYTES]
        if small:
            together = torch.empty(sum(size for _, size in small), dtype=torch.uint8)
            if self.is_source:
                _copy(small, together.data_ptr(), gather=True)
            self._broadcast(together)
            if not self.is_source:
                _copy(small, together.data_ptr(), gather=False)
        for _, address, size in batch:
            if size > _SMALL_BYTES:
                memory = (ctypes.c_char * size).from_address(address)
                self._broadcast(torch.frombuffer(memory, dtype=torch.uint8))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        with _gloo(self._what, self._timeout, self._ticket):
            work = torch.distributed.broadcast(tensor, self._source, group=self._group, async_op=True)
            cast("Work", work).wait(self._timeout)


@contextlib.contextmanager
def spreading(what: str, sources: Sequence[int]) -> Generator[Spread]:
    """The way from a source to this rank, for as long as the block lasts. Every rank enters with the same ``sources``.

    Args:
        what: is spread, for messages.
        sources: the rank from which each rank gets it, in the order of ranks; a source gets it from itself.
    """
    control = get_control()
    assert control.group is not None
    rank = control.meetings.rank
    source = sources[rank]
    members = [number for number, its in enumerate(sources) if its == source]
    ticket = control.meetings.pass_by(what)
    if len(members) == len(sources):
        yield Spread(what, control.group, source, rank, ticket)
        return
    with _gloo(what, control.timeout, ticket):
        group = torch.distributed.new_group(
            members, timeout=control.timeout, backend="gloo", use_local_synchronization=True
        )
    assert isinstance(group, torch.distributed.ProcessGroup)
    try:
        yield Spread(what, group, source, rank, ticket)
    finally:
        torch.distributed.destroy_process_group(group)


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Parts of so many bytes; large pieces are cut."""
    batch: list[Piece] = []
    left = _BATCH_BYTES
    for offset, address, size in pieces:
        done = 0
        while done < size:
            count = min(size - done, left)
            batch.append((offset + done, address + done, count))
            done += count
            left -= count
            if left == 0:
                yield batch
                batch, left = [], _BATCH_BYTES
    if batch:
        yield batch


def _copy(places: Sequence[tuple[int, int]], address: int, *, gather: bool) -> None:
    """Move bytes between ``places`` and the memory at ``address``, where they lie one after the other."""
    for place, size in places:
        ctypes.memmove(*((address, place) if gather else (place, address)), size)
        address += size
