"""The report as one HTML page that needs nothing else: no request leaves it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, cast

from composerlite.errors import bytes_text
from composerlite.report.comparison import compared, names_of
from composerlite.report.curves import curve
from composerlite.report.facts import Facts
from composerlite.report.launches import Launch
from composerlite.report.plot import Axis, plain
from composerlite.report.saves import Save, Stored
from composerlite.report.summary import missing, story, tiles, title_of
from composerlite.report.timeline import ENDS, lanes, time_parts
from composerlite.report.words import clock, duration, number

_MOST_CURVES = 16
_MOST_ROWS = 500
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The browser refuses whatever is not in the page."""
_UNIT = re.compile(r"(?<=\d) (?=%|(?:ms|s|min|h|d|B|kB|MB|GB|TB)\b)")
_CONTROLS = (
    '<p class="controls" hidden><label><input type="checkbox" id="log"> log scale</label> '
    '<label>smoothing <input type="range" id="smooth" min="0" max="0.99" step="0.01" value="0"></label></p>'
    '<noscript><p class="note">A script of this page draws the curves: allow it to see them.</p></noscript>'
)
_STATUS = {
    "finished": "finished",
    "running": "running",
    "interrupted": "interrupted",
    "error": "failed",
    "closed": "ended early",
    "killed": "killed",
    "unknown": "no record",
}


def page_of(facts: Facts, other: Facts | None = None) -> str:
    """Write the page of a run; with ``other``, another run is shown beside it."""
    title, places = plain(title_of(facts)), ", ".join(facts.places)
    sections = [
        _section("Comparison", "" if other is None else _comparison(facts, other)),
        _section("Where the time went", time_parts(facts)),
        _section("Timeline", lanes(facts)),
        _section("Loss and metrics", _curves(facts, other)),
        _section("Launches", _launches(facts.launches)),
        _section("Checkpoints that are kept", _stored(facts.stored)),
        _section("Saves", _saves(facts.saves)),
        _section("Configuration", _configuration(facts)),
    ]
    style = files("composerlite.report").joinpath("page.css").read_text(encoding="utf-8")
    script = files("composerlite.report").joinpath("page.js").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{title}: report of a run</title>
<style>
{style}</style>
</head>
<body>
<main>
{_header(facts)}
{_notices(facts)}
{"".join(sections)}
<footer>Made by <code>composerlite report</code> at {clock(facts.made_at)} from {plain(places)}.</footer>
</main>
<div id="tip" role="status" hidden></div>
<script>
{script}</script>
</body>
</html>
"""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{plain(title)}</h2>{content}</section>\n" if content else ""


def _header(facts: Facts) -> str:
    status = f'<span class="status {plain(facts.status)}">{plain(_STATUS.get(facts.status, facts.status))}</span>'
    said = _UNIT.sub("\u00a0", " ".join(story(facts)))
    shown = "".join(
        f"<div><dt>{plain(name)}</dt><dd>{plain(value)}</dd><dd>{plain(more)}</dd></div>"
        for name, value, more in tiles(facts)
    )
    return (
        f'<header><h1>{plain(title_of(facts))} {status}</h1><p class="story">{plain(said)}</p>'
        f'<dl class="tiles">{shown}</dl></header>'
    )


def _notices(facts: Facts) -> str:
    parts = [f'<li class="fault">{plain(fault)}</li>' for fault in facts.faults]
    parts += [
        f'<li class="fault">launch {number_} ended with {plain(launch.error)}</li>'
        for number_, launch in enumerate(facts.launches, 1)
        if launch.error is not None
    ]
    parts += [f"<li>{plain(note)}</li>" for note in missing(facts)]
    return f'<ul class="notices">{"".join(parts)}</ul>' if parts else ""


# ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _curves(facts: Facts, other: Facts | None) -> str:
    beside = {} if other is None else {series.name: series for series in other.metrics}
    every = [*facts.metrics, *(beside[series.name] for series in facts.metrics if series.name in beside)]
    batches = [point.batch for series in every for point in series.points]
    if not batches:
        return ""
    resumes = [launch.first_batch for launch in facts.launches[1:]]
    axis = Axis.around([0, *batches])
    shown = [curve(series, resumes, axis, beside.get(series.name)) for series in facts.metrics[:_MOST_CURVES]]
    keys = ['<span><i class="key resume"></i> resumed here</span>'] if resumes else []
    keys += ['<span><i class="key wasted"></i> lost, trained again</span>'] if facts.lost_batches else []
    if other is not None:
        name, beside_name = names_of(facts, other)
        keys.append(f'<span><i class="key training"></i> {plain(name)}</span>')
        keys.append(f'<span><i class="key beside"></i> {plain(beside_name)}</span>')
    legend = f'<p class="legend">{"".join(keys)}</p>' if keys else ""
    others = ", ".join(series.name for series in facts.metrics[_MOST_CURVES:])
    more = f'<p class="note">Also in the record: {plain(others)}.</p>' if others else ""
    return f'{_CONTROLS}{legend}<div class="charts">{"".join(shown)}</div>{more}'


def _comparison(facts: Facts, other: Facts) -> str:
    names = names_of(facts, other)
    tables = [
        _table((title, *names), [tuple(plain(cell) for cell in row) for row in rows])
        for title, rows in compared(facts, other)
    ]
    return "".join(tables)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Table of HTML cells, with at most ``_MOST_ROWS`` rows. Empty columns are left out."""
    shown = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    kinds = {at: ' class="n"' if heads[at] in numbers else "" for at in shown}
    head = "".join(f"<th{kinds[at]}>{plain(heads[at])}</th>" for at in shown)
    body = "".join(f"<tr>{''.join(f'<td{kinds[at]}>{row[at]}</td>' for at in shown)}</tr>" for row in rows[:_MOST_ROWS])
    more = len(rows) - _MOST_ROWS
    note = f'<p class="note">And {number(more)} more: --json has all of them.</p>' if more > 0 else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}'


