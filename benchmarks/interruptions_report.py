"""The table and the chart of what interruptions cost."""

from __future__ import annotations

import statistics

from matplotlib.figure import Figure
from tables import BASE, OURS, PEER, print_table, read

__all__ = ["show"]

_COLOURS = {"SIGKILL": PEER, "SIGKILL, memory": BASE, "SIGTERM": OURS}


def show() -> Figure:
    """Batches that are lost against the interval between saves, and the parts of a resume."""
    found = read("interruptions")
    ways = list(dict.fromkeys(row["how"] for row in found["lost"]))
    by_way = {way: [row for row in found["lost"] if row["how"] == way] for way in ways}
    rows = [
        [str(row["interval"]), way, f"{statistics.mean(row['lost']):.1f}", f"{min(row['lost'])}–{max(row['lost'])}"]
        for way in ways
        for row in by_way[way]
    ]
    print_table("Lost at a random instant", ["saved every … batches", "interrupted by", "mean", "min–max"], rows)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way in ways:
        intervals = [row["interval"] for row in by_way[way]]
        means = [statistics.mean(row["lost"]) for row in by_way[way]]
        below = [mean - min(row["lost"]) for mean, row in zip(means, by_way[way], strict=True)]
        above = [max(row["lost"]) - mean for mean, row in zip(means, by_way[way], strict=True)]
        left.errorbar(intervals, means, yerr=[below, above], marker="o", capsize=3, color=_COLOURS[way], label=way)
    left.set_xscale("log")
    left.set_xticks([row["interval"] for row in by_way[ways[0]]], [str(r["interval"]) for r in by_way[ways[0]]])
    left.minorticks_off()
    left.set_title("Work lost at a random instant", loc="left", fontsize=11)
    left.set_xlabel("batches between two saves to the disk")
    left.set_ylabel("batches lost")
    left.legend(frameon=False)
    sizes = [f"{row['size_bytes'] / 1e6:.0f} MB" for row in found["resume"]]
    discovery = [row["discovery"] for row in found["resume"]]
    rest = [max(0.0, row["whole"] - row["discovery"] - row["model"]) for row in found["resume"]]
    right.barh(sizes, discovery, color=PEER, label="find")
    right.barh(sizes, rest, left=discovery, color=OURS, label="read and verify, restore, build")
    right.invert_yaxis()
    right.set_title("Resume, warm", loc="left", fontsize=11)
    right.set_xlabel("seconds, with what is imported late, without the model itself")
    right.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.3, 1.0), ncols=2, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
