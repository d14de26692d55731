"""The documented path of the functions that tell ranks and devices. They live in ``composerlite.dist``."""

from composerlite.dist import (
    get_device,
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_world_size,
)

__all__ = [
    "get_device",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_world_size",
]
