"""What ``composerlite checkpoint verify`` does. It does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import typer

from composerlite.checkpoint.load.progress import progress_of
from composerlite.checkpoint.tools import Found, Place, pointed
from composerlite.cli.output import bytes_text, print_json, print_table
from composerlite.errors import CheckpointNotFoundError, CorruptCheckpointError

__all__ = ["verify"]


@final
@dataclass(frozen=True)
class _Verdict:
    """What was found out about a checkpoint: ``'verified'``, ``'damaged'`` or ``'unverified'``, and why."""

    name: str
    uri: str
    state: str
    faults: list[str]
    size_bytes: int


def verify(targets: Sequence[str], *, run: str | None, as_json: bool) -> None:
    """Read all that manifests vouch for, compare, and print what was found.

    Raises:
        CheckpointNotFoundError: there is nothing to verify.
        typer.Exit: with 1: something is damaged.
    """
    verdicts: list[_Verdict] = []
    for text in targets:
        with pointed(text) as target:
            chosen = [one for one in target.found() if run is None or _run(one) == run]
            if not chosen:
                of_run = "" if run is None else f" of run {run!r}"
                raise CheckpointNotFoundError(f"{text!r} holds no checkpoint{of_run}: there is nothing to verify.")
            size = sum(record.size_bytes for one in chosen for record in one.records)
            with progress_of(f"verifying {text}", size, wanted=True) as progress:
                verdicts += [_verdict(target.place, one, progress) for one in chosen]
    damaged = [verdict for verdict in verdicts if verdict.state == "damaged"]
    if as_json:
        print_json({"checkpoints": [vars(verdict) for verdict in verdicts]})
    else:
        rows = [[v.uri, bytes_text(v.size_bytes), _told(v)] for v in verdicts]
        print_table(("checkpoint", "size", "state"), rows, right=("size",))
    if damaged:
        typer.echo(f"{len(damaged)} of {len(verdicts)} checkpoints are damaged", err=True)
        raise typer.Exit(1)


def _run(found: Found) -> str | None:
    return None if found.manifest is None else found.manifest.run_name


def _told(verdict: _Verdict) -> str:
    return verdict.state if not verdict.faults else f"{verdict.state}: {'; '.join(verdict.faults)}"


def _verdict(place: Place, found: Found, progress: Callable[[int], object]) -> _Verdict:
    uri = place.uri(found.name)
    if found.manifest is None:  # what vouches for it is not there, or damaged itself
        state = "damaged" if found.commits and found.faults else "unverified"
        return _Verdict(found.name, uri, state, list(found.faults), found.size_bytes)
    faults: list[str] = []
    for record in found.records:
        try:
            place.verify(record, progress)
        except FileNotFoundError:
            faults.append(f"{record.path} is missing")
        except CorruptCheckpointError as e:
            faults.append(str(e).rstrip("."))
    return _Verdict(found.name, uri, "damaged" if faults else "verified", faults, found.size_bytes)
