"""The record of a run, as ``JSONLLogger`` writes it: what can be read of it, and what cannot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast, final

_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@final
@dataclass(frozen=True, slots=True)
class Line:
    """Something that happened: of which kind, when (seconds since 1970), at which batch, and what there is to it."""

    kind: str
    at: float
    batch: int | None
    facts: Mapping[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that were logged, by name."""
        given = self.facts.get("metrics")
        pairs = cast("dict[str, Any]", given).items() if isinstance(given, dict) else ()
        numbers = ((name, _number(value)) for name, value in pairs)
        return {name: value for name, value in numbers if value is not None}

    def number(self, name: str) -> float | None:
        """A fact that is a number; ``None``: there is no such."""
        return _number(self.facts.get(name))

    def seconds(self, name: str) -> float | None:
        """A time of those that a save took; ``None``: it is not said."""
        given = self.facts.get("seconds")
        return _number(cast("dict[str, Any]", given).get(name)) if isinstance(given, dict) else None

    def text(self, name: str) -> str:
        """A fact as text; empty: there is none."""
        value = self.facts.get(name)
        return "" if value is None else str(value)


@final
@dataclass(frozen=True, slots=True)
class RunRecord:
    """The lines of one run, in their order; ``faults`` say what could not be read."""

    source: str
    lines: list[Line]
    faults: list[str] = field(default_factory=list[str])
    other_runs: list[str] = field(default_factory=list[str])

    @property
    def run_name(self) -> str:
        """Name of the run; empty if no line has it."""
        return next((line.text("run_name") for line in self.lines if line.kind in ("start", "resume")), "")


def parse_record(data: bytes, source: str, run: str | None = None) -> RunRecord | None:
    """The record in ``data``; ``None``: it is none. Of several runs it is that of ``run``, or else the last one's."""
    lines: list[tuple[str, Line]] = []
    incomplete: list[int] = []
    name = ""
    for number, text in enumerate(data.split(b"\n"), 1):
        if not text.strip():
            continue
        line = _parsed(text)
        if line is None:
            incomplete.append(number)
            continue
        if line.kind in ("start", "resume"):
            name = line.text("run_name")
        lines.append((name, line))
    if not lines:
        return None
    names = list(dict.fromkeys(name for name, _ in lines))
    chosen = lines[-1][0] if run is None else run
    if chosen not in names:
        return None
    faults = (
        [] if not incomplete else [f"{source}: {_lines(incomplete)} cannot be read and left out: a kill cut it off."]
    )
    return RunRecord(
        source, [line for name, line in lines if name == chosen], faults, [name for name in names if name != chosen]
    )


def _lines(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    shown = ", ".join(map(str, numbers[:5]))
    return f"lines {shown}{' and others' if len(numbers) > 5 else ''} ({len(numbers)} in all)"


def _parsed(text: bytes) -> Line | None:
    try:
        fields: Any = json.loads(text)
        at = datetime.fromisoformat(fields["at"]).timestamp()
        kind, batch = str(fields["kind"]), fields.get("batch")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    is_number = isinstance(batch, int) and not isinstance(batch, bool)
    return Line(kind, at, batch if is_number else None, fields)


def _number(value: object) -> float | None:
    if isinstance(value, str):
        return _NUMBERS.get(value)
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
