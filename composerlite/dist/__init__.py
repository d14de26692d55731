"""Ranks, devices, and collectives. Modules for several ranks are imported when a name of theirs is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.dist.env import (
    backend_of,
    claim_device,
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
from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.dist.collectives import (
        all_gather,
        all_gather_object,
        all_reduce,
        barrier,
        begin_run,
        broadcast,
        broadcast_object_list,
        cause_elsewhere,
        leave_with,
        run_local_rank_zero_first,
    )
    from composerlite.dist.connect import (
        check_nobody_left,
        finalize_dist,
        get_control,
        get_group,
        group_of,
        initialize_dist,
    )
    from composerlite.dist.group import Group, PiggybackCounter, SingleProcess
    from composerlite.dist.rounds import Vote
    from composerlite.dist.shards import (
        distributed_like,
        empty_shard_like,
        full_tensor,
        is_dense,
        is_distributed_tensor,
        local_shard,
        make_fillable,
        ranks_with_same_part,
        shard_box,
        shards_like,
        tied_names,
        total_norm,
    )
    from composerlite.dist.transfers import Move, TensorTransfer, broadcast_memory, exchange, move

__all__ = [
    "Group",
    "Move",
    "PiggybackCounter",
    "SingleProcess",
    "TensorTransfer",
    "Vote",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "backend_of",
    "barrier",
    "begin_run",
    "broadcast",
    "broadcast_memory",
    "broadcast_object_list",
    "cause_elsewhere",
    "check_nobody_left",
    "claim_device",
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
    "initialize_dist",
    "is_available",
    "is_dense",
    "is_distributed_tensor",
    "is_initialized",
    "leave_with",
    "local_shard",
    "make_fillable",
    "move",
    "ranks_with_same_part",
    "run_local_rank_zero_first",
    "shard_box",
    "shards_like",
    "tied_names",
    "total_norm",
]

__getattr__, __dir__ = lazy_names(__name__)
