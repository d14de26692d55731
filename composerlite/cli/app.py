"""The commands and their options."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from composerlite.cli.checkpoint import checkpoint_app
from composerlite.cli.output import one_line_errors, readable_errors

__all__ = ["app", "main"]

app = typer.Typer(
    name="composerlite",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes as long to import as all the rest
)
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What a run's YAML file may say.")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(config_app, name="config")


def main() -> None:
    """The entry point of the ``composerlite`` command."""
    gc.disable()  # until a command begins: what imports make stays, and looking through it takes long
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        from composerlite import __version__

        typer.echo(f"composerlite {__version__}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]  (typer calls it)
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models and never lose their progress."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The YAML file that describes the run.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Values that replace those of the file: max_duration=5ep optimizer.lr=1e-3. Where the file has a "
            "defaults list, GROUP=NAME chooses a file of a group: model=large.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration, merged and resolved, and build nothing.")
    ] = False,
    print_origins: Annotated[
        bool, typer.Option("--print-origins", help="The same, each value with the file and line that says it.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the code an error was raised.")] = False,
) -> None:
    """Train what CONFIG describes.

    Where checkpoints and metrics go is told at the start, on stderr. The last line, on stdout, is the result. Every key
    of CONFIG is listed by: composerlite config schema.

    Exit status: 0 after training; 2 if the configuration is wrong; 1 if anything else is; 128 and the number of the
    signal if the run was asked to end, and has saved (143 for SIGTERM): launched again with autoresume it goes on.
    """
    from composerlite.cli import training

    with readable_errors(traceback=traceback):
        if print_origins:
            training.show_origins(config, overrides or [])
        elif print_config:
            training.show(config, overrides or [])
        else:
            training.run(config, overrides or [])


@config_app.command()
def schema(
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON Schema, for editors.")] = False,
) -> None:
    """Print every key of a run's YAML, and every name of an optimizer, callback, … with its arguments, as Markdown."""
    from composerlite.cli import training

    with readable_errors(traceback=False):
        if as_json:
            training.print_schema()
        else:
            training.print_reference()


@app.command()
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="A folder or URI with the checkpoints and the record of a run, or the file of the record. Several are "
            "looked at together.",
            metavar="RUN",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.", metavar="FILE")] = Path(
        "report.html"
    ),
    run: Annotated[
        str | None,
        typer.Option(
            "--run", help="The run of this name; the one that was active last if none is given.", metavar="NAME"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON and write no page.")] = False,
) -> None:
    """Write a page on what happened to RUN: launches, kills, lost work, saves, curves, and what is kept.

    Launches and curves need the record that a JSONLLogger has written. Exit status: 0; 1 if there is no run, or it
    cannot be read; 2 if the command is wrong.
    """
    with one_line_errors():
        from composerlite.cli.reporting import report as write

        write(runs, output, run=run, as_json=as_json)
