"""A sampler for those who want one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composerlite.dist.env import get_global_rank, get_world_size

if TYPE_CHECKING:
    from collections.abc import Sized

    from torch.utils.data import DistributedSampler


def get_sampler(
    dataset: Sized,
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> DistributedSampler[Any]:
    """A sampler that gives each rank its share of ``dataset``.

    The trainer needs none: it partitions the samples of a plain ``DataLoader`` among the ranks. If there is
    one, it keeps to its order, and no sample is given twice.

    Args:
        dataset: with a length.
        drop_last: leave out the samples that do not go up evenly; else some are given twice.
        shuffle: in an order that depends on the epoch only.
        num_replicas: number of shares; by default one per rank.
        rank: whose share; by default that of this process.

    Returns:
        The sampler.
    """
    from torch.utils.data import Dataset, DistributedSampler

    # torch asks for a Dataset and uses its length
    sized: Dataset[Any] = dataset  # pyright: ignore[reportAssignmentType]
    return DistributedSampler(
        sized,
        num_replicas=get_world_size() if num_replicas is None else num_replicas,
        rank=get_global_rank() if rank is None else rank,
        shuffle=shuffle,
        drop_last=drop_last,
    )
