"""What ``composerlite checkpoint diff`` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from composerlite.checkpoint.tools import Difference, compared, flat, pointed, weights_of, whole_contents
from composerlite.cli.inspection import the_one
from composerlite.cli.output import print_json, print_table

__all__ = ["diff"]

_KEYS_SHOWN = 20


def diff(a: str, b: str, *, everything: bool, top: int, exit_code: bool, as_json: bool) -> None:
    """Print how the checkpoints ``a`` and ``b`` differ.

    Raises:
        ConfigError: one of them is a folder of several.
        CheckpointError: one of them is not there, damaged, or holds what is not known to be safe.
        typer.Exit: with 1: they differ, and ``exit_code`` is asked for.
    """
    found = compared(_contents(a, everything=everything), _contents(b, everything=everything))
    if as_json:
        print_json(_told(found, a, b, top))
    else:
        _print(found, a, b, top)
    if exit_code and not found.is_none:
        raise typer.Exit(1)


def _contents(text: str, *, everything: bool) -> Mapping[str, Any]:
    with pointed(text) as target:
        contents = whole_contents(target.place, the_one(target, text), weights_only=not everything)
        return flat(contents) if everything else weights_of(contents, text)


def _told(found: Difference, a: str, b: str, top: int) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "equal": found.is_none,
        "equal_count": found.equal_count,
        "changed_count": len(found.changes),
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "forms": [{"key": key, "a": one, "b": other} for key, one, other in found.forms],
        "changes": [change._asdict() for change in found.changes[:top]],
        "values": [{"key": key, "a": one, "b": other} for key, one, other in found.values],
    }


def _print(found: Difference, a: str, b: str, top: int) -> None:
    for place, keys in ((a, found.only_a), (b, found.only_b)):
        for key in keys[:_KEYS_SHOWN]:
            typer.echo(f"only in {place}: {key}")
        if len(keys) > _KEYS_SHOWN:
            typer.echo(f"only in {place}: and {len(keys) - _KEYS_SHOWN} more")
    for key, one, other in (*found.forms, *found.values):
        typer.echo(f"{key}: {one} in {a}, {other} in {b}")
    if shown := found.changes[:top]:
        columns = ("key", "shape", "max |a-b|", "norm", "relative")
        rows = [
            [change.key, str(list(change.shape)), *(f"{x:.4g}" for x in (change.max_abs, change.norm, change.relative))]
            for change in shown
        ]
        print_table(columns, rows, right=columns[2:])
    typer.echo(
        f"{found.equal_count} equal, {len(found.changes)} changed, {len(found.forms)} of another form, "
        f"{len(found.values)} other values, {len(found.only_a)} only in {a}, {len(found.only_b)} only in {b}"
    )
