"""Timeline of a run: lanes of bars over its wall time."""

from __future__ import annotations

from collections.abc import Sequence

from composerlite.errors import bytes_text
from composerlite.report.facts import Facts
from composerlite.report.launches import Launch
from composerlite.report.plot import HEIGHT, Axis, mark, plain, svg, time_step
from composerlite.report.saves import Save
from composerlite.report.words import clock, duration, number, share

_MOST_MARKS = 1500
ENDS = {
    "finished": "reached its end",
    "interrupted": "was preempted, and saved",
    "error": "ended with an error",
    "closed": "was closed before the end of training",
    "killed": "was killed: it ended without a word",
    "running": "may be running",
    "unknown": "",
}
_SIGNS = {"finished": "■", "interrupted": "▲", "error": "!", "closed": "□", "killed": "✕", "running": "▸"}


def lanes(facts: Facts) -> str:
    """The lanes of ``facts``."""
    moments = [at for launch in facts.launches for at in (launch.launched_at, launch.ended_at)]
    moments += [
        at for save in facts.saves for at in (save.begun_at, save.committed_at, save.uploaded_at) if at is not None
    ]
    if not moments:
        return ""
    times = Axis.around(moments) if max(moments) > min(moments) else Axis(min(moments), min(moments) + 1)
    step = time_step(times.high - times.low, 5)
    ticks = [times.low + tick for tick in Axis(0, times.high - times.low).ticks(step)]
    grid = "".join(f'<path class="grid" d="M{times.x(tick):g} 0V{HEIGHT:g}"/>' for tick in ticks)
    shown = [
        _lane("launches", "Launches", grid, _launches(facts.launches, times), _ends(facts.launches, times)),
        _lane("saves", "Saves", grid, _saves(facts.saves, times)),
        _lane("stalls", "Stalls of saves", grid, _stalls(facts.saves, times)),
        _lane("evaluations", "Evaluations", grid, _evaluations(facts.launches, times)),
    ]
    texts = [(times.part(tick), duration(tick - times.low) if tick > times.low else "0") for tick in ticks]
    labels = "".join(f'<span class="xtick" style="left:{100 * part:.2f}%">{plain(text)}</span>' for part, text in texts)
    began = f'<p class="note">From {clock(times.low)} to {clock(times.high)}.</p>{_legend(facts)}'
    return (
        f'{began}<div class="lanes">{"".join(shown)}<div class="lane axis"><span></span><div>{labels}</div></div></div>'
    )


def _lane(kind: str, name: str, grid: str, marks: Sequence[str], over: str = "") -> str:
    if not marks:
        return ""
    shown = marks[:_MOST_MARKS]
    label = name if len(shown) == len(marks) else f"{name} (the first {number(len(shown))})"
    drawing = svg("drawing", f"{label} over time", [grid, *shown])
    return f'<div class="lane {kind}"><span>{plain(label)}</span><div>{drawing}{over}</div></div>'


def _launches(launches: Sequence[Launch], times: Axis) -> list[str]:
    marks: list[str] = []
    for number_, launch in enumerate(launches, 1):
        began = launch.ended_at if launch.began_at is None else launch.began_at
        name = f"launch {number_}"
        if number_ > 1:
            before = launches[number_ - 2].ended_at
            tip = f"down for {duration(launch.launched_at - before)}"
            marks.append(mark("down", times.x(before), times.x(launch.launched_at), tip, top=42, bottom=58))
        tip = f"{name}: starting, {duration(began - launch.launched_at)}"
        marks.append(mark("starting", times.x(launch.launched_at), times.x(began), tip))
        until = launch.worked_until if launch.lost_from is None else launch.lost_from
        batches = f"batch {number(launch.first_batch)} to {number(launch.last_batch)}"
        tip = f"{name}: {batches}, {duration(launch.ended_at - began)}; it {ENDS.get(launch.end, launch.end)}"
        marks.append(mark("training", times.x(began), times.x(until), tip))
        if launch.lost_from is not None:
            tip = f"lost: {number(launch.lost_batches)} batches, {duration(launch.lost_seconds)}, trained again"
            marks.append(mark("wasted", times.x(until), times.x(launch.worked_until), tip))
        if launch.ended_at > launch.worked_until:
            tip = f"{name}: ending, {duration(launch.ended_at - launch.worked_until)}"
            marks.append(mark("closing", times.x(launch.worked_until), times.x(launch.ended_at), tip))
    return marks


def _ends(launches: Sequence[Launch], times: Axis) -> str:
    """Draw a sign at the end of each launch for how it ended."""
    return "".join(
        f'<b class="sign {plain(launch.end)}" style="left:{100 * times.part(launch.ended_at):.2f}%"'
        f' data-tip="{plain(f"launch {at} {ENDS.get(launch.end, launch.end)}")}">{_SIGNS.get(launch.end, "")}</b>'
        for at, launch in enumerate(launches, 1)
    )


