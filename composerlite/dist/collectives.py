"""Collectives apart from those of training. The main threads of all ranks call the same functions in the same order.

Every wait has a timeout, by default the ``timeout`` of :func:`~composerlite.dist.initialize_dist` (``dist_timeout`` of
the trainer). The error after a timeout names the late ranks. If a rank fails, all ranks raise the same error. In a run
of one process no function waits.

Tensors in host memory use a gloo group apart from training. Tensors on a device use the process group of training: the
operation is queued on the device, and the errors and the timeout are those of the backend, such as NCCL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from composerlite.dist.connect import get_group
from composerlite.dist.env import get_local_rank, get_world_size
from composerlite.errors import ConfigError

T = TypeVar("T")

_REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def barrier(operation: str = "barrier", timeout: timedelta | None = None) -> None:
    """Wait until every rank has called this function.

    Args:
        operation: name of the barrier, for errors.
        timeout: longest wait for other ranks; ``None``: the timeout of ``initialize_dist``.

    Raises:
        Exception: a rank failed before this call. Every rank raises the same exception.
        RankError: a rank was lost.
        LateRankError: not every rank came in time.
    """
    get_group().meet(operation, timeout=timeout)


@contextlib.contextmanager
def run_local_rank_zero_first() -> Generator[None]:
    """Run a block on local rank 0 of every node, and after that on the other ranks.

    If the block fails on another rank, only that rank raises the exception.

    Raises:
        Exception: the block failed on a local rank 0. Every rank raises this exception, and no other rank runs the
            block.
        LateRankError: not every rank came in time.
    """
    with get_group().all_or_none("run_local_rank_zero_first"):
        if get_local_rank() == 0:
            yield
    if get_local_rank() != 0:
        yield


def all_gather_object(obj: T) -> list[T]:
    """Return the ``obj`` of every rank, in the order of ranks. Objects must be picklable.

    Raises:
        RankError: a rank was lost.
        LateRankError: not every rank came in time.
    """
    return get_group().all_reduce("all_gather_object", lambda: obj, list)


def broadcast_object_list(object_list: list[Any], src: int = 0) -> None:
    """Replace the items of ``object_list`` by the items on rank ``src``, in place.

    Args:
        object_list: picklable objects.
        src: the sending rank.

    Raises:
        ConfigError: there is no rank ``src``.
        RankError: a rank was lost.
        LateRankError: not every rank came in time.
    """
    _check_source(src)
    group = get_group()
    own = object_list if group.rank == src else None
    object_list[:] = group.all_reduce("broadcast_object_list", lambda: own, lambda lists: lists[src]) or []


def all_reduce(tensor: torch.Tensor, reduce_operation: str = "SUM") -> None:
    """Reduce ``tensor`` over all ranks, in place.

    Args:
        tensor: of the same shape and dtype on every rank.
        reduce_operation: ``SUM``, ``PRODUCT``, ``MIN``, ``MAX``, ``BAND``, ``BOR`` or ``BXOR``.

    Raises:
        ConfigError: the operation is unknown.
        RankError: for a tensor in host memory: a rank failed, was lost, or is late. Then the ranks cannot communicate
            any more.
    """
    if reduce_operation.upper() not in _REDUCTIONS:
        raise ConfigError(f"reduce_operation={reduce_operation!r} is not known. Known: {', '.join(_REDUCTIONS)}.")
    reduction = getattr(torch.distributed.ReduceOp, reduce_operation.upper())
    _run(tensor, torch.distributed.all_reduce, tensor, reduction)


def broadcast(tensor: torch.Tensor, src: int = 0) -> None:
    """Overwrite ``tensor`` on every rank with the ``tensor`` of rank ``src``.

    Args:
        tensor: of the same shape and dtype on every rank.
        src: the sending rank.

    Raises:
        ConfigError: there is no rank ``src``.
        RankError: for a tensor in host memory: a rank failed, was lost, or is late.
    """
    _check_source(src)
    _run(tensor, torch.distributed.broadcast, tensor, src)


def all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the ``tensor`` of every rank, in the order of ranks. In a run of one process the tensor is not copied.

    Args:
        tensor: of the same shape and dtype on every rank.

    Raises:
        RankError: for a tensor in host memory: a rank failed, was lost, or is late.
    """
    if get_world_size() == 1:
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(get_world_size())]
    _run(tensor, torch.distributed.all_gather, gathered, tensor)
    return gathered


def _check_source(src: int) -> None:
    if not 0 <= src < get_world_size():
        raise ConfigError(f"src={src}: expected a rank from 0 to {get_world_size() - 1}.")


def _run(tensor: torch.Tensor, collective: Callable[..., Any], *arguments: Any) -> None:
    """Call a function of ``torch.distributed`` on the group for the device of ``tensor``."""
    if get_world_size() == 1:
        return
    if tensor.device.type == "cpu":
        get_group().run(collective.__name__, collective, *arguments)
    else:
        collective(*arguments)
