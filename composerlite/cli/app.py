"""The command ``composerlite``, with ``train``, ``report`` and ``config``."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import click

from composerlite._version import VERSION
from composerlite.cli import options
from composerlite.cli.conversion import convert, unshard
from composerlite.cli.copies import cp, pull, push
from composerlite.cli.evaluation import evaluate, predict
from composerlite.cli.inspection import diff, inspect
from composerlite.cli.listing import latest, ls, verify
from composerlite.cli.output import CommandGroup, print_json
from composerlite.cli.sweeping import collect, prune


@click.group("composerlite", cls=CommandGroup, context_settings={"show_default": True})
@click.version_option(VERSION, message="composerlite %(version)s", help="Print the version.")
def app() -> None:
    """Train PyTorch models with checkpoints that survive every crash."""


@app.group()
def checkpoint() -> None:
    """List, verify, copy, compare, convert and remove checkpoints in folders and buckets.

    Exit status of every command: 0 for success; 1 for an error of a checkpoint or a store; 2 for wrong usage.
    """


for command in (ls, latest, inspect, verify, prune, collect, cp, push, pull, diff, unshard, convert):
    checkpoint.add_command(command)
for command in (evaluate, predict):
    app.add_command(command)


@app.command()
@click.argument("config", type=click.Path(path_type=Path), help="YAML file of the run.")
@options.overrides
@click.option("--print-config", is_flag=True, help="Print the resolved configuration and exit.")
@click.option("--print-origins", is_flag=True, help="Print the configuration with the file and line of each value.")
@options.traceback
def train(config: Path, overrides: Sequence[str], print_config: bool, print_origins: bool) -> None:
    """Train the run in the YAML file CONFIG.

    Prints the places of checkpoints and metrics on stderr at the start, and the result as the last line on stdout.
    'composerlite config schema' lists every key of CONFIG.

    Exit status: 0 after training; 2 if the configuration is wrong; 1 for any other error; 128 plus the number of the
    signal if the run was preempted and has saved (143 for SIGTERM). To resume, launch again with autoresume.
    """
    from composerlite.config import load_config

    description = load_config(config, overrides)
    if print_origins or print_config:
        click.echo(description.annotated if print_origins else description.resolved, nl=False)
        return
    from composerlite.config import build_trainer
    from composerlite.trainer.messages import RESULT

    logging.getLogger(RESULT).setLevel(logging.WARNING)  # printed below
    with build_trainer(description) as trainer:
        trainer.fit()
    if trainer.state.rank == 0:
        click.echo(trainer.result)


@app.group()
def config() -> None:
    """Describe the YAML file of a run."""


@config.command()
def schema() -> None:
    """Print every key and name of a run's YAML file, with types, defaults and meanings, as a JSON Schema."""
    from composerlite.config import json_schema

    click.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False, default=str))


@app.command()
@click.argument(
    "runs",
    metavar="RUN...",
    nargs=-1,
    required=True,
    help="Folder or URI with the checkpoints and the record of a run, or the file of a record. Several are combined.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    metavar="FILE",
    help="The page to write.",
)
@click.option("--run", metavar="NAME", help="Name of the run. Default: the run that was active last.")
@click.option("--compare", metavar="OTHER", help="Folder, URI or record of another run to compare.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON; write no page.")
def report(runs: Sequence[str], output: Path, run: str | None, compare: str | None, as_json: bool) -> None:
    """Write an HTML page about RUN: launches, kills, lost work, saves, curves and checkpoints.

    Launches and curves need the record of a JSONLLogger. Exit status: 0 for success; 1 if there is no run, or a place
    cannot be read; 2 for wrong usage.
    """
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
