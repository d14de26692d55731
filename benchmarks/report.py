"""Prints what the benchmarks wrote to ``benchmarks/out`` and draws it: ``docs/images/benchmarks.svg``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measure import OUT

CHART = Path(__file__).parent.parent / "docs" / "images" / "benchmarks.svg"
TARGET_US = 10
TARGET_S = 0.15
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


def verdict(target: str, wall: Spread | None, cpu: Spread, limit: float, unit: str) -> str:
    """Whether a target is met, by the median."""
    digits = 3 if limit < 1 else 1
    if wall is None:
        return f"{target} not measured, other jobs disturbed every repeat; processor time {text(cpu, digits)} {unit}"
    word = "met" if wall["median"] <= limit else "MISSED"
    return f"{target} {word}: {text(wall, digits)} {unit}, at most {limit}"


def comparable(wall: dict[str, Spread | None], cpu: dict[str, Spread]) -> tuple[dict[str, Spread], str]:
    """Wall-clock times if there is one of every system, else processor times; and a word for the axis."""
    measured = {name: spread for name, spread in wall.items() if spread is not None}
    return (measured, "") if len(measured) == len(wall) else (cpu, " of processor time")


def draw(axes: Axes, systems: dict[str, Spread], title: str, unit: str, digits: int) -> None:
    """A bar for each system's median, with a line from minimum to maximum."""
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


def main() -> None:
    """Both tables, whether the targets are met, and the chart."""
    step, imports = read("step_overhead"), read("import_time")

    rows = [
        [
            f"raw loop, torch {system['version']}" if name == "raw" else f"{name} {system['version']}",
            text(system["us_per_step"], 0),
            "" if name == "raw" else text(system["us_over_raw"], 1),
            f"{system['repeats']} + {system['dropped']}",
            text(system["cpu_us_per_step"], 0),
            "" if name == "raw" else text(system["cpu_us_over_raw"], 1),
        ]
        for name, system in step["systems"].items()
    ]
    header = ["median (min–max)", "µs per step", "over raw", "repeats + dropped", "CPU µs per step", "over raw"]
    print_table(f"Training step, {step['steps']} steps of a 16→16→4 network in batches of 8", header, rows)

    rows = [
        [
            f"{name} {system['version']}",
            text(system["torch_s"] if name == "torch" else system["over_torch_s"], 3),
            f"{system['repeats']} + {system['dropped']}",
            text(system["cpu_s"], 3),
        ]
        for name, system in imports["systems"].items()
    ]
    header = ["median (min–max)", "seconds (over torch)", "repeats + dropped", "CPU seconds (over torch)"]
    print_table("Import, fresh interpreter, warm caches", header, rows)

    print()
    ours = step["systems"]["composerlite"]
    print(verdict("P6", ours["us_over_raw"], ours["cpu_us_over_raw"], TARGET_US, "µs per step over the raw loop"))
    ours = imports["systems"]["composerlite"]
    print(verdict("P7", ours["over_torch_s"], ours["cpu_s"], TARGET_S, "s over import torch"))

    mpl.rcParams["svg.hashsalt"] = "composerlite"  # the same numbers give the same file
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    systems = step["systems"]
    shown, which = comparable(
        {name: system["us_per_step"] for name, system in systems.items()},
        {name: system["cpu_us_per_step"] for name, system in systems.items()},
    )
    draw(left, shown, "One training step", f"µs{which}", 0)
    systems = imports["systems"]
    shown, which = comparable(
        {name: system["torch_s" if name == "torch" else "over_torch_s"] for name, system in systems.items()},
        {name: system["cpu_s"] for name, system in systems.items()},
    )
    draw(right, shown, "Import: torch, and on top of it", f"s{which}", 2)
    CHART.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(CHART, metadata={"Date": None})
    print(f"\nWrote {CHART.relative_to(CHART.parents[2])}")


if __name__ == "__main__":
    main()
