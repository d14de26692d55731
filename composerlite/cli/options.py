"""Arguments and options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def _keep_traceback(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta["traceback"] = value  # read by CommandGroup


places = click.argument(
    "places", metavar="PLACE...", nargs=-1, required=True, help="Folders of checkpoints, or URIs: s3://bucket/run."
)
checkpoint = click.argument("checkpoint", metavar="CHECKPOINT", help="Path or URI of a checkpoint, or of a link.")
run = click.option("--run", metavar="NAME", help="Only checkpoints of this run.")
dry_run = click.option("--dry-run", is_flag=True, help="Print the changes without making them.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
overwrite = click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint of the same name.")
link = click.option("--link", metavar="NAME", help="Point this link to the last copied checkpoint: latest-rank0.pt.")
traceback = click.option(
    "--traceback", is_flag=True, expose_value=False, callback=_keep_traceback, help="Print the traceback of an error."
)
overrides = click.argument(
    "overrides",
    metavar="[KEY=VALUE]...",
    nargs=-1,
    help="Replace values of the configuration: max_duration=5ep optimizer.lr=1e-3. If the file has a defaults list, "
    "GROUP=NAME selects a file of a group: model=large.",
)


def evaluated_run(command: F) -> F:
    """Add the arguments of ``eval`` and ``predict`` that select a run and a checkpoint."""
    source = click.argument(
        "source",
        metavar="CONFIG|CHECKPOINT",
        help="YAML file of a run; or a checkpoint of 'composerlite train' with its configuration, or a folder or URI "
        "of such checkpoints.",
    )
    place = click.option(
        "--checkpoint",
        metavar="PLACE",
        help="Checkpoint to evaluate, or a folder or URI whose newest good checkpoint is used. Default: the newest "
        "good checkpoint in the save_folder of CONFIG.",
    )
    trust = click.option(
        "--trust-config", is_flag=True, help="Use the configuration in CHECKPOINT, and run the code named there."
    )
    return source(overrides(place(trust(traceback(command)))))