def _launches(launches: Sequence[Launch]) -> str:
    rows = [
        (
            str(at),
            clock(launch.launched_at),
            f"{number(launch.first_batch)} → {number(launch.last_batch)}",
            duration(launch.ended_at - launch.launched_at),
            "" if launch.began_at is None else duration(launch.began_at - launch.launched_at),
            f"{number(launch.lost_batches)} ({duration(launch.lost_seconds)})" if launch.lost_batches else "",
            plain(ENDS.get(launch.end, launch.end)),
            "" if launch.resumed_from is None else f"<code>{plain(launch.resumed_from)}</code>",
            plain(" ".join(str(launch.setting[name]) for name in ("host", "pid") if name in launch.setting)),
        )
        for at, launch in enumerate(launches, 1)
    ]
    heads = ("", "launched", "batches", "took", "starting", "lost batches", "how it ended", "resumed from", "process")
    return _table(heads, rows, ("took", "starting", "lost batches")) if rows else ""


def _stored(stored: Sequence[Stored]) -> str:
    rows = [
        (
            f"<code>{plain(one.name)}</code>",
            "" if one.epoch is None else number(one.epoch),
            "" if one.batch is None else number(one.batch),
            "" if one.saved_at is None else clock(one.saved_at),
            bytes_text(one.size_bytes),
            plain(f"{one.kind}{' ephemeral' if one.ephemeral else ''}"),
            plain(one.where),
            "committed" if not one.faults else f'<span class="bad">{plain(one.state)}</span>',
            plain(", ".join(f"{name} {number(value)}" for name, value in one.metrics.items())),
        )
        for one in stored
    ]
    if not rows:
        return ""
    totals = []
    for where in ("local", "remote"):
        there = [one.size_bytes for one in stored if one.where == where]
        totals += [f"{where}: {bytes_text(sum(there))} in {number(len(there))}"] if there else []
    heads = ("name", "epoch", "batch", "saved", "size", "kind", "where", "state", "metrics")
    table = _table(heads, rows, ("epoch", "batch", "size"))
    return f"<details><summary>{plain('; '.join(totals))}</summary>{table}</details>"


def _saves(saves: Sequence[Save]) -> str:
    rows = [
        (
            f"<code>{plain(save.name)}</code>",
            "" if save.batch is None else number(save.batch),
            clock(save.begun_at, precise=True),
            "" if save.committed_at is None else duration(save.committed_at - save.begun_at),
            "" if save.stall_seconds is None else duration(save.stall_seconds),
            "" if save.upload_seconds is None else duration(save.upload_seconds),
            "" if save.size_bytes is None else bytes_text(save.size_bytes),
            _fate(save),
        )
        for save in saves
    ]
    heads = ("name", "batch", "begun", "committed after", "stall", "upload took", "size", "now")
    if not rows:
        return ""
    table = _table(heads, rows, ("batch", "committed after", "stall", "upload took", "size"))
    return f"<details><summary>{number(len(rows))} saves</summary>{table}</details>"


def _fate(save: Save) -> str:
    words = {"committed": "kept", "deleted": "deleted", "begun": "begun", "cut off": "cut off", "failed": "failed"}
    text = words[save.state] + (", uploaded" if save.is_uploaded else "")
    bad = save.error is not None or save.state in ("failed", "cut off")
    text += "" if save.error is None else f": {save.error}"
    return f'<span class="bad">{plain(text)}</span>' if bad else plain(text)


def _configuration(facts: Facts) -> str:
    rows = [(f"<code>{plain(name)}</code>", plain(_value(value))) for name, value in facts.hyperparameters.items()]
    if facts.launches:
        setting = _flat(facts.launches[-1].setting)
        rows += [(plain(name.replace("_", " ")), plain(value)) for name, value in setting.items() if name != "pid"]
    if facts.record is not None:
        rows.append(("record", f"<code>{plain(facts.record)}</code>"))
    hint = ""
    if facts.record is not None and not facts.hyperparameters:
        hint = (
            '<p class="note">The record has no hyperparameters. <code>auto_log_hparams=True</code> logs the arguments '
            "of the Trainer; <code>logger.log_hyperparameters</code> logs others.</p>"
        )
    return f"{hint}{_table(('setting', 'value'), rows)}" if rows else ""


def _flat(setting: Mapping[str, Any]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in setting.items():
        if isinstance(value, dict):
            flat |= {
                f"{inner} {name.removesuffix('s')}": str(one) for inner, one in cast("dict[str, Any]", value).items()
            }
        else:
            flat[name] = str(value)
    return flat


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
