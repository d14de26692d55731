"""Render the report as one HTML page without external resources."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any, cast

from composerlite.errors import bytes_text
from composerlite.report.charts import curve, time_parts, timeline
from composerlite.report.facts import Facts
from composerlite.report.formats import clock, duration, number, share
from composerlite.report.summary import ENDS, key_numbers, missing, story, title_of

_MAXIMUM_CURVES = 16
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Forbid the browser to load anything."""
_CONTROLS = (
    '<p class="controls" hidden><label><input type="checkbox" id="log"> log scale</label> '
    '<label>smoothing <input type="range" id="smooth" min="0" max="0.99" step="0.01" value="0"></label></p>'
    '<noscript><p class="note">The curves need JavaScript.</p></noscript>'
)


def render_page(facts: Facts, other: Facts | None = None) -> str:
    """Render the page of a run, compared with ``other`` if given."""
    names = [title_of(facts)]
    if other is not None:
        names.append(title_of(other))
        if names[0] == names[1]:
            names = [f"{names[0]} ({', '.join(run.places)})" for run in (facts, other)]
    notices = [f'<li class="fault">{escape(fault)}</li>' for fault in facts.faults]
    notices += [
        f'<li class="fault">launch {index} failed: {escape(launch.error)}</li>'
        for index, launch in enumerate(facts.launches, 1)
        if launch.error is not None
    ]
    notices += [f"<li>{escape(note)}</li>" for note in missing(facts)]
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(remark)}</dd></div>"
        for name, value, remark in key_numbers(facts)
    )
    sections = {
        "Comparison": "" if other is None else _comparison(facts, other, names),
        "Where the time went": time_parts(facts),
        "Timeline": timeline(facts),
        "Loss and metrics": _curves(facts, other, names),
        "Launches": _launches(facts),
        "Checkpoints": _stored(facts),
        "Saves": _saves(facts),
        "Configuration": _configuration(facts),
    }
    shown = "".join(f"<section><h2>{name}</h2>{text}</section>\n" for name, text in sections.items() if text)
    package, places = files("composerlite.report"), escape(", ".join(facts.places))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title_of(facts))}: run report</title>
