"""Which tensors of a checkpoint can be read straight into the memory of those that they are to replace."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from composerlite import dist
from composerlite.checkpoint.format.torch_reader import Record, Sieve
from composerlite.types import items_of, with_items

__all__ = ["Places", "placed"]


@final
class Places(NamedTuple):
    """Where to read which record.

    Attributes:
        addresses: of the memory of live tensors, by record.
        sieves: that fill this rank's part of distributed ones, by record.
    """

    addresses: dict[str, int]
    sieves: dict[str, Sieve]

    def __bool__(self) -> bool:
        return bool(self.addresses or self.sieves)


class _Pair(NamedTuple):
    """A tensor of the checkpoint and the live one that it is to become, if there is one."""

    saved: Tensor
    live: Tensor | None


def placed(contents: Any, live: Any, unread: Mapping[int, Record]) -> tuple[Any, Places]:
    """``contents`` with live tensors in the place of those that can be read into them, and where to read which record.

    A tensor of the checkpoint is read in place where it is all of its storage, in the same order as the live one, on
    the CPU; and where no two live tensors share memory unless those of the checkpoint do just the same. Of one that is
    to become a distributed tensor a rank keeps its part: the whole is nowhere in memory.

    Args:
        contents: what the checkpoint holds, unread.
        live: the live tensors, by the same path of keys.
        unread: the record of each storage, by the ``id`` of the storage.
    """
    groups: dict[int, list[_Pair]] = {}
    for pair in _pairs(contents, live):
        groups.setdefault(id(pair.saved.untyped_storage()), []).append(pair)
    shared = _shared_memory(groups)
    places = Places({}, {})
    replaced: dict[int, Tensor] = {}
    taken: set[int] = set()
    for storage, pairs in groups.items():
        record = unread.get(storage)
        if record is None:
            continue
        if (targets := _distributed_targets(pairs, record, taken)) is not None:
            places.sieves[record.name] = _Rows(pairs[0].saved, targets)
            replaced |= {id(pair.saved): target for pair, target in zip(pairs, targets, strict=True)}
        elif all(_fits(pair, pairs[0], record) for pair in pairs):
            address = pairs[0].live.data_ptr()  # type: ignore[union-attr]
            if (address, address + record.size) not in shared:
                places.addresses[record.name] = address
                replaced |= {id(pair.saved): pair.live for pair in pairs if pair.live is not None}
    return _with_live(contents, live, replaced), places


def _distributed_targets(pairs: Sequence[_Pair], record: Record, taken: set[int]) -> list[Tensor] | None:
    """The distributed tensors that the record is to be read to; ``None`` if it cannot be read a few rows at a time.

    They are the live ones, or new ones where numbers have to be converted afterwards, which is then said.
    """
    targets: list[Tensor] = []
    for saved, live in pairs:
        if live is None or not dist.is_distributed_tensor(live) or type(saved) is not Tensor:
            return None
        if not saved.is_contiguous() or saved.numel() * saved.itemsize != record.size or saved.shape != live.shape:
            return None
        if record.size == 0 or saved.is_conj() or saved.is_neg() or saved.dtype is not pairs[0].saved.dtype:
            return None
        targets.append(live if live.dtype is saved.dtype else dist.empty_shard_like(live, saved.dtype))
    memory = {local.data_ptr() for target in targets if (local := dist.local_shard(target).local).numel()}
    if memory & taken:
        return None  # tied here and not in the checkpoint: what is loaded last counts
    taken |= memory
    return targets


@final
class _Rows:
    """Takes a tensor row by row and keeps what belongs to distributed ones."""

    def __init__(self, saved: Tensor, targets: Sequence[Tensor]) -> None:
        self._dtype = saved.dtype
        self._row = tuple(saved.shape[1:])
        self._parts = [dist.local_shard(target) for target in targets]
        self.step_bytes = math.prod(self._row) * saved.itemsize

    def take(self, start: int, part: Tensor) -> None:
        first = start // self.step_bytes
        rows = part.view(self._dtype).view(-1, *self._row)
        for offsets, lengths, local in self._parts:
            if not offsets:  # it has no dimensions
                local.copy_(rows[0])
                continue
            begin = max(offsets[0], first)
            end = min(offsets[0] + lengths[0], first + len(rows))
            if begin >= end:
                continue
            wanted = rows[begin - first : end - first]
            for dim in range(1, len(offsets)):
                wanted = wanted.narrow(dim, offsets[dim], lengths[dim])
            local[begin - offsets[0] : end - offsets[0]].copy_(wanted)


def _pairs(saved: Any, live: Any) -> Iterator[_Pair]:
    if isinstance(saved, Tensor):
        if (
            type(saved) in (Tensor, nn.Parameter) and saved.layout is torch.strided
        ):  # others have no storage to speak of
            yield _Pair(saved, live if isinstance(live, Tensor) else None)
        return
    lives = dict(items_of(live))
    for key, value in items_of(saved):
        if isinstance(value, Tensor | dict | list | tuple | deque):
            yield from _pairs(value, lives.get(key))


def _fits(pair: _Pair, first: _Pair, record: Record) -> bool:
    saved, live = pair
    if live is None or first.live is None or type(live) not in (Tensor, nn.Parameter) or type(saved) is not Tensor:
        return False
    return (
        live.device.type == "cpu"
        and live.layout is torch.strided
        and live.dtype is saved.dtype
        and live.shape == saved.shape
        and _same_order(live, saved, first.saved)
        and live.data_ptr() == first.live.data_ptr()
        and saved.dtype is first.saved.dtype
        and saved.numel() * saved.itemsize == record.size > 0
        and _is_dense(saved)
        and not (live.is_conj() or live.is_neg() or saved.is_conj() or saved.is_neg())
    )


def _same_order(*tensors: Tensor) -> bool:
    """Whether the elements of tensors of one shape follow each other in the same order."""
    strides = {tensor.stride() for tensor in tensors}
    return len(strides) == 1 or all(_strides(tensor) == _strides(tensors[0]) for tensor in tensors)


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of each dimension whose stride matters."""
    return [pair for pair in zip(tensor.shape, tensor.stride(), strict=True) if pair[0] != 1]


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements are next to each other in memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in _strides(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def _shared_memory(groups: Mapping[int, list[_Pair]]) -> set[tuple[int, int]]:
    """The ranges of addresses of live tensors that are to get the bytes of more than one storage."""
    owners: dict[tuple[int, int], set[int]] = {}
    for storage, pairs in groups.items():
        for _, live in pairs:
            if live is not None and type(live) in (Tensor, nn.Parameter) and live.layout is torch.strided:
                dense = live.is_contiguous()
                extent = live.numel() if dense else 1 + sum((size - 1) * stride for size, stride in _strides(live))
                start = live.data_ptr()
                owners.setdefault((start, start + extent * live.itemsize), set()).add(storage)
    shared = {span for span, storages in owners.items() if len(storages) > 1}
    widest = (0, 0)
    for here in sorted(owners):
        if here[0] < widest[1]:
            shared |= {here, widest}
        widest = max(here, widest, key=lambda span: span[1])
    return shared


def _with_live(saved: Any, live: Any, replaced: Mapping[int, Tensor]) -> Any:
    if isinstance(saved, Tensor):
        return replaced.get(id(saved), saved)
    lives = dict(items_of(live))
    return with_items(saved, lambda key, value: _with_live(value, lives[key], replaced) if key in lives else value)
