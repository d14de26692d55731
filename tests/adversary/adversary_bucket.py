"""A bucket as the oracle sees it, and as a user, a scheduler and an adversary treat it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import hypothesis.strategies as st
from adversary_checks import SECONDS, Machine, Project
from adversary_oracle import Entry, FoundError, Line, entries_of, folders_in, line_in, place_in
from adversary_run import FILTERS, LONGEST, Order, as_json, live_alone
from forked import run_forked
from hypothesis.stateful import rule

__all__ = ["BucketAdversary", "Server"]

_LOOKS = 5
kills = st.one_of(
    st.just((0, False)),
    st.tuples(st.integers(1, 200), st.just(False)),  # at any event
    st.tuples(st.integers(1, 60), st.just(True)),  # as it sends a request
)


class Server(Protocol):
    """Of S3, on loopback; programs find it by their environment."""

    def client(self) -> Any: ...
    def new_bucket(self) -> str: ...


@dataclass
class BucketProject(Project):
    """A run that saves to a bucket, from one machine after the other.

    Attributes:
        folder: what is in the bucket, as it was when it was looked at last.
        staging: of the machine.
    """

    bucket: str
    client: Any
    staging: Path

    @property
    def uri(self) -> str:
        """Where it saves."""
        return f"s3://{self.bucket}/run"

    def listed(self) -> dict[str, str]:
        """The objects, and the tag of what each holds."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return {item["Key"]: item["ETag"] for page in pages for item in page.get("Contents", ())}

    def look(self) -> None:
        """Make :attr:`folder` the same as the bucket: as it was at one moment, where a run that lives changes it."""
        for _ in range(_LOOKS):
            there = self.listed()
            self.copy(there)
            if self.listed() == there:
                return

    def copy(self, there: Mapping[str, str]) -> None:
        """Get what is ``there``, unless it has vanished meanwhile."""
        top = self.folder.parent
        for path in [path for path in top.rglob("*") if path.is_file()]:
            if str(path.relative_to(top)) not in there:
                path.unlink()
                self.tags.pop(path, None)
        for key, tag in there.items():
            path = top / key
            if self.tags.get(path) != tag:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)  # the oracle knows files by their inodes
                self.tags.pop(path, None)
                with suppress(self.client.exceptions.NoSuchKey):
                    found = self.client.get_object(Bucket=self.bucket, Key=key)
                    path.write_bytes(found["Body"].read())
                    self.tags[path] = found["ETag"]

    def __post_init__(self) -> None:
        self.tags: dict[Path, str] = {}


