"""Collectives apart from those of training. Every rank calls the same functions in the same order.

All are for the main thread. Every wait has a timeout, and its error names the ranks that are late. A rank that fails
makes all raise the same error. In a run of one process each does what it does for a single rank, at once.

Ranks wait for each other over a store first (:mod:`composerlite.dist.store_barrier`); data go over a gloo group once
all are there. Only :func:`all_reduce`, :func:`all_gather` and :func:`broadcast` of tensors do without, because they
are called every batch.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed

from composerlite.dist.env import get_control, get_local_rank, get_world_size
from composerlite.dist.store_barrier import format_ranks
from composerlite.errors import ConfigError, RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

T = TypeVar("T")

_FIND_LOST_RANKS = timedelta(seconds=2)
_LOOK_AROUND = timedelta(seconds=1)
_BROKEN = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe", re.IGNORECASE)
_REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def barrier(what: str = "barrier", timeout: timedelta | None = None) -> None:
    """Wait until every rank is here.

    Args:
        what: name of the barrier, for errors.
        timeout: of the wait for other ranks; ``None``: ``dist_timeout``.

    Raises:
        RankError: a rank failed on its way here.
        LateRankError: not every rank came in ``timeout``.
    """
    if get_world_size() > 1:
        get_control().barrier.succeed(what, _limit(timeout))


@contextlib.contextmanager
def all_succeed(what: str, timeout: timedelta | None = None) -> Generator[None]:
    """Run a block on every rank; afterwards it succeeded on all, or all raise the same error.

    The block may do anything, also wait for other ranks: if one rank fails in it, those who wait for that rank raise
    its error there.

    Args:
        what: the block does, for the error.
        timeout: of the wait for the others, from the end of this rank's block.

    Raises:
        RankError: the block failed on a rank; its cause is the exception. Where it failed on every rank in the same
            way, and in a run of one process: the exception.
        LateRankError: not every rank reached the end of the block in ``timeout``.
    """
    if get_world_size() == 1:
        yield
    else:
        with get_control().barrier.all_succeed(what, _limit(timeout)):
            yield


def leave_with(error: BaseException) -> None:
    """Tell the others that this rank failed and comes no more: who waits for it raises that instead of waiting on.

    For the last words of a rank that an exception ends outside of :func:`all_succeed`. Never waits.
    """
    if get_world_size() > 1:
        get_control().barrier.leave(error)


def begin_run() -> None:
    """Begin another run over the connection that there is, for who caught the error of the last one on all ranks.

    Every rank calls it. That a rank left with :func:`leave_with` before does not count any more.
    """
    if get_world_size() > 1:
        get_control().barrier.begin_run()


def cause_elsewhere(what: str, error: BaseException) -> RankError | None:
    """The failure of another rank that ``error`` follows from: it left, or was lost, and the connection broke.

    ``None`` if ``error`` is this rank's own, or says already whose it is.

    Args:
        what: these ranks were doing, for the error.
        error: was raised here.

    Returns:
        The error to raise in place of ``error``, or ``None``.
    """
    is_broken = isinstance(error, torch.distributed.DistError) or _BROKEN.search(str(error)) is not None
    if get_world_size() == 1 or isinstance(error, RankError) or not (isinstance(error, RuntimeError) and is_broken):
        return None
    barrier = get_control().barrier
    try:
        barrier.check_nobody_left(what)
        lost = barrier.missing(what, _FIND_LOST_RANKS)
    except RankError as e:
        return e
    return RankError(f"{what}: lost {format_ranks(lost)}: {error}", lost) if lost else None


def all_gather_object(obj: T, timeout: timedelta | None = None) -> list[T]:
    """The ``obj`` of every rank, in the order of ranks. They must be picklable.

    Args:
        obj: any picklable object.
        timeout: of the wait for other ranks; ``None``: ``dist_timeout``.

    Returns:
        One object for each rank.

    Raises:
        RankError: a rank's object cannot be pickled, or a rank was lost.
        LateRankError: not every rank came in ``timeout``.
    """
    if get_world_size() == 1:
        return [obj]
    with all_succeed("all_gather_object", timeout):  # before data flow: all know that there are some to come from each
        pickled = pickle.dumps(obj)
    gathered: list[bytes] = [b""] * get_world_size()
    with naming_lost_ranks("all_gather_object", timeout) as group:
        torch.distributed.all_gather_object(gathered, pickled, group=group)
    return [pickle.loads(text) for text in gathered]


def broadcast_object(obj: T, src: int = 0, timeout: timedelta | None = None) -> T:
    """The ``obj`` of rank ``src``; what the other ranks give is ignored.

    Args:
        obj: any picklable object; used on rank ``src`` only.
        src: the rank whose object is sent.
        timeout: of the wait for other ranks; ``None``: ``dist_timeout``.

    Returns:
        The object of rank ``src``.

    Raises:
        RankError: it cannot be pickled, or a rank was lost.
        LateRankError: not every rank came in ``timeout``.
    """
    world_size = get_world_size()
    if not 0 <= src < world_size:
        raise ConfigError(f"src={src}: expected a rank from 0 to {world_size - 1}.")
    if world_size == 1:
        return obj
    is_source = get_control().barrier.rank == src
    with all_succeed("broadcast_object", timeout):
        box: list[Any] = [pickle.dumps(obj if is_source else None)]
    with naming_lost_ranks("broadcast_object", timeout) as group:
        torch.distributed.broadcast_object_list(box, src=src, group=group)
    return obj if is_source else pickle.loads(box[0])


def broadcast_object_list(object_list: list[Any], src: int = 0, timeout: timedelta | None = None) -> None:
    """Put the objects of rank ``src`` in ``object_list`` on every rank.

    Args:
        object_list: picklable objects, replaced in place on all ranks but ``src``.
        src: the rank whose objects are sent.
        timeout: of the wait for other ranks; ``None``: ``dist_timeout``.

    Raises:
        RankError, LateRankError: as :func:`broadcast_object`.
    """
    object_list[:] = broadcast_object(object_list, src, timeout)


def all_reduce(tensor: torch.Tensor, reduce_operation: str = "SUM", timeout: timedelta | None = None) -> None:
    """Reduce ``tensor`` over all ranks, in place. One in host memory never waits on the group of training.

    Args:
        tensor: of the same shape and dtype on every rank.
        reduce_operation: ``SUM``, ``PRODUCT``, ``MIN``, ``MAX``, ``BAND``, ``BOR`` or ``BXOR``.
        timeout: of the wait, for a tensor in host memory. One on a GPU has that of the group of training.

    Raises:
        ConfigError: the operation is unknown.
        RankError: a rank was lost, or failed and said so.
        LateRankError: not every rank came in ``timeout``. The ranks can do no more together after that.
    """
    if reduce_operation.upper() not in _REDUCTIONS:
        raise ConfigError(f"reduce_operation={reduce_operation!r} is not known. Known: {', '.join(_REDUCTIONS)}.")
    operation = getattr(torch.distributed.ReduceOp, reduce_operation.upper())
    _run_on_tensor(
        "all_reduce",
        tensor,
        lambda group: torch.distributed.all_reduce(tensor, operation, group=group, async_op=True),
        timeout,
    )


def broadcast(tensor: torch.Tensor, src: int = 0, timeout: timedelta | None = None) -> None:
    """Copy the ``tensor`` of rank ``src`` into that of every rank, in place.

    Args:
        tensor: of the same shape and dtype on every rank.
        src: the rank whose values are sent.
        timeout: of the wait for other ranks; ``None``: ``dist_timeout``.

    Raises:
        RankError, LateRankError: as :func:`all_reduce`.
    """
    _run_on_tensor(
        "broadcast",
        tensor,
        lambda group: torch.distributed.broadcast(tensor, src, group=group, async_op=True),
        timeout,
    )


def all_gather(tensor: torch.Tensor, timeout: timedelta | None = None) -> list[torch.Tensor]:
    """The ``tensor`` of every rank, in the order of ranks; of the same shape and dtype on all.

    Args:
        tensor: of any device.
        timeout: of the wait for other ranks; ``None``: ``dist_timeout``.

    Returns:
        One tensor for each rank.

    Raises:
        RankError, LateRankError: as :func:`all_reduce`.
    """
    if get_world_size() == 1:
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(get_world_size())]
    _run_on_tensor(
        "all_gather",
        tensor,
        lambda group: torch.distributed.all_gather(gathered, tensor, group=group, async_op=True),
        timeout,
    )
    return gathered


@contextlib.contextmanager
def run_local_rank_zero_first(timeout: timedelta | None = None) -> Generator[None]:
    """Run a block on the local rank 0 of every node, and when all those are done, on the other ranks.

    Raises:
        RankError: the block failed on a local rank 0: raised by every rank, and no other rank runs the block.
        LateRankError: not every rank came in ``timeout``.
    """
    if get_local_rank() == 0:
        with all_succeed("run_local_rank_zero_first", timeout):
            yield
    else:
        barrier("run_local_rank_zero_first", timeout)
        yield


def _limit(timeout: timedelta | None) -> timedelta:
    return get_control().timeout if timeout is None else timeout


@contextlib.contextmanager
def naming_lost_ranks(what: str, timeout: timedelta | None, ticket: int | None = None) -> Generator[ProcessGroup]:
    """Raise an error that names the ranks at fault when gloo fails: those that have not arrived, or that are gone."""
    control = get_control()
    try:
        yield control.group
    except RuntimeError as e:
        if isinstance(e, RankError):
            raise
        control.barrier.check_nobody_left(what)
        if ticket is not None and (late := control.barrier.late(ticket, what, _limit(timeout))) is not None:
            raise late from e
        if "timed out" in str(e).lower():
            raise RankError(f"{what}: every rank arrived, but it did not finish in time: {e}") from e
        if lost := control.barrier.missing(what, _FIND_LOST_RANKS):
            raise RankError(f"{what}: lost {format_ranks(lost)}: {e}", lost) from e
        raise RankError(f"{what}: the connection between the ranks broke: {e}") from e


def _run_on_tensor(
    what: str, tensor: torch.Tensor, start: Callable[[ProcessGroup | None], Work | None], timeout: timedelta | None
) -> None:
    if get_world_size() == 1:
        return
    control = get_control()
    if tensor.device.type != "cpu":
        cast("Work", start(None)).wait()
        return
    ticket = control.barrier.announce(what)
    with naming_lost_ranks(what, timeout, ticket) as group:
        _wait(cast("Work", start(group)), what, _limit(timeout))


def _wait(work: Work, what: str, limit: timedelta) -> None:
    """Wait for ``work``, and look around meanwhile: a rank that failed and said so ends it."""
    end = time.monotonic() + limit.total_seconds()
    while True:
        left = timedelta(seconds=max(0.001, end - time.monotonic()))
        try:
            work.wait(min(left, _LOOK_AROUND))
            return
        except RuntimeError as e:
            if left <= _LOOK_AROUND or "timed out" not in str(e).lower():
                raise
        get_control().barrier.check_nobody_left(what)
