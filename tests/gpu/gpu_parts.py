"""A model, a run of it and the device that the tests in this folder are about.

``COMPOSERLITE_TEST_DEVICE=cpu`` runs what does not need a GPU on the CPU, to see that the tests themselves work.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import ComposerModel, Trainer

DEVICE = os.environ.get("COMPOSERLITE_TEST_DEVICE", "cuda")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"
    ),
]
BATCHES = 6


class Net(ComposerModel):
    """A classifier with batch norm and dropout: it has buffers, and draws numbers on its device."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 4)
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


def data(count: int = 96) -> DataLoader[Any]:
    """Six batches."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(4, (count,), generator=generator)), batch_size=16)


def build(folder: Path | None = None, *, device: str = DEVICE, **arguments: Any) -> Trainer:
    """A trainer that saves after each batch."""
    torch.manual_seed(7)
    model = arguments.pop("model", None) or Net()
    kind = arguments.pop("optimizer", {})
    model.to(device)
    defaults: dict[str, Any] = {
        "train_dataloader": data(),
        "max_duration": f"{BATCHES}ba",
        "seed": 3,
        "precision": "fp32",
        "progress_bar": False,
        "save_folder": None if folder is None else str(folder),
        "save_filename": "ba{batch}.pt",
        "save_interval": "1ba",
        "optimizers": torch.optim.AdamW(model.parameters(), lr=1e-2, **kind),
    }
    return Trainer(model=model, device=device, **{**defaults, **arguments})


def tensors_of(checkpoint: Any) -> dict[str, torch.Tensor]:
    """Tensors of weights and optimizer state by their keys."""
    found: dict[str, torch.Tensor] = {}

    def look(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value.detach().cpu().clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                look(item, f"{path}/{key}")

    look(checkpoint["state"]["model"], "model")
    look(checkpoint["state"]["optimizers"], "optimizers")
    return found


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit."""
    assert first.keys() == second.keys()
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
