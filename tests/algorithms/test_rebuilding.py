"""A checkpoint whose model was changed by an algorithm is loaded by a program that does not import the algorithm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import composerlite.algorithms
from composerlite import Algorithm, Trainer
from composerlite.models import ComposerClassifier

NEEDED = [
    name
    for name in composerlite.algorithms.__all__
    if isinstance(kind := getattr(composerlite.algorithms, name), type)
    and issubclass(kind, Algorithm)
    and kind.required_on_load()
]
ARGUMENTS = {"StochasticDepth": {"target_layer_name": "ResNetBottleneck"}}
MODEL = """
import sys, torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 4))
"""
BY_TRAINER = """
from composerlite import Trainer
from composerlite.models import ComposerClassifier
assert "composerlite.algorithms" not in sys.modules
with Trainer(model=ComposerClassifier(net(), num_classes=4), load_path=sys.argv[1], progress_bar=False) as run:
    print(sorted(run.state.model.state_dict()), [type(algorithm).__name__ for algorithm in run.state.algorithms])
"""
BY_FUNCTION = """
import composerlite
from composerlite.checkpoint import load_checkpoint
state = composerlite.State(
    model=nn.Sequential(), rank_zero_seed=1, run_name="other", device=torch.device("cpu"), max_duration="1ep"
)
state.model.module = net()
assert "composerlite.algorithms" not in sys.modules
load_checkpoint(sys.argv[1], state, load_weights_only=True)
print(sorted(state.model.state_dict()), [type(algorithm).__name__ for algorithm in state.algorithms])
"""


@pytest.mark.parametrize("program", [BY_TRAINER, BY_FUNCTION], ids=["Trainer", "load_checkpoint"])
@pytest.mark.parametrize("name", NEEDED)
def test_an_algorithm_that_was_not_imported_is_rebuilt(tmp_path: Path, name: str, program: str) -> None:
    """``import composerlite`` is enough."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 4))
    samples = TensorDataset(torch.randn(4, 3, 8, 8), torch.randint(4, (4,)))
    with Trainer(
        model=ComposerClassifier(net, num_classes=4),
        train_dataloader=DataLoader(samples, batch_size=2),
        max_duration="1ep",
        algorithms=[getattr(composerlite.algorithms, name)(**ARGUMENTS.get(name, {}))],
        save_folder=tmp_path,
        save_weights_only=True,
        progress_bar=False,
    ) as run:
        run.fit()
        saved, path = sorted(run.state.model.state_dict()), run.saved_checkpoints[-1]
    done = subprocess.run(
        [sys.executable, "-c", MODEL + program, path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{saved} {[name]}"


def test_there_are_algorithms_that_are_needed() -> None:
    """Else the test above says nothing."""
    assert "BlurPool" in NEEDED
