"""The commands, and those that are about a run: ``train``, ``report`` and ``config``."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from composerlite._version import VERSION
from composerlite.cli.conversion import convert, unshard
from composerlite.cli.copies import cp, pull, push
from composerlite.cli.evaluation import evaluate, predict
from composerlite.cli.inspection import diff, inspect
from composerlite.cli.listing import latest, ls, verify
from composerlite.cli.output import print_json, readable_errors
from composerlite.cli.sweeping import collect, prune

if TYPE_CHECKING:
    from composerlite.config import RunConfig


def main() -> None:
    """Run the ``composerlite`` command."""
    gc.disable()  # until a command begins: what imports make stays, and looking through it takes long
    app()


@click.group("composerlite", context_settings={"show_default": True})
@click.version_option(VERSION, message="composerlite %(version)s", help="Show the version.")
def app() -> None:
    """Train PyTorch models and never lose their progress."""


class _CheckpointGroup(click.Group):
    """Commands of which each error is one line, whether composerlite, the system or a store raises it."""

    def invoke(self, ctx: click.Context) -> Any:
        with readable_errors(of_system=True):
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
    """Train the run that CONFIG describes.

    The places of checkpoints and metrics are printed at the start, on stderr; the result is the last line on stdout.
    'composerlite config schema' lists every key of CONFIG.

    Exit status: 0 after training; 2 if the configuration is wrong; 1 if anything else is; 128 and the number of the
    signal if the run was preempted, and has saved (143 for SIGTERM): launched again with autoresume it resumes.
    """
    with readable_errors(traceback=traceback):
        from composerlite.config import load_config

        description = load_config(config, overrides)
        if print_origins:
            click.echo(description.annotated, nl=False)
        elif print_config:
            click.echo(description.resolved, nl=False)
        else:
            _train(description)


def _train(description: RunConfig) -> None:
    """Train to the end; the trainer says on stderr what it does, and the first process on stdout how far it came."""
    from composerlite.config import build_trainer
    from composerlite.trainer.messages import RESULT

    logging.getLogger(RESULT).setLevel(logging.WARNING)  # it is printed
    with build_trainer(description) as trainer:
        trainer.fit()
    if trainer.state.rank == 0:
        click.echo(trainer.result)


app.add_command(evaluate)
app.add_command(predict)


# ── config and report ────────────────────────────────────────────────────────────────────────────────────────────────
@app.group()
def config() -> None:
    """Describe the keys of a run's YAML file."""


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
@click.option(
    "--compare", metavar="OTHER", help="The folder, URI or record of another run, to be shown beside this one."
)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON and write no page.")
def report(runs: Sequence[str], output: Path, run: str | None, compare: str | None, as_json: bool) -> None:
    """Write a page on what happened to RUN: launches, kills, lost work, saves, curves, and what is kept.

    Launches and curves need the record that a JSONLLogger has written. Exit status: 0; 1 if there is no run, or it
    cannot be read; 2 if the command is wrong.
    """
    with readable_errors(of_system=True):
        from composerlite.report import collect_facts, render_page, summarize, to_json

        facts = collect_facts(runs, run)
        other = None if compare is None else collect_facts([compare])
        if as_json:
            print_json(to_json(facts) if other is None else {**to_json(facts), "compare": to_json(other)})
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(render_page(facts, other), encoding="utf-8")
        for sentence in summarize(facts):
            click.echo(sentence)
        for fault in facts.faults:
            click.echo(f"composerlite: {fault}", err=True)
        click.echo(f"report: {output}")
