"""Programs that load a checkpoint whose model an algorithm has changed, and do not import the algorithm."""

from __future__ import annotations

import sys

import torch
from torch import nn

import composerlite
from composerlite import Trainer
from composerlite.checkpoint import load_checkpoint
from composerlite.models import ComposerClassifier


def net() -> nn.Module:
    """The model as it was before the algorithm changed it."""
    return nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 4))


def by_trainer(path: str) -> None:
    """Load it with the Trainer."""
    assert "composerlite.algorithms" not in sys.modules
    with Trainer(model=ComposerClassifier(net(), num_classes=4), load_path=path, progress_bar=False) as run:
        tell(run.state)


def by_function(path: str) -> None:
    """Load it with the function."""
    state = composerlite.State(
        model=nn.Sequential(), rank_zero_seed=1, run_name="other", device=torch.device("cpu"), max_duration="1ep"
    )
    state.model.module = net()
    assert "composerlite.algorithms" not in sys.modules
    load_checkpoint(path, state, load_weights_only=True)
    tell(state)


def tell(state: composerlite.State) -> None:
    """Print the keys of the model, and the algorithms."""
    names = [type(algorithm).__name__ for algorithm in state.algorithms]
    sys.stdout.write(f"{sorted(state.model.state_dict())} {names}\n")
