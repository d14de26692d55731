"""Tensors distributed over ranks (``DTensor``), seen from a single rank.

Only :func:`full_tensor` and :func:`total_norm` communicate.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composerlite._torch_compat import local_part, savable_dtypes
from composerlite.dist.env import get_world_size
from composerlite.types import items_of, with_items

_boxes: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}
"""Cache of :func:`local_shard`: offsets and lengths of shards."""
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class LocalShard(NamedTuple):
    """This rank's shard of a tensor.

    Attributes:
        offsets: position of the shard in the tensor, by dimension.
        lengths: shape of the shard; with a 0 if this rank has no shard.
        local: the shard, in the memory of the tensor.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    local: Tensor


def is_distributed_tensor(value: object) -> bool:
    """Return true if ``value`` is a ``DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: no such tensors
    return module is not None and isinstance(value, module.DTensor)


def is_dense(tensor: Tensor) -> bool:
    """Return true if ``tensor`` has plain strided memory: any part can be read or written alone.

    False for sparse, quantized, nested and meta tensors, for subclasses other than ``nn.Parameter``, and for dtypes
    that cannot be saved. For a distributed tensor the shard of this rank counts.
    """
    if is_distributed_tensor(tensor):
        return is_dense(local_part(tensor))
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested:
        return False
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return is_strided and tensor.dtype in savable_dtypes()


def make_fillable(live: Tensor, value: Tensor | None = None) -> None:
    """Prepare ``live``, in place, for copying a tensor of the same shape into ``live``.

    A tensor whose elements share memory, as after ``expand``, gets memory for each element, since torch cannot copy
    into shared elements.

    Args:
        live: a tensor of the training state.
        value: the tensor to copy. A compressed sparse ``live`` gets room for as many numbers as ``value`` has.
    """
    if live.layout in _COMPRESSED:
        if value is not None and value.layout is live.layout:
            live.resize_as_sparse_(value)
    elif is_dense(live) and not is_distributed_tensor(live):
        end, is_shared = 0, False
        for stride, size in sorted(zip(live.stride(), live.shape, strict=True)):
            is_shared |= size > 1 and stride <= end
            end += (size - 1) * stride
        if is_shared and not live.is_contiguous():
            live.data = live.detach().clone(memory_format=torch.contiguous_format)


def local_shard(tensor: Tensor) -> LocalShard:
    """Return this rank's shard of ``tensor``: all of an undistributed tensor.

    Offsets and lengths are cached for distributed tensors of the same shape and placements.
    """
    value: Any = tensor
    if not is_distributed_tensor(tensor):
        return LocalShard((0,) * value.dim(), tuple(value.shape), value.detach())
    local, coordinate = local_part(value), value.device_mesh.get_coordinate()
    if coordinate is None:
        return LocalShard((0,) * value.dim(), (0,) * value.dim(), local.detach())
    # A local tensor of a subclass may compute the position itself, so the cached position is not used.
    is_plain = type(local) in (Tensor, nn.Parameter)
    key = (is_plain, value.shape, value.device_mesh.shape, tuple(coordinate), value.placements)
    if not is_plain or key not in _boxes:
        (chunk,) = value.__create_chunk_list__()  # called by torch.distributed.checkpoint
        _boxes[key] = tuple(chunk.offsets), tuple(chunk.sizes)
    return LocalShard(*_boxes[key], local.detach())


def ranks_with_same_part(tensor: Tensor) -> Sequence[int]:
    """Return the ranks with the same shard of ``tensor`` as this rank, in order.

    Empty if unknown, because the mesh of the tensor has only some of the ranks.
    """
    if not is_distributed_tensor(tensor):
        return range(get_world_size())
    value: Any = tensor
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or mesh.size() < get_world_size():
        return ()
    splits = (getattr(placement, "dim", None) is not None for placement in value.placements)
    at = tuple(number if is_split else slice(None) for number, is_split in zip(coordinate, splits, strict=True))
    return sorted(mesh.mesh[at].flatten().tolist())


def empty_shard_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of ``dtype`` with the shape, device and placements of ``tensor``.

    Args:
        tensor: a tensor, distributed or not.
        dtype: of the new tensor.

    Returns:
        An uninitialized tensor.
    """
    return torch.empty_like(tensor.detach(), dtype=dtype, requires_grad=False)


@torch.no_grad()
def distributed_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """Distribute a copy of ``whole`` over the ranks.

    Args:
        whole: the complete tensor, equal on every rank.
        tensor: a tensor of the same shape, distributed or not.

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
    """Allocate a tensor for each tensor of ``saved`` that is a distributed tensor of the same shape in ``live``.

    Args:
        saved: nested dicts and lists of a checkpoint.
        live: nested dicts and lists of the state to restore.

    Returns:
        ``saved`` with the new tensors, distributed as in ``live``, and with ``None`` in place of all other tensors.
    """
    if isinstance(saved, Tensor):
        is_like = isinstance(live, Tensor) and is_distributed_tensor(live) and live.shape == saved.shape
        return empty_shard_like(live, saved.dtype) if is_like else None
    lives = dict(items_of(live))
    return with_items(saved, lambda key, item: shards_like(item, lives.get(key)))


def tied_names(tensors: Mapping[str, Any]) -> list[list[str]]:
    """Return groups of two or more names in ``tensors`` for the same memory with the same dtype, shape and strides."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and is_dense(tensor) and (local := local_shard(tensor).local).numel():
            key = local.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            found.setdefault(key, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather ``tensor`` on all ranks that have shards: each of these ranks calls this.

    Returns:
        The complete tensor. An undistributed tensor is returned unchanged, without waiting.
    """
    value: Any = tensor
    return value.full_tensor() if is_distributed_tensor(tensor) else tensor


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all ``tensors`` together, on the device of the first tensor.

    Args:
        tensors: at least one; distributed in any ways. Every rank passes the same tensors in the same order.
    """
    norms = [full_tensor(torch.linalg.vector_norm(tensor.detach())) for tensor in tensors]
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
