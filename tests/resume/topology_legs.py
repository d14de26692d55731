"""A run that goes on with another number of ranks, and another way of spreading the model, after each interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Logger, State, Trainer, dist

GLOBAL_BATCH = 12  # of one, two, three and four shares

SPREAD: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one": (1, None),
    "one, sharded": (1, {"fsdp": {}}),
    "DDP of 2": (2, None),
    "DDP of 3": (3, None),
    "DDP of 4": (4, None),
    "FSDP of 2": (2, {"fsdp": {}}),
    "FSDP of 3": (3, {"fsdp": {}}),
    "FSDP of 4": (4, {"fsdp": {}}),
    "FSDP of 2, full": (2, {"fsdp": {"state_dict_type": "full"}}),
    "FSDP of 3, full": (3, {"fsdp": {"state_dict_type": "full"}}),
    "HSDP of 2 × 2": (4, {"fsdp": {"data_parallel_replicate_degree": 2}}),
    "TP of 2": (2, {"tp": {}}),
    "FSDP of 2 × TP of 2": (4, {"fsdp": {}, "tp": {}}),
}
"""How many ranks there are, and how the model is spread over them."""
_TP = {"tensor_parallel_degree": 2, "layer_plan": {"up": "colwise", "down": "rowwise"}}


class Shape(NamedTuple):
    """What is trained: the width of the two layers that may be split, that of the last, samples, and the seed."""

    width: int
    last: int
    samples: int
    seed: int


class Leg(NamedTuple):
    """Part of a run: how it is spread, and after which batch it ends."""

    spread: str
    end: int


class _Model(ComposerModel):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 2 * shape.width), nn.Linear(2 * shape.width, shape.last)
        self.head = nn.Linear(shape.last, 2, bias=False)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(batch[0])))))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class _Seen(Callback):
    """The samples of each batch on this rank."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        is_padding = state.data_position is not None and state.data_position.is_padding
        self.samples.append([] if is_padding else state.batch[2].tolist())


class Outcome(NamedTuple):
    """What a rank saw, and the whole tensors of the model and the optimizer at the beginning and at the end."""

    seen: list[list[int]]
    began: dict[str, torch.Tensor]
    ended: dict[str, torch.Tensor]
    batch: int


def go(shape: Shape, leg: Leg, folder: Path) -> Outcome:
    """Go on with the run in ``folder`` as ``leg`` says."""
    world_size, config = SPREAD[leg.spread]
    config = (
        None if config is None else {key: {**value, **(_TP if key == "tp" else {})} for key, value in config.items()}
    )
    shares = world_size // (2 if config is not None and "tp" in config else 1)
    numbers = torch.Generator().manual_seed(shape.seed)
    inputs = torch.randn(shape.samples, 3, generator=numbers)
    points = TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(shape.samples))
    torch.manual_seed(shape.seed)
    model, seen = _Model(shape), _Seen()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(points, batch_size=GLOBAL_BATCH // shares, shuffle=True),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.05),
        max_duration=f"{leg.end}ba",
        callbacks=[seen],
        save_folder=folder,
        save_interval="1ba",
        save_num_checkpoints_to_keep=2,
        autoresume=True,
        run_name="run",
        seed=shape.seed,
        device="cpu",
        progress_bar=False,
        parallelism_config=config,
    ) as trainer:
        began, batch = _whole(trainer.state), int(trainer.state.timestamp.batch)
        trainer.fit()
        return Outcome(seen.samples, began, _whole(trainer.state), batch)


def _whole(state: State) -> dict[str, torch.Tensor]:
    found = {
        name: dist.shards.full_tensor(tensor.detach()).clone() for name, tensor in state.model.state_dict().items()
    }
    (optimizer,) = state.optimizers
    for name, parameter in state.model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = dist.shards.full_tensor(value.detach()).clone()
    return found
