"""``composerlite checkpoint cp``, ``push`` and ``pull``. None of these imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from composerlite.checkpoint.place.place import Place, set_link
from composerlite.checkpoint.tools.copying import copy
from composerlite.checkpoint.tools.surveying import Found, checkpoint_at, newest, place_at, pointed, survey
from composerlite.cli import options
from composerlite.cli.output import print_json
from composerlite.errors import CheckpointNotFoundError, ConfigError, bytes_text
from composerlite.storage import is_uri
from composerlite.storage.progress import progress_of

_names = click.argument("names", metavar="[NAME]...", nargs=-1, help="Names as in 'ls'. Default: the newest.")
_everything = click.option("--all", "everything", is_flag=True, help="Copy all committed checkpoints.")


@click.command()
@options.checkpoint
@click.argument("target", metavar="PLACE", help="Target folder or URI.")
@options.overwrite
@options.link
@options.as_json
def cp(checkpoint: str, target: str, **how: Any) -> None:
    """Copy CHECKPOINT to PLACE, between folders and buckets. Every byte is verified.

    The copy becomes a checkpoint when it is complete. Repeat the command to continue an interrupted copy.
    """
    with pointed(checkpoint) as source, place_at(target, may_be_new=True) as place:
        _copy([source.the_one()], place, **how)


@click.command()
@click.argument("folder", metavar="FOLDER", help="Folder of checkpoints.")
@click.argument("uri", metavar="URI", help="Target: s3://bucket/run.")
@_names
@_everything
@options.overwrite
@options.link
@options.as_json
def push(folder: str, uri: str, **how: Any) -> None:
    """Copy checkpoints of FOLDER to a bucket, as 'cp' does: the newest, the named ones, or all."""
    _copy_some("push", folder, uri, **how)


@click.command()
@click.argument("uri", metavar="URI", help="Source: s3://bucket/run.")
@click.argument("folder", metavar="FOLDER", help="Target folder.")
@_names
@_everything
@options.overwrite
@options.link
@options.as_json
def pull(uri: str, folder: str, **how: Any) -> None:
    """Copy checkpoints from a bucket to FOLDER, as 'cp' does: the newest, the named ones, or all."""
    _copy_some("pull", folder, uri, **how)


def _copy_some(verb: str, folder: str, uri: str, names: Sequence[str], everything: bool, **how: Any) -> None:
    """Copy the checkpoints ``names`` from ``folder`` to ``uri``, or the other way round."""
    if is_uri(folder) or not is_uri(uri):
        raise ConfigError(
            f"{verb}: expected a local folder, given {folder!r}, and a URI such as s3://bucket/run, given {uri!r}. "
            "Use cp to copy between two folders or two buckets."
        )
    if names and everything:
        raise ConfigError(f"--all {' '.join(names)}: expected names or --all.")
    source_text, target_text = (folder, uri) if verb == "push" else (uri, folder)
    with place_at(source_text) as source, place_at(target_text, may_be_new=True) as target:
        listed = survey(source)
        by_name = {found.name: found for found in listed}
        chosen = [found for found in listed if found.committed] if everything else []
        for name in names:
            if name not in by_name:
                known = ", ".join(list(by_name)[-8:]) or "none"
                raise CheckpointNotFoundError(f"{source.uri(name)!r} is no checkpoint. Known: {known}.")
            chosen.append(by_name[name])
        if not names and not everything:
            last = newest(listed)
            if last is None:
                raise CheckpointNotFoundError(f"no committed checkpoint in {source.uri()}: there is nothing to copy.")
            chosen = [last]
        _copy(chosen, target, **how)


def _copy(chosen: Sequence[Found], target: Place, *, overwrite: bool, link: str | None, as_json: bool) -> None:
    """Copy checkpoints one after the other, then point ``link`` to the last."""
    if link is not None:
        target.check_link(link)
        existing = checkpoint_at(target, link)
        if link in [found.name for found in chosen] or (existing is not None and existing.copy_of is None):
            raise ConfigError(f"{target.uri(link)!r} is a checkpoint and cannot become a link. Pass another name.")
    copied: list[dict[str, Any]] = []
    for found in chosen:
        with progress_of(f"copying {found.name}", found.size_bytes, wanted=True) as progress:
            is_new = copy(found, target, overwrite=overwrite, progress=progress)
        state, uri = "copied" if is_new else "exists", target.uri(found.name)
        size = found.size_bytes
        copied.append({"name": found.name, "source": found.uri, "target": uri, "size_bytes": size, "state": state})
        if not as_json:
            click.echo(f"{state}: {uri} ({bytes_text(size)})")
    if link is not None and chosen:
        set_link(target, link, chosen[-1].name)
    if as_json:
        print_json({"copied": copied})
