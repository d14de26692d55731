"""What each rank does in the tests of CheckpointManager. Found by name by the processes of ``run_ranks``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from composerlite import dist
from composerlite.checkpoint import CheckpointManager


def a_loop(folder: Path, steps: int, sharded: bool) -> dict[str, Any]:
    """Train ``steps`` steps, of which those are left out that a checkpoint has."""
    torch.manual_seed(0)
    rank = dist.get_global_rank()
    random.seed(rank)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    position = {"rank": rank, "step": 0}
    with CheckpointManager(folder, model=model, optimizer=optimizer, position=position) as checkpoints:
        restored = checkpoints.restore()
        for step in range(restored + 1, steps + 1):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * step)
            optimizer.step()
            position["step"] = step
            random.random()
            checkpoints.save(step)
            checkpoints.poll()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    numbers = [float(weight.detach().sum()) for weight in weights]
    return {"restored": restored, "seen": [position["rank"], position["step"]], "numbers": [*numbers, random.random()]}
