"""The arguments and options that several commands of ``composerlite checkpoint`` have."""

from __future__ import annotations

import click

places = click.argument(
    "places",
    metavar="PLACE...",
    nargs=-1,
    required=True,
    help="Folders of checkpoints, or their URIs: s3://bucket/run.",
)
checkpoint = click.argument(
    "checkpoint", metavar="CHECKPOINT", help="The path or the URI of a checkpoint, or of a link to one."
)
run = click.option("--run", metavar="NAME", help="Only checkpoints of the run of this name.")
dry_run = click.option("--dry-run", is_flag=True, help="Tell what would be done, and do nothing.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
overwrite = click.option("--overwrite", is_flag=True, help="Replace another checkpoint of the same name.")
link = click.option("--link", metavar="NAME", help="Have this link lead to it then, as latest-rank0.pt.")
