"""A network that learns real images of digits, as a script for one process, for torchrun, and for several nodes.

``digits_run.py <config>``: the file describes the run for ``composerlite train`` too, which does the same with it. The
parts of the run are found here by name.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.utils.data import TensorDataset

from composerlite import Callback, ComposerModel, Logger, State, dist
from composerlite.config import build_trainer, load_config


def images(path: str) -> TensorDataset:
    """Those that were saved there, with their labels: reading them takes less than importing what ships them."""
    return TensorDataset(*torch.load(path, weights_only=True))


class Net(ComposerModel):
    """A convolution with batch normalisation and dropout, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(128, 10),
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class Diary(Callback):
    """Writes down what this rank saw: the images of each batch, and at the end a digest of all that was trained."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, f"rank{dist.get_global_rank()}.txt")

    def _write(self, line: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def batch_end(self, state: State, logger: Logger) -> None:
        images = [xxhash.xxh3_64_hexdigest(image.numpy().tobytes()) for image in state.batch[0]]
        self._write(f"{int(state.timestamp.batch)} {' '.join(images)}")

    def fit_end(self, state: State, logger: Logger) -> None:
        digest = xxhash.xxh3_128()
        contents = state.state_dict()
        for part in ("model", "optimizers"):
            _add(digest, contents[part])
        self._write(f"end {int(state.timestamp.sample)} {digest.hexdigest()}")


class DieAt(Callback):
    """Kills a rank, as the kernel would, when it has a batch done; once only, which a file in ``folder`` remembers.

    With ``asks``: asks torchrun to end, as a scheduler would.
    """

    def __init__(self, folder: str, rank: int, batch: int, asks: bool = False) -> None:
        self._died = Path(folder, "died")
        self._batch = batch if dist.get_global_rank() == rank and not self._died.exists() else -1
        self._asks = asks

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self._batch:
            self._died.touch()
            if self._asks:
                os.kill(os.getppid(), signal.SIGTERM)
            else:
                os.kill(os.getpid(), signal.SIGKILL)


class Paced(Callback):
    """Takes its time for each batch until the run resumes."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def fit_start(self, state: State, logger: Logger) -> None:
        self._seconds *= int(state.timestamp.batch) == 0

    def batch_end(self, state: State, logger: Logger) -> None:
        time.sleep(self._seconds)


def _add(digest: Any, value: Any) -> None:
    """Add every tensor and number in ``value``."""
    if isinstance(value, torch.Tensor):
        digest.update(dist.shards.full_tensor(value).detach().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item)
    else:
        digest.update(repr(value).encode())


def main(config: str) -> None:
    """Train as a relaunched job does."""
    with build_trainer(load_config(Path(config))) as trainer:
        trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
