"""What runs on each of several ranks that write and read safetensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bucket_ranks import counting
from checkpoint.sharded_parts import small_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composerlite import dist
from composerlite.checkpoint import RemoteFileSystemReader, load_model_and_optim_state, save_safetensors
from composerlite.checkpoint.load import sharded
from composerlite.checkpoint.load.resolve import find_checkpoint
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.place.place import NewFile
from composerlite.errors import RankError, SaveError

WIDTH = 4096


def whole_weights() -> dict[str, torch.Tensor]:
    """The same on every rank: of several types, and of shapes that no number of ranks divides."""
    torch.manual_seed(7)
    return {
        "rows": torch.randn(WIDTH, 700),
        "columns": torch.randn(WIDTH + 3, 900),
        "few": torch.randn(3, 5),
        "half": torch.randn(77, 1001).bfloat16(),
        "experts": torch.randn(2, 33, 65),
        "row": torch.arange(11),
        "none": torch.zeros(0, 4),
        "plain": torch.randn(50, 50),
        "one": torch.tensor(3.0),
        "flags": torch.tensor([True, False]),
    }


def placements() -> dict[str, tuple[Any, ...]]:
    """Ways to spread them over two dimensions of ranks; what is not here each rank has."""
    return {
        "rows": (Shard(0), Shard(0)),
        "columns": (Shard(1), Shard(0)),
        "few": (Shard(0), Shard(0)),
        "half": (Replicate(), Shard(1)),
        "experts": (Shard(0), Shard(2)),
        "row": (Shard(0), Replicate()),
    }


def spread(mesh: Any) -> dict[str, Any]:
    """Those weights, spread."""
    made: dict[str, Any] = whole_weights()
    for name, how in placements().items():
        made[name] = distribute_tensor(made[name], mesh, how)
    return {**made, "tied": made["rows"]}


def write(folder: Path) -> dict[str, Any]:
    """Every way of spreading in one state dict; in files of one size and of another; a model that FSDP and TP share."""
    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("dp", "tp"))
    save_safetensors(folder / "state", spread(mesh))
    save_safetensors(folder / "cut", spread(mesh), largest_file_bytes=2_000_000)

    model = small_model(width=64, seed=5)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"2": ColwiseParallel()})
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["dp"])
    save_safetensors(folder / "model", model)
    for tensor in model.state_dict().values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    load_model_and_optim_state(folder / "model", model)
    back = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    assert back.keys() == whole.keys()
    assert all(torch.equal(back[name], whole[name]) for name in whole)
    return whole


def outcome(act: Callable[[], Any]) -> str:
    """What it raises."""
    try:
        act()
    except (RankError, SaveError, OSError) as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def fail(folder: Path) -> dict[str, str]:
    """Saves of which one rank cannot do its part."""
    rank = dist.get_global_rank()
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    state = spread(mesh)
    told: dict[str, str] = {}
    odd = {**state, "odd": torch.zeros(2, dtype=torch.complex128)} if rank == 1 else state
    told["type"] = outcome(lambda: save_safetensors(folder / "type", odd))
    real = ShardedDirectory.write

    def failing(self: Any, handle: Any, file: NewFile) -> Any:
        def broken(sink: Any) -> None:
            if when == "during":
                file.fill(sink)
            raise OSError(28, "no space", file.path)

        return real(self, handle, file._replace(fill=broken))

    for when in ("before", "during"):
        if rank == 1:
            ShardedDirectory.write = failing  # type: ignore[method-assign]
        try:
            told[when] = outcome(lambda when=when: save_safetensors(folder / when, state, largest_file_bytes=2_000_000))
        finally:
            ShardedDirectory.write = real  # type: ignore[method-assign]
    save_safetensors(folder / "before", state)
    return told


def write_to_a_bucket(uri: str) -> None:
    """A new folder, and another in its place."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    state = spread(mesh)
    save_safetensors(uri, {name: value + 1 if name == "rows" else value for name, value in state.items()})
    save_safetensors(uri, state, save_overwrite=True)


def read(place: str) -> dict[str, Any]:
    """What a rank reads of weights at a place, and how many bytes: of rows, of columns, and a tie of two names."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    counted: dict[str, int] = {}
    told: dict[str, Any] = {}
    for name, how in (("rows", Shard(0)), ("half", Shard(0)), ("columns", Shard(1))):
        whole = whole_weights()[name]
        wanted = distribute_tensor(torch.zeros_like(whole), mesh, [how])
        counted.clear()
        with contextlib.ExitStack() as stack, counting(counted):
            found = find_checkpoint(stack, place, None, progress_bar=False, trust=False)
            with RemoteFileSystemReader(found.opened(None)[0]) as reader:
                key = f"model.{name}"
                sharded.load_leaves(reader, {key: wanted}, group=dist.get_group())
                told[name] = {"needed": wanted.to_local().nbytes, "read": reader.bytes_read}
            told[name]["moved"] = sum(counted.values())
        assert torch.equal(wanted.full_tensor(), whole), name
    return told
