"""Tables, verdicts and bars of what the benchmarks wrote."""

from __future__ import annotations

import json
from typing import Any

from matplotlib.axes import Axes
from measure import OUT

__all__ = ["BASE", "OURS", "PEER", "Spread", "draw", "print_table", "read", "text", "verdict"]

OURS, PEER, BASE = "#c8553d", "#8d99ae", "#2b2d42"

Spread = dict[str, float]


def read(name: str) -> dict[str, Any]:
    """What the benchmark ``name`` wrote."""
    return json.loads((OUT / f"{name}.json").read_text())


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}\n")
    for row in [header, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def text(spread: Spread | None, digits: int) -> str:
    """Median, and minimum and maximum in brackets."""
    if spread is None:
        return "disturbed"
    return f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f}–{spread['max']:.{digits}f})"


def verdict(
    target: str,
    found: Spread | None,
    unit: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    otherwise: str = "",
) -> str:
    """Whether a target is met, by the median. ``otherwise`` is what to say too if it was not measured."""
    if found is None:
        return f"{target} not measured, other jobs disturbed every repeat{otherwise}"
    met = (at_most is None or found["median"] <= at_most) and (at_least is None or found["median"] >= at_least)
    limit = f"at most {at_most:g}" if at_most is not None else f"at least {at_least:g}"
    digits = 3 if found["median"] < 0.5 else 2 if found["median"] < 5 else 1
    return f"{target} {'met' if met else 'MISSED'}: {text(found, digits)} {unit}, {limit}"


def draw(axes: Axes, systems: dict[str, Spread], title: str, unit: str, digits: int) -> None:
    """A bar for each system's median, with a line from minimum to maximum. The first is a limit, if it is not ours."""
    names = list(systems)
    colours = [OURS if name.startswith("composerlite") else BASE if i == 0 else PEER for i, name in enumerate(names)]
    medians = [systems[name]["median"] for name in names]
    below = [systems[name]["median"] - systems[name]["min"] for name in names]
    above = [systems[name]["max"] - systems[name]["median"] for name in names]
    axes.barh(names, medians, xerr=[below, above], color=colours, error_kw={"ecolor": "#555555", "capsize": 3})
    for row, name in enumerate(names):
        axes.annotate(
            f"{medians[row]:.{digits}f}",
            (systems[name]["max"], row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
