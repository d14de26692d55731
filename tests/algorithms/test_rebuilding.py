"""A checkpoint whose model was changed by an algorithm is loaded by a program that does not import the algorithm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from algorithms.rebuilding_programs import by_function, by_trainer, net
from forked import run_forked
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


@pytest.mark.parametrize("program", [by_trainer, by_function], ids=["Trainer", "load_checkpoint"])
@pytest.mark.parametrize("name", NEEDED)
def test_an_algorithm_that_was_not_imported_is_rebuilt(
    tmp_path: Path, name: str, program: Callable[[str], None]
) -> None:
    """``import composerlite`` is enough."""
    samples = TensorDataset(torch.randn(4, 3, 8, 8), torch.randint(4, (4,)))
    with Trainer(
        model=ComposerClassifier(net(), num_classes=4),
        train_dataloader=DataLoader(samples, batch_size=2),
        max_duration="1ep",
        algorithms=[getattr(composerlite.algorithms, name)(**ARGUMENTS.get(name, {}))],
        save_folder=tmp_path,
        save_weights_only=True,
        progress_bar=False,
    ) as run:
        run.fit()
        saved, path = sorted(run.state.model.state_dict()), run.saved_checkpoints[-1]
    done = run_forked(program, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{saved} {[name]}"


def test_there_are_algorithms_that_are_needed() -> None:
    """Else the test above says nothing."""
    assert "BlurPool" in NEEDED