def _saves(saves: Sequence[Save], times: Axis) -> list[str]:
    marks: list[str] = []
    for save in saves:
        done = save.begun_at if save.committed_at is None else save.committed_at
        left, right = times.x(save.begun_at), times.x(done)
        marks.append(
            mark(save.state.replace(" ", "-"), left, right, _told(save), bottom=50 if save.uploaded_at else HEIGHT)
        )
        if save.uploaded_at is not None:
            began = max(done, save.uploaded_at - (save.upload_seconds or 0.0))
            tip = f"{save.name}: uploaded in {duration(save.uploaded_at - began)}"
            marks.append(mark("uploaded", times.x(began), times.x(save.uploaded_at), tip, top=50))
    return marks


def _told(save: Save) -> str:
    parts = [save.name]
    if save.committed_at is not None:
        parts.append(f"committed after {duration(save.committed_at - save.begun_at)}")
    if save.size_bytes is not None:
        parts.append(bytes_text(save.size_bytes))
    if save.is_held_up:
        parts.append(f"rank {save.slowest_rank} wrote {duration(save.straggler_seconds)} longer than the others")
    if save.state != "committed":
        parts.append(
            {"deleted": "deleted since", "cut off": "cut off: it was never committed"}.get(save.state, save.state)
        )
    return f"{', '.join(parts)}{'' if save.error is None else f': {save.error}'}"


def _stalls(saves: Sequence[Save], times: Axis) -> list[str]:
    known = [save for save in saves if save.stall_seconds is not None]
    return [
        mark(
            "stall",
            times.x(save.begun_at),
            times.x(save.begun_at + (save.stall_seconds or 0.0)),
            f"{save.name} kept training waiting for {duration(save.stall_seconds or 0.0)}",
        )
        for save in known
    ]


def _evaluations(launches: Sequence[Launch], times: Axis) -> list[str]:
    return [
        mark(
            "evaluation",
            times.x(one.ended_at - one.seconds),
            times.x(one.ended_at),
            f"{one.label} at batch {number(one.batch or 0)}: {duration(one.seconds)}",
        )
        for launch in launches
        for one in launch.evaluations
    ]


def _legend(facts: Facts) -> str:
    names = [("training", "training"), ("starting", "starting")] if facts.launches else []
    names += [("wasted", "lost work")] if facts.lost_batches else []
    names += [("down", "down")] if len(facts.launches) > 1 else []
    names += [("committed", "save, from its begin to its commit")] if facts.saves else []
    names += [("deleted", "deleted since")] if any(save.state == "deleted" for save in facts.saves) else []
    names += (
        [("cut-off", "cut off, or failed")] if any(save.state in ("failed", "cut off") for save in facts.saves) else []
    )
    names += [("uploaded", "upload")] if any(save.uploaded_at for save in facts.saves) else []
    keys = [f'<i class="key {kind}"></i>{plain(name)}' for kind, name in names]
    signs = dict.fromkeys(launch.end for launch in facts.launches)
    words = {"finished": "end", "interrupted": "preempted", "error": "error", "closed": "closed", "killed": "kill"}
    keys += [f'<b class="sign {plain(end)}">{_SIGNS[end]}</b> {words[end]}' for end in signs if end in words]
    return f'<p class="legend">{" ".join(f"<span>{key}</span>" for key in keys)}</p>'


# ── where the time went ──────────────────────────────────────────────────────────────────────────────────────────────
_NAMES = {
    "training": ("training", "that counts"),
    "evaluation": ("evaluation", ""),
    "saving": ("stalls of saves", "training waited for a copy"),
    "straggler": ("slow ranks", "training waited for the slowest rank of a save"),
    "starting": ("starting", "from building the trainer to fit"),
    "ending": ("ending", "the last save, uploads, closing"),
    "lost": ("lost work", "trained again"),
    "down": ("down", "between launches, imports included"),
}


def time_parts(facts: Facts) -> str:
    """The wall time of a run as one bar, and as a table."""
    wall, at = facts.wall_seconds, 0.0
    if wall <= 0:
        return ""
    marks: list[str] = []
    rows: list[str] = []
    axis = Axis(0.0, wall)
    for part, (name, meaning) in _NAMES.items():
        seconds = facts.seconds[part]
        if seconds <= 0:
            continue
        tip = f"{name}: {duration(seconds)}, {share(seconds, wall)}"
        marks.append(mark(_KINDS.get(part, part), axis.x(at), axis.x(at + seconds), tip))
        at += seconds
        rows.append(
            f'<tr><td><i class="key {_KINDS.get(part, part)}"></i>{plain(name)} <small>{plain(meaning)}</small></td>'
            f'<td class="n">{duration(seconds)}</td><td class="n">{share(seconds, wall)}</td></tr>'
        )
    return (
        f'<div class="stack">{svg("drawing", "where the wall time went", marks)}</div>'
        f'<div class="scroll"><table class="narrow">{"".join(rows)}</table></div>'
    )


_KINDS = {"lost": "wasted", "saving": "stall", "straggler": "stall", "ending": "closing"}
