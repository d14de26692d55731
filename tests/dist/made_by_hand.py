"""What each rank does whose process group was made by hand, or by nobody."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import ComposerModel, Trainer, dist
from composerlite.checkpoint import load_model_and_optim_state, save_model_and_optim_state
from composerlite.errors import ConfigError

__all__ = ["ENVIRONMENTS", "on_two_machines", "spawned", "train", "who"]

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
ENVIRONMENTS: dict[str, dict[str, str] | None] = {
    "none": {},
    "of another job": dict(zip(NAMES, ("5", "8", "1", "4", "1", "1", "192.0.2.1", "9"), strict=True)),
    "of a job of one process": dict(zip(NAMES, ("0", "1", "0", "1", "0", "0", "192.0.2.1", "9"), strict=True)),
    "half": {"LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    "no numbers": {"RANK": "first", "WORLD_SIZE": "", "LOCAL_RANK": "x"},
    "of this job": None,
}


def who() -> dict[str, int]:
    """Who this process says it is."""
    return {
        "rank": dist.get_global_rank(),
        "world_size": dist.get_world_size(),
        "local_rank": dist.get_local_rank(),
        "local_world_size": dist.get_local_world_size(),
        "node_rank": dist.get_node_rank(),
    }


class _Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


def train(folder: Path, kind: str, by_hand: bool = True) -> list[Any]:
    """Make a group by hand in an environment of that kind; train, save, and load with functions: who it was, each time.

    Without ``by_hand`` the trainer makes the group.
    """
    before = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    rank, world_size = int(before["RANK"]), int(before["WORLD_SIZE"])
    given = ENVIRONMENTS[kind]
    os.environ.update(before if given is None else given)
    try:
        if by_hand:
            store = f"file://{folder}/store"
            torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        return _train(folder)
    finally:
        for name in NAMES:
            os.environ.pop(name, None)
        os.environ.update(before)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _train(folder: Path) -> list[Any]:
    told: list[Any] = [who()]
    torch.manual_seed(0)
    model = _Model()
    points = TensorDataset(torch.randn(16, 3), torch.arange(16) % 2)
    with Trainer(
        model=model,
        train_dataloader=DataLoader(points, batch_size=4),
        max_duration="2ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        save_folder=folder / "run",
        save_filename="ba{batch}-{rank}of{world_size}-{local_rank}of{local_world_size}-{node_rank}.pt",
        save_latest_filename=None,
        device="cpu",
        progress_bar=False,
        run_name="run",
        seed=1,
    ) as trainer:
        trainer.fit()
        told.append(who())
        told.append(int(trainer.state.timestamp.sample))
        told.append((trainer.state.rank, trainer.state.world_size))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        save_model_and_optim_state(folder / "functions", model, optimizer)
        load_model_and_optim_state(folder / "functions", model, optimizer)
        told.append(sorted(path.name for path in (folder / "run").glob("*.pt")))
    return told


def on_two_machines(folder: Path) -> str:
    """Make a group of ranks with other host names and no variables of a launcher: what ``initialize_dist`` raises."""
    before = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    rank, name = int(before["RANK"]), socket.gethostname
    socket.gethostname = lambda: f"node{rank}"
    try:
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        dist.initialize_dist("cpu", 20)
    except ConfigError as e:
        return str(e)
    finally:
        socket.gethostname = name
        os.environ.update(before)
        torch.distributed.destroy_process_group()
    return ""


def spawned(rank: int, world_size: int, folder: str, port: int) -> None:
    """A process of ``torch.multiprocessing.spawn``."""
    store = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    told = _train(Path(folder))
    Path(folder, f"told{rank}").write_text(repr(told))
    torch.distributed.destroy_process_group()
