"""What ``composerlite train`` does."""

from __future__ import annotations

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
    with build_trainer(load_config(config, overrides)) as trainer:
        trainer.fit()
    if trainer.state.rank == 0:
        typer.echo(_summary(trainer))


def _summary(trainer: Trainer) -> str:
    state = trainer.state
    values = {**state.total_loss_dict, **state.eval_metric_values}
    parts = [
        f"run {state.run_name}: {state.timestamp.epoch.value} epochs, {state.timestamp.batch.value} batches",
        *(f"{name} {value:.4g}" for name, value in values.items()),
    ]
    if trainer.saved_checkpoints:
        parts.append(f"last checkpoint {trainer.saved_checkpoints[-1]}")
    return ", ".join(parts)
