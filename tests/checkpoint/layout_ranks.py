"""What each rank does in the tests of an index that is a rule. Found by name by ``run_ranks``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composerlite import dist
from composerlite.checkpoint import load_state_dict, save_state_dict
from composerlite.checkpoint.save import sharded_plan

SHAPES = ((64, 6), (7, 5), (3,), (1, 9), (16, 4, 3), (2, 2))
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "replicas": ((2, 2), (Replicate(), Shard(0))),
    "grid": ((2, 2), (Shard(0), Shard(1))),
    "rows of rows": ((2, 2), (Shard(0), Shard(0))),
    "all": ((4,), (Replicate(),)),
}


def full(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor ``number``, whole."""
    generator = torch.Generator().manual_seed(number)
    dtype = (torch.float32, torch.bfloat16, torch.int64)[number % 3]
    return (torch.rand(shape, generator=generator) * 100).to(dtype)


def _state(layout: str, count: int, *, zeros: bool = False) -> dict[str, Any]:
    mesh_shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", mesh_shape if count == 4 else (count,))
    placements = placements if count == 4 else (Shard(0),)
    state: dict[str, Any] = {}
    for number, shape in enumerate(SHAPES):
        how = tuple(Shard(0) if p.is_shard() and p.dim >= len(shape) else p for p in placements)
        whole = full(number, shape)
        whole = torch.zeros_like(whole) if zeros else whole
        state[f"w{number}"] = distribute_tensor(whole, mesh, list(how))
        state[f"plain{number}"] = whole
    return {**state, "step": 0 if zeros else 3, "name": "" if zeros else "x"}


@contextlib.contextmanager
def _a_rule_for_few_parts() -> Generator[None]:
    """Until the block ends; other tests run in the same processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_plan, "MOST_LISTED", 0)
        yield


def save(folder: Path) -> None:
    """Save every layout, with an index that is a rule however few parts there are."""
    with _a_rule_for_few_parts():
        for layout in LAYOUTS:
            save_state_dict(folder / layout, _state(layout, dist.get_world_size()))


def load(folder: Path) -> None:
    """Load all of them, sharded in another way."""
    count = dist.get_world_size()
    for saved in LAYOUTS:
        for layout in LAYOUTS if count == 4 else ("rows",):
            wanted = _state(layout, count, zeros=True)
            load_state_dict(folder / saved, wanted)
            for key, value in _state(layout, count).items():
                mine: Any = wanted[key]
                if isinstance(value, DTensor):
                    assert torch.equal(mine.full_tensor(), value.full_tensor()), (saved, layout, key)
                elif isinstance(value, torch.Tensor):
                    assert torch.equal(mine, value), (saved, layout, key)
                else:
                    assert mine == value, (saved, layout, key)
