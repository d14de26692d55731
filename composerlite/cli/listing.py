"""What ``composerlite checkpoint ls`` and ``latest`` do. Neither imports torch or opens a data file."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import typer

from composerlite.checkpoint import tools
from composerlite.checkpoint.tools import Found, Place, newest, place_at, survey
from composerlite.cli.output import bytes_text, print_json, print_table
from composerlite.errors import CheckpointNotFoundError

__all__ = ["Order", "list_checkpoints", "print_latest", "told"]

_FAULTS_SHOWN = 3
_COLUMNS = ("name", "run", "epoch", "batch", "sample", "saved", "size", "kind", "ranks", "metrics", "where", "state")
_SPARE = ("metrics", "sample", "ranks", "run", "where", "kind")
_NUMBERS = ("epoch", "batch", "sample", "size", "ranks")


class Order(enum.StrEnum):
    """What a list is sorted by."""

    AGE = "age"
    NAME = "name"
    SIZE = "size"
    SAVED = "saved"


class _Listed(NamedTuple):
    """A checkpoint, where it is, and whether its run was started over since."""

    place: Place
    found: Found
    abandoned: bool


def list_checkpoints(places: Sequence[str], *, run: str | None, sort: Order, as_json: bool) -> None:
    """Print what there is in ``places``."""
    listed = _listed(places, run)
    if sort is Order.NAME:
        listed.sort(key=lambda one: one.found.name)
    elif sort is Order.SIZE:
        listed.sort(key=lambda one: one.found.size_bytes)
    elif sort is Order.SAVED:
        listed.sort(key=lambda one: (one.found.manifest is None, _saved_at(one.found)))
    if as_json:
        print_json({"checkpoints": [told(one.place, one.found, abandoned=one.abandoned) for one in listed]})
        return
    if not listed:
        typer.echo(f"no checkpoints in {', '.join(places)}{'' if run is None else f' of run {run!r}'}", err=True)
        return
    print_table(_COLUMNS, [_row(one) for one in listed], right=_NUMBERS, spare=_SPARE)


def print_latest(places: Sequence[str], *, run: str | None, as_json: bool) -> None:
    """Print where the newest committed checkpoint is; of the run that saved last, if there are several.

    Of the same checkpoint in several places it is the one in the first of them.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    listed = _listed(places, run)
    found = newest(one.found for one in listed)
    if found is None:
        of_run = "" if run is None else f" of run {run!r}"
        raise CheckpointNotFoundError(
            f"no committed checkpoint{of_run} in {', '.join(places)}: 'composerlite checkpoint ls' shows what is there."
        )
    place = next(one.place for one in listed if one.found is found)
    if as_json:
        print_json(told(place, found))
    else:
        typer.echo(place.uri(found.name))


def _listed(places: Sequence[str], run: str | None) -> list[_Listed]:
    listed: list[_Listed] = []
    for text in places:
        with place_at(text) as place:
            there = survey(place)
            left = tools.abandoned(there)
            listed += [_Listed(place, one, one.name in left) for one in there if run is None or _run(one) == run]
    return listed


def _run(found: Found) -> str | None:
    return None if found.manifest is None else found.manifest.run_name


def _saved_at(found: Found) -> str:
    return "" if found.manifest is None else found.manifest.saved_at


# ── how one is told ──────────────────────────────────────────────────────────────────────────────────────────────────
def told(place: Place, found: Found, *, abandoned: bool = False) -> dict[str, Any]:
    """A checkpoint as JSON has it. What is not known is ``null``."""
    manifest = found.manifest
    counts = {} if manifest is None or not (manifest.run_name or found.kind == "step") else manifest.timestamp
    return {
        "name": found.name,
        "uri": place.uri(found.name),
        "where": place.where,
        "state": found.state,
        "attempt": None if manifest is None else manifest.lineage.attempt,
        "abandoned": abandoned,
        "faults": list(found.faults),
        "kind": found.kind or None,
        "run_name": None if manifest is None else manifest.run_name,
        "epoch": counts.get("epoch"),
        "batch": counts.get("batch"),
        "sample": counts.get("sample"),
        "token": counts.get("token"),
        "saved_at": None if manifest is None else manifest.saved_at,
        "size_bytes": found.size_bytes,
        "file_count": len(found.files),
        "world_size": None if manifest is None else manifest.world_size,
        "ephemeral": None if manifest is None else manifest.ephemeral,
        "metrics": None if manifest is None else dict(manifest.metrics),
    }


def _row(one: _Listed) -> list[str]:
    facts = told(one.place, one.found, abandoned=one.abandoned)
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in (facts["metrics"] or {}).items())
    kind = " ".join(part for part in (facts["kind"], "ephemeral" if facts["ephemeral"] else "") if part)
    counts = ["" if facts[name] is None else str(facts[name]) for name in ("epoch", "batch", "sample")]
    saved = (facts["saved_at"] or "")[:19].replace("T", " ")
    ranks = "" if facts["world_size"] is None else str(facts["world_size"])
    size = bytes_text(facts["size_bytes"])
    return [
        *(facts["name"], facts["run_name"] or "", *counts, saved, size, kind, ranks, metrics),
        *(facts["where"], "abandoned" if facts["abandoned"] else _state(one.found)),
    ]


def _state(found: Found) -> str:
    if not found.faults:
        return found.state
    more = len(found.faults) - _FAULTS_SHOWN
    return f"{found.state}: {'; '.join(found.faults[:_FAULTS_SHOWN])}{f'; and {more} more' if more > 0 else ''}"
