"""What there is of a run: its record and its checkpoints, in a folder, in a bucket, or in a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.tools.pointing import place_at
from composerlite.checkpoint.tools.surveying import survey
from composerlite.errors import CheckpointNotFoundError, ConfigError
from composerlite.report.record import Record, parse_record
from composerlite.report.saves import Stored, stored_at
from composerlite.storage import is_uri

__all__ = ["Gathered", "gather"]

_SUFFIX = ".jsonl"
_RECORD = re.compile(r"(?:^|/)[^/]*record[^/]*\.jsonl$")
"""What a record is called; other files of lines may be data, and large."""


@final
@dataclass(slots=True)
class Gathered:
    """What was found of a run: ``record`` is ``None`` where there is none, ``faults`` are what could not be read."""

    places: list[str]
    run_name: str = ""
    record: Record | None = None
    stored: list[Stored] = field(default_factory=list[Stored])
    faults: list[str] = field(default_factory=list[str])
    other_runs: list[str] = field(default_factory=list[str])


def gather(places: Sequence[str], run: str | None = None) -> Gathered:
    """Look at ``places``: folders, URIs and files of records. Of several runs the one that was active last is meant.

    Raises:
        CheckpointNotFoundError: there is no such folder or file, or nothing of a run in them.
        ConfigError: a URI names no store.
        OSError, ObjectStoreError: a place cannot be read.
    """
    found = Gathered(list(places))
    records: list[Record] = []
    for text in places:
        if text.endswith(_SUFFIX):
            folder, _, name = text.rpartition("/")
            if not is_uri(text):
                folder, name = str(Path(text).parent), Path(text).name
            with place_at(folder) as place:
                records += _records(place, [name], run)
        else:
            with place_at(text) as place:
                found.stored += [stored_at(place, one) for one in survey(place)]
                records += _records(place, [path for path in place.files() if _RECORD.search(path)], run)
    asked, run = run, _last_run(records, found.stored) if run is None else run
    if run is None:
        raise CheckpointNotFoundError(
            f"there is no run in {', '.join(places)}: want a folder or a URI with checkpoints, or the file that a "
            "JSONLLogger has written."
        )
    mine = [record for record in records if record.run_name == run]
    found.run_name = run
    found.record = max(mine, key=lambda record: record.lines[-1].at, default=None)
    found.faults = [] if found.record is None else list(found.record.faults)
    names = [one.run_name for one in found.stored if one.run_name is not None]
    names += [name for record in records for name in (record.run_name, *record.other_runs)]
    found.other_runs = [name for name in dict.fromkeys(names) if name and name != run]
    found.stored = [one for one in found.stored if one.run_name in (run, None)]
    if asked is not None and found.record is None and not any(one.run_name == run for one in found.stored):
        others = f" There are: {', '.join(found.other_runs)}." if found.other_runs else ""
        raise ConfigError(f"--run {asked}: no run of that name in {', '.join(places)}.{others}")
    for one in found.stored:
        found.faults += [f"{one.uri}: {fault}" for fault in one.faults]
    return found


def _records(place: Place, names: Sequence[str], run: str | None) -> list[Record]:
    records: list[Record] = []
    for name in names:
        try:
            data = place.read(name)
        except FileNotFoundError as e:
            raise CheckpointNotFoundError(f"there is no file {place.uri(name)!r}.") from e
        record = parse_record(data, place.uri(name), run)
        if record is not None:
            records.append(record)
    return records


def _last_run(records: Sequence[Record], stored: Sequence[Stored]) -> str | None:
    """The name of the run that did something last."""
    active = [(record.lines[-1].at, record.run_name) for record in records]
    active += [(one.saved_at, one.run_name) for one in stored if one.saved_at is not None and one.run_name is not None]
    return max(active)[1] if active else ("" if stored else None)
