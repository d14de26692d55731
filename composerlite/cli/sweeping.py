"""``composerlite checkpoint prune`` and ``gc``. Neither imports torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any

import click

from composerlite.checkpoint.place.commit import garbage
from composerlite.checkpoint.place.place import Place, StoredFile
from composerlite.checkpoint.record.record import Manifest
from composerlite.checkpoint.record.retention import deletions, retention_policy
from composerlite.checkpoint.tools.pointing import place_at
from composerlite.checkpoint.tools.surveying import Found, abandoned, remove, survey
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
    What a link leads to stays.
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
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(place_at(text)) for text in places]
        listed = [(place, survey(place)) for place in opened]
        if run is not None:
            _check_run(run, [one.run_name for _, there in listed for one in there])
        plans: list[tuple[Place, list[Found], dict[str, str | None]]] = []
        groups: list[tuple[str, list[Manifest], list[Manifest]]] = []
        for place, there in listed:
            left = abandoned(there)
            chosen = [(one, m) for one in there if (m := one.committed) and run in (None, m.run_name)]
            counted: dict[tuple[str, str, str], list[Manifest]] = {}
            for found, manifest in chosen:
                if found.name not in left:
                    counted.setdefault((found.home, manifest.run_name, manifest.template), []).append(manifest)
            gone: dict[str, str | None] = {}
            for (home, _, _), group in counted.items():
                groups.append((place.uri(home), group, deletions(group, policy)))
                gone |= dict.fromkeys((manifest.name for manifest in groups[-1][2]), None)
            if with_abandoned:
                gone |= dict.fromkeys(left, "abandoned: its run was started over")
            plans.append((place, [found for found, _ in chosen], gone))
        if best_metric is not None:
            _check_metric(best_metric, groups)
        seen: set[str] = set()
        for place, chosen, gone in plans:
            used = _with_folders({*place.links().values()}) if gone else set[str]()
            for found in chosen:
                if _is_known(place.uri(found.name), seen):
                    continue
                stays = found.name not in gone or not used.isdisjoint((found.name, *(f.path for f in found.files)))
                if stays or not remove(place, found, dry_run=dry_run):  # or it was saved again meanwhile
                    kept.append(place.uri(found.name))
                else:
                    removed.append(_removed(place, found, gone[found.name]))
    _tell(removed, kept, dry_run=dry_run, as_json=as_json)


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
    removed: list[dict[str, Any]] = []
    seen: set[str] = set()
    for text in places:
        with place_at(text) as place:
            for one in place.sweep(age, dry_run=dry_run):
                uri = place.uri(one.path)
                if not _is_known(uri, seen):
                    removed.append({"uri": uri, "size_bytes": one.size_bytes, "why": _why(one)})
            for file in _garbage(place, age):
                if not _is_known(place.uri(file.path), seen):
                    removed.append(
                        {"uri": place.uri(file.path), "size_bytes": file.size_bytes, "why": "a file of a killed save"}
                    )
                    if not dry_run:
                        place.delete([file.path], folders=True)
    _tell(removed, [], dry_run=dry_run, as_json=as_json)


def _garbage(place: Place, age: timedelta) -> list[StoredFile]:
    """Data files of killed saves that are as old as ``age``."""
    files = place.files()
    old = [path for path, file in files.items() if _is_old([file], age)]
    return [files[path] for path in garbage(place, old, re.compile(".*"))]


def _with_folders(names: set[str]) -> set[str]:
    """``names``, and the folders they are in: a link may lead to a file of a checkpoint that is a directory."""
    return names | {str(folder) for name in names for folder in PurePosixPath(name).parents}


def _check_run(run: str, there: Iterable[str | None]) -> None:
    """See that a checkpoint is of the run ``run``; raises :class:`ConfigError`."""
    known = {name for name in there if name}
    if run not in known:
        hint = did_you_mean(run, known) if known else " There is no checkpoint of a run."
        raise ConfigError(f"--run {run}: no checkpoint there is of this run.{hint}")


def _check_metric(metric: str, groups: Sequence[tuple[str, Sequence[Manifest], Sequence[Manifest]]]) -> None:
    """See that what would go was compared with a checkpoint that has ``metric``.

    Args:
        metric: its name.
        groups: where each group is, its checkpoints, and those that would go.

    Raises:
        ConfigError: no checkpoint has it, or none of a group of which some would go.
    """
    blind = [one for one in groups if not any(metric in manifest.run.metrics for manifest in one[1])]
    at_risk = [one for one in blind if one[2]] or (blind if len(blind) == len(groups) else [])
    if at_risk:
        where, group, _ = at_risk[0]
        known = {name for manifest in group for name in manifest.run.metrics}
        hint = did_you_mean(metric, known) if known else " They have no metrics: name another rule."
        of_run = f" of run {group[0].run_name!r}" if group[0].run_name else ""
        raise ConfigError(
            f"--best-metric {metric}: no checkpoint{of_run} in {where} has this metric, and the best of them are not "
            f"known. Nothing was removed.{hint}"
        )


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


def _is_old(files: Iterable[StoredFile], older_than: timedelta) -> bool:
    """Return true if all files are that old. Without a known age they may be those of a save in progress."""
    latest = datetime.now(UTC) - older_than
    return all(file.modified_at is not None and file.modified_at <= latest for file in files)


def _is_known(uri: str, seen: set[str]) -> bool:
    """Return true if ``uri`` has been ``seen`` before, as of places that are the same or one in the other."""
    key = uri if is_uri(uri) else os.path.realpath(uri)
    known = key in seen
    seen.add(key)
    return known


def _removed(place: Place, found: Found, why: str | None) -> dict[str, Any]:
    return {"uri": place.uri(found.name), "size_bytes": found.size_bytes, "why": why}


def _why(one: StoredFile) -> str:
    """Description of a leftover of a killed process: an upload has the time at which it was started."""
    if one.modified_at is None:
        return "a file that was not written to its end"
    return f"the parts of an upload that was started {one.modified_at}"


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