class BucketAdversary(Machine):
    """A run in a bucket. Each launch is on the machine of the one before, or on another one, whose disk is empty."""

    server: ClassVar[Server]

    def __init__(self) -> None:
        super().__init__()
        client = self.server.client()
        self.machines = 0
        folder = self.root / "bucket" / "run"
        folder.mkdir(parents=True)
        self.project = BucketProject(folder, self.server.new_bucket(), client, self.root / "machine0")
        self.projects: list[Project] = [self.project]
        self.kept: dict[str, bytes] = {}

    def teardown(self) -> None:
        self.project.client.close()
        super().teardown()

    def entries(self, project: Project) -> list[Entry]:
        """What is in the bucket."""
        self.project.look()
        return super().entries(project)

    def look_for_mended(self) -> None:
        """What was damaged may have been written over."""
        self.project.look()
        super().look_for_mended()

    def on_disk(self) -> list[Entry]:
        """What the machine has on its disk."""
        return [entry for folder in folders_in(self.project.staging) for entry in entries_of(folder, set())]

    def in_memory_of(
        self, project: Project, look: Callable[[Path], list[Entry]] = lambda folder: entries_of(folder, set())
    ) -> list[Entry]:
        """What launches on this machine have saved in its memory."""
        return [entry for folder in folders_in(self.memory_here) for entry in look(folder)]

    @property
    def memory_here(self) -> Path:
        """For checkpoints in the memory of this machine."""
        path = self.memory / str(self.machines)
        path.mkdir(exist_ok=True)
        return path

    def may_start_from(self, *, memory: bool = False) -> list[Line | None] | None:
        """As :meth:`acceptable`, for a launch on this machine."""
        entries = [entry for entry in self.entries(self.project) if entry.kind != "weights"]
        here = self.on_disk()
        in_memory = self.in_memory_of(self.project) if memory else []
        good = [*here, *in_memory, *(entry for entry in entries if entry.line is not None)]
        lost = [self.damaged[entry.data] for entry in entries if entry.line is None]
        newest = max((self.history.attempts[entry.launch] for entry in good), default=0)
        if not good:
            return None if entries else [None]
        if max(lost, default=0) > newest:
            return None
        scratch = [None] if not (here or entries) else []  # whose memory it is nothing says
        return [*scratch, *self.newest_lines(good)]

    def check_are_there(self, wanted: Iterable[Entry], now: Mapping[str, Entry], *, launch: int = 0) -> None:
        """As for a folder; a launch may also send what the one before had saved on this machine."""
        saved = {entry.line for entry in self.on_disk()} if launch else set[Line | None]()
        super().check_are_there(
            [entry for entry in wanted if entry.name not in now or now[entry.name].line not in saved],
            now,
            launch=launch,
        )

    def check_link(self, project: Project, order: Order, saved: Sequence[Entry]) -> None:
        """The object that names the newest does so."""
        link = project.folder / f"{'latest' if order.sharded else 'latest.pt'}.symlink"
        names = {f"run/{entry.name}" for entry in saved}
        if not link.exists() or link.read_text().strip() not in names:
            raise FoundError(f"[latest] {link.name} says {link.exists() and link.read_text()!r}, and not {names}")

    def change_machine(self, lost: bool) -> None:
        """The next launch is on another one, if ``lost``."""
        if lost:
            self.machines += 1
            self.project.staging = self.root / f"machine{self.machines}"

    def bucket_order(self, *, dies: tuple[int, bool] = (0, False), **given: Any) -> Order:
        """A launch on this machine."""
        order = self.order(self.project, die_at=dies[0], dies_sending=dies[1], **given)
        return replace(order, folder=self.project.uri, staging=str(self.project.staging))

    @rule(
        lost=st.booleans(),
        more=st.integers(0, 4),
        dies=kills,
        saving=st.sampled_from(["default", "copied", "waits", "ring"]),
        keep=st.sampled_from([-1, -1, 1, 2]),
        interval=st.sampled_from([1, 1, 2]),
        clock=st.sampled_from([0.0] * 6 + [-48.0, 5.0]),
        load=st.one_of(st.none(), st.tuples(st.integers(0, 30), st.sampled_from([*FILTERS]))),
        weights=st.sampled_from([False] * 3 + [True]),
        sharded=st.sampled_from([False] * 3 + [True]),
        memory=st.sampled_from([False] * 3 + [True]),
        two_ranks=st.sampled_from([False] * 9 + [True]),
    )
    def launch(
        self,
        lost: bool,
        more: int,
        load: tuple[int, str] | None,
        sharded: bool,
        memory: bool,
        two_ranks: bool,
        **given: Any,
    ) -> None:
        """The script is started, as by a scheduler; it goes on by itself, whatever it says of how it once began."""
        self.change_machine(lost)
        memory = memory and not sharded and not two_ranks
        if sharded:
            given |= {"sharded": True, "weights": False, "filename": "ba{batch}"}
        if load is not None and not sharded and (chosen := self.one_of(self.project, load[0])) is not None:
            given |= {"load": f"{self.project.uri}/{chosen.name}", "filtered": load[1]}
        acceptable = self.may_start_from(memory=memory)
        order = self.bucket_order(until=self.later(acceptable, more), **given)
        order = replace(order, memory=str(self.memory_here) if memory else "", dying_rank=order.die_at % 2 * two_ranks)
        self.run(self.project, order, acceptable, ranks=1 + two_ranks)

    @rule(lost=st.booleans(), until=st.integers(1, 5), dies=kills)
    def start_from_scratch(self, lost: bool, **given: Any) -> None:
        """The user wants none of what there was, and lets the run write over it."""
        self.change_machine(lost)
        self.run(self.project, self.bucket_order(resume=False, **given), [None])

    @rule(
        lost=st.booleans(),
        which=st.integers(0, 30),
        more=st.integers(1, 3),
        dies=kills,
    )
    def go_on_from_an_older_one(self, lost: bool, which: int, more: int, dies: tuple[int, bool]) -> None:
        """The user takes a checkpoint from before, out of the bucket."""
        if (chosen := self.one_of(self.project, which)) is None:
            return
        self.change_machine(lost)
        until = min(chosen.batch + more, LONGEST)
        load = f"{self.project.uri}/{chosen.name}"
        order = self.bucket_order(resume=False, load=load, until=until, dies=dies)
        self.run(self.project, order, [chosen.line])

    @rule(
        lost=st.booleans(),
        more=st.integers(1, 3),
        what=st.sampled_from(["ls", "prune", "gc"]),
        waits_at=st.integers(1, 160),
        keep=st.sampled_from([-1, 1, 2]),
        keeps=st.integers(1, 2),
    )
    def use_a_tool_while_a_run_lives(self, lost: bool, more: int, what: str, keeps: int, **given: Any) -> None:
        """At an event where one thread of the run has stopped the user looks, makes room, or tidies up."""
        self.change_machine(lost)
        acceptable = self.may_start_from()
        order = self.bucket_order(until=self.later(acceptable, more), **given)

        def beside() -> None:
            if self.entries(self.project):
                self.command(what, self.project.uri, *(("--keep-last", keeps) if what == "prune" else ()))

        keeps = keeps if what == "prune" else -1
        self.run(self.project, order, acceptable, beside=beside, keeps=keeps)

    @rule(more=st.integers(2, 5))
    def two_launches_at_once(self, more: int) -> None:
        """The scheduler starts the run twice, on two machines: one trains it, the other is told, or comes after it."""
        self.change_machine(lost=True)
        acceptable = self.may_start_from()
        before = self.entries(self.project)
        if acceptable is None:
            return
        until = self.later(acceptable, more)
        first = self.bucket_order(until=until)
        self.change_machine(lost=True)
        orders = [first, self.bucket_order(until=until)]
        with ThreadPoolExecutor(2) as threads:
            done = list(threads.map(self.live_with_others, orders))
        if not any(one.returncode == 0 for one in done):
            raise FoundError(f"[two] neither of {[order.launch for order in orders]} has trained: {done[0].stderr}")
        self.check_two(self.project, orders, {order.launch: acceptable for order in orders}, before)

    def live_with_others(self, order: Order) -> subprocess.CompletedProcess[str]:
        """In a process of its own; it may be told that another one trains the run."""
        try:
            done = run_forked(live_alone, as_json(order), cwd=self.root, timeout=SECONDS)
        except subprocess.TimeoutExpired as e:
            raise FoundError(f"[hang] launch {order.launch} does not end: {e.stderr!r}") from e
        if done.returncode and "RunInUseError" not in done.stderr:
            raise FoundError(f"[crash] launch {order.launch} ended with {done.returncode}: {done.stderr[-3000:]}")
        return done

    @rule(keep=st.integers(1, 3))
    def prune(self, keep: int) -> None:
        """The user makes room in the bucket."""
        if not (before := self.entries(self.project)):
            return
        self.command("prune", self.project.uri, "--keep-last", keep)
        after = {entry.name: entry for entry in self.entries(self.project)}
        for template in {entry.template for entry in before}:
            stays = self.what_stays(before, [], template, keep).values()
            self.check_are_there((entry for entry in stays if entry.template == template), after)

    @rule()
    def collect_garbage(self) -> None:
        """The user removes what dead processes have left."""
        if before := self.entries(self.project):
            self.command("gc", self.project.uri, "--older-than", "0s")
            self.check_are_there(before, {entry.name: entry for entry in self.entries(self.project)})

    @rule(what=st.sampled_from(["notes.txt", "other.pt", "ba99.pt"]))
    def plant(self, what: str) -> None:
        """Somebody puts an object beside the checkpoints."""
        if "ba9" in what and self.one_of(self.project, 0) is None:
            return  # what may be the run's cannot be read, and nothing is good: it would not start
        body = f"of others, {self.new_number()}".encode()
        self.project.client.put_object(Bucket=self.project.bucket, Key=f"run/{what}", Body=body)
        self.kept[f"run/{what}"] = body

    @rule(which=st.integers(0, 30), suffix=st.sampled_from([".pt", ".pt.gz"]))
    def convert(self, which: int, suffix: str) -> None:
        """The user takes a checkpoint out of the bucket."""
        entry = self.one_of(self.project, which)
        if entry is not None and not entry.data.is_dir():  # which unshard makes a file of
            target = self.root / f"converted{self.new_number()}{suffix}"
            self.command("convert", f"{self.project.uri}/{entry.name}", target)
            self.check_copy(entry, target)

    @rule(which=st.integers(0, 30), elsewhere=st.sampled_from(["folder", "bucket"]))
    def copy(self, which: int, elsewhere: str) -> None:
        """The user keeps a checkpoint in another place."""
        if (entry := self.one_of(self.project, which)) is None:
            return
        name = f"kept{self.new_number()}"
        place = self.root / name
        uri = f"s3://{self.project.bucket}/{name}"
        self.command("cp", f"{self.project.uri}/{entry.name}", place if elsewhere == "folder" else uri)
        if elsewhere == "bucket":
            self.project.look()
            place = self.project.folder.with_name(name)
        self.check_copy(entry, place / entry.name)

    def check_copy(self, entry: Entry, target: Path) -> None:
        """It holds the same, now and later."""
        if line_in(target) != entry.line:
            raise FoundError(f"[content] {entry} was copied, and {target} has {line_in(target)}")
        for path in target.rglob("*") if target.is_dir() else [target]:
            self.planted.add(path)

    @rule(which=st.integers(0, 30), name=st.sampled_from(["best{}.pt", "ba10{}.pt"]))
    def copy_by_hand(self, which: int, name: str) -> None:
        """The user keeps a checkpoint under another name, which may look like one of the run's."""
        entry = self.one_of(self.project, which)
        if entry is None or entry.data.is_dir():
            return
        key, body = f"run/{name.format(self.new_number())}", entry.data.read_bytes()
        self.project.client.put_object(Bucket=self.project.bucket, Key=key, Body=body)
        self.kept[key] = body

    @rule(which=st.integers(0, 30), where=st.sampled_from(["data", "record"]))
    def damage(self, which: int, where: str) -> None:
        """The store gives a byte of a checkpoint wrongly, and there is another good one."""
        living = [e for e in self.history.living(self.entries(self.project)) if e.kind != "weights"]
        if len(living) < 2:
            return
        entry = living[which % len(living)]
        part = next(entry.data.glob("*.distcp")) if entry.data.is_dir() else entry.data
        data = bytearray(part.read_bytes())
        data[place_in(entry.data, len(data), where)] ^= 1
        key = str(part.relative_to(self.project.folder.parent))
        self.project.client.put_object(Bucket=self.project.bucket, Key=key, Body=bytes(data))
        self.project.look()
        self.note_damage(entry.data, self.history.attempts[entry.launch])

    def check_project(self, project: Project) -> None:
        """Every checkpoint holds what was trained, ``latest`` leads to one, and what is of others is as it was."""
        for entry in self.entries(project):
            self.history.check(entry)
        for key, body in self.kept.items():
            path = self.project.folder.parent / key
            if not path.exists() or path.read_bytes() != body:
                raise FoundError(f"[planted] {key} is {path.exists() and path.read_bytes()[:60]!r}, and was {body!r}")
        names = {f"run/{entry.name}" for entry in self.entries(project)}
        for link in (project.folder / "latest.pt.symlink", project.folder / "latest.symlink"):
            if link.exists() and (name := link.read_text().strip()) not in names:
                raise FoundError(f"[latest] {link.name} says {name!r}, which is not there")
