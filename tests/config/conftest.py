"""A folder with the YAML file of a run and a user's module beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composerlite.config import build_trainer, load_config
from composerlite.errors import ConfigError

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from composerlite.models import ComposerClassifier

NUMBER = 3


def net(width: int = 4):
    return ComposerClassifier(nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)), num_classes=2)


def data(size):
    points = torch.arange(2.0 * size).view(size, 2) / size
    return TensorDataset(points, torch.arange(size) % 2)


def loader(size):
    return torch.utils.data.DataLoader(data(size=size), batch_size=2)


def plain_module():
    return nn.Linear(2, 2)


def collate(samples):
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
"""

RUN = """\
model: {name: my_task:net, width: 8}
train_loader:
  dataset: {name: my_task:data, size: 8}
  batch_size: 4
max_duration: 2ba
progress_bar: false
"""


@pytest.fixture
def write_run(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Writes ``run.yaml``, by default :data:`RUN`, and the module ``my_task``; returns the path of the YAML file."""
    path_before = sys.path.copy()

    def write(text: str = RUN, task: str = TASK) -> Path:
        (tmp_path / "my_task.py").write_text(task)
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return file

    yield write
    sys.path[:] = path_before
    sys.modules.pop("my_task", None)  # the next test has its own module


@pytest.fixture
def error_of() -> Callable[..., str]:
    """Loads a file with overrides, and builds the Trainer if asked; returns the message of the ConfigError."""

    def error(file: Path, *overrides: str, build: bool = False) -> str:
        with pytest.raises(ConfigError) as raised:
            build_trainer(load_config(file, overrides)) if build else load_config(file, overrides)
        return str(raised.value)

    return error
