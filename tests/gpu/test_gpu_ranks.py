"""Two ranks that share one GPU: gradients are averaged over gloo, since NCCL refuses two ranks on one device
(https://github.com/NVIDIA/nccl/issues/103)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gpu_parts import BATCHES, DEVICE, GPU, build, differing, tensors_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from composerlite import dist
from composerlite.checkpoint import async_save_state_dict, load_state_dict
from composerlite.testing import run_ranks

pytestmark = GPU
PLACE = "cuda:0" if DEVICE == "cuda" else DEVICE
ROWS = 1 << 16  # of each rank, of 64 numbers: 16 MiB


def connect() -> None:
    """Make the group of training, of gloo for both kinds of devices: the trainer takes the one that is there."""
    if DEVICE == "cuda":
        torch.cuda.set_device(0)  # else a mesh of torch takes the device of the rank's number
        torch.cuda.init()
    torch.distributed.init_process_group("gloo")


def train(folder: Path, **arguments: Any) -> dict[str, torch.Tensor]:
    """Train with DDP; weights and optimizer state in the end, and the number of batches."""
    connect()
    with build(folder, device=PLACE, **arguments) as trainer:
        first = int(trainer.state.timestamp.batch)
        trainer.fit()
        state = tensors_of({"state": trainer.state.state_dict()})
    torch.distributed.destroy_process_group()
    return {**state, "batches": torch.tensor(int(trainer.state.timestamp.batch) - first)}


def resume(whole: Path, folder: Path) -> dict[str, torch.Tensor]:
    """:func:`train` from the third batch of another run on."""
    return train(folder, load_path=str(whole / "ba3.pt"))


def test_two_ranks_on_one_gpu_resume_exactly(tmp_path: Path) -> None:
    """Bit for bit, on both ranks; the file has what the first of them had, whose statistics of batches are taken."""
    whole = run_ranks(train, 2, tmp_path / "whole", dist_timeout=None, timeout=60)
    resumed = run_ranks(resume, 2, tmp_path / "whole", tmp_path / "resumed", dist_timeout=None, timeout=60)
    for state, again in zip(whole, resumed, strict=True):
        assert (int(state.pop("batches")), int(again.pop("batches"))) == (BATCHES, BATCHES - 3)
        assert differing(state, again) == []
    saved = tensors_of(torch.load(tmp_path / "whole" / f"ba{BATCHES}.pt", weights_only=True))
    assert differing(saved, whole[0]) == []


def shards(value: float) -> dict[str, Any]:
    """A tensor of which each rank has a half, and one that both have."""
    mesh = DeviceMesh(DEVICE, [0, 1])
    half = torch.full((ROWS, 64), value + torch.distributed.get_rank(), device=PLACE)
    return {"half": DTensor.from_local(half, mesh, [Shard(0)]), "both": torch.full((100,), value, device=PLACE)}


def save_and_load(folder: Path) -> tuple[list[float], bool]:
    """Save a directory, change what was saved meanwhile, and load it in place; the values, and if memory stayed."""
    connect()
    state, live = shards(1.0), shards(0.0)
    pending = async_save_state_dict(folder / "step", state)
    for tensor in state.values():
        tensor.add_(7.0)
    pending.result(60)
    half = live["half"].to_local()
    address = half.data_ptr()
    load_state_dict(folder / "step", live)
    stayed = address == live["half"].to_local().data_ptr()
    values = [float(part) for tensor in (half, live["both"]) for part in (tensor.min(), tensor.max())]
    dist.finalize_dist()
    torch.distributed.destroy_process_group()
    return values, stayed


def test_two_ranks_on_one_gpu_save_shards_in_the_background(tmp_path: Path) -> None:
    """Each writes and loads its own, in place, and changes its tensors as soon as the save returns."""
    found = run_ranks(save_and_load, 2, tmp_path, dist_timeout=None, timeout=60)
    assert found == [([1.0, 1.0, 1.0, 1.0], True), ([2.0, 2.0, 1.0, 1.0], True)]
