"""Two ranks that share one GPU: training averages gradients over gloo, since NCCL refuses two ranks on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_parts import BATCHES, DEVICE, GPU, build, tensors_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composerlite.checkpoint import async_save_state_dict, load_state_dict
from composerlite.testing import run_ranks

pytestmark = GPU
ROWS = 1 << 16


def connect() -> None:
    """Make the group of training: of gloo for the device, too (https://github.com/NVIDIA/nccl/issues/103)."""
    torch.distributed.init_process_group("gloo")


def train(folder: Path, arguments: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Train with DDP; the weights and optimizer state in the end, and the batches that this took."""
    connect()
    try:
        with build(folder, device=f"{DEVICE}:0" if DEVICE == "cuda" else DEVICE, **arguments) as trainer:
            first = int(trainer.state.timestamp.batch)
            trainer.fit()
            state = tensors_of({"state": trainer.state.state_dict()})
        return state, int(trainer.state.timestamp.batch) - first
    finally:
        torch.distributed.destroy_process_group()


def test_two_ranks_on_one_gpu_resume_exactly(tmp_path: Path) -> None:
    """Both copy from the same device; a run that resumes ends bit for bit as the one before it, on both ranks."""
    whole = run_ranks(train, 2, tmp_path / "whole", {}, dist_timeout=None, timeout=150)
    arguments = {"load_path": str(tmp_path / "whole" / "ba3.pt")}
    resumed = run_ranks(train, 2, tmp_path / "resumed", arguments, dist_timeout=None, timeout=150)
    saved = tensors_of(torch.load(tmp_path / "whole" / f"ba{BATCHES // 2}.pt", weights_only=True))
    for (state, _), (again, batches) in zip(whole, resumed, strict=True):
        assert batches
        assert state.keys() == again.keys() == saved.keys()
        assert [name for name, tensor in state.items() if not torch.equal(tensor, again[name])] == []
