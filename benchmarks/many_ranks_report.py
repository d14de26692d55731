"""The tables, verdicts and chart of ``many_ranks.py``."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import BASE, OURS, PEER, Spread, print_table, read, text

__all__ = ["show"]

SOME_KEYS, RESHARD = 1.05, 1.10
COLOURS = {"composerlite": OURS, "torch DCP": PEER, "OLMo-core": BASE}
MARKS = "osD^"

Part = dict[str, Any]


def show() -> Figure:
    """Print all tables and verdicts; the chart."""
    results = read("many_ranks")
    print_saves(results)
    print_bytes(results["bytes"])
    print_planning(results["planning"])
    print_votes(results["votes"])
    print()
    for line in verdicts(results["bytes"]):
        print(line)
    return chart(results)


def shown(part: Part, name: str) -> Spread:
    """Of the undisturbed repeats; of all where there is none."""
    return part[name] or part["all"][name]


def print_saves(results: dict[str, Any]) -> None:
    """Seconds of the slowest rank, and of the limit."""
    rows = [
        [
            f"{name} {version}, {ranks}",
            text(shown(parts[f"{name}, sync"], "durable_s"), 2),
            text(shown(parts[f"{name}, sync"], "of_disk_write"), 2),
            text(shown(parts[f"{name}, async"], "blocked_s"), 3),
            text(shown(parts[f"{name}, async"], "durable_s"), 2),
            text(shown(parts[f"{name}, load"], "warm_s"), 2),
            text(shown(parts[f"{name}, load"], "of_page_cache_read"), 2),
            "{repeats} + {dropped}".format(**parts[f"{name}, sync"]),
        ]
        for ranks, parts in results["ranks"].items()
        for name, version in results["versions"].items()
    ]
    header = ["median (min–max), ranks", "sync, durable, s", "of disk_write", "async, waits, s", "durable after, s"]
    header += ["load, warm, s", "of page_cache_read", "repeats + dropped (where none was undisturbed, all count)"]
    print_table(f"A sharded state of {results['state_bytes'] / 1e6:.0f} MB in all", header, rows)


def print_bytes(found: dict[str, Any]) -> None:
    """What was read, of what was needed."""
    rows = [
        [part, f"{values['needed'] / 1e6:.1f}", f"{values['read'] / values['needed']:.3f}"]
        for part, values in found.items()
    ]
    print_table("Bytes that all ranks read, index included", ["", "needed, MB", "read ÷ needed"], rows)


def print_planning(points: list[Part]) -> None:
    """The first rank's part of a save."""
    names = ("plan_s", "dcp_plan_s", "commit_s", "read_index_s")
    rows = [
        [
            f"{point['tensors']:.0f} tensors, {point['ranks']:.0f} ranks",
            *(f"{point[name]:.3f}" if name in point else "" for name in names),
            f"{point['plan_bytes'] / 1e6:.2f}",
            f"{point['dcp_plan_bytes'] / 1e6:.2f}" if "dcp_plan_bytes" in point else "",
            f"{point['index_bytes'] / 1e6:.2f}" if "index_bytes" in point else "",
        ]
        for point in points
    ]
    header = ["", "plan, s", "plan by DCP, s", "commit, s", "read the index, s", "plan, MB", "by DCP, MB", "index, MB"]
    print_table("What the first rank does, in one process, with the plans of all ranks", header, rows)


def print_votes(parts: dict[str, Part]) -> None:
    """A vote, by the number of ranks."""
    rows = [
        [
            ranks,
            text(shown(part, "seconds"), 4),
            text(shown(part, "requests_per_rank"), 1),
            text(shown(part, "polls_per_rank"), 1),
        ]
        for ranks, part in parts.items()
    ]
    header = ["ranks", "s from the last vote until all know", "requests per rank", "of them looking"]
    print_table("A vote over a TCPStore; the ranks are threads of one process", header, rows)


def verdicts(found: dict[str, Any]) -> list[str]:
    """P9."""
    lines: list[str] = []
    for part, limit in (("10 % of the keys", SOME_KEYS), ("4→2 ranks", RESHARD), ("2→3 ranks", RESHARD)):
        values = found[f"composerlite, {part}"]
        share = values["counted"] / values["needed"]
        met = "met" if share <= limit else "MISSED"
        lines.append(f"P9 {met}: {share:.3f} of the bytes needed for {part}, at most {limit:g}")
    return lines


def chart(results: dict[str, Any]) -> Figure:
    """Saves and planning, by the number of ranks."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    saves, plans = figure.subplots(1, 2)
    for name in results["versions"]:
        found = {
            int(ranks): shown(parts[f"{name}, sync"], "durable_s")["median"]
            for ranks, parts in results["ranks"].items()
        }
        saves.plot(list(found), list(found.values()), "o-", color=COLOURS[name], label=name)
    saves.set_xticks([int(ranks) for ranks in results["ranks"]])
    finish(saves, "A durable save of one state", "processes on one machine", "s")
    for mark, tensors in zip(MARKS, sorted({point["tensors"] for point in results["planning"]}), strict=False):
        for name, who in (("plan_s", "composerlite"), ("dcp_plan_s", "torch DCP")):
            mine = [point for point in results["planning"] if point["tensors"] == tensors and name in point]
            label = f"{who}, {tensors:,.0f} tensors"
            x, y = [point["ranks"] for point in mine], [point[name] for point in mine]
            plans.plot(x, y, f"{mark}-", color=COLOURS[who], label=label, markersize=4)
    plans.set_xscale("log")
    plans.set_yscale("log")
    finish(plans, "Planning on the first rank", "ranks", "s")
    return figure


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    """Titles and the like."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0 if axes.get_yscale() == "linear" else None)
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
