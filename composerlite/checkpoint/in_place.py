"""Which tensors of a checkpoint can be read straight into the memory of those that they are to replace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composerlite.checkpoint.formats.torch_reader import Record

__all__ = ["placed"]


class _Pair(NamedTuple):
    """A tensor of the checkpoint and the live one that it is to become, if there is one."""

    saved: Tensor
    live: Tensor | None


def placed(contents: Any, live: Any, unread: Mapping[int, Record]) -> tuple[Any, dict[str, int]]:
    """``contents`` with live tensors in the place of those that can be read into them, and where to read which record.

    A tensor of the checkpoint is read in place where it is all of its storage, in the same order as the live one, on
    the CPU; and where no two live tensors share memory unless those of the checkpoint do just the same.

    Args:
        contents: what the checkpoint holds, unread.
        live: the live tensors, by the same path of keys.
        unread: the record of each storage, by the ``id`` of the storage.
    """
    groups: dict[int, list[_Pair]] = {}
    for pair in _pairs(contents, live):
        groups.setdefault(id(pair.saved.untyped_storage()), []).append(pair)
    shared = _shared_memory(groups)
    places: dict[str, int] = {}
    replaced: set[int] = set()
    for storage, pairs in groups.items():
        record = unread.get(storage)
        if record is None or not all(_fits(pair, pairs[0], record) for pair in pairs):
            continue
        address = pairs[0].live.data_ptr()  # type: ignore[union-attr]
        if (address, address + record.size) not in shared:
            places[record.name] = address
            replaced.add(storage)
    return _with_live(contents, live, replaced), places


def _pairs(saved: Any, live: Any) -> Iterator[_Pair]:
    if isinstance(saved, Tensor):
        if (
            type(saved) in (Tensor, nn.Parameter) and saved.layout is torch.strided
        ):  # others have no storage to speak of
            yield _Pair(saved, live if isinstance(live, Tensor) else None)
    elif isinstance(saved, dict):
        lives = live if isinstance(live, dict) else {}
        for key, value in saved.items():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(value, Tensor | dict | list | tuple):
                yield from _pairs(value, lives.get(key))  # pyright: ignore[reportUnknownMemberType]
    elif isinstance(saved, list | tuple):
        for value in saved:  # pyright: ignore[reportUnknownVariableType]
            if isinstance(value, Tensor | dict | list | tuple):
                yield from _pairs(value, None)


def _fits(pair: _Pair, first: _Pair, record: Record) -> bool:
    saved, live = pair
    if live is None or first.live is None or type(live) not in (Tensor, nn.Parameter) or type(saved) is not Tensor:
        return False
    return (
        live.device.type == "cpu"
        and live.layout is torch.strided
        and live.dtype is saved.dtype
        and live.shape == saved.shape
        and _strides(live) == _strides(saved) == _strides(first.saved)
        and live.data_ptr() == first.live.data_ptr()
        and saved.dtype is first.saved.dtype
        and saved.numel() * saved.itemsize == record.size > 0
        and _is_dense(saved)
        and not (live.is_conj() or live.is_neg() or saved.is_conj() or saved.is_neg())
    )


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
                extent = 1 + sum((size - 1) * stride for size, stride in _strides(live))
                start = live.data_ptr()
                owners.setdefault((start, start + extent * live.itemsize), set()).add(storage)
    shared = {span for span, storages in owners.items() if len(storages) > 1}
    widest = (0, 0)
    for here in sorted(owners):
        if here[0] < widest[1]:
            shared |= {here, widest}
        widest = max(here, widest, key=lambda span: span[1])
    return shared


def _with_live(saved: Any, live: Any, replaced: set[int]) -> Any:
    if type(saved) is Tensor and saved.layout is torch.strided:
        return live if id(saved.untyped_storage()) in replaced else saved
    if isinstance(saved, dict) and isinstance(live, dict):
        return {key: _with_live(value, live[key], replaced) if key in live else value for key, value in saved.items()}  # pyright: ignore
    return saved
