"""A tiny run with a record and a table. A launch can be killed after a batch; the next launch resumes.

24 batches in 3 epochs, a checkpoint every 4 batches, an evaluation after each epoch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from forked import run_forked
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, Logger, State, Trainer, dist
from composerlite.loggers import CSVLogger, JSONLLogger, RemoteUploaderDownloader
from composerlite.models import ComposerClassifier

__all__ = ["launch", "main", "train", "train_beside_a_slow_disk"]


class DieAt(Callback):
    """Send SIGKILL after a batch is logged, before it is saved."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, *, save_folder: str | None = None, die_at: int = 0, **settings: Any) -> None:
    """Train once, with the record ``folder/record.jsonl`` and the table ``folder/metrics.csv``."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(128, 8, generator=generator)
    data = TensorDataset(samples, (samples.sum(1) > 0).long())
    model = ComposerClassifier(torch.nn.Linear(8, 2), num_classes=2)
    remote = settings.pop("bucket_uri", None)
    name = None if remote is None else "{run_name}/record.jsonl"
    loggers: list[Any] = settings.pop("loggers", None) or [
        JSONLLogger(folder / "record.jsonl", remote_file_name=name, flush_seconds=0),
        CSVLogger(folder / "metrics.csv", flush_seconds=0),
    ]
    callbacks = settings.pop("callbacks", ())
    arguments: dict[str, Any] = {"max_duration": "3ep", "autoresume": True, "save_async": False, **settings}
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=16, shuffle=True),
        eval_dataloader=DataLoader(data, batch_size=64),
        optimizers=torch.optim.Adam(model.parameters()),
        run_name="tiny",
        seed=3,
        save_folder=str(folder) if save_folder is None else save_folder,
        save_interval="4ba",
        progress_bar=False,
        auto_log_hparams=True,
        callbacks=[DieAt(die_at), *callbacks],
        loggers=[*([] if remote is None else [RemoteUploaderDownloader(remote)]), *loggers],
        **arguments,
    ) as trainer:
        trainer.fit()


def main(folder: str, die_at: str = "0", max_duration: str = "3ep", bucket: str = "") -> None:
    """Run a launch in a process of its own; with a bucket, checkpoints and record are uploaded."""
    torch.set_num_threads(1)
    os.chdir(folder)
    settings: dict[str, Any] = {"bucket_uri": bucket, "save_folder": f"{bucket}/{{run_name}}"} if bucket else {}
    train(Path(folder), die_at=int(die_at), max_duration=max_duration, **settings)


def train_beside_a_slow_disk(folder: str) -> None:
    """Run a launch on two ranks. On rank 1, each flush of a file takes a second longer."""
    sync = os.fsync

    def sync_slowly(descriptor: int) -> None:
        time.sleep(1.0)
        sync(descriptor)

    if dist.get_global_rank() == 1:
        os.fsync = sync_slowly
    try:
        train(Path(folder), parallelism_config={"fsdp": {}}, max_duration="8ba")
    finally:
        os.fsync = sync


def launch(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> int:
    """Launch the run in ``folder``, and return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    done = run_forked(main, str(folder), *arguments, cwd=folder, environment=environment)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode
