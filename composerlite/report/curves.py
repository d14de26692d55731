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
    """Make a chart of ``series``, with the batches at which the run was resumed. The script of the page draws it."""
    kept = [point for point in series.kept if math.isfinite(point.value)]
    lost = [point for point in series.points if point.is_lost and math.isfinite(point.value)]
    if not kept and not lost:
        return _nothing(series)
    means, per_mean = _means(kept)
    others, _ = _means([point for point in ([] if other is None else other.kept) if math.isfinite(point.value)])
    runs = [
        [[round(batches.part(point.batch), 5), _short(point.value)] for _, point in group]
        for _, group in groupby(enumerate(lost), key=lambda pair: pair[1].batch - pair[0])
    ]
    data = {
        "x": [round(batches.part(mean.batch), 5) for mean in means],
        "v": [_short(mean.value) for mean in means],
        "low": [_short(mean.low) for mean in means] if per_mean > 1 else [],
        "high": [_short(mean.high) for mean in means] if per_mean > 1 else [],
        "lost": runs,
        "other": [[round(batches.part(mean.batch), 5), _short(mean.value)] for mean in others],
        "t": [f"batch {number(round(mean.batch))}: {number(mean.value)}" for mean in means],
    }
    parts: list[str] = []
    for batch in resumes:
        tip = f"resumed from batch {number(batch)}"
        parts.append(f"<path{attributes(class_='resume', d=f'M{batches.x(batch):g} 0V{HEIGHT:g}', data_tip=tip)}/>")
    drawn = ["band", *["lost"] * len(runs), "other", "raw", "curve", *(["dots"] if len(means) <= _DOTS_UP_TO else [])]
    parts += [f'<path class="{kind}"/>' for kind in drawn]
    return (
        f'<figure class="chart" data-chart="{plain(json.dumps(data, separators=(",", ":")))}">'
        f"<figcaption><strong>{plain(series.name)}</strong> <span>{_summary(kept, per_mean)}</span></figcaption>"
        f'<div class="plot">{svg("drawing", f"{series.name} over batches", parts)}{_batch_ticks(batches)}</div>'
        "</figure>"
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


def _batch_ticks(batches: Axis) -> str:
    ticks = batches.ticks(nice_step(batches.high - batches.low, 5, whole=True))
    labels = [
        f'<span class="xtick" style="left:{100 * batches.part(tick):.2f}%">{number(tick)}</span>'
        for tick in ticks
        if tick >= 0
    ]
    return "".join(labels) + '<span class="xname">batch</span>'
