"""Tensors of which each rank has a part (``DTensor``), seen from one rank. Nothing here waits for another rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from composerlite._torch_compat import local_part, savable_dtypes
from composerlite.dist.env import get_world_size
from composerlite.types import items_of, with_items

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_boxes: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}
_MOST_BOXES = 4096
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class LocalShard(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        offsets: where it begins in the whole, by dimension.
        lengths: how long it is; with a 0 where this rank has nothing of it.
        local: the part itself.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    local: Tensor


def is_distributed_tensor(value: object) -> bool:
    """Return true if ``value`` is a tensor of which each rank has a part."""
    module = sys.modules.get(
        "torch.distributed.tensor"
    )  # where it was not imported there is none, and it takes its time
    return module is not None and isinstance(value, module.DTensor)


def is_dense(tensor: Tensor) -> bool:
    """Check that ``tensor`` is nothing but numbers at strides, of which a part can be read or written by itself.

    Others are saved as values: sparse and quantized ones, those without numbers, and those of classes of their own.
    Of a distributed one the part of this rank counts.
    """
    if is_distributed_tensor(tensor):
        return is_dense(local_part(tensor))
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested:
        return False
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return is_strided and tensor.dtype in savable_dtypes()


def make_fillable(live: Tensor, value: Tensor | None = None) -> None:
    """Prepare ``live``, in place, so that a tensor of its shape can be copied into it.

    One whose elements share memory, as ``expand`` makes it, gets memory of its own with the same numbers: torch copies
    nothing into it.

    Args:
        live: a tensor of the state of training.
        value: what will be copied; a compressed sparse ``live`` gets room for as many numbers.
    """
    if live.layout in _COMPRESSED:
        if value is not None and value.layout is live.layout:
            live.resize_as_sparse_(value)
    elif is_dense(live) and not is_distributed_tensor(live) and _shares_elements(live):
        live.data = live.detach().clone(memory_format=torch.contiguous_format)


def _shares_elements(tensor: Tensor) -> bool:
    """Check if elements of ``tensor`` may have the same place in memory."""
    if tensor.is_contiguous():
        return False
    end = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride <= end:
            return True
        end += (size - 1) * stride
    return False


def local_shard(tensor: Tensor) -> LocalShard:
    """Return this rank's shard of ``tensor``; all of it where it is not distributed."""
    if not is_distributed_tensor(tensor):
        return LocalShard((0,) * tensor.dim(), tuple(tensor.shape), tensor.detach())
    value: Any = tensor.detach()
    return LocalShard(*shard_box(value), value.to_local())


def shard_box(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and lengths of this rank's shard of a distributed tensor: lengths with a 0 where it has nothing of it.

    They are worked out once for all tensors of one shape that are split in the same way: a model of thousands has ten.

    Args:
        tensor: a distributed tensor.

    Returns:
        Offsets and lengths, by dimension.
    """
    value: Any = tensor
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return (0,) * value.dim(), (0,) * value.dim()
    if type(local_part(value)) not in (Tensor, torch.nn.Parameter):  # it may know its place itself
        return _box_of(value)
    key = (value.shape, value.device_mesh.shape, tuple(coordinate), value.placements)
    box = _boxes.get(key)
    if box is None:
        if len(_boxes) >= _MOST_BOXES:
            _boxes.clear()
        box = _boxes[key] = _box_of(value)
    return box


def _box_of(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    (chunk,) = value.__create_chunk_list__()  # what torch.distributed.checkpoint asks it for
    return tuple(chunk.offsets), tuple(chunk.sizes)


def ranks_with_same_part(tensor: Tensor) -> Sequence[int] | None:
    """Return the ranks that have the same part of ``tensor``, in order: only this one where each has its own.

    ``None`` where it is not known, since the mesh of the tensor has some of the ranks only.
    """
    if not is_distributed_tensor(tensor):
        return range(get_world_size())
    value = cast("DTensor", tensor)
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or mesh.size() < get_world_size():
        return None
    splits = (getattr(placement, "dim", None) is not None for placement in value.placements)
    at = tuple(number if is_split else slice(None) for number, is_split in zip(coordinate, splits, strict=True))
    return sorted(mesh.mesh[at].flatten().tolist())


def empty_shard_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor of ``dtype`` that is distributed as ``tensor`` is.

    Args:
        tensor: a tensor, sharded or not.
        dtype: of the new tensor.

    Returns:
        An uninitialized tensor of the same shape and placements.
    """
    return torch.empty_like(tensor.detach(), dtype=dtype, requires_grad=False)


@torch.no_grad()
def distributed_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """``whole``, which every rank has, distributed as ``tensor`` of the same shape is, on its device.

    Args:
        whole: the complete tensor, equal on every rank.
        tensor: a tensor of the same shape, sharded or not.

    Returns:
        A new tensor with the placements and the device of ``tensor``.
    """
    made = empty_shard_like(tensor, whole.dtype)
    part = local_shard(made)
    for dim, (start, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
        whole = whole.narrow(dim, start, length)
    part.local.copy_(whole)
    return made


def shards_like(saved: Any, live: Any) -> Any:
    """``saved`` with a new tensor for each whose counterpart in ``live`` is distributed, distributed as that is.

    ``None`` stands for the other tensors.

    Args:
        saved: nested dicts and lists of a checkpoint.
        live: those of the state to restore.

    Returns:
        ``saved`` with the new tensors in it.
    """
    if isinstance(saved, Tensor):
        is_like = isinstance(live, Tensor) and is_distributed_tensor(live) and live.shape == saved.shape
        return empty_shard_like(live, saved.dtype) if is_like else None
    lives = dict(items_of(live))
    return with_items(saved, lambda key, item: shards_like(item, lives.get(key)))


def tied_names(tensors: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of each tensor that has several in ``tensors``: of one part of memory, seen in the same way."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and is_dense(tensor) and (local := local_shard(tensor).local).numel():
            key = local.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            found.setdefault(key, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def any_distributed(tensors: Iterable[torch.Tensor]) -> bool:
    """Return true if any is distributed. Waits for nobody."""
    return any(is_distributed_tensor(tensor) for tensor in tensors)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather ``tensor`` from all ranks; a tensor that is not distributed is returned as it is."""
    value: Any = tensor
    return value.full_tensor() if is_distributed_tensor(tensor) else tensor


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of ``tensors`` as one vector, each as a whole; they may be distributed in different ways."""
    norms = [full_tensor(torch.linalg.vector_norm(tensor.detach())) for tensor in tensors]
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
