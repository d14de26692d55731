"""Parse the record of a run, a file of JSON lines written by ``JSONLLogger``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast, final


@final
@dataclass(frozen=True, slots=True)
class Line:
    """A line of a record.

    Attributes:
        kind: kind of the event, such as ``'metrics'``.
        at: time in seconds since 1970.
        batch: number of finished batches, if known.
        fields: all fields of the line.
    """

    kind: str
    at: float
    batch: int | None
    fields: Mapping[str, Any]

    @property
    def starts_launch(self) -> bool:
        """True for the first line of a launch."""
        return self.kind in ("start", "resume")

    def text(self, name: str) -> str:
        """Return a field as text; empty if the field is missing."""
        value = self.fields.get(name)
        return "" if value is None else str(value)

    def number(self, name: str) -> float | None:
        """Return a field as a number; ``None`` if the field is missing or not a number."""
        return _number(self.fields.get(name))

    def numbers(self, name: str) -> dict[str, float]:
        """Return the numbers in a field with an object, by name: ``metrics`` or ``seconds``."""
        given = self.fields.get(name)
        items = cast("dict[str, Any]", given).items() if isinstance(given, dict) else ()
        return {key: value for key, value in ((key, _number(value)) for key, value in items) if value is not None}


@final
@dataclass(frozen=True, slots=True)
class RunRecord:
    """The lines of one run.

    Attributes:
        run_name: name of the run.
        source: path or URI of the file.
        lines: all readable lines, oldest first. Never empty.
        faults: messages about unreadable lines.
    """

    run_name: str
    source: str
    lines: list[Line] = field(default_factory=list[Line])
    faults: list[str] = field(default_factory=list[str])


def parse_record(data: bytes, source: str) -> list[RunRecord]:
    """Parse a record file. Returns a record for each run in the file; empty if no line is readable."""
    runs: dict[str, RunRecord] = {}
    unreadable: list[str] = []
    run_name = ""
    for number, text in enumerate(data.split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            fields: Any = json.loads(text)
            batch = fields.get("batch")
            line = Line(str(fields["kind"]), datetime.fromisoformat(fields["at"]).timestamp(), batch, fields)
            if not isinstance(batch, int | None):
                raise TypeError(batch)
        except (ValueError, KeyError, TypeError, AttributeError):
            unreadable.append(str(number))
            continue
        if line.starts_launch:
            run_name = line.text("run_name")
        runs.setdefault(run_name, RunRecord(run_name, source)).lines.append(line)
    if unreadable:
        more = f" and {len(unreadable) - 5} more" if len(unreadable) > 5 else ""
        fault = f"{source}: lines {', '.join(unreadable[:5])}{more} cannot be read and are ignored (cut off by a kill)."
        for record in runs.values():
            record.faults.append(fault)
    return list(runs.values())


def _number(value: object) -> float | None:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
