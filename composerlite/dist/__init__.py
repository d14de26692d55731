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
        gather_outcomes,
        leave_with,
        run_local_rank_zero_first,
    )
    from composerlite.dist.commit_barrier import CommitBarrier, CommitRound
    from composerlite.dist.sampling import get_sampler

__all__ = [
    "CommitBarrier",
    "CommitRound",
    "Control",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_succeed",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "finalize_dist",
    "gather_outcomes",
    "get_control",
    "get_device",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_sampler",
    "get_world_size",
    "initialize_dist",
    "is_available",
    "is_initialized",
    "leave_with",
    "run_local_rank_zero_first",
]

_HOMES = {
    "CommitBarrier": "commit_barrier",
    "CommitRound": "commit_barrier",
    "get_sampler": "sampling",
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
            "gather_outcomes",
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
