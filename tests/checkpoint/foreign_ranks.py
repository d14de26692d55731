"""What runs on each of several ranks that continue from a checkpoint of another system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from test_other_systems import WHOLE, Losses, Wrapped, trainer
from torch.utils.data import DataLoader, TensorDataset

from composerlite import dist

FSDP = {"fsdp": {}}


def batches(ranks: int) -> DataLoader[Any]:
    """The samples of make_fixtures.py, in batches of four over all ranks."""
    x, y = torch.arange(64).reshape(16, 4).float().sin(), torch.arange(16) % 2
    return DataLoader(TensorDataset(x, y), batch_size=4 // ranks)


def losses_of(system: str, path: str, config: Any = None) -> list[float]:
    """Continue to the end: the losses of all ranks together."""
    found = Losses()
    model = Wrapped() if dist.get_world_size() > 1 else None
    data = batches(dist.get_world_size())
    with trainer(Path(path), found, model, train_dataloader=data, parallelism_config=config, **WHOLE[system][1]) as run:
        run.fit()
    mine = torch.tensor(found.found, dtype=torch.float64)
    dist.all_reduce(mine)
    return (mine / dist.get_world_size()).tolist()
