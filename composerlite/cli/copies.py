"""What ``composerlite checkpoint cp``, ``push`` and ``pull`` do. None of them imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import typer

from composerlite.checkpoint.load.progress import progress_of
from composerlite.checkpoint.tools import Found, Place, copy, newest, place_at, pointed, survey, target_at
from composerlite.cli.output import bytes_text, print_json
from composerlite.errors import CheckpointNotFoundError, ConfigError
from composerlite.storage import is_uri

__all__ = ["Copying", "copy_many", "copy_one", "local", "remote"]


@final
@dataclass(frozen=True)
class Copying:
    """How to copy.

    Attributes:
        overwrite: replace other checkpoints of the same names.
        link: a link to the last one that is copied.
        as_json: print JSON.
    """

    overwrite: bool
    link: str | None
    as_json: bool

    def run(self, source: Place, chosen: Sequence[Found], target: Place) -> None:
        """Copy, one after the other, and tell of each when it is there."""
        copied: list[dict[str, Any]] = []
        for found in chosen:
            with progress_of(f"copying {found.name}", found.size_bytes, wanted=True) as progress:
                is_new = copy(source, found, target, overwrite=self.overwrite, progress=progress)
            state = "copied" if is_new else "was there"
            uris = {"source": source.uri(found.name), "target": target.uri(found.name)}
            copied.append({"name": found.name, **uris, "size_bytes": found.size_bytes, "state": state})
            if not self.as_json:
                typer.echo(f"{state}: {uris['target']} ({bytes_text(found.size_bytes)})")
        if self.link is not None and chosen:
            target.point(self.link, chosen[-1].name)
        if self.as_json:
            print_json({"copied": copied})


def copy_one(source: str, target: str, copying: Copying) -> None:
    """Copy the checkpoint ``source``.

    Raises:
        ConfigError: it is a folder of several.
        CheckpointError: see :func:`composerlite.checkpoint.tools.copying.copy`.
    """
    with pointed(source) as found, target_at(target) as place:
        if found.name is None:
            raise ConfigError(
                f"{source!r} is a folder of checkpoints: give one of them, as 'ls' names it, or use push or pull."
            )
        copying.run(found.place, found.found(), place)


def copy_many(source: str, target: str, names: Sequence[str], *, everything: bool, copying: Copying) -> None:
    """Copy the checkpoints ``names``; the newest if there are none, or all that are committed.

    Raises:
        ConfigError: names are given, and everything is asked for.
        CheckpointNotFoundError: one of them is not there.
        CheckpointError: see :func:`composerlite.checkpoint.tools.copying.copy`.
    """
    if names and everything:
        raise ConfigError(f"--all {' '.join(names)}: want names or --all.")
    with place_at(source) as here, target_at(target) as there:
        copying.run(here, _chosen(here, names, everything=everything), there)


def _chosen(place: Place, names: Sequence[str], *, everything: bool) -> Sequence[Found]:
    listed = survey(place)
    if everything:
        return [one for one in listed if one.manifest is not None and not one.faults]
    if not names:
        last = newest(listed)
        if last is None:
            raise CheckpointNotFoundError(f"no committed checkpoint in {place.uri()}: there is nothing to copy.")
        return [last]
    by_name = {one.name: one for one in listed}
    for name in names:
        if name not in by_name:
            known = ", ".join(list(by_name)[-8:]) or "none"
            raise CheckpointNotFoundError(f"{place.uri(name)!r} is no checkpoint. There are: {known}.")
    return [by_name[name] for name in names]


def local(text: str, verb: str) -> str:
    """``text`` if it is a path; ConfigError."""
    if is_uri(text):
        raise ConfigError(f"{verb} {text}: want a folder of this machine there. To copy between buckets use cp.")
    return text


def remote(text: str, verb: str) -> str:
    """``text`` if it is a URI; ConfigError."""
    if not is_uri(text):
        raise ConfigError(f"{verb} {text}: want a URI there, as s3://bucket/run. To copy between folders use cp.")
    return text
