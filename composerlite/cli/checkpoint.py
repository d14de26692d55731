"""``composerlite checkpoint …``: the commands and their options. What a command does is imported when it is run."""

from __future__ import annotations

from typing import Annotated

import typer

from composerlite.cli.errors import chosen, one_line_errors

__all__ = ["checkpoint_app"]

checkpoint_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Places = Annotated[
    list[str], typer.Argument(help="Folders of checkpoints, or their URIs: s3://bucket/run.", metavar="PLACE")
]
Checkpoint = Annotated[
    str, typer.Argument(help="The path or the URI of a checkpoint, or of a link to one.", metavar="CHECKPOINT")
]
Run = Annotated[str | None, typer.Option("--run", help="Only checkpoints of the run of this name.", metavar="NAME")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@checkpoint_app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]  (typer calls it)
    """List, verify, copy, compare, convert and remove checkpoints, in folders and buckets.

    Exit status of every command: 0; 1 if something is wrong with a checkpoint or a store; 2 if the command is.
    """


@checkpoint_app.command("ls")
def ls(
    places: Places,
    run: Run = None,
    sort: Annotated[str, typer.Option("--sort", help="age, name, size or saved.")] = "age",
    as_json: Json = False,
) -> None:
    """List the checkpoints in PLACE: whether each is whole, of which moment, how large.

    No data file is opened: 'verify' reads them.
    """
    with one_line_errors():
        from composerlite.cli.listing import Order, list_checkpoints

        list_checkpoints(places, run=run, sort=chosen(Order, sort, "--sort"), as_json=as_json)


@checkpoint_app.command("latest")
def latest(places: Places, run: Run = None, as_json: Json = False) -> None:
    """Print the path or the URI of the newest committed checkpoint in PLACE. Exit status 1: there is none."""
    with one_line_errors():
        from composerlite.cli.listing import print_latest

        print_latest(places, run=run, as_json=as_json)


@checkpoint_app.command("inspect")
def inspect(
    checkpoint: Checkpoint,
    depth: Annotated[int | None, typer.Option("--depth", help="Show so many levels of keys.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Show the keys in CHECKPOINT, with shapes, types and bytes.

    Nothing in it is run, and the bytes of its tensors are read only where it is compressed.
    """
    with one_line_errors():
        from composerlite.cli.inspection import inspect as show

        show(checkpoint, depth=depth, as_json=as_json)


@checkpoint_app.command("verify")
def verify(
    targets: Annotated[
        list[str], typer.Argument(help="Checkpoints, or folders or URIs of such.", metavar="CHECKPOINT")
    ],
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Read CHECKPOINT, or all in a folder, and compare every byte with the manifest.

    Exit status 1: something is damaged; what, is listed. What has no manifest is told to be unverified.
    """
    with one_line_errors():
        from composerlite.cli.verification import verify as compare

        compare(targets, run=run, as_json=as_json)
