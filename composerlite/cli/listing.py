"""``composerlite checkpoint ls``, ``latest`` and ``verify``.

Only ``verify`` reads data. None imports torch, except ``verify`` for checkpoints without a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from composerlite.checkpoint.tools.surveying import Found, newest, place_at, pointed, survey
from composerlite.cli import options
from composerlite.cli.output import print_json, print_table
from composerlite.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UntrustedCheckpointError,
    bytes_text,
)
from composerlite.storage.progress import progress_of

_FAULTS_SHOWN = 3
_COLUMNS = ("name", "run", "epoch", "batch", "sample", "saved", "size", "kind", "ranks", "metrics", "where", "state")
_SPARE = ("metrics", "sample", "ranks", "run", "where", "kind")
_NUMBERS = ("epoch", "batch", "sample", "size", "ranks")
_SORT_KEYS: dict[str, Callable[[Found], Any]] = {
    "age": lambda found: 0,  # keep the order of training
    "name": lambda found: found.name,
    "saved": lambda found: "~" if found.manifest is None else found.manifest.saved_at,  # unknown times last
    "size": lambda found: found.size_bytes,
}


@click.command()
@options.places
@options.run
@click.option("--sort", type=click.Choice(list(_SORT_KEYS)), default="age", help="Order of the list.")
@options.as_json
def ls(places: Sequence[str], run: str | None, sort: str, as_json: bool) -> None:
    """List the checkpoints in PLACE with state, time and size.

    Only records are read; use 'verify' to read all bytes. A file under another name than the name in its record is
    listed as a copy: no run resumes from a copy, and 'prune' keeps copies.
    """
    listed = sorted(_listed(places, run), key=_SORT_KEYS[sort])
    if as_json:
        print_json({"checkpoints": [described(found) for found in listed]})
    elif listed:
        print_table(_COLUMNS, [_row(found) for found in listed], right=_NUMBERS, spare=_SPARE)
    else:
        click.echo(f"no checkpoints{_of_run(run)} in {', '.join(places)}", err=True)


@click.command()
@options.places
@options.run
@options.as_json
def latest(places: Sequence[str], run: str | None, as_json: bool) -> None:
    """Print the path or URI of the newest committed checkpoint in PLACE. Exit status 1 if there is none.

    Of several runs, the run that saved last is used; of equal checkpoints in several places, the first place.
    """
    found = newest(_listed(places, run))
    if found is None:
        raise CheckpointNotFoundError(
            f"no committed checkpoint{_of_run(run)} in {', '.join(places)}. 'composerlite checkpoint ls' lists all."
        )
    if as_json:
        print_json(described(found))
    else:
        click.echo(found.uri)


def _listed(places: Sequence[str], run: str | None) -> list[Found]:
    listed: list[Found] = []
    for text in places:
        with place_at(text) as place:
            listed += [found for found in survey(place) if run in (None, found.run_name)]
    return listed


def _of_run(run: str | None) -> str:
    return "" if run is None else f" of run {run!r}"


def described(found: Found) -> dict[str, Any]:
    """Describe a checkpoint in JSON types. Unknown values are ``None``."""
    manifest = found.manifest
    counts = {} if manifest is None or not (manifest.run_name or found.kind == "step") else manifest.timestamp
    return {
        "name": found.name,
        "uri": found.uri,
        "where": "remote" if found.place.path_of("") is None else "local",
        "state": found.state,
        "copy_of": found.copy_of,
        "attempt": None if manifest is None else manifest.run.lineage.attempt,
        "abandoned": found.abandoned,
        "faults": list(found.faults),
        "kind": found.kind or None,
        "run_name": found.run_name,
        **{name: counts.get(name) for name in ("epoch", "batch", "sample", "token")},
        "saved_at": None if manifest is None else manifest.saved_at,
        "size_bytes": found.size_bytes,
        "file_count": len(found.files),
        "world_size": None if manifest is None else manifest.run.world_size,
        "ephemeral": None if manifest is None else manifest.ephemeral,
        "metrics": None if manifest is None else dict(manifest.run.metrics),
    }


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Format metrics on one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _row(found: Found) -> list[str]:
    facts = described(found)
    is_not_finite = found.manifest is not None and bool(found.manifest.run.not_finite)
    kind = [facts["kind"], "ephemeral" if facts["ephemeral"] else "", "not finite" if is_not_finite else ""]
    state = "abandoned" if found.abandoned else found.state
    if found.copy_of is not None:
        state = f"a copy of {found.copy_of!r}"
    elif found.faults:
        more = len(found.faults) - _FAULTS_SHOWN
        state += f": {'; '.join(found.faults[:_FAULTS_SHOWN])}{f'; and {more} more' if more > 0 else ''}"
    facts |= {
        "run": found.run_name,
        "saved": (facts["saved_at"] or "")[:19].replace("T", " "),
        "size": bytes_text(found.size_bytes),
        "kind": " ".join(filter(None, kind)),
        "ranks": facts["world_size"],
        "metrics": metrics_text(facts["metrics"] or {}),
        "state": state,
    }
    return ["" if facts[name] is None else str(facts[name]) for name in _COLUMNS]


@click.command()
@click.argument("targets", metavar="CHECKPOINT...", nargs=-1, required=True, help="Checkpoints, folders or URIs.")
@options.run
@options.as_json
def verify(targets: Sequence[str], run: str | None, as_json: bool) -> None:
    """Read CHECKPOINT, or all checkpoints in a folder, and compare every byte with the record.

    A copied file is verified under any name. A checkpoint without a record, written by another program, is read and
    compared with the checksums in its files, and listed as unverified. Exit status 1: a checkpoint is damaged, or
    contains types that are not known to be safe.
    """
    verdicts: list[dict[str, Any]] = []
    for text in targets:
        with pointed(text) as target:
            chosen = [found for found in target.found() if run in (None, found.run_name)]
            if not chosen:
                raise CheckpointNotFoundError(f"no checkpoint{_of_run(run)} in {text!r}: there is nothing to verify.")
            sizes = [
                sum(r.size_bytes for r in found.records) if found.manifest else found.size_bytes for found in chosen
            ]
            with progress_of(f"verifying {text}", sum(sizes), wanted=True) as progress:
                for found in chosen:
                    state, faults = verdict(found, progress, is_named=target.name is not None)
                    facts = {"name": found.name, "uri": found.uri, "state": state, "copy_of": found.copy_of}
                    verdicts.append({**facts, "faults": faults, "size_bytes": found.size_bytes})
    if as_json:
        print_json({"checkpoints": verdicts})
    else:
        rows: list[list[str]] = []
        for facts in verdicts:
            copy = "" if facts["copy_of"] is None else f"a copy of {facts['copy_of']!r}"
            state = ": ".join(filter(None, (facts["state"], copy, "; ".join(facts["faults"]))))
            rows.append([facts["uri"], bytes_text(facts["size_bytes"]), state])
        print_table(("checkpoint", "size", "state"), rows, right=("size",))
    bad = [facts["state"] for facts in verdicts if facts["state"] in ("damaged", "refused")]
    if bad:
        click.echo(f"{len(bad)} of {len(verdicts)} checkpoints are {' or '.join(sorted(set(bad)))}", err=True)
        raise click.exceptions.Exit(1)


def verdict(found: Found, progress: Callable[[int], object], *, is_named: bool = True) -> tuple[str, list[str]]:
    """Verify a checkpoint. Returns ``'verified'``, ``'damaged'``, ``'refused'`` or ``'unverified'``, and the reasons.

    An incomplete checkpoint without a record is damaged if ``is_named``. In a list it is unverified, since a save may
    be running.
    """
    if found.state == "unverified":
        from composerlite.checkpoint.tools.reading import read_without_record  # imports torch

        try:
            return "unverified", [read_without_record(found)]
        except (CheckpointError, ConfigError) as e:
            states: dict[type[Exception], str] = {
                CorruptCheckpointError: "damaged",
                UntrustedCheckpointError: "refused",
            }
            return states.get(type(e), "unverified"), [str(e).rstrip(".")]
    if found.manifest is None:
        is_damaged = bool(found.faults) and bool(found.decider or is_named)
        return "damaged" if is_damaged else "unverified", list(found.faults)
    faults: list[str] = []
    for record in found.records:
        try:
            found.place.verify(record, progress)
        except FileNotFoundError:
            faults.append(f"{record.path} is missing")
        except CorruptCheckpointError as e:
            faults.append(str(e).rstrip("."))
    return "damaged" if faults else "verified", faults
