"""What ``composerlite train`` does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from composerlite.config import build_trainer, load_config

if TYPE_CHECKING:
    from composerlite.trainer import Trainer

__all__ = ["run", "show"]


def show(config: Path, overrides: Sequence[str]) -> None:
    """Print the configuration as it would be used. Keys and types are checked; nothing is built, torch not imported."""
    typer.echo(load_config(config, overrides).resolved, nl=False)


def run(config: Path, overrides: Sequence[str]) -> None:
    """Train to the end, then print one line: the run's name, how far it came, its last metrics, its last checkpoint."""
    # What happens to checkpoints is worth a line each: saved, deleted, resumed from, passed over.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("composerlite").setLevel(logging.INFO)
    with build_trainer(load_config(config, overrides)) as trainer:
        start = trainer.state.timestamp
        trainer.fit()
    if trainer.state.rank == 0:
        typer.echo(_summary(trainer, trained=trainer.state.timestamp != start))


def _summary(trainer: Trainer, *, trained: bool) -> str:
    state = trainer.state
    place = f"epoch {state.timestamp.epoch.value}, batch {state.timestamp.batch.value}"
    if not trained:
        return f"run {state.run_name} had ended before at {place}: checkpoint {state.load_path}"
    results = [f"{name} {value:.4g}" for name, value in (state.total_loss_dict | state.eval_metric_values).items()]
    results += [f"last checkpoint {path}" for path in trainer.saved_checkpoints[-1:]]
    return f"run {state.run_name} ended at {place}: {', '.join(results)}"
