"""Runs that log to W&B and MLflow: a program that may be killed, and what one rank of two does."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from wandb_files import OfflineRun

from composerlite import Callback, ComposerModel, Logger, State, Trainer, dist
from composerlite.loggers import FileLogger, MLFlowLogger, WandBLogger

BATCHES = 8


class Line(ComposerModel):
    """A small model without metrics, whose library imports slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class DieAt(Callback):
    """Kills the process, as the kernel would, at the end of a batch, when W&B has the batches before on the disk."""

    def __init__(self, batch: int, folder: Path) -> None:
        self.batch = batch
        self.folder = folder

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            (run,) = self.folder.glob("wandb/offline-run-*")
            while (self.batch - 1) not in {batch for batch, _ in OfflineRun(run).values("loss/train/total")}:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


def build(**arguments: Any) -> Trainer:
    """A trainer of a few batches."""
    data = TensorDataset(torch.randn(32, 6), torch.randint(4, (32,)))
    model = Line()
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration=arguments.pop("max_duration", f"{BATCHES}ba"),
        run_name="fox",
        device="cpu",
        progress_bar=False,
        seed=3,
        **arguments,
    )


def services(folder: Path, attempt: str = "", **arguments: Any) -> list[WandBLogger | MLFlowLogger]:
    """Both loggers, W&B's in a folder of this attempt."""
    wandb_folder = folder / f"wandb{attempt}"
    return [
        WandBLogger(init_kwargs={"dir": str(wandb_folder)}, log_artifacts=True, **arguments),
        MLFlowLogger(tracking_uri=folder / "mlflow", **arguments),
    ]


def main(folder: str, attempt: str, die_at: str = "") -> None:
    """Train as a relaunched job does; the process dies at the end of the batch ``die_at``."""
    torch.set_num_threads(1)
    with build(
        loggers=services(Path(folder), attempt),
        callbacks=[DieAt(int(die_at), Path(folder) / f"wandb{attempt}")] if die_at else [],
        save_folder=f"{folder}/checkpoints",
        save_interval="2ba",
        save_async=False,
        autoresume=True,
    ) as trainer:
        trainer.fit()


def on_a_rank(folder: Path, rank_zero_only: bool) -> list[str | None]:
    """Train on one rank of several, with a log file that is kept by the services; the ids of the runs."""
    loggers = services(folder, rank_zero_only=rank_zero_only)
    log_file = FileLogger(str(folder / "log-{rank}.txt"), remote_file_name="log-{rank}.txt")
    with build(loggers=[*loggers, log_file]) as trainer:
        trainer.fit(duration="2ba")
    import wandb

    wandb.teardown()
    return [logger.run_id for logger in loggers if dist.get_global_rank() == 0 or not rank_zero_only]


if __name__ == "__main__":
    main(*sys.argv[1:])
