"""What ``composerlite report`` does. It does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from composerlite.cli.output import print_json
from composerlite.report import facts_of, page_of, sentences, to_plain

__all__ = ["report"]


def report(places: Sequence[str], output: Path, *, run: str | None, as_json: bool) -> None:
    """Write the page of the run in ``places`` to ``output``, or print its facts.

    Raises:
        CheckpointNotFoundError: there is nothing of a run. ConfigError: a URI names no store, or ``run`` is not there.
        OSError, ObjectStoreError: a place cannot be read, or the page not be written.
    """
    facts = facts_of(places, run)
    if as_json:
        print_json(to_plain(facts))
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page_of(facts), encoding="utf-8")
    for sentence in sentences(facts):
        typer.echo(sentence)
    for fault in facts.faults:
        typer.echo(f"composerlite: {fault}", err=True)
    typer.echo(f"report: {output}")
