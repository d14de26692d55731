"""A user, a scheduler and an adversary, drawn by hypothesis; after each step the oracle looks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
from adversary_oracle import Entry, FoundError, History, Line, Planted, begun_in, entries_of, line_in, line_of
from adversary_run import LONGEST, RUN, Order, as_json, live, live_alone, load_saved, save_alone
from forked import run_forked
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from typer.testing import CliRunner

from composerlite.checkpoint import FileRecord, Manifest
from composerlite.cli.app import app
from composerlite.errors import CheckpointNotFoundError

__all__ = ["Adversary"]

MEMORY = Path("/dev/shm")
SECONDS = 60.0
numbers = st.integers(0, 30)


@dataclass
class Project:
    """A folder of checkpoints in which one run is trained; the user has two of them, with runs of one name."""

    folder: Path


def hostile(**fields: Any) -> Callable[[Path], None]:
    """A record that is whole, and says what it must not."""

    def write(path: Path) -> None:
        name = path.name.removesuffix(".json")
        record = FileRecord(path=fields.get("path", name), size_bytes=9, xxh3_128="0" * 32)
        time = {"batch": 10**6, "epoch": 0}
        manifest = Manifest(
            name=name, kind="monolithic", template="ba{batch}.pt", run_name=RUN, timestamp=time, files=(record,)
        )
        path.write_bytes(manifest.to_json())

    return write


THINGS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "file": ("notes{}.txt", lambda path: path.write_text("notes")),
    "archive": ("other{}.pt", lambda path: path.write_bytes(b"no checkpoint")),
    "dangling link": ("data{}", lambda path: path.symlink_to("/nowhere/imagenet")),
    "link in a folder": ("venv{}/bin/python", lambda path: path.symlink_to("/nowhere/python3")),
    "link to a file": ("link{}.pt", lambda path: path.symlink_to(sys.executable)),
    "link to a folder": ("outside{}", lambda path: path.symlink_to(path.parents[1], target_is_directory=True)),
    "link of another saver": ("latest-of-others{}.pt", lambda path: path.symlink_to("theirs.pt")),
    "folder": ("folder{}", lambda path: path.mkdir()),
    "pipe": ("pipe{}", lambda path: os.mkfifo(path)),
}
BAD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "nesting": lambda path: path.write_text("[" * 100_000),
    "empty": lambda path: path.touch(),
    "number": lambda path: path.write_text("7"),
    "half": lambda path: path.write_text('{"name": "ba'),
    "link": lambda path: path.symlink_to("/nowhere/record.json"),
    "out": hostile(path="../victim.txt"),
    "absolute": hostile(path="/nowhere/file"),
}


def may(kind: str) -> Callable[[Any], bool]:
    """Whether the rules ``kind`` are among those of the machine: to look for one thing at a time."""
    return lambda machine: machine.only is None or kind in machine.only


class Adversary(RuleBasedStateMachine):
    """Two projects on one machine."""

    only: ClassVar[frozenset[str] | None] = None
    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="adversary-", dir=MEMORY if MEMORY.is_dir() else None))
        self.memory = self.root / "memory"
        self.memory.mkdir()
        self.projects = [Project(self.root / "a" / "checkpoints"), Project(self.root / "b" / "checkpoints")]
        self.history, self.planted = History(), Planted()
        self.owners: dict[int, Project] = {}
        self.damaged: dict[Path, int] = {}  # the attempt that they were of
        self.marks: dict[Path, tuple[int, int] | None] = {}
        self.values: dict[tuple[Path, str], tuple[int, int]] = {}  # the least there, and the last tried
        self.launches = 0
        self.names = 0
        self.has_pipe = False

    def new_number(self) -> int:
        """For a name that was not there before."""
        self.names += 1
        return self.names

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────────
    @precondition(may("train"))
    @rule(
        b=st.booleans(),
        more=st.integers(0, 4),
        memory=st.booleans(),
        die_at=st.one_of(st.just(0), st.just(0), st.just(0), st.integers(1, 160)),
        saving=st.sampled_from(["default", "copied", "waits", "ring"]),
        keep=st.sampled_from([-1, -1, 1, 2, 3]),
        interval=st.sampled_from([1, 1, 2, 3]),
        suffix=st.sampled_from(["", "", "", ".gz"]),
        weights=st.booleans(),
        sharded=st.sampled_from([False] * 7 + [True]),
    )
    def launch(self, b: bool, more: int, memory: bool, suffix: str, sharded: bool, **given: Any) -> None:
        """The script is started, as by a scheduler; it goes on by itself."""
        project = self.projects[b]
        memory = memory and may("memory")(self)
        acceptable = self.acceptable(project, memory=memory)
        until = self.later(acceptable, more)
        name = f"ba{{batch}}.pt{suffix}"
        if sharded and may("sharded")(self):
            given |= {"sharded": True, "weights": False}
            name, memory = "ba{batch}", False
        order = self.order(project, until=until, filename=name, **given)
        self.run(project, replace(order, memory=str(self.memory) if memory else ""), acceptable)

    @precondition(may("restart"))
    @rule(
        b=st.booleans(),
        until=st.integers(1, 6),
        die_at=st.one_of(st.just(0), st.integers(1, 120)),
        keep=st.sampled_from([-1, -1, 1, 2]),
        saving=st.sampled_from(["default", "waits"]),
    )
    def start_from_scratch(self, b: bool, **given: Any) -> None:
        """The user wants none of what there was, and lets the run write over it."""
        self.run(self.projects[b], self.order(self.projects[b], resume=False, **given), [None])

    @precondition(may("older"))
    @rule(
        b=st.booleans(),
        which=numbers,
        more=st.integers(1, 3),
        die_at=st.one_of(st.just(0), st.integers(1, 120)),
        keep=st.sampled_from([-1, -1, 1, 2]),
    )
    def go_on_from_an_older_one(self, b: bool, which: int, more: int, **given: Any) -> None:
        """The user does not like what became of the run, and takes a checkpoint from before."""
        project = self.projects[b]
        if (chosen := self.one_of(project, which)) is None:
            return
        until = min(chosen.batch + more, LONGEST)
        order = self.order(project, resume=False, load=str(chosen.folder / chosen.name), until=until, **given)
        self.run(project, order, [chosen.line])

    @precondition(may("clock"))
    @rule(b=st.booleans(), more=st.integers(1, 3), clock=st.sampled_from([-48.0, -1.0, 5.0, 24.0]))
    def launch_where_the_clock_is_wrong(self, b: bool, more: int, clock: float) -> None:
        """The same on a machine whose clock is wrong."""
        project = self.projects[b]
        acceptable = self.acceptable(project, memory=False)
        self.run(project, self.order(project, until=self.later(acceptable, more), clock=clock), acceptable)

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

    # ── functions ────────────────────────────────────────────────────────────────────────────────────────────────
    @precondition(may("functions"))
    @rule(
        b=st.booleans(),
        kind=st.sampled_from(["function", "step"]),
        more=st.integers(1, 3),
        die_at=st.one_of(st.just(0), st.integers(1, 40), st.integers(1, 120)),
    )
    def save_with_functions(self, b: bool, kind: str, more: int, die_at: int) -> None:
        """A loop of somebody's own saves again and again to one name, and is killed; then it is started again."""
        folder = self.projects[b].folder.with_name("functions")
        least, most = self.values.get((folder, kind), (0, 0))
        notes = self.root / f"saved{self.new_number()}"
        given = [kind, str(folder), str(most + 1), str(most + more), str(die_at), str(notes)]
        done = run_forked(save_alone, *given, cwd=self.root, timeout=SECONDS)
        if done.returncode not in ((0, -signal.SIGKILL) if die_at else (0,)):
            raise FoundError(f"[crash] {given} ended with {done.returncode}: {done.stderr[-3000:]}")
        saved = [json.loads(line)["saved"] for line in notes.read_text().splitlines()] if notes.exists() else []
        least = max([least, *saved])
        most = max(least + 1, most) if done.returncode else least
        if most:
            self.values[folder, kind] = self.found_value(folder, kind, least, most + (most > least))

    def found_value(self, folder: Path, kind: str, least: int, most: int) -> tuple[int, int]:
        """The value that is there, which has to be one of these; 0: none."""
        try:
            found = load_saved(kind, str(folder))
        except CheckpointNotFoundError as e:
            if least:
                raise FoundError(f"[gone] {kind} in {folder}: {least} was saved: {e}") from e
            found = 0
        except Exception as e:
            raise FoundError(f"[content] {kind} in {folder} cannot be loaded: {e!r}") from e
        if not least <= found <= most:
            raise FoundError(f"[content] {kind} in {folder} has {found}, and not one of {least} to {most}")
        return found, most

    # ── what has to be ───────────────────────────────────────────────────────────────────────────────────────────
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
        link = project.folder / ("latest" if order.sharded else "latest.pt")
        acted = order.resume or len(end) > len(start)  # else it has saved nothing
        if own and acted and link.resolve() not in [(e.folder / e.name).resolve() for e in saved]:
            raise FoundError(f"[latest] {link} leads to {link.readlink()}, and not to {own[0].name}")
        if order.keep != -1 and len(end) > len(start):
            living = self.history.living(after)
            left = [e.name for e in living if e.template == order.filename]
            if len(left) > order.keep:
                raise FoundError(f"[retention] launch {order.launch} keeps {order.keep}, and {left} are there")

    def look_for_mended(self) -> None:
        """What was damaged may have been written over, or set aside."""
        for path, status in list(self.marks.items()):
            if _mark(path) != status:
                del self.marks[path], self.damaged[path]

    @invariant()
    def everything_is_as_it_has_to_be(self) -> None:
        """After each step."""
        type(self).steps += 1
        self.look_for_mended()
        self.planted.check()
        for project in self.projects:
            for entry in self.entries(project):
                self.history.check(entry)
            for link in (project.folder / "latest.pt", project.folder / "latest"):
                set_aside = link.resolve().with_name(f"{link.resolve().name}.damaged").exists()
                if link.is_symlink() and not link.exists() and not set_aside:
                    raise FoundError(f"[latest] {link} leads to {link.readlink()}, which is not there")

    # ── the tools ────────────────────────────────────────────────────────────────────────────────────────────────
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

    @precondition(may("prune"))
    @rule(b=st.booleans(), keep=st.integers(1, 3))
    def prune(self, b: bool, keep: int) -> None:
        """The user makes room."""
        project = self.projects[b]
        if not (before := self.entries(project)):
            return
        self.command("prune", project.folder, "--keep-last", keep)
        after = self.entries(project)
        for template in {entry.template for entry in before}:
            stays = self.what_stays(before, [], template, keep).values()
            self.check_are_there((e for e in stays if e.template == template), {e.name: e for e in after})

    @precondition(may("gc"))
    @rule(b=st.booleans())
    def collect_garbage(self, b: bool) -> None:
        """The user removes what dead processes have left."""
        project = self.projects[b]
        if not (before := self.entries(project)):
            return
        self.command("gc", project.folder, "--older-than", "0s")
        self.check_are_there(before, {e.name: e for e in self.entries(project)})

    @precondition(may("convert"))
    @rule(b=st.booleans(), which=numbers, suffix=st.sampled_from([".pt", ".pt.gz"]))
    def convert(self, b: bool, which: int, suffix: str) -> None:
        """The user takes a checkpoint elsewhere."""
        entry = self.one_of(self.projects[b], which)
        if entry is not None and not (entry.folder / entry.name).is_dir():  # which unshard makes a file of
            target = self.root / f"converted{self.new_number()}{suffix}"
            self.command("convert", entry.folder / entry.name, target)
            if line_in(target) != entry.line:
                raise FoundError(f"[content] {entry} was converted to {line_in(target)}")
            self.planted.add(target)

    def one_of(self, project: Project, which: int) -> Entry | None:
        """Any checkpoint that can be resumed from."""
        found = [e for e in self.entries(project) if e.kind != "weights" and e.line is not None]
        return found[which % len(found)] if found else None

    # ── the hands of the user, and others ────────────────────────────────────────────────────────────────────────
    @precondition(may("copy"))
    @rule(b=st.booleans(), which=numbers, how=st.sampled_from(["bare", "with its manifest", "in a folder"]))
    def copy_by_hand(self, b: bool, which: int, how: str) -> None:
        """The user keeps a checkpoint under another name."""
        entry = self.one_of(self.projects[b], which)
        if (
            entry is None
            or (entry.folder / entry.name).is_dir()
            or (how == "with its manifest" and not may("records")(self))
        ):
            return
        records, name = entry.folder / ".manifest", f"best{self.new_number()}.pt"
        if how == "in a folder":
            folder = entry.folder / name.removesuffix(".pt")
            (folder / ".manifest").mkdir(parents=True)
            shutil.copy(records / f"{entry.name}.json", folder / ".manifest" / f"{entry.name}.json")
            self.planted.add(folder / ".manifest" / f"{entry.name}.json")
            name = f"{folder.name}/{entry.name}"
        if how == "with its manifest":
            shutil.copy(records / f"{entry.name}.json", records / f"{name}.json")
            self.planted.add(records / f"{name}.json")
        shutil.copy(entry.folder / entry.name, entry.folder / name)
        self.planted.add(entry.folder / name)

    @precondition(may("plant"))
    @rule(b=st.booleans(), what=st.sampled_from([*THINGS]))
    def plant(self, b: bool, what: str) -> None:
        """Somebody puts something into the folder."""
        if "link" in what and not may("links")(self):
            return
        name, make = THINGS[what]
        path = self.projects[b].folder / name.format(self.new_number())
        if not path.parent.is_dir() and path.parent.name == ".manifest":
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
        self.planted.add(path)

    @precondition(may("manifest"))
    @rule(b=st.booleans(), what=st.sampled_from([*BAD]))
    def plant_a_manifest(self, b: bool, what: str) -> None:
        """Something has gone wrong with a record, or it is hostile."""
        records = self.projects[b].folder / ".manifest"
        if not records.is_dir():
            return
        victim = records.parent.parent / "victim.txt"
        if victim not in self.planted.things:
            victim.write_text("of others")
            self.planted.add(victim)
        path = records / f"bad{self.new_number()}.pt.json"
        BAD[what](path)
        self.has_pipe |= what == "pipe"

    @precondition(may("damage"))
    @rule(b=st.booleans(), which=numbers)
    def damage(self, b: bool, which: int) -> None:
        """The disk loses a byte of a checkpoint, and there is another good one."""
        living = [e for e in self.history.living(self.entries(self.projects[b])) if e.kind != "weights"]
        if len(living) < 2:
            return
        entry = living[which % len(living)]
        path = entry.folder / entry.name
        part = next(path.glob("*.distcp")) if path.is_dir() else path
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
        self.damaged[path], self.marks[path] = self.history.attempts[entry.launch], _mark(path)

    @precondition(may("remove"))
    @rule(b=st.booleans())
    def remove_the_folder(self, b: bool) -> None:
        """The user wants to be rid of it all."""
        if (folder := self.projects[b].folder).exists():
            shutil.rmtree(folder)
            self.planted.forget_below(folder)

    @precondition(may("reboot"))
    @rule()
    def reboot(self) -> None:
        """What was in memory is gone."""
        shutil.rmtree(self.memory)
        self.memory.mkdir()


def command(*_: str) -> None:
    """The command line with the arguments of its process."""
    app()


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
