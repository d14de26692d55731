"""Training with algorithms in the real trainer, interrupted after a batch and resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from short_run import assert_same
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from composerlite import Algorithm, ComposerModel, Trainer
from composerlite.models import ComposerClassifier

EPOCHS, BATCHES = 2, 6


class Bottleneck(nn.Module):
    """A residual block as those of a ResNet: its parts have the names that torchvision gives them."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv3, self.bn3 = nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + x)


def image_model() -> ComposerModel:
    """A convolution, two residual blocks, norms of all kinds, dropout and an output layer."""
    torch.manual_seed(5)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        Bottleneck(),
        Bottleneck(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    )
    return ComposerClassifier(net, num_classes=3)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    return TensorDataset(torch.randn(24, 2, 8, 8, generator=generator), torch.randint(3, (24,), generator=generator))


def new_trainer(
    algorithms: Sequence[Algorithm],
    folder: Path | None = None,
    *,
    model: Callable[[], ComposerModel] = image_model,
    data: Callable[[], Any] = images,
    **arguments: Any,
) -> Trainer:
    """A trainer of three batches of eight samples an epoch, which saves at every batch."""
    built = model()
    saving = {"save_folder": folder, "save_filename": "ba{batch}.pt", "save_interval": "1ba"} if folder else {}
    given: dict[str, Any] = {
        "model": built,
        "train_dataloader": DataLoader(data(), batch_size=8, shuffle=True),
        "max_duration": f"{EPOCHS}ep",
        "optimizers": torch.optim.SGD(built.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
        "algorithms": list(algorithms),
        "seed": 3,
        "progress_bar": False,
        "save_metrics": True,
        **saving,
        **arguments,
    }
    return Trainer(**given)


def trained(trainer: Trainer) -> dict[str, Any]:
    """All that a checkpoint holds when ``trainer`` has come to its end, but what a clock says."""
    with trainer:
        trainer.fit()
        contents = trainer.state.state_dict()
    return {name: contents[name] for name in ("model", "optimizers", "algorithms", "train_metrics", "rank_zero_seed")}


def assert_resumes_bit_for_bit(
    make: Callable[[], list[Algorithm]], folder: Path, at: Sequence[int] = (1, 3, 4), **arguments: Any
) -> None:
    """A run that ends after ``at`` batches, as a kill ends it, and is resumed in a new trainer is the whole run."""
    whole = folder / "whole"
    expected = trained(new_trainer(make(), whole, **arguments))
    for batch in at:
        resumed = new_trainer(make(), folder / f"from{batch}", load_path=whole / f"ba{batch}.pt", **arguments)
        assert int(resumed.state.timestamp.batch) == batch
        assert_same(trained(resumed), expected)


class Sequences(Dataset[dict[str, Tensor]]):
    """Token sequences."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.arange(index, index + 16) % 11, "labels": torch.arange(index + 1, index + 17) % 11}


class LanguageModel(ComposerModel):
    """An embedding and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.1), nn.Linear(8, 11))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["input_ids"])

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
