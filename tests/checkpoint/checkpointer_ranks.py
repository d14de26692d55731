"""What each rank does in the tests of the Checkpointer. Found by name by the processes of ``run_ranks``."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saving_ranks import fail_on
from checkpoint.sharded_parts import same, small_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import AdamW, Optimizer

from composerlite import dist
from composerlite.checkpoint import Checkpointer, async_save_state_dict, load_state_dict, save_state_dict
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.errors import CheckpointExistsError, LateRankError, RankError, SaveError


def sharded_training(seed: int, steps: int) -> tuple[nn.Module, Optimizer]:
    """A model that all ranks have a part of, and an optimizer that has stepped."""
    model = small_model(width=64, seed=seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optim = AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        optim.step()
    return model, optim


def whole(model: nn.Module, optim: Optimizer) -> dict[str, Any]:
    """Both states, with whole tensors."""

    def gathered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: gathered(inner) for key, inner in value.items()}
        return value.full_tensor().clone() if isinstance(value, DTensor) else value

    return {"model": gathered(model.state_dict()), "optim": gathered(optim.state_dict()["state"])}


def save_and_load(folder: Path) -> dict[str, Any]:
    """Save, train on, load on the same ranks; rank 0 returns the weights that one process must find."""
    rank = dist.get_global_rank()
    model, optim = sharded_training(seed=0, steps=2)
    checkpointer = Checkpointer()
    checkpointer.save(folder / "step1", (model, optim), {"rank": rank, "step": 1})
    saved = whole(model, optim)
    future = checkpointer.save_async(folder / "step2", (model, optim), {"rank": rank, "step": 2}, ephemeral=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    future.result(60)
    other, other_optim = sharded_training(seed=1, steps=1)
    assert checkpointer.load(folder / "step2", (other, other_optim)) == {"rank": rank, "step": 2}
    assert same(whole(other, other_optim), saved)
    with pytest.raises(CheckpointExistsError):  # on every rank, though one has looked
        checkpointer.save(folder / "step1", (model, optim), {})
    return saved


def fail_on_one_rank(folder: Path) -> None:
    """What one rank cannot write, before training goes on and behind it, no rank has saved; and it can be repeated."""
    rank = dist.get_global_rank()
    model, optim = sharded_training(seed=0, steps=1)
    checkpointer = Checkpointer()
    with pytest.raises(SaveError, match=r"train_state/bad.*lambda"):
        checkpointer.save_async(folder / "step3", (model, optim), {"bad": (lambda: 0) if rank == 1 else 0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    future = checkpointer.save_async(folder / "step3", (model, optim), {"rank": rank})
    with pytest.raises(RankError, match=r"rank 1 failed: .*File too large"):
        future.result(60)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()  # rank 0 tidies up, after all have heard of it
    assert not any("step3" in path.name for path in folder.iterdir())
    assert Checkpointer.latest_checkpoint(folder) == str(folder / "step2")
    checkpointer.save_async(folder / "step3", (model, optim), {"rank": rank}).result(60)
    assert checkpointer.load(folder / "step3", (model, optim)) == {"rank": rank}
    restore = fail_on(0, ShardedDirectory, "sweep")
    with pytest.raises(OSError, match="No space"):  # on every rank
        save_state_dict(folder / "weights", model.state_dict())
    restore()


def plans(folder: Path) -> None:
    """The plan is used again while nothing has changed on any rank, and what is saved is right in any case."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    again: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: again.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("composerlite.checkpoint.save.sharded_plan")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)

    def state(rows: int = 6, dtype: torch.dtype = torch.float32, key: str = "w", place: Any = None) -> dict[str, Any]:
        tensor = torch.arange(rows * 4).reshape(rows, 4).to(dtype) + len(list(folder.iterdir()))
        return {key: distribute_tensor(tensor, mesh, [place or Shard(0)]), "n": rows, "r": torch.ones(3)}

    def saved(number: int, wanted: dict[str, Any]) -> bool:
        """Save and load; whether the plan was an old one."""
        again.clear()
        future = async_save_state_dict(folder / str(number), wanted, enable_plan_caching=True)
        future.result(60)
        empty = {
            k: torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) else 0 for k, v in wanted.items()
        }
        load_state_dict(folder / str(number), empty)
        full = {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in wanted.items()}
        assert same(empty, full), number
        return bool(again)

    assert not saved(0, state())
    assert saved(1, state())
    assert not saved(2, state(rows=10))
    assert not saved(3, state(dtype=torch.bfloat16))
    assert not saved(4, state(place=Shard(1)))
    assert not saved(5, state(key="v"))
    assert saved(6, state(key="v"))
    assert not saved(7, {**state(key="v"), **({"only": torch.ones(2)} if dist.get_global_rank() == 1 else {})})
    assert not saved(8, state(place=Replicate()))
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)

    copies = {f"r{n}": torch.ones(1000) for n in range(10)}
    save_state_dict(folder / "copies", copies)
    sizes = [path.stat().st_size for path in (folder / "copies").glob("*.distcp")]
    assert len(sizes) == dist.get_world_size()  # what all have each writes a part of
    assert sum(sizes) < 1.5 * 40_000


def all_of_it(root: Path) -> Any:
    """The above one after the other: starting ranks takes long."""
    saved = save_and_load(root / "run")
    fail_on_one_rank(root / "run")
    (root / "plans").mkdir(exist_ok=True)
    dist.barrier()
    plans(root / "plans")
    module = Module()
    found = Checkpointer().load(root / "one" / "step7", module, load_optim_state=False)
    assert module.loaded == {"model": {"w": 5}}
    return saved, found


class Module:
    """Says itself what is saved of it."""

    loaded: Any = None

    def state_dict_to_save(self) -> dict[str, Any]:
        return {"model": {"w": 5}, "optim": {"step": 1}}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.loaded = state_dict


def die_behind_training(folder: Path) -> None:
    """Rank 1 is killed while it writes; rank 0 hears of it in time."""
    dist.initialize_dist(timeout=3.0)
    checkpointer = Checkpointer()
    model = small_model()
    checkpointer.save(folder / "step1", model, {"step": 1})
    if dist.get_global_rank() == 1:

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and "rank1.pt" in str(arguments[0]):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
    future = checkpointer.save_async(folder / "step2", model, {"step": 2})
    with pytest.raises(LateRankError, match="rank 1"):
        future.result(60)
