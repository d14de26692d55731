"""``composerlite checkpoint prune`` and ``gc``. Neither imports torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any

import click

from composerlite.checkpoint.place.commit import garbage
from composerlite.checkpoint.place.place import Place, StoredFile
from composerlite.checkpoint.record.history import RetentionPolicy, deletions, retention_policy
from composerlite.checkpoint.record.record import Manifest
from composerlite.checkpoint.tools.surveying import Found, place_at, remove, survey
from composerlite.cli import options
from composerlite.cli.output import print_json
from composerlite.core import Time, TimeUnit
from composerlite.errors import ConfigError, bytes_text, did_you_mean
from composerlite.storage import is_uri


@click.command()
@options.places
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N.")
@click.option("--keep-every", metavar="TIME", help="The first at or after each multiple stays: 10ep, 5000ba.")
@click.option("--best-k", type=click.IntRange(min=1), metavar="K", help="Keep the best K by --best-metric.")
@click.option("--best-metric", metavar="NAME", help="As 'ls' shows it.")
@click.option("--best-mode", default="max", help="max or min: which values are better.")
@click.option("--abandoned", "with_abandoned", is_flag=True, help="Remove what runs left that were started over, too.")
@options.run
@options.dry_run
@options.as_json
def prune(
    places: Sequence[str], run: str | None, with_abandoned: bool, dry_run: bool, as_json: bool, **rules: Any
) -> None:
    """Remove the checkpoints in PLACE that no rule keeps. Each run and each file name template counts by itself.

    The newest always stays, and so does what is incomplete. A run that was started over has left the checkpoints of the
    attempt before: they count for nothing, and stay without --abandoned. Ephemeral checkpoints go, but for the newest.
    What a link leads to stays.
    """
    policy = _policy(rules, with_abandoned=with_abandoned)
    removed: list[dict[str, Any]] = []
    kept: list[str] = []
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(place_at(text)) for text in places]
        found: dict[str, Found] = {}  # a place may be inside another place
        for place in opened:
            for one in survey(place):
                key = _identity(one.uri)
                if one.committed or key not in found:  # in another place the checkpoint may look like a copy
                    found[key] = one
        if run is not None:
            _check_run(run, {one.run_name for one in found.values() if one.run_name})
        chosen = [one for one in found.values() if one.committed and run in (None, one.run_name)]
        gone = {one.uri: "abandoned: its run was started over" for one in chosen if one.abandoned and with_abandoned}
        gone |= dict.fromkeys(_not_kept([one for one in chosen if not one.abandoned], policy))
        for place in opened:
            linked = _with_folders(place.links().values()) if gone else set[str]()
            for one in (one for one in chosen if one.place is place):
                stays = one.uri not in gone or not linked.isdisjoint((one.name, *(file.path for file in one.files)))
                if stays or not remove(one, dry_run=dry_run):  # or another process saved the checkpoint again
                    kept.append(one.uri)
                else:
                    removed.append({"uri": one.uri, "size_bytes": one.size_bytes, "why": gone[one.uri]})
    _tell(removed, kept, dry_run=dry_run, as_json=as_json)


def _policy(rules: Mapping[str, Any], *, with_abandoned: bool) -> RetentionPolicy:
    """Return the policy of the options of ``prune``."""
    if not with_abandoned and all(rules[name] is None for name in ("keep_last", "keep_every", "best_k", "best_metric")):
        raise ConfigError("prune: which checkpoints are kept? Give --keep-last, --keep-every, --best-k or --abandoned.")
    every = None if rules["keep_every"] is None else Time.from_timestring(rules["keep_every"])
    best = {name: rules[name] for name in ("best_k", "best_metric", "best_mode")}
    return retention_policy(rules["keep_last"] or -1, keep_every=every, **best)


def _not_kept(chosen: Sequence[Found], policy: RetentionPolicy) -> list[str]:
    """Return the URIs of the checkpoints that ``policy`` does not keep: of each run, and each template of names.

    Raises:
        ConfigError: no checkpoint has the metric of the policy, or none in a group that would lose checkpoints.
    """
    groups: dict[tuple[str, str, str], list[Manifest]] = {}
    uris: dict[int, str] = {}
    for one in chosen:
        if (manifest := one.committed) is not None:
            group = (one.place.uri(one.home), manifest.run_name, manifest.template)
            groups.setdefault(group, []).append(manifest)
            uris[id(manifest)] = one.uri
    metrics = {name for manifests in groups.values() for manifest in manifests for name in manifest.run.metrics}
    not_kept: list[str] = []
    for (home, run_name, _), manifests in groups.items():
        deleted = deletions(manifests, policy)
        known = {name for manifest in manifests for name in manifest.run.metrics}
        if policy.metric and policy.metric not in (known if deleted else metrics):
            hint = did_you_mean(policy.metric, known) if known else " They have no metrics: name another rule."
            of_run = f" of run {run_name!r}" if run_name else ""
            raise ConfigError(
                f"--best-metric {policy.metric}: no checkpoint{of_run} in {home} has this metric, and the best of them "
                f"are not known. Nothing was removed.{hint}"
            )
        not_kept += [uris[id(manifest)] for manifest in deleted]
    return not_kept


@click.command("gc")
@options.places
@click.option(
    "--older-than", default="24h", metavar="TIME", help="Remove data files, and parts of uploads, of at least this age."
)
@options.dry_run
@options.as_json
def collect(places: Sequence[str], older_than: str, dry_run: bool, as_json: bool) -> None:
    """Remove leftovers of killed processes in PLACE: temporary files, parts of uploads, unnamed data files.

    No checkpoint is deleted. What a process that lives is writing on this machine's disks stays.
    """
    age = _age(older_than)
    removed: dict[str, dict[str, Any]] = {}
    for text in places:
        with place_at(text) as place:
            until = datetime.now(UTC) - age
            for one in place.sweep(age, dry_run=dry_run):
                why = "a file that was not written to its end"
                if one.modified_at is not None:
                    why = f"the parts of an upload that was started {one.modified_at}"
                _add(removed, place, one, why)
            files = place.files()
            old = [file.path for file in files.values() if file.modified_at is not None and file.modified_at <= until]
            unused = garbage(place, old, re.compile(".*"))
            for path in unused:
                _add(removed, place, files[path], "a file of a killed save")
            if not dry_run:
                place.delete(unused, folders=True)
    _tell(list(removed.values()), [], dry_run=dry_run, as_json=as_json)


def _add(removed: dict[str, dict[str, Any]], place: Place, one: StoredFile, why: str) -> None:
    """Add a file to ``removed``, once if one place is inside another."""
    uri = place.uri(one.path)
    removed.setdefault(_identity(uri), {"uri": uri, "size_bytes": one.size_bytes, "why": why})


def _with_folders(names: Iterable[str]) -> set[str]:
    """Return ``names`` with the folders above: a link may lead to a file of a checkpoint that is a directory."""
    return {str(path) for name in names for path in (name, *PurePosixPath(name).parents)}


def _check_run(run: str, known: set[str]) -> None:
    if run not in known:
        hint = did_you_mean(run, known) if known else " There is no checkpoint of a run."
        raise ConfigError(f"--run {run}: no checkpoint there is of this run.{hint}")


def _age(text: str) -> timedelta:
    time = Time.from_timestring(text)
    if time.unit is not TimeUnit.SECOND or time.value < 0:
        raise ConfigError(f"--older-than {text}: expected a time by the clock, such as '24h', '90m' or '0s'.")
    try:
        age = timedelta(seconds=float(time.value))
        _ = datetime.now(UTC) - age
    except OverflowError as e:
        raise ConfigError(f"--older-than {text}: no file is as old as that. Give less, such as '24h'.") from e
    return age


def _identity(uri: str) -> str:
    """Return a text that is equal for two paths of one file, in places that are the same or one in the other."""
    return uri if is_uri(uri) else os.path.realpath(uri)


def _tell(removed: Sequence[dict[str, Any]], kept: Sequence[str], *, dry_run: bool, as_json: bool) -> None:
    """Print the removed checkpoints and files, or those that would be removed."""
    freed = sum(one["size_bytes"] for one in removed)
    if as_json:
        print_json({"dry_run": dry_run, "removed": removed, "kept": kept, "freed_bytes": freed})
        return
    verb = "would remove" if dry_run else "removed"
    for one in removed:
        why = "" if one["why"] is None else f": {one['why']}"
        click.echo(f"{verb} {one['uri']} ({bytes_text(one['size_bytes'])}){why}")
    rest = f", {len(kept)} stay" if kept else ""
    click.echo(f"{verb} {len(removed)}, {bytes_text(freed)}{rest}")
