"""What is on the disk, read without the code under test, and what has to be so."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import stat
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from adversary_run import LONGEST
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

__all__ = [
    "IN_RECORD",
    "Entry",
    "FoundError",
    "History",
    "Line",
    "Planted",
    "entries_of",
    "folders_in",
    "line_in",
    "line_of",
    "place_in",
]

Line = tuple[int, ...]
"""The launches that made some weights: who started from scratch, and who trained each batch."""


class FoundError(AssertionError):
    """The code under test has done what it must not do.

    Attributes:
        seen: all that were raised: what depends on when threads run may not be found again, and is told all the same.
    """

    seen: ClassVar[list[str]] = []

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.seen.append(what)


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed checkpoint.

    Attributes:
        folder: where it is. name: below that.
        template: it was named by.
        kind: of its record.
        data: where its bytes are.
        line: in its weights; ``None``: its data are not what was saved.
    """

    folder: Path
    name: str
    template: str
    kind: str
    data: Path
    line: Line | None

    @property
    def batch(self) -> int:
        """How far it is."""
        assert self.line is not None
        return len(self.line) - 1

    @property
    def launch(self) -> int:
        """Who saved it."""
        assert self.line is not None
        return self.line[-1]


def line_of(weights: Iterable[float]) -> Line:
    """What the weights tell. FoundError: they are of no moment of any launch."""
    numbers = [int(value) for value in weights]
    length = next((index for index, number in enumerate(numbers) if number == 0), len(numbers))
    if any(numbers[length:]) or length == 0:
        raise FoundError(f"[content] weights of no moment: {numbers}")
    return tuple(numbers[:length])


_LOOKS, _PAUSE_SECONDS = 5, 0.1
IN_RECORD = 20
"""Bytes from the end of a file to a letter of the digest of its record."""
_FOOTER = re.compile(rb"\nCLREC1 ([0-9a-f]{8}) .{32}\n\Z", re.DOTALL)
_read: dict[tuple[str, int, int, int], Line | None] = {}


def entries_of(folder: Path, damaged: set[Path]) -> list[Entry]:
    """The checkpoints below ``folder`` that have a record of their own. ``damaged`` are known not to be readable.

    A run that lives may replace one while it is read: what cannot be read each of several times is an error.
    """
    for _ in range(_LOOKS):
        with suppress(Exception):
            return _entries_of(folder, damaged)
        time.sleep(_PAUSE_SECONDS)
    return _entries_of(folder, damaged)


def _entries_of(folder: Path, damaged: set[Path]) -> list[Entry]:
    found: list[Entry] = []
    for name, record, source in _sealed(folder):
        data = folder / name
        if record["name"] != name:
            continue  # a copy made by hand
        line: Line | None = None
        if data not in damaged:
            if not data.is_file() and not (data / ".metadata").is_file():
                continue  # no checkpoint: somebody has planted the record, or removed the data
            try:
                line = line_in(data)
            except Exception:
                if source.exists():
                    raise
                continue  # removed while it was looked at, by a run that lives
        found.append(Entry(folder, name, record["template"], record["kind"], data, line))
    return found


def _sealed(folder: Path) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Names of checkpoints, with the record of each, and the path of the file that contains it."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        named = relative.parent if path.name == ".metadata" else relative
        if any(part.startswith(".") for part in named.parts) or (record := _record_in(path)) is None:
            continue
        if (record["form"] == "file") == (named == relative):
            yield str(named), record, path


def _last_member(data: bytes) -> bytes:
    """What the end of a gzip file holds: the record, also where what is before it is damaged."""
    at = len(data)
    while (at := data.rfind(b"\x1f\x8b\x08", 0, at)) > 0:
        with contextlib.suppress(OSError, EOFError, zlib.error):
            return gzip.decompress(data[at:])
    return b""


