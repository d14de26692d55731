"""``composerlite checkpoint ls``, ``latest`` and ``verify``: what there is, and whether it is what was saved.

None of them imports torch, but ``verify`` where something is damaged or has no record; only that reads data.
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


_ORDERS: dict[str, Callable[[Found], Any]] = {
    "age": lambda one: 0,  # as they are
    "name": lambda one: one.name,
    "saved": lambda one: "~" if one.manifest is None else one.manifest.saved_at,  # later than any date
    "size": lambda one: one.size_bytes,
}


@click.command()
@options.places
@options.run
@click.option("--sort", type=click.Choice(list(_ORDERS)), default="age", help="Order of the list.")
@options.as_json
def ls(places: Sequence[str], run: str | None, sort: str, as_json: bool) -> None:
    """List the checkpoints in PLACE: whether each is whole, of which moment, how large.

    A file is read at its end only, where its record is: 'verify' reads all. A file that was saved under another name is
    listed as a copy: no run resumes from it, and 'prune' leaves it.
    """
    listed = sorted(_listed(places, run), key=_ORDERS[sort])
    if as_json:
        print_json({"checkpoints": [described(one) for one in listed]})
    elif listed:
        print_table(_COLUMNS, [_row(one) for one in listed], right=_NUMBERS, spare=_SPARE)
    else:
        click.echo(f"no checkpoints in {', '.join(places)}{_of_run(run)}", err=True)


@click.command()
@options.places
@options.run
@options.as_json
def latest(places: Sequence[str], run: str | None, as_json: bool) -> None:
    """Print the path or the URI of the newest committed checkpoint in PLACE. Exit status 1: there is none.

    Of several runs it is that of the one that saved last; of several places with the same, that in the first of them.
    """
    found = newest(_listed(places, run))
    if found is None:
        raise CheckpointNotFoundError(
            f"no committed checkpoint{_of_run(run)} in {', '.join(places)}: 'composerlite checkpoint ls' shows what is "
            "there."
        )
    if as_json:
        print_json(described(found))
    else:
        click.echo(found.uri)


def _listed(places: Sequence[str], run: str | None) -> list[Found]:
    listed: list[Found] = []
    for text in places:
        with place_at(text) as place:
            listed += [one for one in survey(place) if run in (None, one.run_name)]
    return listed


def _of_run(run: str | None) -> str:
    return "" if run is None else f" of run {run!r}"


def described(found: Found) -> dict[str, Any]:
    """A checkpoint as JSON has it. What is not known is ``null``."""
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
        "epoch": counts.get("epoch"),
        "batch": counts.get("batch"),
        "sample": counts.get("sample"),
        "token": counts.get("token"),
        "saved_at": None if manifest is None else manifest.saved_at,
        "size_bytes": found.size_bytes,
        "file_count": len(found.files),
        "world_size": None if manifest is None else manifest.run.world_size,
        "ephemeral": None if manifest is None else manifest.ephemeral,
        "metrics": None if manifest is None else dict(manifest.run.metrics),
    }


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Metrics and their values on one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _row(one: Found) -> list[str]:
    facts = described(one)
    metrics = metrics_text(facts["metrics"] or {})
    is_marked = one.manifest is not None and bool(one.manifest.run.not_finite)
    marks = ("ephemeral" if facts["ephemeral"] else "", "not finite" if is_marked else "")
    kind = " ".join(part for part in (facts["kind"], *marks) if part)
    counts = ["" if facts[name] is None else str(facts[name]) for name in ("epoch", "batch", "sample")]
    saved = (facts["saved_at"] or "")[:19].replace("T", " ")
    ranks = "" if facts["world_size"] is None else str(facts["world_size"])
    size = bytes_text(facts["size_bytes"])
    return [
        *(facts["name"], facts["run_name"] or "", *counts, saved, size, kind, ranks, metrics),
        *(facts["where"], "abandoned" if one.abandoned else _state(one)),
    ]


def _state(found: Found) -> str:
    if found.copy_of is not None:
        return f"a copy of {found.copy_of!r}"
    if not found.faults:
        return found.state
    more = len(found.faults) - _FAULTS_SHOWN
    return f"{found.state}: {'; '.join(found.faults[:_FAULTS_SHOWN])}{f'; and {more} more' if more > 0 else ''}"


# ── verify ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@click.command()
@click.argument(
    "targets", metavar="CHECKPOINT...", nargs=-1, required=True, help="Checkpoints, or folders or URIs of such."
)
@options.run
@options.as_json
def verify(targets: Sequence[str], run: str | None, as_json: bool) -> None:
    """Read CHECKPOINT, or all in a folder, and compare every byte with the record.

    A file contains its record, so a copy of it is verified wherever it is, under any name. Exit status 1: a checkpoint
    is damaged, or holds what is not known to be safe. Checkpoints without a record, as other programs write them, are
    read and compared with the checksums in their own files. They are listed as unverified, and so are directories that
    another program has rewritten.
    """
    verdicts: list[dict[str, Any]] = []
    for text in targets:
        with pointed(text) as target:
            chosen = [one for one in target.found() if run in (None, one.run_name)]
            if not chosen:
                raise CheckpointNotFoundError(
                    f"{text!r} holds no checkpoint{_of_run(run)}: there is nothing to verify."
                )
            size = sum(sum(r.size_bytes for r in one.records) if one.manifest else one.size_bytes for one in chosen)
            with progress_of(f"verifying {text}", size, wanted=True) as progress:
                verdicts += [_verdict(one, progress, is_named=target.name is not None) for one in chosen]
    if as_json:
        print_json({"checkpoints": verdicts})
    else:
        rows = [[v["uri"], bytes_text(v["size_bytes"]), _told(v)] for v in verdicts]
        print_table(("checkpoint", "size", "state"), rows, right=("size",))
    states = [verdict["state"] for verdict in verdicts if verdict["state"] in ("damaged", "refused")]
    if states:
        words = " or ".join(sorted(set(states)))
        click.echo(f"{len(states)} of {len(verdicts)} checkpoints are {words}", err=True)
        raise click.exceptions.Exit(1)


def _told(verdict: dict[str, Any]) -> str:
    copy = "" if verdict["copy_of"] is None else f"a copy of {verdict['copy_of']!r}"
    return ": ".join(filter(None, (verdict["state"], copy, "; ".join(verdict["faults"]))))


def _verdict(found: Found, progress: Callable[[int], object], *, is_named: bool = True) -> dict[str, Any]:
    """Return the verdict on a checkpoint, ``'verified'``, ``'damaged'``, ``'refused'`` or ``'unverified'``, with the
    reason. An incomplete one without a record is unverified in a listing, since its save may continue; it is damaged if
    it is named.
    """
    faults: list[str] = []
    for record in found.records:
        try:
            found.place.verify(record, progress)
        except FileNotFoundError:
            faults.append(f"{record.path} is missing")
        except CorruptCheckpointError as e:
            faults.append(str(e).rstrip("."))
    state = "damaged" if faults else "verified"
    if found.state == "unverified":
        state, faults = _by_itself(found)
    elif found.manifest is None:  # the record is damaged, or the save did not end
        faults = list(found.faults)
        state = "damaged" if (found.decider or is_named) and faults else "unverified"
    return {
        "name": found.name,
        "uri": found.uri,
        "state": state,
        "copy_of": found.copy_of,
        "faults": faults,
        "size_bytes": found.size_bytes,
    }


def _by_itself(found: Found) -> tuple[str, list[str]]:
    """Return the verdict on a checkpoint without a record."""
    from composerlite.checkpoint.tools.reading import read_without_record  # imports torch

    try:
        return "unverified", [read_without_record(found)]
    except (CheckpointError, ConfigError) as e:
        states: dict[type[Exception], str] = {CorruptCheckpointError: "damaged", UntrustedCheckpointError: "refused"}
        return states.get(type(e), "unverified"), [str(e).rstrip(".")]
