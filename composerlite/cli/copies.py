"""``composerlite checkpoint cp``, ``push`` and ``pull``. None of them imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_names = click.argument("names", metavar="[NAME]...", nargs=-1, help="As 'ls' names them; the newest if none is given.")
_everything = click.option("--all", "everything", is_flag=True, help="All that are committed.")


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of every command that copies: see :func:`_copy`."""
    return options.overwrite(options.link(options.as_json(command)))


@click.command()
@options.checkpoint
@click.argument("target", metavar="PLACE", help="The folder, or the URI, that gets it.")
@_options
def cp(checkpoint: str, target: str, **how: Any) -> None:
    """Copy CHECKPOINT to PLACE under its name, between folders and buckets, every byte verified.

    It exists in PLACE when all of it is there. A copy of a directory that was interrupted resumes where it was.
    """
    with pointed(checkpoint) as source, place_at(target, may_be_new=True) as place:
        _copy([source.the_one()], place, **how)


@click.command()
@click.argument("folder", metavar="FOLDER", help="A folder of checkpoints.")
@click.argument("target", metavar="URI", help="Where to: s3://bucket/run.")
@_names
@_everything
@_options
def push(folder: str, target: str, names: Sequence[str], everything: bool, **how: Any) -> None:
    """Copy checkpoints of FOLDER to a bucket, as 'cp' does: the newest, those that are named, or all."""
    _check_kinds("push", folder, target)
    with place_at(folder) as source, place_at(target, may_be_new=True) as place:
        _copy(_chosen(source, names, everything=everything), place, **how)


@click.command()
@click.argument("source", metavar="URI", help="Where from: s3://bucket/run.")
@click.argument("folder", metavar="FOLDER", help="The folder that gets them.")
@_names
@_everything
@_options
def pull(source: str, folder: str, names: Sequence[str], everything: bool, **how: Any) -> None:
    """Copy checkpoints from a bucket to FOLDER, as 'cp' does: the newest, those that are named, or all."""
    _check_kinds("pull", folder, source)
    with place_at(source) as bucket, place_at(folder, may_be_new=True) as place:
        _copy(_chosen(bucket, names, everything=everything), place, **how)


def _check_kinds(verb: str, folder: str, uri: str) -> None:
    if is_uri(folder) or not is_uri(uri):
        raise ConfigError(
            f"{verb}: expected a folder of this machine, given {folder!r}, and a URI such as s3://bucket/run, given "
            f"{uri!r}. To copy between two folders or two buckets use cp."
        )


def _chosen(place: Place, names: Sequence[str], *, everything: bool) -> Sequence[Found]:
    """The checkpoints ``names``; the newest if there are none, or all that are committed."""
    if names and everything:
        raise ConfigError(f"--all {' '.join(names)}: expected names or --all.")
    listed = survey(place)
    if everything:
        return [one for one in listed if one.committed]
    if not names:
        last = newest(listed)
        if last is None:
            raise CheckpointNotFoundError(f"no committed checkpoint in {place.uri()}: there is nothing to copy.")
        return [last]
    by_name = {one.name: one for one in listed}  # a path that is not listed may lead out of the place
    for name in names:
        if name not in by_name:
            known = ", ".join(list(by_name)[-8:]) or "none"
            raise CheckpointNotFoundError(f"{place.uri(name)!r} is no checkpoint. There are: {known}.")
    return [by_name[name] for name in names]


def _copy(chosen: Sequence[Found], target: Place, *, overwrite: bool, link: str | None, as_json: bool) -> None:
    """Copy, one after the other, and tell of each when it is there; then point ``link`` to the last."""
    if link is not None:
        target.check_link(link)
        there = checkpoint_at(target, link)
        if link in [found.name for found in chosen] or (there is not None and there.copy_of is None):
            raise ConfigError(f"{target.uri(link)!r} is a checkpoint, and no link takes its place. Give another name.")
    copied: list[dict[str, Any]] = []
    for found in chosen:
        with progress_of(f"copying {found.name}", found.size_bytes, wanted=True) as progress:
            is_new = copy(found, target, overwrite=overwrite, progress=progress)
        state = "copied" if is_new else "was there"
        uris = {"source": found.uri, "target": target.uri(found.name)}
        copied.append({"name": found.name, **uris, "size_bytes": found.size_bytes, "state": state})
        if not as_json:
            click.echo(f"{state}: {uris['target']} ({bytes_text(found.size_bytes)})")
    if link is not None and chosen:
        set_link(target, link, chosen[-1].name)
    if as_json:
        print_json({"copied": copied})
