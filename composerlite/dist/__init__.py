"""Ranks, devices, and collectives.

``__all__`` lists the names for users. Other packages of composerlite also use other names here, such as
``dist.is_dense`` and ``dist.shards.total_norm``.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from composerlite.dist import connect, env, shards, transfers
from composerlite.dist.collectives import (
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object_list,
    run_local_rank_zero_first,
)
from composerlite.dist.connect import finalize_dist, get_group, group_of, initialize_dist
from composerlite.dist.env import (
    get_device,
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_sampler,
    get_world_size,
    is_available,
    is_initialized,
)
from composerlite.dist.group import Group, PiggybackCounter
from composerlite.dist.shards import empty_shard_like, is_dense, is_distributed_tensor, local_shard, tied_names
from composerlite.dist.transfers import Move, TensorTransfer, exchange, move
from composerlite.dist.votes import Vote

__all__ = [
    "Group",
    "Vote",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "finalize_dist",
    "get_device",
    "get_global_rank",
    "get_group",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_sampler",
    "get_world_size",
    "initialize_dist",
    "is_available",
    "is_initialized",
    "run_local_rank_zero_first",
]


def __dir__() -> list[str]:
    return __all__
