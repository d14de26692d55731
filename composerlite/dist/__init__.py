"""Ranks, devices, and what the ranks tell each other. What takes several ranks is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from composerlite.dist.env import (
    Control,
    finalize_dist,
    get_control,
    get_device,
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_world_size,
    initialize_dist,
    is_available,
    is_initialized,
)

if TYPE_CHECKING:
    from composerlite.dist.collectives import (
        all_gather,
        all_gather_object,
        all_reduce,
        all_succeed,
        barrier,
        broadcast,
        broadcast_object,
        broadcast_object_list,
        cause_elsewhere,
        leave_with,
        run_local_rank_zero_first,
    )
    from composerlite.dist.commit_barrier import CommitBarrier, CommitRound
    from composerlite.dist.exchanging import Move, Transfer, exchange, move
    from composerlite.dist.group import AllRanks, Group, RanksOf, SingleProcess, Vote, get_group, group_of
    from composerlite.dist.riders import Rider, Riders
    from composerlite.dist.sampling import get_sampler
    from composerlite.dist.shards import (
        Part,
        distributed_like,
        empty_shard_like,
        has_copies,
        is_distributed_tensor,
        part_of,
        shards_like,
    )
    from composerlite.dist.spread import Spread, spreading
    from composerlite.dist.tensors import any_distributed, full_tensor, total_norm

__all__ = [
    "AllRanks",
    "CommitBarrier",
    "CommitRound",
    "Control",
    "Group",
    "Move",
    "Part",
    "RanksOf",
    "Rider",
    "Riders",
    "SingleProcess",
    "Spread",
    "Transfer",
    "Vote",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_succeed",
    "any_distributed",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "cause_elsewhere",
    "distributed_like",
    "empty_shard_like",
    "exchange",
    "finalize_dist",
    "full_tensor",
    "get_control",
    "get_device",
    "get_global_rank",
    "get_group",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_sampler",
    "get_world_size",
    "group_of",
    "has_copies",
    "initialize_dist",
    "is_available",
    "is_distributed_tensor",
    "is_initialized",
    "leave_with",
    "move",
    "part_of",
    "run_local_rank_zero_first",
    "shards_like",
    "spreading",
    "total_norm",
]

_HOMES = {
    "CommitBarrier": "commit_barrier",
    "CommitRound": "commit_barrier",
    "get_sampler": "sampling",
    **dict.fromkeys(("Move", "Transfer", "exchange", "move"), "exchanging"),
    **dict.fromkeys(("AllRanks", "Group", "RanksOf", "SingleProcess", "Vote", "get_group", "group_of"), "group"),
    **dict.fromkeys(("Rider", "Riders"), "riders"),
    **dict.fromkeys(("any_distributed", "full_tensor", "total_norm"), "tensors"),
    **dict.fromkeys(
        (
            "Part",
            "distributed_like",
            "empty_shard_like",
            "has_copies",
            "is_distributed_tensor",
            "part_of",
            "shards_like",
        ),
        "shards",
    ),
    **dict.fromkeys(("Spread", "spreading"), "spread"),
    **dict.fromkeys(
        (
            "all_gather",
            "all_gather_object",
            "all_reduce",
            "all_succeed",
            "barrier",
            "broadcast",
            "broadcast_object",
            "broadcast_object_list",
            "cause_elsewhere",
            "leave_with",
            "run_local_rank_zero_first",
        ),
        "collectives",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'composerlite.dist' has no attribute {name!r}")
    return getattr(importlib.import_module(f"composerlite.dist.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
