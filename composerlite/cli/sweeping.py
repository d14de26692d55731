"""``composerlite checkpoint prune`` and ``gc``. Neither imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from composerlite.checkpoint.place.place import Leftover, Place
from composerlite.checkpoint.record.manifest import Manifest, bytes_text
from composerlite.checkpoint.record.retention import deletions, retention_policy
from composerlite.checkpoint.tools.pointing import place_at
from composerlite.checkpoint.tools.surveying import Found, abandoned, remove, survey, vouched_from_above
from composerlite.cli import options
from composerlite.cli.output import print_json
from composerlite.core import Time, TimeUnit
from composerlite.errors import ConfigError


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
    places: Sequence[str],
    keep_last: int | None,
    keep_every: str | None,
    best_k: int | None,
    best_metric: str | None,
    best_mode: str,
    with_abandoned: bool,
    run: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove the checkpoints in PLACE that no rule keeps. Each run and each file name template counts by itself.

    The newest always stays, and so does what is incomplete. A run that was started over has left the checkpoints of the
    attempt before: they count for nothing, and stay without --abandoned. Ephemeral checkpoints go, but for the newest.
    What a link leads to stays, and so does what a killed process has begun to replace.
    """
    if keep_last is None and keep_every is None and best_k is None and best_metric is None and not with_abandoned:
        raise ConfigError("prune: which checkpoints are kept? Give --keep-last, --keep-every, --best-k or --abandoned.")
    if (best_k is None) != (best_metric is None):
        raise ConfigError("prune: --best-k 3 and --best-metric NAME go together; 'ls' shows the metrics there are.")
    policy = retention_policy(
        -1 if keep_last is None else keep_last,
        keep_every=None if keep_every is None else Time.from_timestring(keep_every),
        best_k=best_k,
        best_metric=best_metric,
        best_mode=best_mode,
    )
    removed: list[dict[str, Any]] = []
    kept: list[str] = []
    for text in places:
        with place_at(text) as place:
            listed = survey(place)
            left = abandoned(listed)
            chosen = [(one, m) for one in listed if (m := one.committed) and run in (None, m.run_name)]
            groups: dict[tuple[str, str, str], list[Manifest]] = {}
            for found, manifest in chosen:
                if found.name not in left:
                    groups.setdefault((found.home, manifest.run_name, manifest.template), []).append(manifest)
            gone = {manifest.name: None for group in groups.values() for manifest in deletions(group, policy)}
            why = dict.fromkeys(left, "abandoned: its run was started over") if with_abandoned else {}
            used = place.in_use() if gone or why else set[str]()
            for found, _ in chosen:
                if found.name not in {*gone, *why} or not used.isdisjoint((found.name, *(f.path for f in found.files))):
                    kept.append(place.uri(found.name))
                    continue
                removed.append(_removed(place, found, why.get(found.name), dry_run=dry_run))
    _tell(removed, kept, dry_run=dry_run, as_json=as_json)


@click.command("gc")
@options.places
@click.option(
    "--orphans", is_flag=True, help="Remove data without a manifest, too: also what other programs have saved."
)
@click.option(
    "--older-than",
    default="24h",
    metavar="TIME",
    help="Orphans, and parts of uploads, go if they are as old as that.",
)
@options.dry_run
@options.as_json
def collect(places: Sequence[str], orphans: bool, older_than: str, dry_run: bool, as_json: bool) -> None:
    """Remove leftovers of killed processes in PLACE: temporary files, parts of uploads. No checkpoint is deleted.

    What a process that lives is writing on this machine's disks stays.
    """
    age = _age(older_than)
    removed: list[dict[str, Any]] = []
    for text in places:
        with place_at(text) as place:
            removed += [_leftover(one) for one in place.leftovers(age)]
            if not dry_run:
                place.sweep(age)
            if not orphans:
                continue
            is_vouched = vouched_from_above(place)
            for found in survey(place):
                if found.may_be_left_over and not is_vouched(found) and _is_old(found, age):
                    removed.append(_removed(place, found, "data without a manifest", dry_run=dry_run))
    _tell(removed, [], dry_run=dry_run, as_json=as_json)


def _age(text: str) -> timedelta:
    time = Time.from_timestring(text)
    if time.unit is not TimeUnit.SECOND or time.value < 0:
        raise ConfigError(f"--older-than {text}: expected a time by the clock, such as '24h', '90m' or '0s'.")
    return timedelta(seconds=float(time.value))


def _is_old(found: Found, older_than: timedelta) -> bool:
    """Return true if all its files are that old. Without a known age it may be a save in progress, and is not old."""
    latest = datetime.now(UTC) - older_than
    return all(file.modified_at is not None and file.modified_at <= latest for file in found.files)


def _removed(place: Place, found: Found, why: str | None, *, dry_run: bool) -> dict[str, Any]:
    if not dry_run:
        remove(place, found)
    return {"uri": place.uri(found.name), "size_bytes": found.size_bytes, "why": why}


def _leftover(one: Leftover) -> dict[str, Any]:
    return {"uri": one.uri, "size_bytes": one.size_bytes, "why": one.what}


def _tell(removed: Sequence[dict[str, Any]], kept: Sequence[str], *, dry_run: bool, as_json: bool) -> None:
    """Print the files that were removed, or would be."""
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
