"""What is on the disk, read without the code under test, and what has to be so."""

from __future__ import annotations

import gzip
import io
import json
import stat
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from adversary_run import LONGEST
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from xxhash import xxh3_128_hexdigest as xxh3

__all__ = ["Entry", "FoundError", "History", "Line", "Planted", "begun_in", "entries_of", "line_in", "line_of"]

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
        kind: of its manifest.
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
_read: dict[tuple[str, int, int, int], Line | None] = {}


def entries_of(folder: Path, damaged: set[Path]) -> list[Entry]:
    """The checkpoints below ``folder`` that have a manifest of their own. ``damaged`` are known not to be readable.

    A run that lives may replace one while it is read: what cannot be read each of several times is an error.
    """
    for _ in range(_LOOKS):
        with suppress(Exception):
            return _entries_of(folder, damaged)
        time.sleep(_PAUSE_SECONDS)
    return _entries_of(folder, damaged)


def _entries_of(folder: Path, damaged: set[Path]) -> list[Entry]:
    found: list[Entry] = []
    records = folder / ".manifest"
    begun = {entry.name for entry in begun_in(folder)}  # data and record may be of two checkpoints
    for path in sorted(records.rglob("*.json")) if records.is_dir() else ():
        manifest = _manifest(path)
        if manifest is None or path.name.startswith("."):
            continue
        if manifest["name"] in begun and not _is_of(folder, manifest):
            continue
        if f"{manifest['name']}.json" != str(path.relative_to(records)):
            continue
        data = folder / manifest["name"]
        paths = [Path(record["path"]) for record in manifest["files"]]
        if len(paths) == 1 and not paths[0].is_absolute() and ".." not in paths[0].parts and not data.is_dir():
            data = folder / paths[0]  # one that replaced another in a bucket may have a name of its own
        line: Line | None = None
        if data not in damaged:
            if not data.is_file() and not (data / ".metadata").is_file():
                continue  # no checkpoint: somebody has planted the record, or removed the data
            try:
                line = line_in(data)
            except Exception:
                if path.exists():
                    raise
                continue  # removed while it was looked at, by a run that lives
        found.append(Entry(folder, manifest["name"], manifest["template"], manifest["kind"], data, line))
    return found


def _is_of(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether the record is that of the file which is there: a commit may have begun, and been given up."""
    data = [folder / record["path"] for record in manifest["files"]]
    return len(data) == 1 and data[0].is_file() and manifest["files"][0]["xxh3_128"] == xxh3(data[0].read_bytes())


def begun_in(folder: Path) -> list[Entry]:
    """Checkpoints whose process was killed within the commit: the next one may complete it."""
    found: list[Entry] = []
    announced = (path for what in (".*.tmp-*", "*.json.next") for path in (folder / ".manifest").glob(what))
    for path in sorted(announced):
        manifest = None if ".gone.tmp-" in path.name else _manifest(path)  # a deletion, which only goes on
        data = folder / manifest["name"] if manifest is not None else folder
        if manifest is not None and (data.is_file() or (data / ".metadata").is_file()):
            found.append(Entry(folder, manifest["name"], manifest["template"], manifest["kind"], data, line_in(data)))
    return found


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        fields = json.loads(path.read_bytes())
        return fields if {"name", "template", "kind", "run_name", "digest"} <= fields.keys() else None
    except (ValueError, AttributeError, RecursionError, FileNotFoundError):  # the last: a run that lives removed it
        return None


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

    def living(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those of the highest attempt that can be resumed from, and of those it came from, the oldest first."""
        known = sorted((e for e in entries if e.line is not None), key=lambda e: (self.attempts[e.launch], e.batch))
        whole = [e for e in known if e.kind != "weights"]
        if not whole:
            return known
        until = {self.attempts[whole[-1].launch]: LONGEST}
        attempt, least = self.attempts[whole[-1].launch], LONGEST
        while attempt in self.left:
            attempt, batch = self.left[attempt]
            until[attempt] = least = min(least, batch)
        newest = self.attempts[whole[-1].launch]
        return [
            e for e in known if self.attempts[e.launch] > newest or e.batch <= until.get(self.attempts[e.launch], -1)
        ]
