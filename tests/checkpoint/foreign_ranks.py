"""What runs on each of several ranks that continue from a checkpoint of another system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from test_other_systems import WHOLE, Losses, Wrapped, trainer
from tiny_training import Classifier
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from composerlite import dist
from composerlite.errors import IncompatibleCheckpointError

FSDP = {"fsdp": {}}
STEPS = 3


class Tied(Classifier):
    """A body and a head with one weight: that of the head is left out where a weight is saved once."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.head.weight = self.body.weight


def batches(ranks: int) -> DataLoader[Any]:
    """The samples of make_fixtures.py, in batches of four over all ranks."""
    x, y = torch.arange(64).reshape(16, 4).float().sin(), torch.arange(16) % 2
    return DataLoader(TensorDataset(x, y), batch_size=4 // ranks)


def whole(tensors: Any) -> dict[str, torch.Tensor]:
    """Tensors by name, none of them spread."""
    return {key: one.full_tensor() if isinstance(one, DTensor) else one.clone() for key, one in tensors.items()}


def losses_of(system: str, path: str, config: Any = None) -> list[float]:
    """Continue to the end: the losses of all ranks together."""
    found = Losses()
    model = Wrapped() if dist.get_world_size() > 1 else None
    data = batches(dist.get_world_size())
    with trainer(Path(path), found, model, train_dataloader=data, parallelism_config=config, **WHOLE[system][1]) as run:
        run.fit()
    mine = torch.tensor(found.found, dtype=torch.float64)
    dist.all_reduce(mine)
    return (mine / dist.get_world_size()).tolist()


def trained_with_a_tie(path: str, config: Any = None, **more: Any) -> dict[str, Any]:
    """Load a model with one weight under two names, and train on: what was loaded, and what came of it."""

    def constant(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    how = {"train_dataloader": batches(dist.get_world_size()), "parallelism_config": config, "scheduler": constant}
    with trainer(Path(path), None, model := Tied(), max_duration=f"{STEPS}ba", **how, **more) as run:
        own: nn.Module = run.state.model
        found: dict[str, Any] = {"loaded": whole(own.state_dict())}
        kept = run.state.optimizers[0].state
        found["moments"] = [whole(kept[parameter])["exp_avg"] for parameter in own.parameters() if parameter in kept]
        run.fit()
        found["tied"] = model.head.weight is model.body.weight
        found["trained"] = whole(own.state_dict())
    return found


def refusal_of_a_tie(path: str) -> str:
    """Load two weights into a model that has one of both: the error."""
    try:
        trainer(Path(path), None, Tied(), parallelism_config=FSDP, load_weights_only=True)
    except IncompatibleCheckpointError as e:
        return str(e)
    return ""
