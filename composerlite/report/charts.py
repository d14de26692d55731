"""Draw the bars and curves of the report. Positions are percentages, so the page can have any width."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape

from composerlite.errors import bytes_text
from composerlite.report.facts import PARTS, Facts, Series
from composerlite.report.formats import clock, duration, number, share
from composerlite.report.summary import ENDS

_MAXIMUM_BARS = 1500
_MAXIMUM_POINTS = 400
_LEGEND = {
    **{kind: name for kind, (name, _) in PARTS.items()},
    "committed": "save, until committed",
    "deleted": "save, deleted later",
    "cut-off": "save, cut off",
    "failed": "save, failed",
    "upload": "upload",
}

Bar = tuple[str, float, float, str]
"""Kind, start and end in seconds, and the text on hover."""


def time_parts(facts: Facts) -> str:
    """Draw the wall time as a bar of its parts, with a table."""
    bars: list[Bar] = []
    rows: list[str] = []
    at, wall = 0.0, facts.wall_seconds
    for part, (name, meaning) in PARTS.items():
        seconds = facts.seconds.get(part, 0.0)
        if seconds > 0:
            bars.append((part, at, at + seconds, f"{name}: {duration(seconds)}, {share(seconds, wall)}"))
            at += seconds
            rows.append(
                f'<tr><td><i class="key {part}"></i>{name} <small>{meaning}</small></td>'
                f'<td class="n">{duration(seconds)}</td><td class="n">{share(seconds, wall)}</td></tr>'
            )
    if not bars:
        return ""
    table = f'<div class="scroll"><table class="narrow">{"".join(rows)}</table></div>'
    return f'<div class="stack">{_bars(bars, 0.0, wall)}</div>{table}'


def timeline(facts: Facts) -> str:
    """Draw launches, saves, stalls, uploads and evaluations over the wall time."""
    lanes: dict[str, list[Bar]] = {"Launches": [], "Saves": [], "Stalls": [], "Uploads": [], "Evaluations": []}
    before = None
    for index, launch in enumerate(facts.launches, 1):
        began = launch.ended_at if launch.began_at is None else launch.began_at
        kept_until = launch.worked_until - launch.lost_seconds
        batches = f"batch {number(launch.first_batch)} to {number(launch.last_batch)}"
        told = f"launch {index}: {batches}, {duration(launch.ended_at - began)}; {ENDS.get(launch.end, launch.end)}"
        lost = f"lost: {number(launch.lost_batches)} batches, {duration(launch.lost_seconds)}"
        if before is not None:
            down = launch.launched_at - before
            lanes["Launches"].append(("down", before, launch.launched_at, f"down for {duration(down)}"))
        lanes["Launches"] += [
            ("starting", launch.launched_at, began, f"starting, {duration(began - launch.launched_at)}"),
            ("training", began, kept_until, told),
            ("lost", kept_until, launch.worked_until, lost),
            ("ending", launch.worked_until, launch.ended_at, f"ending; {ENDS.get(launch.end, launch.end)}"),
        ]
        before = launch.ended_at
        for one in launch.evaluations:
            text = f"{one.label} at batch {number(one.batch or 0)}: {duration(one.seconds)}"
            lanes["Evaluations"].append(("evaluation", one.ended_at - one.seconds, one.ended_at, text))
    for save in facts.saves:
        done = save.begun_at if save.committed_at is None else save.committed_at
        size = "" if save.size_bytes is None else f", {bytes_text(save.size_bytes)}"
        error = "" if save.error is None else f": {save.error}"
        text = f"{save.name}: {save.state}, {duration(done - save.begun_at)}{size}{error}"
        lanes["Saves"].append((save.state.replace(" ", "-"), save.begun_at, done, text))
        if save.stall_seconds is not None:
            text = f"{save.name}: training waited {duration(save.stall_seconds)}"
            lanes["Stalls"].append(("saving", save.begun_at, save.begun_at + save.stall_seconds, text))
        if save.uploaded_at is not None:
            began = max(done, save.uploaded_at - (save.upload_seconds or 0.0))
            text = f"{save.name}: uploaded in {duration(save.uploaded_at - began)}"
            lanes["Uploads"].append(("upload", began, save.uploaded_at, text))
    moments = [at for bars in lanes.values() for _, start, end, _ in bars for at in (start, end)]
    if not moments:
        return ""
    low, high = min(moments), max(moments)
    drawn: list[str] = []
    for name, bars in lanes.items():
        if bars:
            drawn.append(f'<div class="lane"><span>{name}</span><div>{_bars(bars, low, high)}</div></div>')
    ticks = "".join(
        f'<span class="xtick" style="left:{25 * quarter}%">{duration((high - low) * quarter / 4)}</span>'
        for quarter in range(5)
    )
    keys = [f'<span><i class="key {kind}"></i>{name}</span>' for kind, name in _LEGEND.items()]
    return (
        f'<p class="note">From {clock(low)} to {clock(high)}.</p><p class="legend">{" ".join(keys)}</p>'
        f'<div class="lanes">{"".join(drawn)}'
        f'<div class="lane axis"><span></span><div>{ticks}</div></div></div>'
    )


def _bars(bars: Sequence[Bar], low: float, high: float) -> str:
    """Draw at most ``_MAXIMUM_BARS`` bars. Parts of the wall time without duration are left out."""
    scale = 100 / ((high - low) or 1.0)
    return "".join(
        f'<i class="mark {escape(kind)}" style="left:{scale * (start - low):.3f}%;width:{scale * (end - start):.3f}%"'
        f' data-tip="{escape(text)}"></i>'
        for kind, start, end, text in bars[:_MAXIMUM_BARS]
        if end > start or kind not in PARTS
    )


def curve(series: Series, resumes: Sequence[int], last_batch: int, other: Series | None) -> str:
    """Return a chart of a metric over batches. The script of the page draws the values in ``data-chart``.

    Args:
        series: the metric.
        resumes: batches where a launch resumed.
        last_batch: end of the axis.
        other: the same metric of another run.
    """
    lost = [[point for point in points if math.isfinite(point[1])] for points in series.lost.values()]
    data = {
        "last": last_batch,
        "values": _average(series.finite),
        "lost": [points for points in lost if points],
        "other": [] if other is None else _average(other.finite),
        "resumes": list(resumes),
    }
    known = [value for _, value in series.finite]
    facts = ["no finite value"]
    if known:
        facts = [f"last {number(known[-1])}", f"lowest {number(min(known))}", f"highest {number(max(known))}"]
    return (
        f'<figure class="chart" data-chart="{escape(json.dumps(data))}">'
        f"<figcaption><strong>{escape(series.name)}</strong> <span>{' · '.join(facts)}</span></figcaption>"
        f'<div class="plot"><svg class="drawing" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(series.name)} over batches"></svg></div></figure>'
    )


def _average(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Average groups of neighbors, for at most ``_MAXIMUM_POINTS`` points."""
    size = max(1, math.ceil(len(points) / _MAXIMUM_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        ((group[0][0] + group[-1][0]) / 2, float(f"{sum(value for _, value in group) / len(group):.6g}"))
        for group in groups
    ]
