"""The commands and their options."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from composerlite.cli.checkpoint import checkpoint_app
from composerlite.cli.errors import readable_errors

__all__ = ["app", "main"]

app = typer.Typer(
    name="composerlite",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes as long to import as all the rest
)
app.add_typer(checkpoint_app, name="checkpoint")


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
            help="Values that replace those of the file: max_duration=5ep optimizer.lr=1e-3.", metavar="KEY=VALUE"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and build nothing.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the code an error was raised.")] = False,
) -> None:
    """Train what CONFIG describes.

    Exit status: 0 after training, 2 if the configuration is wrong, 1 if anything else is.
    """
    from composerlite.cli import training

    with readable_errors(traceback=traceback):
        if dry_run:
            training.show(config, overrides or [])
        else:
            training.run(config, overrides or [])
