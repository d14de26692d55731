"""``composerlite checkpoint inspect`` and ``diff``. What takes torch is imported when they are run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from composerlite.checkpoint.tools.surveying import pointed
from composerlite.cli import options
from composerlite.cli.listing import described, metrics_text
from composerlite.cli.output import print_json, print_table
from composerlite.errors import bytes_text

if TYPE_CHECKING:
    from composerlite.checkpoint.tools.comparing import Comparison
    from composerlite.checkpoint.tools.reading import Leaf


@click.command()
@options.checkpoint
@click.option("--depth", type=click.IntRange(min=1), help="Levels of keys to show.")
@options.as_json
def inspect(checkpoint: str, depth: int | None, as_json: bool) -> None:
    """Show the keys in CHECKPOINT, with shapes, types and bytes.

    Nothing in it is run, and the bytes of its tensors are read only where it is compressed.
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
    where = [f"epoch {facts['epoch']}, batch {facts['batch']}"] if facts["epoch"] is not None else []
    run = [f"run {facts['run_name']}"] if facts["run_name"] else []
    saved = [f"saved {facts['saved_at']}"] if facts["saved_at"] else []
    copy = [f"a copy of {facts['copy_of']!r}"] if facts["copy_of"] else []
    system = [facts["system"]] if facts["system"] and found.manifest is None else []
    kind = [facts["kind"]] if facts["kind"] else []
    click.echo(", ".join([facts["uri"], *kind, *system, *run, *where, *saved, *copy]))
    if facts["metrics"]:
        click.echo(f"metrics: {metrics_text(facts['metrics'])}")
    for line in _tree(leaves, depth):
        click.echo(line)
    click.echo(f"{count} tensors, {bytes_text(total)}; in files {bytes_text(facts['size_bytes'])}")
    for fault in facts["faults"]:
        click.echo(f"{facts['state']}: {fault}", err=True)
    if facts["system"] is None:
        click.echo(f"It is of no system that is recognised. {what_is_recognised()}", err=True)


def _tensors_in(leaves: Sequence[Leaf]) -> tuple[int, int]:
    """Return the number of tensors, and the size of all of them in bytes."""
    sizes = [leaf.size_bytes or 0 for leaf in leaves if leaf.kind == "tensor"]
    return len(sizes), sum(sizes)


def _tree(leaves: Sequence[Leaf], depth: int | None, level: int = 0) -> Iterator[str]:
    """A line for each key, indented; below ``depth`` only what there is in all."""
    indent = "  " * level
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.path[level] if len(leaf.path) > level else "", []).append(leaf)
    for key, group in groups.items():
        first = group[0]
        if len(group) == 1 and len(first.path) <= level + 1:
            yield f"{indent}{key}  {_line(first)}".rstrip()
            continue
        count, size_bytes = _tensors_in(group)
        yield f"{indent}{key}" + (f"  {count} tensors, {bytes_text(size_bytes)}" if count else "")
        if depth is None or level + 1 < depth:
            yield from _tree(group, depth, level + 1)


def _line(leaf: Leaf) -> str:
    if leaf.shape is None:
        return leaf.value or ""
    return f"{leaf.dtype} {list(leaf.shape)}  {bytes_text(leaf.size_bytes or 0)}"


# ── diff ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
_KEYS_SHOWN = 20


@click.command()
@click.argument("a", metavar="A", help="A checkpoint.")
@click.argument("b", metavar="B", help="Another.")
@click.option("--all", "everything", is_flag=True, help="Compare all that they hold, and not the weights alone.")
@click.option("--top", type=click.IntRange(min=0), default=20, help="Number of largest changes to show.")
@click.option("--exit-code", is_flag=True, help="Exit status 1 if they differ.")
@options.as_json
def diff(a: str, b: str, everything: bool, top: int, exit_code: bool, as_json: bool) -> None:
    """Show the differences of A and B: keys that only one has, shapes and types, and changes of the numbers.

    They may be in different places and of different forms. Both are read into memory.
    """
    from composerlite.checkpoint.tools.comparing import compared

    found = compared(_contents(a, everything=everything), _contents(b, everything=everything))
    if as_json:
        print_json(_told(found, a, b, top))
    else:
        _print(found, a, b, top)
    if exit_code and not found.is_none:
        raise click.exceptions.Exit(1)


def _contents(text: str, *, everything: bool) -> Mapping[str, Any]:
    from composerlite.checkpoint.tools.comparing import flat
    from composerlite.checkpoint.tools.reading import weights_of, whole_contents

    with pointed(text) as target:
        contents = whole_contents(target.the_one(), weights_only=not everything)
        return flat(contents if everything else weights_of(contents, text))


def _told(found: Comparison, a: str, b: str, top: int) -> dict[str, Any]:
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


def _print(found: Comparison, a: str, b: str, top: int) -> None:
    for place, keys in ((a, found.only_a), (b, found.only_b)):
        for key in keys[:_KEYS_SHOWN]:
            click.echo(f"only in {place}: {key}")
        if len(keys) > _KEYS_SHOWN:
            click.echo(f"only in {place}: and {len(keys) - _KEYS_SHOWN} more")
    for key, one, other in (*found.forms, *found.values):
        click.echo(f"{key}: {one} in {a}, {other} in {b}")
    if shown := found.changes[:top]:
        columns = ("key", "shape", "max |a-b|", "norm", "relative")
        rows = [
            [change.key, str(list(change.shape)), *(f"{x:.4g}" for x in (change.max_abs, change.norm, change.relative))]
            for change in shown
        ]
        print_table(columns, rows, right=columns[2:])
    click.echo(
        f"{found.equal_count} equal, {len(found.changes)} changed, {len(found.forms)} of another form, "
        f"{len(found.values)} other values, {len(found.only_a)} only in {a}, {len(found.only_b)} only in {b}"
    )
