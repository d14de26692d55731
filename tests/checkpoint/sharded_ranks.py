"""What each rank does in the test that saves and loads sharded checkpoints. Found by name by ``run_ranks``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.sharded_parts import small_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import AdamW

from composerlite import dist
from composerlite.checkpoint import (
    RemoteFileSystemReader,
    async_save_state_dict,
    load_model_and_optim_state,
    load_state_dict,
    save_model_and_optim_state,
    save_state_dict,
)
from composerlite.checkpoint.load import sharded
from composerlite.errors import SaveError


def main(folder: Path) -> None:
    rank, count = dist.get_global_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    full = torch.arange(640_000.0).reshape(800, 800)
    for placement in (Shard(0), Shard(1), Replicate()):
        wanted: dict[str, Any] = {"w": distribute_tensor(torch.zeros(800, 800), mesh, [placement])}
        reader = RemoteFileSystemReader(folder / "grid")
        sharded.load(reader, wanted)
        assert torch.equal(wanted["w"].full_tensor(), full), placement
        if placement == Shard(0):
            needed = full.nbytes // count
            assert reader.bytes_read <= 1.1 * needed, (reader.bytes_read, needed)

    name = f"parts-{count}"
    state = {
        f"w{n}": distribute_tensor(full.clone(), mesh, [p]) for n, p in enumerate((Shard(0), Shard(1), Replicate()))
    }
    future = async_save_state_dict(folder / name, {**state, "step": 3})
    for tensor in state.values():
        tensor.to_local().zero_()
    future.result(60)
    wanted = {f"w{n}": distribute_tensor(torch.zeros(800, 800), mesh, [p]) for n, p in enumerate((Shard(1), Shard(0)))}
    load_state_dict(folder / name, wanted)
    assert all(torch.equal(tensor.full_tensor(), full) for tensor in wanted.values())

    model = small_model(width=64, seed=5)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = AdamW(model.parameters())
    load_model_and_optim_state(folder / "one", model, optim)
    whole = small_model(width=64)
    load_state_dict(folder / "one", {"model": dict(whole.state_dict())})
    for (key, mine), theirs in zip(model.state_dict().items(), whole.state_dict().values(), strict=True):
        value = mine.full_tensor() if isinstance(mine, DTensor) else mine
        assert torch.equal(value, theirs), key
    save_model_and_optim_state(folder / "two", model, optim)

    bad: Any = {"bad": lambda: 0} if rank == count - 1 else {}
    with pytest.raises(SaveError, match=rf"'bad' cannot be written: .*lambda.*Seen by rank {count - 1}"):
        save_state_dict(folder / "failed", {"w": full, **bad})
