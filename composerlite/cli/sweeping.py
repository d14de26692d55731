"""What ``composerlite checkpoint prune`` and ``gc`` do. Neither imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, final

import typer

from composerlite.checkpoint.record.retention import RetentionPolicy, deletions
from composerlite.checkpoint.tools import Found, Leftover, Place, abandoned, place_at, survey, vouched_from_above
from composerlite.cli.output import bytes_text, print_json

__all__ = ["Sweep", "collect", "prune"]


@final
@dataclass(frozen=True)
class Sweep:
    """How to clean up.

    Attributes:
        dry_run: tell what would be done, and leave everything as it is.
        as_json: print JSON.
    """

    dry_run: bool
    as_json: bool

    def tell(self, removed: Sequence[dict[str, Any]], kept: Sequence[str]) -> None:
        """Print what was removed, or would be."""
        freed = sum(one["size_bytes"] for one in removed)
        if self.as_json:
            print_json({"dry_run": self.dry_run, "removed": removed, "kept": kept, "freed_bytes": freed})
            return
        verb = "would remove" if self.dry_run else "removed"
        for one in removed:
            why = "" if one["why"] is None else f": {one['why']}"
            typer.echo(f"{verb} {one['uri']} ({bytes_text(one['size_bytes'])}){why}")
        rest = f", {len(kept)} stay" if kept else ""
        typer.echo(f"{verb} {len(removed)}, {bytes_text(freed)}{rest}")


def prune(
    places: Sequence[str], policy: RetentionPolicy, *, run: str | None, with_abandoned: bool, sweep: Sweep
) -> None:
    """Remove the committed checkpoints that ``policy`` gives up, of each run and each name template by itself.

    What is incomplete is left alone, and counts for nothing. So is what a run abandoned when it was started over, which
    ``with_abandoned`` removes. What a link leads to stays, and so does what a killed process has begun to replace.
    """
    removed: list[dict[str, Any]] = []
    kept: list[str] = []
    for text in places:
        with place_at(text) as place:
            groups: dict[tuple[str, str, str], list[Found]] = {}
            listed = survey(place)
            left = abandoned(listed)
            gone: dict[str, str | None] = (
                dict.fromkeys(left, "abandoned: its run was started over") if with_abandoned else {}
            )
            chosen = [
                f for f in listed if f.manifest is not None and not f.faults and run in (None, f.manifest.run_name)
            ]
            for found in chosen:
                if found.manifest is not None and found.name not in left:
                    groups.setdefault((found.home, found.manifest.run_name, found.manifest.template), []).append(found)
            for group in groups.values():
                gone |= dict.fromkeys(_given_up(group, policy))
            used = place.in_use() if gone else set[str]()
            for found in chosen:
                if found.name not in gone or not used.isdisjoint((found.name, *(file.path for file in found.files))):
                    kept.append(place.uri(found.name))
                    continue
                if not sweep.dry_run:
                    _remove(place, found)
                removed.append(_told(place, found, gone[found.name]))
    sweep.tell(removed, kept)


def _given_up(group: Sequence[Found], policy: RetentionPolicy) -> set[str]:
    manifests = [found.manifest for found in group if found.manifest is not None]
    return {manifest.name for manifest in deletions(manifests, policy)}


def collect(places: Sequence[str], *, orphans: bool, older_than: timedelta, sweep: Sweep) -> None:
    """Remove what dead processes have left and, with ``orphans``, the data that no manifest vouches for."""
    removed: list[dict[str, Any]] = []
    for text in places:
        with place_at(text) as place:
            removed += [_leftover(one) for one in place.leftovers(older_than)]
            if not sweep.dry_run:
                place.sweep(older_than)
            is_vouched = vouched_from_above(place) if orphans else bool
            for found in survey(place) if orphans else ():
                if found.manifest is not None or found.commits or is_vouched(found):
                    continue
                if _is_old(found, older_than):
                    if not sweep.dry_run:
                        _remove(place, found)
                    removed.append(_told(place, found, "data without a manifest"))
    sweep.tell(removed, [])


def _is_old(found: Found, older_than: timedelta) -> bool:
    """Whether all of it was written so long ago. What nobody knows the age of may be a save that is going on."""
    latest = datetime.now(UTC) - older_than
    return all(file.modified_at is not None and file.modified_at <= latest for file in found.files)


def _remove(place: Place, found: Found) -> None:
    """Remove a checkpoint: what makes it one first, and of a directory its index next."""
    for path in reversed(found.commits):
        place.remove(path)
    for file in sorted(found.files, key=lambda file: not file.path.endswith("/.metadata")):
        place.remove(file.path)


def _told(place: Place, found: Found, why: str | None) -> dict[str, Any]:
    return {"uri": place.uri(found.name), "size_bytes": found.size_bytes, "why": why}


def _leftover(one: Leftover) -> dict[str, Any]:
    return {"uri": one.uri, "size_bytes": one.size_bytes, "why": one.what}
