"""Saves a tensor over an index that is a rule, and dies each time one step later: see ``sharded_kills.py``."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from checkpoint.sharded_kills import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composerlite.checkpoint.save import sharded_plan


def split(value: float) -> dict[str, Any]:
    """A state of one tensor that is distributed, over the only rank that there is."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return {"a": distribute_tensor(torch.full((1000,), value), init_device_mesh("cpu", (1,)), [Shard(0)])}


def main(folder: str) -> None:
    sharded_plan._MOST_LISTED = 0
    run(Path(folder), split)


if __name__ == "__main__":
    main(sys.argv[1])
