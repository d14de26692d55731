"""The commands, and those that are about a run: ``train``, ``report`` and ``config``."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from composerlite.cli.conversion import convert, unshard
from composerlite.cli.copies import cp, pull, push
from composerlite.cli.inspection import diff, inspect
from composerlite.cli.listing import latest, ls, verify
from composerlite.cli.output import one_line_errors, print_json, readable_errors
from composerlite.cli.sweeping import collect, prune

if TYPE_CHECKING:
    from composerlite.config import RunConfig
    from composerlite.trainer import Trainer

__all__ = ["app", "main"]


def main() -> None:
    """Run the ``composerlite`` command."""
    gc.disable()  # until a command begins: what imports make stays, and looking through it takes long
    app()


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from composerlite import __version__

        click.echo(f"composerlite {__version__}")
        context.exit()


@click.group("composerlite", context_settings={"show_default": True})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def app() -> None:
    """Train PyTorch models and never lose their progress."""


class _CheckpointGroup(click.Group):
    """Commands of which each error is one line, whether composerlite, the system or a store raises it."""

    def invoke(self, ctx: click.Context) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


@app.group(cls=_CheckpointGroup)
def checkpoint() -> None:
    """List, verify, copy, compare, convert and remove checkpoints, in folders and buckets.

    Exit status of every command: 0; 1 if something is wrong with a checkpoint or a store; 2 if the command is.
    """


for command in (ls, latest, inspect, verify, prune, collect, cp, push, pull, diff, unshard, convert):
    checkpoint.add_command(command)


# ── train ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@app.command()
@click.argument("config", type=click.Path(path_type=Path), help="The YAML file that describes the run.")
@click.argument(
    "overrides",
    metavar="[KEY=VALUE]...",
    nargs=-1,
    help="Values that replace those of the file: max_duration=5ep optimizer.lr=1e-3. Where the file has a defaults "
    "list, GROUP=NAME chooses a file of a group: model=large.",
)
@click.option("--print-config", is_flag=True, help="Print the configuration, merged and resolved, and build nothing.")
@click.option("--print-origins", is_flag=True, help="The same, each value with the file and line that says it.")
@click.option("--traceback", is_flag=True, help="Show where in the code an error was raised.")
def train(config: Path, overrides: Sequence[str], print_config: bool, print_origins: bool, traceback: bool) -> None:
    """Train what CONFIG describes.

    Where checkpoints and metrics go is told at the start, on stderr. The last line, on stdout, is the result. Every key
    of CONFIG is listed by: composerlite config schema.

    Exit status: 0 after training; 2 if the configuration is wrong; 1 if anything else is; 128 and the number of the
    signal if the run was asked to end, and has saved (143 for SIGTERM): launched again with autoresume it goes on.
    """
    with readable_errors(traceback=traceback):
        from composerlite.config import load_config

        if not print_config and not print_origins:
            # What happens to checkpoints is worth a line each: saved, deleted, resumed from, passed over.
            logging.basicConfig(format="%(message)s")
            logging.getLogger("composerlite").setLevel(logging.INFO)
        description = load_config(config, overrides)
        if print_origins:
            click.echo(description.annotated, nl=False)
        elif print_config:
            click.echo(description.resolved, nl=False)
        else:
            _train(description)


def _train(description: RunConfig) -> None:
    """Train to the end; the first process tells before on stderr what, and then on stdout how far it came."""
    from composerlite.config import build_trainer

    with build_trainer(description) as trainer:
        start = trainer.state.timestamp
        if trainer.state.rank == 0:
            click.echo(_announcement(trainer, description), err=True)
        trainer.fit()
    if trainer.state.rank == 0:
        click.echo(_summary(trainer, trained=trainer.state.timestamp != start))


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


# ── config and report ────────────────────────────────────────────────────────────────────────────────────────────────
@app.group()
def config() -> None:
    """Tell what a run's YAML file may say."""


@config.command()
@click.option("--json", "as_json", is_flag=True, help="As a JSON Schema, for editors.")
def schema(as_json: bool) -> None:
    """Print every key of a run's YAML, and every name of an optimizer, callback, … with its arguments, as Markdown."""
    with readable_errors():
        from composerlite.config import json_schema, reference_page

        if as_json:
            click.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))
        else:
            click.echo(reference_page(), nl=False)


@app.command()
@click.argument(
    "runs",
    metavar="RUN...",
    nargs=-1,
    required=True,
    help="A folder or URI with the checkpoints and the record of a run, or the file of the record. Several are looked "
    "at together.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    metavar="FILE",
    help="The page to write.",
)
@click.option("--run", metavar="NAME", help="The run of this name; the one that was active last if none is given.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON and write no page.")
def report(runs: Sequence[str], output: Path, run: str | None, as_json: bool) -> None:
    """Write a page on what happened to RUN: launches, kills, lost work, saves, curves, and what is kept.

    Launches and curves need the record that a JSONLLogger has written. Exit status: 0; 1 if there is no run, or it
    cannot be read; 2 if the command is wrong.
    """
    with one_line_errors():
        from composerlite.report import facts_of, page_of, sentences, to_plain

        facts = facts_of(runs, run)
        if as_json:
            print_json(to_plain(facts))
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page_of(facts), encoding="utf-8")
        for sentence in sentences(facts):
            click.echo(sentence)
        for fault in facts.faults:
            click.echo(f"composerlite: {fault}", err=True)
        click.echo(f"report: {output}")
