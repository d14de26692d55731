"""What the optimizer trains and no checkpoint would have is refused, before it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from trainer_parts import Net, Points

from composerlite import Callback, Logger, State, Trainer
from composerlite.errors import ConfigError, SaveError


def model_and_optimizer() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.Adam(model.parameters())


def new_trainer(folder: Path, model: Any, optimizer: Any, **arguments: Any) -> Trainer:
    return Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=DataLoader(Points(), batch_size=5),
        max_duration="1ep",
        save_folder=folder,
        save_interval="1ba",
        progress_bar=False,
        **arguments,
    )


def test_a_parameter_beside_the_model_is_refused_before_training(tmp_path: Path) -> None:
    """A temperature of the loss, trained by the optimizer and in no checkpoint: the message says which one it is, and
    what to do; done so, it trains. One that is frozen is let be."""
    model, optimizer = model_and_optimizer()
    temperature = nn.Parameter(torch.ones(2, 3))
    optimizer.add_param_group({"params": [temperature], "lr": 0.5})
    with pytest.raises(
        ConfigError, match=r"not in the model.*parameter 0 of group 1, of the shape \(2, 3\).*model\.name ="
    ):
        new_trainer(tmp_path, model, optimizer)
    temperature.requires_grad_(False)
    with new_trainer(tmp_path / "frozen", model, optimizer) as run:
        run.fit()
    model.temperature = temperature.requires_grad_(True)
    with new_trainer(tmp_path / "own", model, optimizer) as run:
        run.fit()


def test_a_parameter_that_is_added_in_training_is_refused_at_the_save(tmp_path: Path) -> None:
    """No checkpoint is there without it."""

    class Adds(Callback):
        def fit_start(self, state: State, logger: Logger) -> None:
            state.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(5))]})

    model, optimizer = model_and_optimizer()
    with new_trainer(tmp_path, model, optimizer, callbacks=[Adds()]) as run, pytest.raises(SaveError, match=r"\(5,\)"):
        run.fit()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".pt"]
