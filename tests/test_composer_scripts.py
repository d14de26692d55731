"""Scripts in the manner of Composer's documentation run unchanged, but for the name of the package in the imports.

``composer_scripts/`` has the pages: for each code block of Composer's documentation of trainer, checkpoints, schedules,
callbacks, loggers and algorithms one that makes the same calls, written anew with a tiny model. What the fixtures of
that documentation give is given here: ``model``, ``train_dataloader``, ``optimizer``, ``state`` and the like. Blocks
of algorithms that composerlite leaves out are not among them; ``docs/migration/composer.md`` names those.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Engine, Logger, State
from composerlite.devices import DeviceCPU
from composerlite.models import ComposerClassifier

PAGES = sorted((Path(__file__).parent / "composer_scripts").glob("*.md"))
_BLOCK = re.compile(r"^## (?P<title>[^\n]+)\n```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"\b(from|import) composer\b")  # as the migration page has it

CHANNELS, CLASSES = 3, 10


class Model(ComposerClassifier):
    """A classifier of tiny images, with a convolution."""

    def __init__(self, num_channels: int, num_classes: int) -> None:
        layers = nn.Sequential(
            nn.Conv2d(num_channels, 4, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        super().__init__(nn.Sequential(layers, nn.LayerNorm(16), nn.Linear(16, num_classes)), num_classes=num_classes)


def blocks() -> list[Any]:
    """Each block of each page, with its name."""
    return [
        pytest.param(
            f"\n{'#' * text[: found.start('code')].count(chr(10))}\n{found['code']}",
            id=f"{page.stem}: {found['title']}",
        )
        for page in PAGES
        for text in [page.read_text()]
        for found in _BLOCK.finditer(text)
    ]


def given() -> dict[str, Any]:
    """The names that the documentation's own fixtures give to each block."""
    torch.manual_seed(0)
    model = Model(CHANNELS, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = TensorDataset(torch.randn(16, CHANNELS, 8, 8), torch.randint(CLASSES, (16,)))
    loader = DataLoader(dataset, batch_size=4)
    state = State(
        rank_zero_seed=0,
        model=model,
        run_name="run_name",
        device=DeviceCPU(),
        optimizers=optimizer,
        device_train_microbatch_size=4,
        dataloader=loader,
        dataloader_label="train",
        max_duration="1ep",
        precision="fp32",
    )
    logger = Logger(state)
    return {
        "Model": Model,
        "X_example": torch.randn(4, CHANNELS, 8, 8),
        "dataset": dataset,
        "engine": Engine(state, logger),
        "eval_dataloader": DataLoader(dataset, batch_size=4),
        "logger": logger,
        "logits": torch.randn(4, CLASSES),
        "model": model,
        "num_channels": CHANNELS,
        "num_classes": CLASSES,
        "optimizer": optimizer,
        "os": os,
        "state": state,
        "torch": torch,
        "train_dataloader": loader,
        "y_example": torch.randint(CLASSES, (4,)),
    }


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """The scripts write below the current folder, and log to no service."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "object_store" / "bucket").mkdir(parents=True)


@pytest.mark.parametrize("block", blocks())
def test_a_script_of_composer_runs_with_the_package_renamed(block: str, request: pytest.FixtureRequest) -> None:
    """Nothing else is changed in it."""
    script = _IMPORT.sub(r"\1 composerlite", block)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a script says nothing of them
            exec(compile(script, request.node.name, "exec"), given())
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic = False
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_there_is_a_script_for_what_the_documentation_shows() -> None:
    """At least as many as Composer's documentation of these parts has blocks that it runs itself."""
    assert len(blocks()) >= 87
