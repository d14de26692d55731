"""``composerlite checkpoint inspect`` and ``diff``. Modules with torch are imported when a command runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from composerlite.checkpoint.tools.surveying import pointed
from composerlite.cli import options
from composerlite.cli.listing import described, metrics_text
from composerlite.cli.output import print_json, print_table
from composerlite.errors import bytes_text

if TYPE_CHECKING:
    from composerlite.checkpoint.tools.reading import Leaf

_KEYS_SHOWN = 20


@click.command()
@options.checkpoint
@click.option("--depth", type=click.IntRange(min=1), help="Number of levels to show.")
@options.as_json
def inspect(checkpoint: str, depth: int | None, as_json: bool) -> None:
    """Show the keys in CHECKPOINT, with shapes, types and sizes.

    No code in the checkpoint is run. The bytes of tensors are read only from compressed files.
    """
    from composerlite.checkpoint.foreign.systems import recognised, what_is_recognised
    from composerlite.checkpoint.tools.reading import contents_of, leaves_of_contents

    with pointed(checkpoint) as target:
        found = target.the_one()
        contents = contents_of(found)
        leaves = list(leaves_of_contents(contents))
        facts = described(found)
    facts["system"] = recognised(contents) if found.manifest is None else "composerlite"
    count, total = _tensors_in(leaves)
    if as_json:
        entries = [{"key": ".".join(leaf.path), **leaf._asdict()} for leaf in leaves]
        print_json({**facts, "tensor_count": count, "tensor_bytes": total, "entries": entries})
        return
    parts = [
        facts["uri"],
        facts["kind"],
        facts["system"] if found.manifest is None else None,
        facts["run_name"] and f"run {facts['run_name']}",
        None if facts["epoch"] is None else f"epoch {facts['epoch']}, batch {facts['batch']}",
        facts["saved_at"] and f"saved {facts['saved_at']}",
        facts["copy_of"] and f"a copy of {facts['copy_of']!r}",
    ]
    click.echo(", ".join(filter(None, parts)))
    if facts["metrics"]:
        click.echo(f"metrics: {metrics_text(facts['metrics'])}")
    _print_tree(leaves, depth)
    click.echo(f"{count} tensors, {bytes_text(total)}; in files {bytes_text(facts['size_bytes'])}")
    for fault in facts["faults"]:
        click.echo(f"{facts['state']}: {fault}", err=True)
    if facts["system"] is None:
        click.echo(f"The system that wrote this checkpoint is unknown. {what_is_recognised()}", err=True)


def _tensors_in(leaves: Sequence[Leaf]) -> tuple[int, int]:
    """Return the number of tensors, and their total size in bytes."""
    sizes = [leaf.size_bytes or 0 for leaf in leaves if leaf.kind == "tensor"]
    return len(sizes), sum(sizes)


def _print_tree(leaves: Sequence[Leaf], depth: int | None, level: int = 0) -> None:
    """Print an indented line for each key; below ``depth`` only totals."""
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.path[level] if len(leaf.path) > level else "", []).append(leaf)
    for key, group in groups.items():
        first, indent = group[0], "  " * level
        if len(group) == 1 and len(first.path) <= level + 1:
            text = first.value or ""
            if first.shape is not None:
                text = f"{first.dtype} {list(first.shape)}  {bytes_text(first.size_bytes or 0)}"
            click.echo(f"{indent}{key}  {text}".rstrip())
            continue
        count, size_bytes = _tensors_in(group)
        click.echo(f"{indent}{key}" + (f"  {count} tensors, {bytes_text(size_bytes)}" if count else ""))
        if depth is None or level + 1 < depth:
            _print_tree(group, depth, level + 1)


@click.command()
@click.argument("a", metavar="A", help="A checkpoint.")
@click.argument("b", metavar="B", help="Another checkpoint.")
@click.option("--all", "everything", is_flag=True, help="Compare everything instead of the weights only.")
@click.option("--top", type=click.IntRange(min=0), default=20, help="Number of largest changes to show.")
@click.option("--exit-code", is_flag=True, help="Exit with status 1 if A and B differ.")
@options.as_json
def diff(a: str, b: str, everything: bool, top: int, exit_code: bool, as_json: bool) -> None:
    """Compare A and B: missing keys, shapes and types, and changes of the numbers.

    Places and formats may differ. Both checkpoints are read into memory.
    """
    from composerlite.checkpoint.tools.comparing import compared, flat
    from composerlite.checkpoint.tools.reading import weights_of, whole_contents

    sides: list[dict[str, object]] = []
    for text in (a, b):
        with pointed(text) as target:
            contents = whole_contents(target.the_one(), weights_only=not everything)
            sides.append(dict(flat(contents if everything else weights_of(contents, text))))
    found = compared(*sides)
    if as_json:
        differences = {
            "a": a,
            "b": b,
            "equal": found.is_none,
            "equal_count": found.equal_count,
            "changed_count": len(found.changes),
            "only_a": list(found.only_a),
            "only_b": list(found.only_b),
            "forms": [{"key": key, "a": left, "b": right} for key, left, right in found.forms],
            "changes": [change._asdict() for change in found.changes[:top]],
            "values": [{"key": key, "a": left, "b": right} for key, left, right in found.values],
        }
        print_json(differences)
    else:
        for text, keys in ((a, found.only_a), (b, found.only_b)):
            for key in keys[:_KEYS_SHOWN]:
                click.echo(f"only in {text}: {key}")
            if len(keys) > _KEYS_SHOWN:
                click.echo(f"only in {text}: and {len(keys) - _KEYS_SHOWN} more")
        for key, left, right in (*found.forms, *found.values):
            click.echo(f"{key}: {left} in {a}, {right} in {b}")
        columns = ("key", "shape", "max |a-b|", "norm", "relative")
        rows = [
            [change.key, str(list(change.shape)), *(f"{x:.4g}" for x in (change.max_abs, change.norm, change.relative))]
            for change in found.changes[:top]
        ]
        if rows:
            print_table(columns, rows, right=columns[2:])
        click.echo(
            f"{found.equal_count} equal, {len(found.changes)} changed, {len(found.forms)} with another shape or type, "
            f"{len(found.values)} other values, {len(found.only_a)} only in {a}, {len(found.only_b)} only in {b}"
        )
    if exit_code and not found.is_none:
        raise click.exceptions.Exit(1)
