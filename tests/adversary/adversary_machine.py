"""A user, a scheduler and an adversary, drawn by hypothesis; after each step the oracle looks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
import xxhash
from adversary_checks import SECONDS, Machine, Project
from adversary_oracle import IN_RECORD, FoundError, Line, line_in, place_in
from adversary_run import FILTERS, LONGEST, RUN, Order, elsewhere, live, load_saved, save_alone
from forked import run_forked
from hypothesis.stateful import precondition, rule

from composerlite.checkpoint import FileRecord, Manifest, read_checkpoint
from composerlite.checkpoint.record.record import SavedRun, seal
from composerlite.errors import CheckpointNotFoundError, RunInUseError
from composerlite.storage import FileDigest

__all__ = ["Adversary"]

numbers = st.integers(0, 30)


def hostile(*others: str, **fields: Any) -> Callable[[Path], None]:
    """A file whose record is whole, and says what it must not."""
    files = tuple(FileRecord(path=other, size_bytes=9, xxh3_128="0" * 32) for other in others)

    def write(path: Path) -> None:
        time = {"batch": 10**6, "epoch": 0}
        known = {"name": path.name, "kind": "monolithic", "template": "ba{batch}.pt", **fields}
        body = b"no checkpoint"
        stored = FileDigest(len(body), xxhash.xxh3_128_hexdigest(body))
        path.write_bytes(body + seal(Manifest(**known, run=SavedRun(name=RUN, timestamp=time), files=files), stored))

    return write


THINGS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "file": ("notes{}.txt", lambda path: path.write_text("notes")),
    "archive": ("other{}.pt", lambda path: path.write_bytes(b"no checkpoint")),
    "half a record": ("half{}.pt", lambda path: path.write_bytes(b'\n{"composerlite": 1, "record": {"name": "ba')),
    "empty": ("empty{}.pt", lambda path: path.touch()),
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
    "nesting": lambda path: path.write_text('\n{"composerlite": ' + "[" * 60_000),
    "number": lambda path: path.write_text("7\nCLREC1 00000001 00000000000000000000000000000000\n"),
    "link": lambda path: path.symlink_to("/nowhere/record.pt"),
    "out": hostile("../victim.txt", form="archives"),
    "absolute": hostile("/nowhere/file", form="archives"),
    "of others": hostile("victim.txt", form="archives"),
    "another name": hostile(name="../victim.txt"),
    "another form": hostile(form="sharded"),
}


def flip_a_byte(places: Iterable[tuple[Path, int]]) -> None:
    """Change a byte of each file, or change it back; the files are not newer than they were."""
    for path, at in places:
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def may(kind: str) -> Callable[[Any], bool]:
    """Whether the rules ``kind`` are among those of the machine: to look for one thing at a time."""
    return lambda machine: machine.only is None or kind in machine.only


class Adversary(Machine):
    """Two projects on one machine, with runs of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.projects = [Project(self.root / "a" / "checkpoints"), Project(self.root / "b" / "checkpoints")]
        self.values: dict[tuple[Path, str], tuple[int, int]] = {}  # the least there, and the last tried

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
        relative=st.sampled_from([False, False, True]),
        sharded=st.sampled_from([False] * 7 + [True]),
        two_ranks=st.sampled_from([False] * 19 + [True]),
        load=st.one_of(st.none(), st.none(), st.tuples(numbers, st.sampled_from([*FILTERS]))),
    )
    def launch(
        self, b: bool, more: int, memory: bool, suffix: str, sharded: bool, two_ranks: bool, load: Any, **given: Any
    ) -> None:
        """The script is started, as by a scheduler; it goes on by itself, whatever it says of how it once began."""
        project = self.projects[b]
        ranks = 2 if two_ranks and may("ranks")(self) else 1
        memory = memory and may("memory")(self)
        name = f"ba{{batch}}.pt{suffix}"
        if sharded and may("sharded")(self):
            given |= {"sharded": True, "weights": False}
            name, memory = "ba{batch}", False
        if ranks > 1:
            memory, given["relative"] = False, False
        acceptable = self.acceptable(project, memory=memory)
        until = self.later(acceptable, more)
        if load is not None and not sharded and may("load")(self) and acceptable is not None:
            chosen = self.one_of(self.projects[load[0] % 2], load[0] // 2)
            if chosen is not None and (None not in acceptable or chosen.batch + more < LONGEST):
                given |= {"load": str(chosen.folder / chosen.name), "filtered": load[1]}
                until = max(until, chosen.batch + more) if None in acceptable else until
        order = self.order(project, until=until, filename=name, **given)
        order = replace(order, memory=str(self.memory) if memory else "", dying_rank=b if ranks > 1 else 0)
        self.run(project, order, acceptable, ranks=ranks)

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

    @precondition(may("wrong-bytes"))
    @rule(b=st.booleans(), which=numbers, what=st.sampled_from(["records", "data", "both"]))
    def launch_where_all_is_read_wrongly(self, b: bool, which: int, what: str) -> None:
        """The run is started on a machine that reads other bytes than there are: it ends, and discards nothing."""
        project = self.projects[b]
        known = self.entries(project)
        if (named := self.one_of(project, which)) is None:
            return
        places: list[tuple[Path, int]] = []
        for entry in known:
            parts = entry.data.glob("*.distcp") if entry.data.is_dir() else [entry.data]
            if what != "records" and entry.line is not None:  # what the disk has damaged would be whole again
                places += [(part, part.stat().st_size // 2) for part in parts]
            if what != "data" and entry.data.is_dir():
                path = entry.data / ".metadata"
                places.append((path, path.stat().st_size - IN_RECORD + 1))
            elif what != "data":
                places.append((entry.data, entry.data.stat().st_size - IN_RECORD + 1))
        order = self.order(
            project, until=LONGEST, filename=named.template, sharded=(named.folder / named.name).is_dir()
        )
        flip_a_byte(places)
        try:
            self.let_live(order, may_refuse=True)
        finally:
            flip_a_byte((path, at) for path, at in places if path.exists())
        if "started" in (told := self.told(order)):
            raise FoundError(f"[resume] launch {order.launch} started at {told['started']}: nothing was good")
        if gone := [path for path, _ in places if not path.exists()]:
            raise FoundError(f"[gone] {gone} after launch {order.launch}, which could read nothing")

    @precondition(may("beside"))
    @rule(
        b=st.booleans(),
        more=st.integers(1, 4),
        what=st.sampled_from(["ls", "prune", "gc", "launch"]),
        waits_at=st.integers(1, 120),
        saving=st.sampled_from(["default", "waits"]),
        keep=st.sampled_from([-1, -1, 1, 2]),
        keeps=st.integers(1, 2),
        resume=st.sampled_from([True, True, False]),
        sharded=st.sampled_from([False] * 3 + [True]),
    )
    def do_something_while_a_run_lives(
        self, b: bool, more: int, what: str, sharded: bool, keeps: int, resume: bool, **given: Any
    ) -> None:
        """At an event where one thread of the run has stopped the user looks, makes room, or starts it once more."""
        project = self.projects[b]
        acceptable = self.acceptable(project, memory=False)
        until = self.later(acceptable, more)
        if what == "launch":
            if acceptable is not None:
                again = given["waits_at"] % 10 > 0  # a launch from scratch waits for the other one for ten seconds
                self.launch_twice(project, acceptable, until=until, resume=(resume, again), **given)
            return
        filename = "ba{batch}" if sharded else "ba{batch}.pt"
        order = self.order(project, until=until, filename=filename, sharded=sharded, resume=resume, **given)

        def beside() -> None:
            if not project.folder.is_dir():
                return
            if what == "ls":
                self.list_at_any_time(project)
            else:
                how = ("--keep-last", keeps) if what == "prune" else ("--older-than", "0s")
                self.command(what, project.folder, *how)

        keeps = keeps if what == "prune" else -1
        self.run(project, order, acceptable if resume else [None], beside=beside, keeps=keeps)

    def launch_twice(
        self, project: Project, known: list[Line | None], *, until: int, resume: tuple[bool, bool], **given: Any
    ) -> None:
        """The run is started again while it lives."""
        before = self.entries(project)
        first = self.order(project, until=until, resume=resume[0], **given)
        orders = [first, self.order(project, until=until, resume=resume[1])]
        with self.living_beside(first) as life:
            told = [self.is_told(orders[1])]
        done = life.result()
        told.insert(0, "RunInUseError" in done.stderr)
        if done.returncode and not told[0]:
            raise FoundError(f"[crash] launch {first.launch} ended with {done.returncode}: {done.stderr[-3000:]}")
        if all(told):
            raise FoundError(f"[two] neither of {[order.launch for order in orders]} has trained: {done.stderr}")
        self.check_two(project, orders, {o.launch: known if o.resume else [None] for o in orders}, before)

    def is_told(self, order: Order) -> bool:
        """Let it live; whether it was told that another one trains the run."""
        if self.has_pipe:
            done = self.live_alone(order)
            if "RunInUseError" not in done.stderr:
                self.check_life(order, done, may_refuse=False)
            return bool(done.returncode)
        try:
            live(order)
        except RunInUseError:
            return True
        except Exception as e:
            raise FoundError(f"[crash] launch {order.launch} ended with {e!r}") from e
        return False

    def list_at_any_time(self, project: Project) -> None:
        """``ls`` knows the checkpoints that are there before and after it."""
        before = self.entries(project)
        told = {
            Path(one["uri"]).resolve()
            for one in json.loads(self.command("ls", project.folder, "--json"))["checkpoints"]
        }
        for entry in self.entries(project):
            if entry in before and entry.line is not None and (entry.folder / entry.name).resolve() not in told:
                raise FoundError(f"[ls] {entry} is not among {told}")

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
        # A step is deleted before one of the same name is written: a kill in between leaves neither.
        least = max([least, *saved])
        most = max(least + 1, most) if done.returncode else least
        least = 0 if kind == "step" and done.returncode else least
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

    def check_project(self, project: Project) -> None:
        """Nothing is where a script was that had moved, besides."""
        super().check_project(project)
        with suppress(FileNotFoundError):
            if strays := [*elsewhere(str(project.folder)).iterdir()]:
                raise FoundError(f"[elsewhere] {strays}")

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

    @precondition(may("copy"))
    @rule(
        b=st.booleans(), which=numbers, name=st.sampled_from(["best{}.pt", "best{}/{name}", "ba10{}.pt", "ba20{}.pt"])
    )
    def copy_by_hand(self, b: bool, which: int, name: str) -> None:
        """The user keeps a checkpoint under another name, which may look like one of the run's, or without a record."""
        entry = self.one_of(self.projects[b], which)
        if entry is None or entry.data.is_dir():
            return
        path = entry.folder / name.format(self.new_number(), name=entry.name)
        path.parent.mkdir(exist_ok=True)
        if path.name.startswith("ba20"):
            torch.save(read_checkpoint(entry.data), path)
        else:
            shutil.copy(entry.data, path)
        self.planted.add(path)

    @precondition(may("plant"))
    @rule(b=st.booleans(), what=st.sampled_from([*THINGS]))
    def plant(self, b: bool, what: str) -> None:
        """Somebody puts something into the folder."""
        if "link" in what and not may("links")(self):
            return
        name, make = THINGS[what]
        path = self.projects[b].folder / name.format(self.new_number())
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
        self.planted.add(path)

    @precondition(may("record"))
    @rule(b=st.booleans(), what=st.sampled_from([*BAD]))
    def plant_a_record(self, b: bool, what: str) -> None:
        """Something has gone wrong with a record, or it is hostile."""
        folder = self.projects[b].folder
        if not folder.is_dir():
            return
        for victim in (folder.parent / "victim.txt", folder / "victim.txt"):
            if victim not in self.planted.things:
                victim.write_text("of others")
                self.planted.add(victim)
        BAD[what](folder / f"bad{self.new_number()}.pt")
        self.has_pipe |= what == "pipe"

    @precondition(may("damage"))
    @rule(b=st.booleans(), which=numbers, where=st.sampled_from(["data", "record"]))
    def damage(self, b: bool, which: int, where: str) -> None:
        """The disk loses a byte of a checkpoint, and there is another good one."""
        living = [e for e in self.history.living(self.entries(self.projects[b])) if e.kind != "weights"]
        if len(living) < 2:
            return
        entry = living[which % len(living)]
        path = entry.folder / entry.name
        part = next(path.glob("*.distcp")) if path.is_dir() else path
        data = bytearray(part.read_bytes())
        data[place_in(path, len(data), where)] ^= 1
        part.write_bytes(data)
        self.note_damage(path, self.history.attempts[entry.launch])

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
