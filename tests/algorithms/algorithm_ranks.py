"""What a rank does in the tests of algorithms on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from resumed_training import image_model, images, new_trainer
from torch.utils.data import DataLoader

from composerlite import ComposerModel, DataSpec
from composerlite.algorithms import SAM, GradientClipping, LayerFreezing, StochasticDepth
from composerlite.errors import ConfigError
from composerlite.models import ComposerClassifier

__all__ = ["refusals", "train_with", "train_without_some"]


def flat_model() -> ComposerModel:
    torch.manual_seed(5)
    return ComposerClassifier(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(128, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)),
        num_classes=3,
    )


def in_order(**arguments: Any) -> dict[str, Any]:
    """Batches of eight samples of all ranks together, in the same order whatever their number."""
    return {"train_dataloader": DataSpec(DataLoader(images(), batch_size=arguments.pop("size"))), **arguments}


def train_with(name: str, size: int, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights at the end of a run with an algorithm."""
    algorithm = SAM(rho=0.5) if name == "sam" else GradientClipping("adaptive", 0.01)
    with new_trainer([algorithm], model=flat_model, **in_order(size=size, **arguments)) as trainer:
        trainer.fit()
        state = trainer.state.model.state_dict()
        return {name: w.full_tensor() if hasattr(w, "full_tensor") else w.clone() for name, w in state.items()}


def train_without_some(microbatch: int | None) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What is frozen at the end, and the parameters."""
    algorithms = [LayerFreezing(0.0, 0.9), StochasticDepth("ResNetBottleneck", drop_rate=0.5)]
    with new_trainer(
        algorithms, model=image_model, device_train_microbatch_size=microbatch, **in_order(size=4, max_duration="3ep")
    ) as trainer:
        trainer.fit()
        parameters = dict(trainer.state.model.named_parameters())
        frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        return frozen, {name: parameter.detach().clone() for name, parameter in parameters.items()}


def refusals() -> list[str]:
    """The errors of what cannot be."""
    found: list[str] = []
    block = StochasticDepth("ResNetBottleneck")
    for algorithm, arguments in (
        (LayerFreezing(), {"ddp_sync_strategy": "single_auto_sync"}),
        (LayerFreezing(), {"parallelism_config": {"fsdp": {}}}),
        (block, {"parallelism_config": {"fsdp": {}}}),
    ):
        try:
            new_trainer([algorithm], **arguments)
        except ConfigError as e:
            found.append(str(e))
    return found
