"""``composerlite checkpoint prune`` and ``gc``. Neither imports torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any

import click

from composerlite.checkpoint.place.commit import garbage
from composerlite.checkpoint.record.history import RetentionPolicy, deletions, retention_policy
from composerlite.checkpoint.record.record import Manifest
from composerlite.checkpoint.tools.surveying import Found, place_at, remove, survey
from composerlite.cli import options
from composerlite.cli.output import print_json
from composerlite.core import Time, TimeUnit
from composerlite.errors import ConfigError, bytes_text, did_you_mean

_LONGEST_SECONDS = 1e9


@click.command()
@options.places
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N.")
@click.option("--keep-every", metavar="TIME", help="Keep the first at or after each multiple: 10ep, 5000ba.")
@click.option("--best-k", type=click.IntRange(min=1), metavar="K", help="Keep the best K by --best-metric.")
@click.option("--best-metric", metavar="NAME", help="Name of a metric, as in 'ls'.")
@click.option("--best-mode", default="max", help="max or min: larger or smaller values are better.")
@click.option("--abandoned", is_flag=True, help="Also remove checkpoints of attempts before a run was started over.")
@options.run
@options.dry_run
@options.as_json
def prune(places: Sequence[str], run: str | None, abandoned: bool, dry_run: bool, as_json: bool, **rules: Any) -> None:
    """Remove the checkpoints in PLACE that no rule keeps. Runs and file name templates are counted separately.

    Always kept: the newest checkpoint, incomplete checkpoints, and targets of links. Checkpoints of an earlier attempt
    of a run are kept and not counted, unless --abandoned is given. Of ephemeral checkpoints only the newest is kept.
    """
    if not abandoned and all(rules[name] is None for name in ("keep_last", "keep_every", "best_k", "best_metric")):
        raise ConfigError("prune: no rule is given. Pass --keep-last, --keep-every, --best-k or --abandoned.")
    every = None if rules["keep_every"] is None else Time.from_timestring(rules["keep_every"])
    best = {name: rules[name] for name in ("best_k", "best_metric", "best_mode")}
    policy = retention_policy(rules["keep_last"] or -1, keep_every=every, **best)
    removed: list[dict[str, Any]] = []
    kept: list[str] = []
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(place_at(text)) for text in places]
        surveyed = [[found for found in survey(place) if found.committed] for place in opened]
        known = {found.run_name for listed in surveyed for found in listed if found.run_name}
        if run is not None and run not in known:
            hint = did_you_mean(run, known) if known else " No run was found."
            raise ConfigError(f"--run {run}: no checkpoint of this run was found.{hint}")
        chosen = [[found for found in listed if run in (None, found.run_name)] for listed in surveyed]
        expired = [_expired(listed, policy) for listed in chosen]  # raises before anything is removed
        for place, listed, uris in zip(opened, chosen, expired, strict=True):
            linked = _with_folders(place.links().values())
            for found in listed:
                is_expired = abandoned if found.abandoned else found.uri in uris
                is_linked = not linked.isdisjoint((found.name, *(file.path for file in found.files)))
                if is_expired and not is_linked and remove(found, dry_run=dry_run):
                    why = "abandoned: its run was started over" if found.abandoned else None
                    removed.append({"uri": found.uri, "size_bytes": found.size_bytes, "why": why})
                else:
                    kept.append(found.uri)
    _print_removed(removed, kept, dry_run=dry_run, as_json=as_json)


def _expired(listed: Sequence[Found], policy: RetentionPolicy) -> set[str]:
    """Return the URIs of the checkpoints that ``policy`` does not keep, counted by run and file name template.

    Raises:
        ConfigError: no checkpoint of a run that would lose checkpoints has the metric of the policy.
    """
    groups: dict[tuple[str, str, str], dict[str, Manifest]] = {}
    for found in listed:
        if (manifest := found.committed) is not None and not found.abandoned:
            groups.setdefault((found.home, manifest.run_name, manifest.template), {})[found.uri] = manifest
    uris: set[str] = set()
    for (_, run_name, _), manifests in groups.items():
        expired = deletions(list(manifests.values()), policy)
        known = {name for manifest in manifests.values() for name in manifest.run.metrics}
        if policy.metric and expired and policy.metric not in known:
            hint = did_you_mean(policy.metric, known) if known else " The checkpoints have no metrics."
            raise ConfigError(
                f"--best-metric {policy.metric}: no checkpoint of run {run_name!r} has this metric, such as "
                f"{next(iter(manifests))}. Nothing was removed.{hint}"
            )
        uris |= {uri for uri, manifest in manifests.items() if manifest in expired}
    return uris


def _with_folders(names: Iterable[str]) -> set[str]:
    """Return names and the folders above: a link may point to a file in the directory of a checkpoint."""
    return {str(path) for name in names for path in (name, *PurePosixPath(name).parents)}


@click.command("gc")
@options.places
@click.option("--older-than", default="24h", metavar="TIME", help="Minimum age of data files and parts of uploads.")
@options.dry_run
@options.as_json
def collect(places: Sequence[str], older_than: str, dry_run: bool, as_json: bool) -> None:
    """Remove leftovers of killed processes in PLACE: temporary files, parts of uploads, data files without a record.

    Checkpoints are never removed, nor files that a running process on this machine is writing.
    """
    time = Time.from_timestring(older_than)
    if time.unit is not TimeUnit.SECOND or time.value < 0:
        raise ConfigError(f"--older-than {older_than}: expected a duration such as '24h', '90m' or '0s'.")
    age = timedelta(seconds=min(float(time.value), _LONGEST_SECONDS))
    until = datetime.now(UTC) - age
    removed: list[dict[str, Any]] = []
    for text in places:
        with place_at(text) as place:
            for leftover in place.sweep(age, dry_run=dry_run):
                why = "an unfinished file"
                if leftover.modified_at is not None:
                    why = f"parts of an upload that was started {leftover.modified_at}"
                removed.append({"uri": place.uri(leftover.path), "size_bytes": leftover.size_bytes, "why": why})
            files = place.files()
            old = [file.path for file in files.values() if file.modified_at is not None and file.modified_at <= until]
            unused = garbage(place, old, re.compile(".*"))
            for path in unused:
                uri, size_bytes = place.uri(path), files[path].size_bytes
                removed.append({"uri": uri, "size_bytes": size_bytes, "why": "a file of a killed save"})
            if not dry_run:
                place.delete(unused, folders=True)
    _print_removed(removed, [], dry_run=dry_run, as_json=as_json)


def _print_removed(removed: Sequence[Mapping[str, Any]], kept: Sequence[str], *, dry_run: bool, as_json: bool) -> None:
    freed = sum(entry["size_bytes"] for entry in removed)
    if as_json:
        print_json({"dry_run": dry_run, "removed": removed, "kept": kept, "freed_bytes": freed})
        return
    verb = "would remove" if dry_run else "removed"
    for entry in removed:
        why = "" if entry["why"] is None else f": {entry['why']}"
        click.echo(f"{verb} {entry['uri']} ({bytes_text(entry['size_bytes'])}){why}")
    rest = f", {len(kept)} kept" if kept else ""
    click.echo(f"{verb} {len(removed)}, {bytes_text(freed)}{rest}")
