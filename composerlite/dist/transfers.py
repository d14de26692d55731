"""Transfers of tensors, parts of files and memory between ranks, over the gloo group, not the training group."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed
import xxhash

from composerlite.dist.connect import get_group
from composerlite.errors import RankError
from composerlite.types import Piece, batches

_WINDOW_BYTES = 64 << 20
"""Bytes to send at the same time."""
_PIECE_BYTES = 8 << 20
"""Largest part of a file to send at once."""
_TOGETHER_BYTES = 1 << 20
"""Most bytes of pieces that are broadcast together. Larger pieces are broadcast alone, without a copy."""
_BACKGROUND_TAG = 1
"""Tag of messages from a background thread: the main thread may use the group at the same time."""


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class TensorTransfer(NamedTuple):
    """Tensors to send from a rank to other ranks.

    Attributes:
        source: the sending rank.
        ranks: the source and all receiving ranks.
        tensors: at least one tensor of this rank, on any device. Shapes and dtypes are the same on all of ``ranks``.
            The source sends the contents; receiving ranks get the contents in place.
    """

    source: int
    ranks: tuple[int, ...]
    tensors: Sequence[torch.Tensor]


def exchange(operation: str, transfers: Iterable[TensorTransfer], *, tag: int = 0) -> None:
    """Make all ``transfers``. Every rank calls this.

    Each rank passes only the transfers that the rank sends or receives, in an order common to all ranks.

    Args:
        operation: name of the operation, for errors.
        transfers: the tensors to send and to receive.
        tag: of the messages. Messages of threads that use the group at the same time need different tags.

    Raises:
        RankError: a rank was lost or is late.
    """
    group = get_group()
    # Ranks may have different windows, without a deadlock: the first unfinished transfer is in the current windows of
    # all ranks of this transfer.
    for window in batches(transfers, _WINDOW_BYTES, lambda transfer: sum(tensor.nbytes for tensor in transfer.tensors)):
        messages = [_message(transfer, group.rank) for transfer in window]
        works: list[Any] = []
        with group.naming_lost_ranks(operation) as process_group:
            for transfer, message in zip(window, messages, strict=True):
                if transfer.source == group.rank:
                    targets = [rank for rank in transfer.ranks if rank != group.rank]
                    works += [torch.distributed.isend(message, rank, group=process_group, tag=tag) for rank in targets]
                else:
                    works.append(torch.distributed.irecv(message, transfer.source, group=process_group, tag=tag))
            for work in works:
                work.wait(group.timeout)
        for transfer, message in zip(window, messages, strict=True):
            _unpack(transfer, message, group.rank)


def _message(transfer: TensorTransfer, rank: int) -> torch.Tensor:
    """Return the bytes to send, or a buffer for the bytes to receive.

    The buffer is the memory of a single tensor if gloo can use this memory. Otherwise the tensors are copied into one
    message.
    """
    first, *others = transfer.tensors
    is_plain = first.device.type == "cpu" and first.is_contiguous() and not (first.is_conj() or first.is_neg())
    if is_plain and not others:
        return _bytes_of(first)
    if rank == transfer.source:
        plain = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in transfer.tensors]
        return torch.cat([_bytes_of(tensor) for tensor in plain])
    return torch.empty(sum(tensor.nbytes for tensor in transfer.tensors), dtype=torch.uint8)


def _unpack(transfer: TensorTransfer, message: torch.Tensor, rank: int) -> None:
    """Copy the received ``message`` into the tensors, unless ``message`` is the memory of the tensor."""
    if rank == transfer.source or message.data_ptr() == transfer.tensors[0].data_ptr():
        return
    parts = message.split([tensor.nbytes for tensor in transfer.tensors])
    for tensor, part in zip(transfer.tensors, parts, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # the clone is aligned for its dtype


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


# ── parts of files ───────────────────────────────────────────────────────────────────────────────────────────────────
@final
class Move(NamedTuple):
    """A part of a file to send from a rank to another rank.

    Attributes:
        source: the sending rank.
        target: the receiving rank.
        name: of the file, for ``read`` and ``write`` of :func:`move`.
        offset: of the part in the file, in bytes.
        size_bytes: size of the part.
    """

    source: int
    target: int
    name: str
    offset: int
    size_bytes: int


def move(
    operation: str,
    moves: Sequence[Move],
    read: Callable[[str, int, int], bytes | bytearray],
    write: Callable[[str, int, memoryview], object],
    *,
    in_background: bool = False,
) -> None:
    """Make all ``moves``. Every rank calls this with the same ``moves``. All moves advance together.

    If ``read`` fails on the source, the target writes zeros and raises no error. So the ranks must exchange errors
    before the files are used, as :meth:`~composerlite.dist.Group.all_or_none` does.

    Args:
        operation: name of the operation, for errors.
        moves: the parts of files.
        read: on the source: returns bytes of a file, given name, offset and size. Called for pieces of at most 8 MiB.
        write: on the target: writes bytes of a file, given name, offset and bytes. Called for the same pieces.
        in_background: a background thread calls this, and no other background thread at the same time. Then only
            sources and targets call this, and may leave out moves between other ranks.

    Raises:
        RankError: a rank was lost.
        Exception: raised by ``read`` or ``write`` on this rank, after all moves, so that no other rank waits in vain.
    """
    rank = get_group().rank
    pieces = [piece for piece in _pieces_in_turn(moves) if rank in (piece.source, piece.target)]
    failures: list[Exception] = []
    for at in range(0, len(pieces), 2):
        window = [(piece, bytearray(piece.size_bytes)) for piece in pieces[at : at + 2]]
        transfers: list[TensorTransfer] = []
        for piece, memory in window:
            if piece.source == rank:
                try:
                    memoryview(memory)[:] = read(piece.name, piece.offset, piece.size_bytes)
                except Exception as e:  # noqa: BLE001 - raised below; the target gets zeros
                    failures.append(e)
            tensors = [torch.frombuffer(memory, dtype=torch.uint8)]
            transfers.append(TensorTransfer(piece.source, (piece.source, piece.target), tensors))
        exchange(operation, transfers, tag=_BACKGROUND_TAG if in_background else 0)
        for piece, memory in window:
            if piece.target == rank:
                try:
                    write(piece.name, piece.offset, memoryview(memory))
                except Exception as e:  # noqa: BLE001 - raised below
                    failures.append(e)
    if failures:
        raise failures[0]


def _pieces_in_turn(moves: Sequence[Move]) -> list[Move]:
    """Cut ``moves`` into pieces, ordered for all moves to advance together. The same order on every rank."""
    pieces: list[tuple[int, Move]] = []
    for move in moves:
        for start in range(0, move.size_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, move.size_bytes - start)
            pieces.append((start, move._replace(offset=move.offset + start, size_bytes=size)))
    return [piece for _, piece in sorted(pieces)]


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def broadcast_memory(operation: str, pieces: Sequence[Piece], read: Callable[[Sequence[Piece]], object]) -> None:
    """Fill memory on every rank. Rank 0 calls ``read`` with a part of ``pieces`` at a time, and sends the bytes.

    Every rank calls this. If ``read`` fails, all ranks raise the exception.

    Args:
        operation: name of the operation, for errors.
        pieces: offset in a file, address in memory, and number of bytes. Offsets and sizes are the same on every rank.
            Addresses are of memory of this rank, and the memory must exist until this returns.
        read: called on rank 0: reads the given pieces into the memory of rank 0.

    Raises:
        RankError: ranks have different pieces, or a rank was lost.
    """
    group = get_group()
    text = repr([(offset, size) for offset, _, size in pieces]).encode()
    digests = group.gather(xxhash.xxh3_64_intdigest(text))
    if other := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise RankError(f"{operation}: rank 0 needs other parts than these ranks: {other}", other)
    parts = [
        (offset + start, address + start, min(_WINDOW_BYTES, size - start))
        for offset, address, size in pieces
        for start in range(0, size, _WINDOW_BYTES)
    ]
    for batch in batches(parts, _WINDOW_BYTES, lambda part: part[2]):
        with group.all_or_none(operation):
            if group.is_first:
                read(batch)
        buffers = [(ctypes.c_char * size).from_address(address) for _, address, size in batch]
        tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        for together in batches(tensors, _TOGETHER_BYTES, lambda tensor: tensor.nbytes):
            transfer = TensorTransfer(0, (), together)
            message = _message(transfer, group.rank)
            group.run(operation, torch.distributed.broadcast, message, 0)
            _unpack(transfer, message, group.rank)