def _record_in(path: Path) -> dict[str, Any] | None:
    """The record at the end of the file, whatever its digest; ``None``: there is none."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        data = path.read_bytes()
        plain = _last_member(data) if path.suffix == ".gz" else data
        footer = _FOOTER.search(plain[-64:])
        if footer is None:
            return None
        size = int(footer[1], 16) + len(footer[0])
        return json.loads(plain[-size : -len(footer[0])])["record"]
    except (ValueError, TypeError, OSError, EOFError):  # FileNotFoundError: a run that lives removed it
        return None


def place_in(data: Path, size: int, where: str) -> int:
    """Where to damage a file of a checkpoint: in the middle, or in the digest of its record if it has one inside."""
    has_record = where == "record" and not data.is_dir() and data.suffix != ".gz"
    return size - IN_RECORD if has_record else size // 2


def folders_in(root: Path) -> set[Path]:
    """The folders below ``root`` that may have checkpoints."""
    return {path.parent for path in root.rglob("*")}


def line_in(data: Path) -> Line:
    """What the checkpoint ``data`` has in its weights."""
    status = (data / ".metadata" if data.is_dir() else data).stat()
    key = str(data), status.st_ino, status.st_mtime_ns, status.st_size
    if key not in _read:
        _read[key] = line_of(_weights_in_directory(data) if data.is_dir() else _weights_in_file(data))
    line = _read[key]
    assert line is not None
    return line


def _weights_in_file(data: Path) -> list[float]:
    packed = data.read_bytes()
    plain = gzip.decompress(packed) if data.suffix == ".gz" else packed
    saved = torch.load(io.BytesIO(plain), weights_only=False)
    return saved["state"]["model"]["weights"].tolist()


def _weights_in_directory(data: Path) -> list[float]:
    wanted = {"state.model.weights": torch.zeros(LONGEST + 1, dtype=torch.float64)}
    with warnings.catch_warnings():  # that there is no process group
        warnings.simplefilter("ignore")
        try:
            load(wanted, storage_reader=FileSystemReader(data), no_dist=True)
        except CheckpointException as e:  # no Exception, as torch has it
            raise FoundError(f"[content] {data}: {e}") from e
    return wanted["state.model.weights"].tolist()


@dataclass
class Planted:
    """What is not the trainer's: paths, and what is there."""

    things: dict[Path, tuple[Any, ...]] = field(default_factory=dict[Path, tuple[Any, ...]])

    def add(self, path: Path) -> None:
        """It must stay as it is now."""
        self.things[path] = _what_is_at(path)

    def forget_below(self, folder: Path) -> None:
        """The user has removed the folder."""
        self.things = {path: what for path, what in self.things.items() if folder not in path.parents}

    def check(self) -> None:
        """Nothing of it was touched."""
        for path, what in self.things.items():
            if (now := _what_is_at(path)) != what:
                raise FoundError(f"[planted] {path}: {_short(what)} has become {_short(now)}")


def _what_is_at(path: Path) -> tuple[Any, ...]:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ("nothing",)
    if stat.S_ISLNK(mode):
        return "link", str(path.readlink())
    if stat.S_ISREG(mode):
        return "file", path.read_bytes()
    return ("folder",) if stat.S_ISDIR(mode) else ("pipe",)


def _short(what: tuple[Any, ...]) -> str:
    return " ".join(str(part)[:60] for part in what)


@dataclass
class History:
    """Who came from where: the lines of all launches, and the attempt that each belongs to."""

    starts: dict[int, Line] = field(default_factory=dict[int, Line])
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    left: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """The attempt that an attempt came from, and at which batch it left that one."""

    def begin(self, launch: int, start: Line, *, goes_on: bool) -> None:
        """The launch starts with these weights: ``goes_on`` in the attempt that they are of, or else a new one."""
        self.starts[launch] = start
        if goes_on:
            self.attempts[launch] = self.attempts[start[-1]]
            return
        attempt = self.attempts[launch] = max(self.attempts.values(), default=0) + 1
        if start[-1] != launch:
            self.left[attempt] = self.attempts[start[-1]], len(start) - 1

    def check(self, entry: Entry) -> None:
        """The checkpoint holds what the launch had at that batch."""
        if entry.line is None:
            return
        start = self.starts.get(entry.launch)
        expected = None if start is None else start + (entry.launch,) * (len(entry.line) - len(start))
        if entry.line != expected:
            raise FoundError(f"[content] {entry.folder / entry.name} has {entry.line}, and {expected} was trained")
        if f"ba{entry.batch}." not in f"{entry.name}.":
            raise FoundError(f"[content] {entry.folder / entry.name} is of batch {entry.batch}")

    def living(self, entries: Iterable[Entry], newest: int = 0) -> list[Entry]:
        """Those of the highest attempt that can be resumed from, and of those it came from, the oldest first.

        ``newest``: of an attempt whose checkpoints are damaged, which has come after those of ``entries``.
        """
        known = sorted((e for e in entries if e.line is not None), key=lambda e: (self.attempts[e.launch], e.batch))
        whole = [e for e in known if e.kind != "weights"]
        if not whole:
            return known
        newest = max(newest, self.attempts[whole[-1].launch])
        until = {newest: LONGEST}
        attempt, least = newest, LONGEST
        while attempt in self.left:
            attempt, batch = self.left[attempt]
            until[attempt] = least = min(least, batch)
        return [
            e for e in known if self.attempts[e.launch] > newest or e.batch <= until.get(self.attempts[e.launch], -1)
        ]
