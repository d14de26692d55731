"""What runs on each of several ranks that save checkpoints together."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from checkpoint.parts import new_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from composerlite import dist
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.save.save import LONGEST_WORK, SaveTask
from composerlite.checkpoint.save.snapshot import StagingMemory
from composerlite.core import Logger, ParallelismConfig, State
from composerlite.core.parallelism import FSDPConfig
from composerlite.dist.votes import Vote
from composerlite.errors import RankError


def ready(folder: Path, state: State, **arguments: Any) -> tuple[CheckpointSaver, Logger]:
    """A saver that has started."""
    logger = Logger(state)
    saver = CheckpointSaver(folder=folder, **arguments)
    saver.init(state, logger)
    saver.after_load(state, logger)
    saver.fit_start(state, logger)
    return saver, logger


def next_batch(state: State, saver: CheckpointSaver, logger: Logger) -> None:
    """One batch of training, as far as the saver sees it."""
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizers[0].step()
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.to_next_batch(4, 8, 0.5)
    saver.batch_checkpoint(state, logger)


def a_run(folder: Path) -> dict[str, Any]:
    """Four batches with a save at each, and what every rank knows afterwards."""
    rank = dist.get_global_rank()
    random.seed(rank)
    state = new_state()
    saver, logger = ready(
        folder, state, filename="ba{batch}-rank{rank}.pt", save_interval="1ba", num_checkpoints_to_keep=2
    )
    for _ in range(4):
        next_batch(state, saver, logger)
    saver.fit_end(state, logger)
    saver.close(state, logger)
    return {"saved": saver.saved_checkpoints, "next": random.random(), "stalls": len(saver.manager.outcomes.reports)}


def sharded_state(mesh_shape: tuple[int, ...] = (), *, width: int = 24, kind: str = "sharded") -> State:
    """A state whose model is sharded over all ranks, or, with two dimensions, replicated over the first."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 5))
    shape = mesh_shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return State(
        model,
        rank_zero_seed=17,
        run_name="run",
        device=torch.device("cpu"),
        max_duration="100ep",
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        parallelism=ParallelismConfig(fsdp=FSDPConfig(state_dict_type=kind)),
        rank=dist.get_global_rank(),
        world_size=dist.get_world_size(),
    )


def step(state: State) -> None:
    """One step of the optimizer, with the same data on every rank."""
    generator = torch.Generator().manual_seed(int(state.timestamp.batch))
    inputs = torch.randn(4, next(state.model.parameters()).shape[1], generator=generator)
    state.model(inputs).square().mean().backward()
    state.optimizers[0].step()
    state.optimizers[0].zero_grad()
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.to_next_batch(4, 8, 0.5)


def whole(state: State) -> dict[str, torch.Tensor]:
    """The weights and the optimizer's state, of all ranks, by the keys of a checkpoint."""
    contents = state.state_dict()
    (optimizer,) = contents["optimizers"].values()
    tensors = {f"state.model.{key}": value for key, value in contents["model"].items()}
    for parameter, values in optimizer["state"].items():
        tensors |= {f"state.optimizers.AdamW.state.{parameter}.{key}": value for key, value in values.items()}
    return {
        key: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for key, t in tensors.items()
        if isinstance(t, torch.Tensor)
    }


