"""A metric over the batches of a run, as a chart."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import final

from composerlite.report.facts import Point, Series
from composerlite.report.plot import HEIGHT, Axis, attributes, nice_step, plain, svg
from composerlite.report.words import number

__all__ = ["curve"]

_MOST_POINTS = 400
_DOTS_UP_TO = 40


@final
@dataclass(frozen=True, slots=True)
class _Mean:
    """The mean of the points of some batches, in their middle, and the least and the most of them."""

    batch: float
    value: float
    low: float
    high: float


def curve(series: Series, resumes: Sequence[int], batches: Axis, other: Series | None = None) -> str:
    """Draw ``series`` as a chart, with the batches at which the run was resumed.

    Args:
        series: the metric.
        resumes: batches at which the run was resumed.
        batches: the axis, the same for all charts.
        other: the same metric of a run to compare with.
    """
    kept = [point for point in series.kept if math.isfinite(point.value)]
    lost = [point for point in series.points if point.is_lost and math.isfinite(point.value)]
    if not kept and not lost:
        return _nothing(series)
    means, per_mean = _means(kept)
    beside = [point for point in ([] if other is None else other.kept) if math.isfinite(point.value)]
    others, _ = _means(beside)
    values = Axis.around([point.value for point in (*kept, *lost, *beside)], 0.06)
    step = nice_step(values.high - values.low, 5)
    ticks = values.ticks(step)
    parts = [f'<path class="grid" d="M0 {values.y(tick):g}H1000"/>' for tick in ticks]
    for batch in resumes:
        tip = f"resumed from batch {number(batch)}"
        parts.append(f"<path{attributes(class_='resume', d=f'M{batches.x(batch):g} 0V{HEIGHT:g}', data_tip=tip)}/>")
    if per_mean > 1:
        parts.append(_band(means, batches, values))
    runs = [
        [(point.batch, point.value) for _, point in group]
        for _, group in groupby(enumerate(lost), key=lambda pair: pair[1].batch - pair[0])
    ]
    parts += [_line("lost", run, batches, values) for run in runs]
    if others:
        parts.append(_line("other", [(mean.batch, mean.value) for mean in others], batches, values))
    parts.append('<path class="raw" d=""/>')
    if means:
        parts.append(_line("curve", [(mean.batch, mean.value) for mean in means], batches, values))
    if len(means) <= _DOTS_UP_TO:
        dots = "".join(f"M{batches.x(mean.batch):g} {values.y(mean.value):g}h0" for mean in means)
        parts.append(f'<path class="dots" d="{dots}"/>')
    data = {
        "x": [round(batches.part(mean.batch), 5) for mean in means],
        "y": [round(1 - values.part(mean.value), 5) for mean in means],
        "v": [_short(mean.value) for mean in means],
        "low": [_short(mean.low) for mean in means] if per_mean > 1 else [],
        "high": [_short(mean.high) for mean in means] if per_mean > 1 else [],
        "lost": [[[round(batches.part(batch), 5), _short(value)] for batch, value in run] for run in runs],
        "other": [[round(batches.part(mean.batch), 5), _short(mean.value)] for mean in others],
        "t": [f"batch {number(round(mean.batch))}: {number(mean.value)}" for mean in means],
    }
    drawing = svg("drawing", f"{series.name} over batches", parts)
    labels = [
        f'<span class="ytick" style="top:{100 * (1 - values.part(tick)):.2f}%">{_tick(tick, step)}</span>'
        for tick in ticks
    ]
    return (
        f'<figure class="chart" data-chart="{plain(json.dumps(data, separators=(",", ":")))}">'
        f"<figcaption><strong>{plain(series.name)}</strong> <span>{_summary(kept, per_mean)}</span></figcaption>"
        f'<div class="plot">{drawing}{"".join(labels)}{_batch_ticks(batches)}</div></figure>'
    )


def _nothing(series: Series) -> str:
    return (
        f'<figure class="chart"><figcaption><strong>{plain(series.name)}</strong> <span>no finite value'
        f" in {number(len(series.points))}</span></figcaption></figure>"
    )


def _summary(kept: Sequence[Point], per_mean: int) -> str:
    if not kept:
        return "all of it was lost"
    values = [point.value for point in kept]
    parts = [f"last {number(values[-1])}"]
    if len(values) > 1:
        parts += [f"lowest {number(min(values))}", f"highest {number(max(values))}"]
    if per_mean > 1:
        parts.append(f"means of up to {number(per_mean)} batches")
    return plain(" · ".join(parts))


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _means(points: Sequence[Point]) -> tuple[list[_Mean], int]:
    """Average groups of points, to as many means as a chart can show. Returns the points per group, too."""
    width = max(1, math.ceil(len(points) / _MOST_POINTS))
    groups = [points[start : start + width] for start in range(0, len(points), width)]
    means: list[_Mean] = []
    for group in groups:
        values = [point.value for point in group]
        middle = (group[0].batch + group[-1].batch) / 2
        means.append(_Mean(middle, sum(values) / len(values), min(values), max(values)))
    return means, width


def _line(kind: str, pairs: Sequence[tuple[float, float]], batches: Axis, values: Axis) -> str:
    points = "L".join(f"{batches.x(batch):g} {values.y(value):g}" for batch, value in pairs)
    return f'<path class="{kind}" d="M{points}{"h0" if len(pairs) == 1 else ""}"/>'


def _band(means: Sequence[_Mean], batches: Axis, values: Axis) -> str:
    there = [f"{batches.x(mean.batch):g} {values.y(mean.high):g}" for mean in means]
    back = [f"{batches.x(mean.batch):g} {values.y(mean.low):g}" for mean in reversed(means)]
    return f'<path class="band" d="M{"L".join(there + back)}Z"/>'


def _batch_ticks(batches: Axis) -> str:
    ticks = batches.ticks(nice_step(batches.high - batches.low, 5, whole=True))
    labels = [
        f'<span class="xtick" style="left:{100 * batches.part(tick):.2f}%">{number(tick)}</span>'
        for tick in ticks
        if tick >= 0
    ]
    return "".join(labels) + '<span class="xname">batch</span>'


def _tick(value: float, step: float) -> str:
    if abs(value) >= 1e5 or (value != 0 and abs(value) < 1e-4):
        return f"{value:.1e}"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}".replace(",", "\u202f")