<style>
{package.joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<header><h1>{escape(title_of(facts))} <span class="status {escape(facts.status)}">{escape(facts.status)}</span></h1>
<p class="story">{escape(" ".join(story(facts)))}</p>
<dl class="tiles">{tiles}</dl></header>
{f'<ul class="notices">{"".join(notices)}</ul>' if notices else ""}
{shown}
<footer>Made by <code>composerlite report</code> at {clock(facts.made_at)} from {places}.</footer>
</main>
<div id="tip" role="status" hidden></div>
<script>
{package.joinpath("page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _curves(facts: Facts, other: Facts | None, names: Sequence[str]) -> str:
    beside = {} if other is None else {series.name: series for series in other.metrics}
    last_batch = max((launch.last_batch for run in (facts, other or facts) for launch in run.launches), default=0)
    resumes = [launch.first_batch for launch in facts.launches[1:]]
    shown = facts.metrics[:_MAXIMUM_CURVES]
    charts = "".join(curve(series, resumes, last_batch, beside.get(series.name)) for series in shown)
    if not charts:
        return ""
    keys = {} if other is None else {"training": names[0], "beside": names[1]}
    keys |= {"resume": "resumed", "lost": "lost, trained again"} if resumes else {}
    legend = "".join(f'<span><i class="key {kind}"></i>{escape(name)}</span>' for kind, name in keys.items())
    rest = ", ".join(series.name for series in facts.metrics[_MAXIMUM_CURVES:])
    note = f'<p class="note">Without a chart: {escape(rest)}.</p>' if rest else ""
    return f'{_CONTROLS}<p class="legend">{legend}</p><div class="charts">{charts}</div>{note}'


def _comparison(facts: Facts, other: Facts, names: Sequence[str]) -> str:
    """Compare numbers, last values and settings of two runs. Equal settings are left out."""
    tables: list[str] = []
    left, right = _compared(facts), _compared(other)
    for title in left:
        cells = [(name, left[title].get(name, ""), right[title].get(name, "")) for name in left[title] | right[title]]
        rows = [[escape(cell) for cell in row] for row in cells if title != "Setting" or row[1] != row[2]]
        tables.append(_table((title, *names), rows))
    return "".join(tables)


def _compared(facts: Facts) -> dict[str, dict[str, str]]:
    """Return the values for the tables of the comparison."""
    numbers = {
        "status": facts.status,
        "batches": number(facts.last_batch or 0),
        "wall time": duration(facts.wall_seconds),
        "launches": number(len(facts.launches)),
        "batches trained twice": number(facts.lost_batches),
        "goodput": "" if facts.goodput is None else share(facts.goodput),
        "saves": number(len(facts.saves)),
        "stalls of saves": duration(sum(save.stall_seconds or 0.0 for save in facts.saves)),
        "checkpoints": number(len(facts.committed)),
    }
    last = {series.name: number(series.finite[-1][1]) for series in facts.metrics if series.finite}
    return {
        "Run": numbers,
        "Last value": last,
        "Setting": {name: _text(value) for name, value in facts.hyperparameters.items()},
    }


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Return a table of HTML cells without empty columns. ``numbers``: heads of columns aligned to the right."""
    shown = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    kinds = {at: ' class="n"' if heads[at] in numbers else "" for at in shown}
    head = "".join(f"<th{kinds[at]}>{escape(heads[at])}</th>" for at in shown)
    lines = ["".join(f"<td{kinds[at]}>{row[at]}</td>" for at in shown) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return table if rows else ""


def _launches(facts: Facts) -> str:
    rows = [
        (
            str(index),
            clock(launch.launched_at),
            f"{number(launch.first_batch)} → {number(launch.last_batch)}",
            duration(launch.ended_at - launch.launched_at),
            "" if launch.began_at is None else duration(launch.began_at - launch.launched_at),
            f"{number(launch.lost_batches)} ({duration(launch.lost_seconds)})" if launch.lost_batches else "",
            escape(ENDS.get(launch.end, launch.end)),
            "" if launch.resumed_from is None else f"<code>{escape(launch.resumed_from)}</code>",
        )
        for index, launch in enumerate(facts.launches, 1)
    ]
    heads = ("", "launched", "batches", "took", "starting", "lost batches", "end", "resumed from")
    return _table(heads, rows, ("took", "starting", "lost batches"))


def _stored(facts: Facts) -> str:
    rows = [
        (
            f"<code>{escape(one.name)}</code>",
            "" if one.epoch is None else number(one.epoch),
            "" if one.batch is None else number(one.batch),
            "" if one.saved_at is None else clock(one.saved_at),
            bytes_text(one.size_bytes),
            escape(f"{one.kind}{' ephemeral' if one.ephemeral else ''}"),
            one.where,
            f'<span class="bad">{escape(one.state)}</span>' if one.faults else escape(one.state),
            escape(", ".join(f"{name} {number(value)}" for name, value in one.metrics.items())),
        )
        for one in facts.stored
    ]
    heads = ("name", "epoch", "batch", "saved", "size", "kind", "where", "state", "metrics")
    table = _table(heads, rows, ("epoch", "batch", "size"))
    total = bytes_text(sum(one.size_bytes for one in facts.stored))
    return f"<details><summary>{number(len(rows))}, {total}</summary>{table}</details>" if rows else ""


def _saves(facts: Facts) -> str:
    rows = [
        (
            f"<code>{escape(save.name)}</code>",
            "" if save.batch is None else number(save.batch),
            clock(save.begun_at),
            "" if save.committed_at is None else duration(save.committed_at - save.begun_at),
            "" if save.stall_seconds is None else duration(save.stall_seconds),
            "" if save.upload_seconds is None else duration(save.upload_seconds),
            "" if save.size_bytes is None else bytes_text(save.size_bytes),
            escape(save.state + (", uploaded" if save.is_uploaded else "")),
            "" if save.error is None else f'<span class="bad">{escape(save.error)}</span>',
        )
        for save in facts.saves
    ]
    heads = ("name", "batch", "begun", "committed after", "stall", "upload took", "size", "state", "error")
    table = _table(heads, rows, ("batch", "committed after", "stall", "upload took", "size"))
    return f"<details><summary>{number(len(rows))}</summary>{table}</details>" if rows else ""


def _configuration(facts: Facts) -> str:
    settings = dict(facts.hyperparameters)
    if facts.launches:
        settings |= facts.launches[-1].setting
    rows = [(f"<code>{escape(name)}</code>", escape(_text(value))) for name, value in settings.items()]
    if facts.record is not None:
        rows.append(("record", f"<code>{escape(facts.record)}</code>"))
    return _table(("setting", "value"), rows)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in cast("dict[str, Any]", value).items())
    return value if isinstance(value, str) else json.dumps(value, default=str)
