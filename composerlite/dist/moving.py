"""Bytes that one rank has and another needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast, final

import torch
import torch.distributed

from composerlite.dist.collectives import _gloo  # pyright: ignore[reportPrivateUsage] - of this package
from composerlite.dist.env import get_control

if TYPE_CHECKING:
    from torch.distributed import Work

__all__ = ["Move", "move"]

_PIECE_BYTES = 8 << 20
"""What is on its way at a time."""


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
    """Make all ``moves``, in order. Every rank calls it with the same ones; those that have no part in them wait.

    Args:
        what: is moved, for messages.
        moves: of which parts.
        read: on the source: so many bytes of a file, from an offset.
        write: on the target: takes them.

    Raises:
        RankError: a rank was lost.
        Exception: what ``read`` or ``write`` raised on this rank, when all moves are made: others are not kept waiting.
    """
    control = get_control()
    rank = control.meetings.rank
    ticket = control.meetings.pass_by(what)
    failure: Exception | None = None
    for source, target, name, offset, size in _pieces(moves):
        if rank not in (source, target):
            continue
        memory = bytearray(size)
        if rank == source and failure is None:
            try:
                memory[:] = read(name, offset, size)
            except Exception as e:  # noqa: BLE001 - raised below; zeros are sent, and nobody uses them
                failure = e
        with _gloo(what, control.timeout, ticket) as group:
            tensor = torch.frombuffer(memory, dtype=torch.uint8)
            if rank == source:
                work = torch.distributed.isend(tensor, target, group=group)
            else:
                work = torch.distributed.irecv(tensor, source, group=group)
            cast("Work", work).wait(control.timeout)
        if rank == target and failure is None:
            try:
                write(name, offset, memoryview(memory))
            except Exception as e:  # noqa: BLE001 - raised below
                failure = e
    if failure is not None:
        raise failure


def _pieces(moves: Sequence[Move]) -> Iterator[Move]:
    for one in moves:
        for start in range(0, one.size_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, one.size_bytes - start)
            yield one._replace(offset=one.offset + start, size_bytes=size)
