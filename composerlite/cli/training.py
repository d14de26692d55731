"""What ``composerlite train`` and ``composerlite config`` do."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from composerlite.config import RunConfig, build_trainer, json_schema, load_config, reference_page

if TYPE_CHECKING:
    from composerlite.trainer import Trainer

__all__ = ["print_reference", "print_schema", "run", "show", "show_origins"]


def show(config: Path, overrides: Sequence[str]) -> None:
    """Print the configuration as it would be used. Keys and types are checked; nothing is built, torch not imported."""
    typer.echo(load_config(config, overrides).resolved, nl=False)


def show_origins(config: Path, overrides: Sequence[str]) -> None:
    """:func:`show` with the place of each value: the file and line, or the override, that says it."""
    typer.echo(load_config(config, overrides).annotated, nl=False)


def run(config: Path, overrides: Sequence[str]) -> None:
    """Train to the end, then print one line: the run's name, how far it came, its last metrics, its last checkpoint.

    Before, what is about to be trained and where checkpoints and metrics go is told on stderr.
    """
    # What happens to checkpoints is worth a line each: saved, deleted, resumed from, passed over.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("composerlite").setLevel(logging.INFO)
    description = load_config(config, overrides)
    with build_trainer(description) as trainer:
        start = trainer.state.timestamp
        if trainer.state.rank == 0:
            typer.echo(_announcement(trainer, description), err=True)
        trainer.fit()
    if trainer.state.rank == 0:
        typer.echo(_summary(trainer, trained=trainer.state.timestamp != start))


def _announcement(trainer: Trainer, config: RunConfig) -> str:
    state, settings = trainer.state, config.trainer
    where = state.device if state.world_size == 1 else f"{state.device}, {state.world_size} ranks"
    folders = [] if settings.save_folder is None else [f"{settings.save_folder} (each {settings.save_interval})"]
    folders += [str(c.arguments["folder"]) for c in config.callbacks if "folder" in c.arguments]
    kept = [f"{logger.place} ({type(logger).__name__})" for logger in trainer.logger.destinations if logger.place]
    batch = state.timestamp.batch.value
    start = f" from batch {batch}" if batch else ""
    lines = [
        f"run {state.run_name}: {config.origin.files[0]}{start} until {settings.max_duration}, on {where}",
        f"  checkpoints: {', '.join(folders) or 'none; save_folder=PATH keeps some'}",
        f"  metrics: {', '.join(kept) or 'not kept; loggers.file={} writes them to a file'}",
    ]
    return "\n".join(lines).replace("{run_name}", state.run_name)


def _summary(trainer: Trainer, *, trained: bool) -> str:
    state = trainer.state
    place = f"epoch {state.timestamp.epoch.value}, batch {state.timestamp.batch.value}"
    if not trained:
        return f"run {state.run_name} had ended before at {place}: checkpoint {state.load_path}"
    results = [f"{name} {value:.4g}" for name, value in (state.total_loss_dict | state.eval_metric_values).items()]
    results += [f"last checkpoint {path}" for path in trainer.saved_checkpoints[-1:]]
    return f"run {state.run_name} ended at {place}: {', '.join(results)}"


def print_reference() -> None:
    """Print every key and name, as Markdown."""
    typer.echo(reference_page(), nl=False)


def print_schema() -> None:
    """Print the JSON Schema of a run's YAML."""
    typer.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))
