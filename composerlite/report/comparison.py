"""Two runs side by side: their numbers, last metrics, and the settings that differ."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from composerlite.report.facts import Facts
from composerlite.report.summary import title_of
from composerlite.report.words import duration, number, share

Row = tuple[str, str, str]


def names_of(facts: Facts, other: Facts) -> tuple[str, str]:
    """Names that tell the two runs apart: with their places where both have one name."""
    names = title_of(facts), title_of(other)
    if names[0] != names[1]:
        return names
    return f"{names[0]} ({', '.join(facts.places)})", f"{names[1]} ({', '.join(other.places)})"


def compared(facts: Facts, other: Facts) -> list[tuple[str, list[Row]]]:
    """Groups of rows: what is compared, in the first run, in the other."""
    groups = [
        ("Run", _numbers(facts, other)),
        ("Last value", _metrics(facts, other)),
        ("Setting", _settings(facts, other)),
    ]
    return [(title, rows) for title, rows in groups if rows]


def _numbers(facts: Facts, other: Facts) -> list[Row]:
    def of(run: Facts) -> Sequence[tuple[str, str]]:
        stalls = sum(save.stall_seconds or 0.0 for save in run.saves)
        return (
            ("status", run.status),
            ("batches", number(run.last_batch or 0)),
            ("wall time", duration(run.wall_seconds) if run.launches else ""),
            ("launches", number(len(run.launches)) if run.launches else ""),
            ("batches trained twice", number(run.lost_batches) if run.launches else ""),
            ("goodput", "" if run.goodput is None else share(run.goodput, 1.0)),
            ("saves", number(len(run.saves))),
            ("stalls of saves", duration(stalls)),
            ("checkpoints kept", number(len(run.committed))),
        )

    return [(name, one, two) for (name, one), (_, two) in zip(of(facts), of(other), strict=True) if one or two]


def _metrics(facts: Facts, other: Facts) -> list[Row]:
    def last(run: Facts) -> dict[str, str]:
        kept = {series.name: [p.value for p in series.kept if math.isfinite(p.value)] for series in run.metrics}
        return {name: number(values[-1]) for name, values in kept.items() if values}

    one, two = last(facts), last(other)
    return [(name, one.get(name, ""), two.get(name, "")) for name in dict.fromkeys([*one, *two])]


def _settings(facts: Facts, other: Facts) -> list[Row]:
    def text(run: Facts, name: str) -> str:
        value = run.hyperparameters.get(name, "")
        return value if isinstance(value, str) else json.dumps(value, default=str)

    if not (facts.hyperparameters and other.hyperparameters):
        return []
    names = dict.fromkeys([*facts.hyperparameters, *other.hyperparameters])
    rows = [(name, text(facts, name), text(other, name)) for name in names]
    return [row for row in rows if row[1] != row[2]]