def a_sharded_run(folder: Path, mesh_shape: tuple[int, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """Three batches with a save at each, and what the last one has to hold."""
    state = sharded_state(mesh_shape)
    saver, logger = ready(
        folder, state, filename="ba{batch}-rank{rank}.pt", save_interval="1ba", num_checkpoints_to_keep=2, **arguments
    )
    random.seed(dist.get_global_rank())
    expected: dict[str, torch.Tensor] = {}
    for _ in range(3):
        step(state)
        expected = whole(state)
        saver.batch_checkpoint(state, logger)
    step(state)  # not what was saved
    saver.fit_end(state, logger)
    saver.close(state, logger)
    return {
        "saved": saver.saved_checkpoints,
        "next": random.random(),
        "whole": {key: tensor.numpy() for key, tensor in expected.items()},
    }


def saves_before_a_write(folder: Path, rank: int) -> dict[str, Any]:
    """Saves in the background, after each of which ``rank`` changes its shards of the weights by ways that torch does
    not count; what each of those that were committed has to hold.
    """
    state = sharded_state(width=1200)
    saver, logger = ready(folder, state, filename="ba{batch}.pt", save_interval="1ba", lazy=True, failure_limit=1)
    expected: dict[str, dict[str, Any]] = {}
    for batch in range(1, 7):
        step(state)
        expected[f"ba{batch}"] = {key: tensor.numpy() for key, tensor in whole(state).items()}
        saver.batch_checkpoint(state, logger)
        if batch > 1 and dist.get_global_rank() == rank:
            for parameter in state.model.parameters():
                shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                shard.data.mul_(0.5)
                shard.detach().numpy()[-1:] = batch
    saver.fit_end(state, logger)
    saver.close(state, logger)
    return {Path(path).name: expected[Path(path).name] for path in saver.saved_checkpoints}


def full_saves(folder: Path) -> list[dict[str, Any]]:
    """Saves of a sharded state to one file, in each way of copying it."""
    told: list[dict[str, Any]] = []
    for number, how in enumerate(({}, {"staging_bytes": 0}, {"asynchronous": False}, {"lazy": True})):
        state = sharded_state(kind="full")
        saver, logger = ready(folder / str(number), state, filename="ba{batch}.pt", save_interval="1ba", **how)
        step(state)
        expected = whole(state)
        saver.batch_checkpoint(state, logger)
        step(state)
        saver.fit_end(state, logger)
        saver.close(state, logger)
        told.append({key: tensor.numpy() for key, tensor in expected.items()})
    return told


def die_in(kind: type, method: str) -> None:
    """This process is killed when it comes to ``method``; of a round, where the ranks vote on a commit."""
    real = getattr(kind, method)

    def die(*arguments: Any, **others: Any) -> Any:
        if kind is Vote and arguments[0].timeout < LONGEST_WORK:
            return real(*arguments, **others)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(kind, method, die)


STAGES: dict[str, tuple[type, str]] = {
    "snapshot": (StagingMemory, "take"),
    "write": (ShardedDirectory, "write"),
    "vote": (Vote, "arrive"),
    "commit": (ShardedDirectory, "commit"),
    "answer": (SaveTask, "_conclude"),
}


def save_and_be_killed(folder: Path, rank: int, stage: str) -> str:
    """Two saves, in the second of which ``rank`` is killed: what the other one raises."""
    state = sharded_state()
    saver, logger = ready(folder, state, filename="ba{batch}.pt", save_interval="1ba")
    step(state)
    saver.batch_checkpoint(state, logger)
    saver.fit_end(state, logger)
    step(state)
    dist.barrier()
    object.__setattr__(dist.get_group(), "timeout", timedelta(seconds=3))  # all has been imported: that takes longer
    if dist.get_global_rank() == rank:
        die_in(*STAGES[stage])
    try:
        saver.batch_checkpoint(state, logger)
        saver.fit_end(state, logger)
    except RankError as e:
        return str(e)
    return "nothing was raised"


def fail_on(rank: int, kind: type, method: str) -> Callable[[], None]:
    """On ``rank`` there is no space in ``method`` until what is returned is called."""
    real = getattr(kind, method)

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    if dist.get_global_rank() == rank:
        setattr(kind, method, no_space)
    return lambda: setattr(kind, method, real)


def saves_that_fail(folder: Path) -> dict[str, Any]:
    """The second of three saves fails on rank 1: tolerated in one run, raised in another."""
    told: dict[str, Any] = {}
    for limit in (1, 0):
        state = sharded_state()
        saver, logger = ready(
            folder / str(limit), state, filename="ba{batch}.pt", save_interval="1ba", failure_limit=limit
        )
        try:
            for batch in (1, 2, 3):
                step(state)
                restore = fail_on(1 if batch == 2 else -1, ShardedDirectory, "write")
                try:
                    saver.batch_checkpoint(state, logger)
                    saver.fit_end(state, logger)
                finally:
                    restore()
        except RankError as e:
            told["raised"] = str(e)
        saver.close(state, logger)
        told[f"saved {limit}"] = [Path(path).name for path in saver.saved_checkpoints]
    return told
