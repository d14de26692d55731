"""``composerlite …`` as a user runs it, in a process of its own, and a run to look at."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from forked import run_forked
from sent_files import publish_files
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Trainer
from composerlite.checkpoint import Catalog
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.cli import main
from composerlite.models import ComposerClassifier
from composerlite.storage import Transfer, open_store

__all__ = ["answer", "composerlite", "published", "train"]


def composerlite(
    *arguments: object, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command, with its output."""
    return run_forked(command, *map(str, arguments), cwd=cwd, environment=environment)


def command(*_: str) -> None:
    """What the command does with the arguments of its process."""
    main()


def answer(*arguments: object, cwd: Path, environment: Mapping[str, str] | None = None) -> Any:
    """What the command answers a program that asks for JSON. Its status is 0."""
    done = composerlite(*arguments, "--json", cwd=cwd, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def train(folder: Path, *, epochs: int = 3, **settings: Any) -> None:
    """A run of four batches in an epoch, with a checkpoint of each epoch."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(64, 8, generator=generator)
    labels = (samples.sum(1) > 0).long()
    layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    model = ComposerClassifier(layers, num_classes=2)
    arguments: dict[str, Any] = {
        "run_name": "demo",
        "save_interval": "1ep",
        "optimizers": torch.optim.Adam(model.parameters()),
        **settings,
    }
    with Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(samples, labels), batch_size=16),
        max_duration=f"{epochs}ep",
        save_folder=str(folder),
        progress_bar=False,
        **arguments,
    ) as trainer:
        trainer.fit()


def published(folder: Path, uri: str) -> None:
    """Every checkpoint of ``folder`` in a bucket."""
    with open_store(uri) as store, Transfer(store) as transfer:
        catalog, remote = Catalog(folder), Catalog(Bucket(transfer, "demo"))
        for manifest in catalog.manifests():
            files = {record.path: folder / record.path for record in manifest.files}
            publish_files(remote, manifest, files, link="demo/latest-rank0.pt")
