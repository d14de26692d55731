"""What ranks say, where logging is not configured: standard error of each."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import dist
from composerlite.models import ComposerClassifier
from composerlite.trainer import Trainer


@contextlib.contextmanager
def unconfigured() -> Generator[io.StringIO]:
    """Within it logging is as in a program that has not configured it; what is written to standard error."""
    logger = logging.getLogger("composerlite")
    handlers, own, level = logging.root.handlers[:], logger.handlers[:], logger.level
    logging.root.handlers[:], logger.handlers[:] = [], []
    logger.setLevel(logging.NOTSET)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield said
    finally:
        logging.root.handlers[:], logger.handlers[:] = handlers, own
        logger.setLevel(level)


def train(**arguments: Any) -> Trainer:
    """A run ``fox`` of epochs of five batches, one unless said otherwise; the trainer, closed."""
    data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4)
    model = ComposerClassifier(nn.Linear(6, 4), num_classes=4)
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8 // dist.get_world_size()),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        run_name="fox",
        device="cpu",
        seed=1,
        **{"max_duration": "1ep", "progress_bar": False, **arguments},
    ) as trainer:
        trainer.fit()
    return trainer


def lines_of_a_rank(folder: Path, **arguments: Any) -> tuple[list[str], float]:
    """What this rank has said in a run with a checkpoint, and the loss of its own last batch."""
    with unconfigured() as said:
        trainer = train(save_folder=folder, progress_bar=True, **arguments)
    return said.getvalue().splitlines(), float(trainer.state.total_loss_dict["loss/train/total"])
