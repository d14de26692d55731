"""The run whose checkpoints are tried, and what has to be after each step, wherever they are."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from adversary_oracle import (
    Entry,
    FoundError,
    History,
    Line,
    Planted,
    entries_of,
    folders_in,
    line_in,
    line_of,
)
from adversary_run import LONGEST, Order, as_json, live, live_alone, live_as_rank
from click.testing import CliRunner
from forked import run_forked
from hypothesis.stateful import RuleBasedStateMachine, invariant

from composerlite.cli.app import app
from composerlite.testing.cluster import run_ranks_to_the_end

__all__ = ["SECONDS", "Machine", "Project"]

NONE_GOOD = "none can be loaded. A run with checkpoints never starts over"
MEMORY = Path("/dev/shm")
SECONDS = 60.0
RANK_SECONDS = 20.0
"""After which a rank gives up another one that is late."""


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

    def run(
        self,
        project: Project,
        order: Order,
        acceptable: list[Line | None] | None,
        *,
        ranks: int = 1,
        beside: Callable[[], object] | None = None,
        keeps: int = -1,
    ) -> None:
        """Let it live, and compare what it did with what it had to do.

        ``acceptable``: what it may start from. ``beside``: what others do where it waits, who leave so many checkpoints
        as ``keeps`` says.
        """
        before = self.entries(project)
        others = [e for other in self.projects if other is not project for e in self.entries(other)]
        loaded = self.with_load(order)
        newest = self.newest_attempt(before)
        none_good = order.resume and self.none_is_good(before)
        if beside is not None:
            with self.living_beside(order) as life:
                beside()
                # Prune counts what looks whole: it may leave damaged ones only before the run has looked for one.
                none_good |= order.resume and self.none_is_good(self.entries(project))
            self.check_life(order, life.result(), may_refuse=none_good)
        elif ranks > 1:
            self.let_ranks_live(order, ranks, may_refuse=none_good)
        else:
            self.let_live(order, may_refuse=none_good)
        self.look_for_mended()
        told = self.told(order)
        if "started" in told:
            self.check_start(order, told, acceptable, loaded, newest)
        after = self.entries(project)
        self.check_what_stays(order, before, after, keeps)
        for entry in others:
            if not (entry.folder / entry.name).exists():
                raise FoundError(f"[others] {entry.folder / entry.name} of the other project is gone")
        if "closed" in told:
            self.check_end(project, order, line_of(told["weights at end"]), after)

    def none_is_good(self, entries: Sequence[Entry]) -> bool:
        """Return whether there are checkpoints and each that a run could resume from is damaged.

        Good ones of an attempt before that of a damaged one are of training that was given up.
        """
        kept = [entry for entry in entries if entry.kind != "weights"]
        lost = [self.damaged.get(entry.data, 0) for entry in kept if entry.line is None]
        # What a run that lives has saved meanwhile is of an attempt that is not known yet.
        good = [self.history.attempts.get(entry.launch, math.inf) for entry in kept if entry.line is not None]
        return bool(entries) and max(lost, default=0) >= max(good, default=0) + bool(good)

    def let_live(self, order: Order, *, may_refuse: bool) -> None:
        """Here, or in a process of its own if it may end otherwise than well.

        ``may_refuse``: what is left is damaged, as where the good ones were pruned: it may say so and not start.
        """
        if order.die_at or order.clock or order.sharded or self.has_pipe or may_refuse:
            self.check_life(order, self.live_alone(order), may_refuse=may_refuse)
            return
        try:
            live(order)
        except Exception as e:
            raise FoundError(f"[crash] launch {order.launch} ended with {e!r}") from e

    def live_alone(self, order: Order) -> subprocess.CompletedProcess[str]:
        """In a process of its own."""
        try:
            return run_forked(live_alone, as_json(order), cwd=self.root, timeout=SECONDS)
        except subprocess.TimeoutExpired as e:
            raise FoundError(f"[hang] launch {order.launch} does not end: {e.stderr!r}") from e

    def check_life(self, order: Order, done: subprocess.CompletedProcess[str], *, may_refuse: bool) -> None:
        """It has ended as it may."""
        if may_refuse and NONE_GOOD in done.stderr:
            return
        if done.returncode not in ((0, -signal.SIGKILL) if order.die_at else (0,)):
            raise FoundError(f"[crash] launch {order.launch} ended with {done.returncode}: {done.stderr[-3000:]}")

    def let_ranks_live(self, order: Order, ranks: int, *, may_refuse: bool) -> None:
        """In processes that train together, of which one may be killed."""
        try:
            done = run_ranks_to_the_end(
                live_as_rank,
                ranks,
                order,
                timeout=SECONDS,
                dist_timeout=RANK_SECONDS,
                fresh=bool(order.die_at),  # its fuse stays in the process
            )
        except TimeoutError as e:
            raise FoundError(f"[hang] ranks of launch {order.launch} do not end") from e
        errors = [one.error for one in done if one.error is not None]
        if may_refuse and any(NONE_GOOD in str(error) for error in errors):
            return
        if errors and not any(isinstance(error, ChildProcessError) for error in errors):
            raise FoundError(f"[crash] ranks of launch {order.launch} ended with {errors}") from errors[0]

    @contextmanager
    def living_beside(self, order: Order) -> Iterator[Future[subprocess.CompletedProcess[str]]]:
        """Within it the launch lives, and waits at its event unless it has ended before."""
        with ThreadPoolExecutor(1) as threads:
            life = threads.submit(self.live_alone, order)
            try:
                while not life.done() and "waits" not in self.told(order):
                    time.sleep(0.005)
                yield life
            finally:
                order.go.touch()

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
        if not entries:
            if not project.folder.exists() or not memory:
                return [None]
            known = self.in_memory_of(project)
            return [None, *self.newest_lines(known)]
        good = [e for e in entries if e.line is not None]
        lost = [self.damaged[e.folder / e.name] for e in entries if e.line is None]
        if max(lost, default=0) > max((self.history.attempts[e.launch] for e in good), default=0):
            return None
        candidates = [*good, *(self.in_memory_of(project) if memory else ())]
        return self.newest_lines(candidates)

    def newest_lines(self, entries: Sequence[Entry]) -> list[Line | None]:
        """What is in the newest; two launches that went on from one checkpoint may have come equally far."""
        living = self.history.living(entries)
        top = max(((self.history.attempts[e.launch], e.batch) for e in living), default=None)
        return [e.line for e in living if (self.history.attempts[e.launch], e.batch) == top]

    def in_memory_of(
        self, project: Project, look: Callable[[Path], list[Entry]] = lambda folder: entries_of(folder, set())
    ) -> list[Entry]:
        """What launches of this project have saved in memory."""
        found = [entry for folder in folders_in(self.memory) for entry in look(folder)]
        return [entry for entry in found if self.owners[entry.launch] is project]

    def with_load(self, order: Order) -> tuple[int, Line] | None:
        """The batch and the weights that the launch has where it begins with its ``load_path`` and resumes nothing."""
        if not (order.load and order.resume) or order.staging:  # what is loaded from a bucket is there to be resumed
            return None
        line = line_in(Path(order.load))
        known = {"whole": (len(line) - 1, line), "nothing": (0, (order.launch,)), "weights": (0, line)}
        return known.get(order.filtered, (len(line) - 1, (order.launch,)))

    def check_start(
        self,
        order: Order,
        told: Mapping[str, Any],
        acceptable: list[Line | None] | None,
        loaded: tuple[int, Line] | None,
        newest: int,
    ) -> None:
        """It starts from where it has to. ``loaded``: so with its ``load_path``; ``newest``: attempt before it."""
        batch, start = told["started"], line_of(told["weights at start"])
        found = None if start == (order.launch,) else start
        if loaded == (batch, start) and acceptable is not None and None in acceptable and found not in acceptable[1:]:
            own = start if order.filtered == "whole" else (order.launch,) * (batch + 1)
            self.history.begin(order.launch, own, goes_on=False)
            return
        # Where a checkpoint of a later attempt was not good a new attempt begins.
        goes_on = order.resume and found is not None and self.history.attempts[start[-1]] >= newest
        self.history.begin(order.launch, start, goes_on=goes_on)
        if loaded is not None and acceptable is not None:
            acceptable = [line for line in acceptable if line is not None]
        if acceptable is not None and found not in acceptable:
            raise FoundError(f"[resume] launch {order.launch} started from {found}, and not from one of {acceptable}")
        if batch != len(start) - 1:
            raise FoundError(f"[resume] launch {order.launch} is at batch {batch} with {start}")

    def newest_attempt(self, entries: Sequence[Entry]) -> int:
        """The highest attempt of which there are checkpoints, good ones or damaged ones."""
        kept = [entry for entry in entries if entry.kind != "weights"]
        attempts = [self.damaged.get(e.data, 0) if e.line is None else self.history.attempts[e.launch] for e in kept]
        return max(attempts, default=0)

    def check_what_stays(self, order: Order, before: list[Entry], after: list[Entry], keeps: int = -1) -> None:
        """What was there is there, or is one of those that this launch may delete or write over.

        ``keeps``: what ``prune`` has left meanwhile, of each kind of name.
        """
        now = {entry.name: entry for entry in after}
        stays = {e.name: e for e in before if e.line is not None}
        limits = [(template, keeps) for template in {e.template for e in before} if keeps != -1]
        limits += [(order.filename, order.keep)] if order.keep != -1 else []
        for template, keep in limits:
            left = self.what_stays(before, after, template, keep)
            stays = {name: e for name, e in stays.items() if name in left}
        if limits:
            first = len(self.history.starts.get(order.launch, ()))  # of the names that it may give, and take again
            names = [order.filename.format(batch=batch) for batch in range(first, order.until)]
            own = {*names, *(f"weights-{name}" for name in names if keeps != -1)}
            stays = {name: e for name, e in stays.items() if name not in own or e in self.history.living(after)}
        self.check_are_there(stays.values(), now, launch=order.launch)

    def what_stays(self, before: list[Entry], after: list[Entry], template: str, keep: int) -> dict[str, Entry]:
        """What a retention has to leave: the newest so many of the line, what is abandoned, and other names."""
        known = {e.name: e for e in (*before, *after) if e.line is not None}
        counted = len([e for e in before if e.line is None and e.template == template])  # it looks whole
        may_go: set[str] = set()
        # What was the line until a later attempt had its first checkpoint may have gone before that.
        # Nor need it be seen that what is of the latest attempt is damaged.
        damaged = max((self.damaged.get(e.data, 0) for e in before if e.line is None), default=0)
        for entries, newest in itertools.product((known.values(), before), (0, damaged)):
            living = self.history.living(entries, newest)
            line = sorted((e for e in living if e.template == template), key=lambda e: e.batch)
            may_go |= {e.name for e in line[: max(len(line) - max(keep - counted, 0), 0)]}
        return {name: e for name, e in known.items() if name not in may_go}

    def check_are_there(self, wanted: Iterable[Entry], now: Mapping[str, Entry], *, launch: int = 0) -> None:
        """Each is as it was, or the launch has saved another one of its name."""
        for entry in wanted:
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
        only_loaded = bool(order.load) and end == start  # a base that is at its end: nothing is trained or saved
        if not saved and not only_loaded and end not in [e.line for e in self.in_memory_of(project)]:
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

    def check_two(
        self,
        project: Project,
        orders: Sequence[Order],
        acceptable: Mapping[int, list[Line | None] | None],
        before: list[Entry],
    ) -> None:
        """Of two launches at once one has trained the run, and the other was told, or came after it.

        ``acceptable``: what each may start from if it is the first, by the number of the launch.
        """
        newest = self.newest_attempt(before)
        self.look_for_mended()
        found = {order.launch: self.told(order) for order in orders}
        told = [order for order in orders if "started" in found[order.launch]]
        told.sort(key=lambda order: found[order.launch]["at"])
        starts = {order.launch: line_of(found[order.launch]["weights at start"]) for order in told}
        trained: list[Order] = []
        for order in told:
            came_after = trained and order.resume
            may = [self.end_of(trained[-1])] if came_after else acceptable[order.launch]
            self.check_start(order, found[order.launch], may, None, newest)
            if "closed" in found[order.launch] and len(self.end_of(order)) > len(starts[order.launch]):
                trained.append(order)
        if len(trained) > 1 and all(order.resume for order in orders):
            raise FoundError(f"[two] both of {[order.launch for order in orders]} have trained the run")
        after = self.entries(project)
        for order in orders if trained else ():
            self.check_what_stays(order, [e for e in before if e.name not in self.names_of(orders)], after)
        if trained and (last := trained[-1]).resume:
            self.check_end(project, last, self.end_of(last), after)

    def names_of(self, orders: Iterable[Order]) -> set[str]:
        """What the launches may call their checkpoints."""
        return {order.filename.format(batch=batch) for order in orders for batch in range(1, order.until + 1)}

    def end_of(self, order: Order) -> Line:
        """The weights with which the launch has ended."""
        return line_of(self.told(order)["weights at end"])

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

    def command(self, *arguments: object) -> str:
        """Run ``composerlite checkpoint …``; what it has printed."""
        given = ["checkpoint", *map(str, arguments)]
        if self.has_pipe:
            try:
                done = run_forked(command, *given, cwd=self.root, timeout=SECONDS)
            except subprocess.TimeoutExpired as e:
                raise FoundError(f"[hang] {given}") from e
            if done.returncode:
                raise FoundError(f"[crash] {given}: {done.stderr[-3000:]}")
            return done.stdout
        result = CliRunner().invoke(app, given)
        if result.exit_code:
            raise FoundError(f"[crash] {given}: {result.output[-3000:]}") from result.exception
        return result.stdout

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
