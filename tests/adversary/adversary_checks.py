"""The run whose checkpoints are tried, and what has to be after each step, wherever they are."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from adversary_oracle import Entry, FoundError, History, Line, Planted, begun_in, entries_of, line_of
from adversary_run import LONGEST, Order, as_json, live, live_alone
from click.testing import CliRunner
from forked import run_forked
from hypothesis.stateful import RuleBasedStateMachine, invariant

from composerlite.cli.app import app

__all__ = ["SECONDS", "Machine", "Project"]

MEMORY = Path("/dev/shm")
SECONDS = 60.0


@dataclass
class Project:
    """A folder of checkpoints in which one run is trained."""

    folder: Path


class Machine(RuleBasedStateMachine):
    """What launches of a run did, and what the oracle asks of it; the rules are of the classes below it."""

    only: ClassVar[frozenset[str] | None] = None
    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="adversary-", dir=MEMORY if MEMORY.is_dir() else None))
        self.memory = self.root / "memory"
        self.memory.mkdir()
        self.projects: list[Project] = []
        self.history, self.planted = History(), Planted()
        self.owners: dict[int, Project] = {}
        self.damaged: dict[Path, int] = {}  # the attempt that they were of
        self.marks: dict[tuple[Path, tuple[int, int] | None], int] = {}  # the same of all there ever were
        self.launches = 0
        self.names = 0
        self.has_pipe = False

    def new_number(self) -> int:
        """For a name that was not there before."""
        self.names += 1
        return self.names

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def later(self, acceptable: list[Line | None] | None, more: int) -> int:
        """So many batches after where the run may stand."""
        known = LONGEST if acceptable is None else max(len(line) - 1 if line else 0 for line in acceptable)
        return max(1, min(known + more, LONGEST))

    def order(self, project: Project, **given: Any) -> Order:
        """A launch of the run in the project."""
        self.launches += 1
        self.owners[self.launches] = project
        folder = str(project.folder)
        return Order(launch=self.launches, folder=folder, notes=str(self.root / f"notes{self.launches}"), **given)

    def run(self, project: Project, order: Order, acceptable: list[Line | None] | None) -> None:
        """Let it live, and compare what it did with what it had to do. ``acceptable``: what it may start from."""
        before = self.entries(project)
        others = [e for other in self.projects if other is not project for e in self.entries(other)]
        none_good = order.resume and bool(before) and not any(e.line for e in before if e.kind != "weights")
        self.let_live(order, may_refuse=none_good)
        self.look_for_mended()
        told = self.told(order)
        if (started := told.get("started")) is not None:
            self.check_start(order, line_of(told["weights at start"]), acceptable)
            if started != len(line_of(told["weights at start"])) - 1:
                raise FoundError(
                    f"[resume] launch {order.launch} is at batch {started} with {told['weights at start']}"
                )
        after = self.entries(project)
        self.check_what_stays(order, before, after)
        for entry in others:
            if not (entry.folder / entry.name).exists():
                raise FoundError(f"[others] {entry.folder / entry.name} of the other project is gone")
        if "closed" in told:
            self.check_end(project, order, line_of(told["weights at end"]), after)

    def let_live(self, order: Order, *, may_refuse: bool) -> None:
        """Here, or in a process of its own if it may end otherwise than well.

        ``may_refuse``: what is left is damaged, as where the good ones were pruned: it may say so and not start.
        """
        if not (order.die_at or order.clock or order.sharded or self.has_pipe or may_refuse):
            try:
                live(order)
            except Exception as e:
                raise FoundError(f"[crash] launch {order.launch} ended with {e!r}") from e
            return
        try:
            done = run_forked(live_alone, as_json(order), cwd=self.root, timeout=SECONDS)
        except subprocess.TimeoutExpired as e:
            raise FoundError(f"[hang] launch {order.launch} does not end: {e.stderr!r}") from e
        if may_refuse and "none of them is good, so it does not start over" in done.stderr:
            return
        if done.returncode not in ((0, -signal.SIGKILL) if order.die_at else (0,)):
            raise FoundError(f"[crash] launch {order.launch} ended with {done.returncode}: {done.stderr[-3000:]}")

    def told(self, order: Order) -> dict[str, Any]:
        """What the launch has told."""
        found: dict[str, Any] = {}
        with suppress(FileNotFoundError):
            for line in Path(order.notes).read_text().splitlines():
                note = json.loads(line)
                if "weights" in note:
                    note["weights at start" if "started" in note else "weights at end"] = note.pop("weights")
                found |= note
        return found

    def entries(self, project: Project) -> list[Entry]:
        """The checkpoints in the project's folder."""
        return entries_of(project.folder, set(self.damaged))

    def acceptable(self, project: Project, *, memory: bool) -> list[Line | None] | None:
        """What a run that goes on by itself may start from: lines, or ``None`` in the list for from scratch.

        ``None`` where that is not known: nothing of the living attempt is good.
        """
        entries = [e for e in self.entries(project) if e.kind != "weights"]
        begun = [e for e in begun_in(project.folder) if e.kind != "weights"]
        if not entries and begun:
            return None
        if not entries:
            if not project.folder.exists() or not memory:
                return [None]
            return [None, *self.newest_lines(self.in_memory_of(project))]
        good = [e for e in entries if e.line is not None]
        lost = [self.damaged[e.folder / e.name] for e in entries if e.line is None]
        if max(lost, default=0) > max((self.history.attempts[e.launch] for e in good), default=0):
            return None
        candidates = [*good, *(self.in_memory_of(project) if memory else ())]
        completed = [line for one in begun for line in self.newest_lines([*candidates, one])]
        return [*self.newest_lines(candidates), *completed]

    def newest_lines(self, entries: Sequence[Entry]) -> list[Line | None]:
        """What is in the newest; two launches that went on from one checkpoint may have come equally far."""
        living = self.history.living(entries)
        top = max(((self.history.attempts[e.launch], e.batch) for e in living), default=None)
        return [e.line for e in living if (self.history.attempts[e.launch], e.batch) == top]

    def in_memory_of(self, project: Project) -> list[Entry]:
        """What launches of this project have saved in memory."""
        folders = {path.parent for path in self.memory.rglob(".manifest")}
        found = [entry for folder in folders for entry in entries_of(folder, set())]
        return [entry for entry in found if self.owners[entry.launch] is project]

    def check_start(self, order: Order, start: Line, acceptable: list[Line | None] | None) -> None:
        """It starts from where it has to."""
        found = None if start == (order.launch,) else start
        self.history.begin(order.launch, start, goes_on=order.resume and found is not None)
        if acceptable is not None and found not in acceptable:
            raise FoundError(f"[resume] launch {order.launch} started from {found}, and not from one of {acceptable}")

    def check_what_stays(self, order: Order, before: list[Entry], after: list[Entry]) -> None:
        """What was there is there, or is one of those that this launch may delete or write over."""
        now = {entry.name: entry for entry in after}
        stays = {e.name: e for e in before if e.line is not None}
        if order.keep != -1:
            stays = self.what_stays(before, after, order.filename, order.keep)
            first = len(self.history.starts.get(order.launch, ()))  # of the names that it may give, and take again
            own = {order.filename.format(batch=batch) for batch in range(first, order.until)}
            stays = {name: e for name, e in stays.items() if name not in own or e in self.history.living(after)}
        self.check_are_there(stays.values(), now, launch=order.launch)

    def what_stays(self, before: list[Entry], after: list[Entry], template: str, keep: int) -> dict[str, Entry]:
        """What a retention has to leave: the newest so many of the line, what is abandoned, and other names."""
        known = {e.name: e for e in (*before, *after) if e.line is not None}
        counted = len([e for e in before if e.line is None and e.template == template])  # it looks whole
        may_go: set[str] = set()
        # What was the line until a later attempt had its first checkpoint may have gone before that.
        for entries in (known.values(), before):
            line = sorted((e for e in self.history.living(entries) if e.template == template), key=lambda e: e.batch)
            may_go |= {e.name for e in line[: max(len(line) - max(keep - counted, 0), 0)]}
        return {name: e for name, e in known.items() if name not in may_go}

    def check_are_there(self, wanted: Iterable[Entry], now: Mapping[str, Entry], *, launch: int = 0) -> None:
        """Each is as it was, or the launch has saved another one of its name."""
        for entry in wanted:
            if entry.name in {begun.name for begun in begun_in(entry.folder)}:
                continue  # the old one or the new one, which the next launch finds out
            there = now.get(entry.name)
            if there is None or (there.line != entry.line and there.launch != launch):
                raise FoundError(f"[gone] {entry}, of {self.history.attempts}, is now {there}")

    def check_end(self, project: Project, order: Order, end: Line, after: list[Entry]) -> None:
        """It has trained to its end, and saved that."""
        start = self.history.starts[order.launch]
        expected = start + (order.launch,) * (order.until + 1 - len(start))
        if end != expected:
            raise FoundError(f"[content] launch {order.launch} ended with {end}, and not with {expected}")
        saved = [e for e in after if e.line == end and e.kind != "weights"]
        if not saved and end not in [e.line for e in self.in_memory_of(project)]:
            raise FoundError(f"[gone] launch {order.launch} ended with {end}, which is nowhere")
        own = [e for e in saved if e.template == order.filename]
        if own and (order.resume or len(end) > len(start)):  # else it has saved nothing
            self.check_link(project, order, saved)
        if order.keep != -1 and len(end) > len(start):
            living = self.history.living(after)
            left = [e.name for e in living if e.template == order.filename]
            if len(left) > order.keep:
                raise FoundError(f"[retention] launch {order.launch} keeps {order.keep}, and {left} are there")

    def check_link(self, project: Project, order: Order, saved: Sequence[Entry]) -> None:
        """The link of the newest leads to one of those ``saved``."""
        link = project.folder / ("latest" if order.sharded else "latest.pt")
        if link.resolve() not in [(e.folder / e.name).resolve() for e in saved]:
            raise FoundError(f"[latest] {link} leads to {link.readlink()}, and not to {saved[0].name}")

    def note_damage(self, path: Path, attempt: int) -> None:
        """The data at ``path``, of a checkpoint of ``attempt``, are not what was saved, until they are another file."""
        self.damaged[path] = self.marks[path, _mark(path)] = attempt

    def look_for_mended(self) -> None:
        """What was damaged may have been written over, or set aside; a commit that is undone puts it back."""
        self.damaged = {path: attempt for (path, mark), attempt in self.marks.items() if _mark(path) == mark}

    @invariant()
    def everything_is_as_it_has_to_be(self) -> None:
        """After each step."""
        type(self).steps += 1
        self.look_for_mended()
        self.planted.check()
        for project in self.projects:
            self.check_project(project)

    def check_project(self, project: Project) -> None:
        """Every checkpoint holds what was trained, and the links lead to some."""
        for entry in self.entries(project):
            self.history.check(entry)
        for link in (project.folder / "latest.pt", project.folder / "latest"):
            set_aside = link.resolve().with_name(f"{link.resolve().name}.damaged").exists()
            if link.is_symlink() and not link.exists() and not set_aside:
                raise FoundError(f"[latest] {link} leads to {link.readlink()}, which is not there")

    def command(self, *arguments: object) -> None:
        """``composerlite checkpoint …``."""
        given = ["checkpoint", *map(str, arguments)]
        if self.has_pipe:
            try:
                done = run_forked(command, *given, cwd=self.root, timeout=SECONDS)
            except subprocess.TimeoutExpired as e:
                raise FoundError(f"[hang] {given}") from e
            if done.returncode:
                raise FoundError(f"[crash] {given}: {done.stderr[-3000:]}")
            return
        result = CliRunner().invoke(app, given)
        if result.exit_code:
            raise FoundError(f"[crash] {given}: {result.output[-3000:]}") from result.exception

    def one_of(self, project: Project, which: int) -> Entry | None:
        """Any checkpoint that can be resumed from."""
        found = [e for e in self.entries(project) if e.kind != "weights" and e.line is not None]
        return found[which % len(found)] if found else None


def command(*_: str) -> None:
    """The command line with the arguments of its process."""
    app()


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
