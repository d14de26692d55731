"""Launches that want one lease of a bucket at the same moment, in every order of their requests that is drawn."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock
from uuid import uuid4

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composerlite.checkpoint.place import lease as module
from composerlite.checkpoint.place.lease import HeartbeatLease

NAME = ".run.lease"
SECONDS = 20.0


real_process = module.this_process
this_thread = threading.local()
"""Its ``record`` is of the process that the thread plays."""


def played_process(_pid: int) -> dict[str, Any]:
    return this_thread.record


def threads_when_joined(run: Callable[[], object], count: int, *, name: str) -> list[Any]:
    """A thread that does its work when it is waited for."""
    return [SimpleNamespace(join=lambda timeout: run())]


class Killed(BaseException):
    """The process of a launch is no more."""


class Turns:
    """One launch at a time makes one request; ``order`` says which, by its place among those that wait."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.waiting: set[int] = set()
        self.running: set[int] = set()
        self.next: int | None = None
        self.dying: set[int] = set()

    def wait_for(self, launch: int) -> None:
        """Wait for a turn, and end there where the launch is to die."""
        with self.condition:
            self.running.discard(launch)
            self.waiting.add(launch)
            self.condition.notify_all()
            assert self.condition.wait_for(lambda: self.next == launch, SECONDS)
            self.next = None
            self.waiting.discard(launch)
            self.running.add(launch)
            if launch in self.dying:
                raise Killed

    def end(self, launch: int) -> None:
        """The launch makes no more requests."""
        with self.condition:
            self.running.discard(launch)
            self.condition.notify_all()

    def give(self, choice: int, dies: bool, kill: Any) -> bool:
        """Let one launch make its request, or kill its process before; false if none wants to."""
        with self.condition:
            assert self.condition.wait_for(lambda: not self.running and self.next is None, SECONDS)
            if not self.waiting:
                return False
            launch = sorted(self.waiting)[choice % len(self.waiting)]
            if dies:
                self.dying.add(launch)
                kill(launch)
            self.next = launch
            self.condition.notify_all()
            assert self.condition.wait_for(lambda: self.next is None, SECONDS)
            return True


@dataclass
class Bucket:
    """Objects with versions, as a store with conditional writes has them."""

    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict[str, tuple[bytes, str]])
    uri: str = field(default_factory=lambda: uuid4().hex)


class TransferInTurns:
    """Each request to the bucket waits for its turn, if there are turns."""

    def __init__(self, bucket: Bucket, turns: Turns | None, launch: int) -> None:
        self.bucket, self.turns, self.launch = bucket, turns, launch
        self.store = SimpleNamespace(get_uri=lambda name: f"{bucket.uri} {launch}/{name}")

    def _wait(self) -> None:
        if self.turns is not None:
            self.turns.wait_for(self.launch)

    def put_bytes(self, name: str, data: bytes, *, create_only: bool) -> None:
        self._wait()
        assert create_only
        if name in self.bucket.objects:
            raise FileExistsError(name)
        self.bucket.objects[name] = (data, uuid4().hex)

    def swap_bytes(self, name: str, data: bytes, version: str) -> None:
        self._wait()
        if self.bucket.objects.get(name, (b"", ""))[1] != version:
            raise FileExistsError(name)
        self.bucket.objects[name] = (data, uuid4().hex)

    def read_versioned(self, name: str) -> tuple[bytes, str]:
        self._wait()
        if name not in self.bucket.objects:
            raise FileNotFoundError(name)
        return self.bucket.objects[name]

    def delete(self, name: str) -> None:
        self._wait()
        self.bucket.objects.pop(name, None)


def lease_of(bucket: Bucket, turns: Turns | None, process: subprocess.Popen[bytes], launch: int) -> HeartbeatLease:
    """The lease of a launch whose process is ``process``."""
    transfer = cast("Any", TransferInTurns(bucket, turns, launch))
    this_thread.record = record_of(process, launch)
    return HeartbeatLease(transfer, NAME)


@contextmanager
def processes(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that live: a lease looks whether its holder does."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(number)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def record_of(process: subprocess.Popen[bytes], launch: int) -> dict[str, Any]:
    """What the launch whose process that is writes into its lease."""
    return {**real_process(os.getpid()), "pid": process.pid, "id": f"launch {launch}"}


@mock.patch.object(module, "start_threads", threads_when_joined)
@mock.patch.object(module, "this_process", played_process)
@mock.patch.object(module, "DEAD_SECONDS", 1e6)
def play(what_is_there: bytes | None, order: list[tuple[int, bool]], launches: int) -> int:
    """Let ``launches`` of one run try for its lease in ``order``; how often one of them had it."""
    turns, holders, had, failures = Turns(), set[int](), [0], list[BaseException]()
    bucket = Bucket()
    if what_is_there is not None:
        bucket.objects[NAME] = (what_is_there, "first")
    with processes(launches) as alive:

        def kill(launch: int) -> None:
            alive[launch].kill()
            alive[launch].wait()
            holders.discard(launch)

        def live(launch: int) -> None:
            lease = lease_of(bucket, turns, alive[launch], launch)
            try:
                turns.wait_for(launch)
                for _ in range(3):
                    if lease.try_to_take() is not None:
                        continue
                    assert not holders, f"launch {launch} has the lease that launches {holders} have"
                    holders.add(launch)
                    had[0] += 1
                    for _ in range(5):  # it trains
                        turns.wait_for(launch)
                    holders.discard(launch)
                    lease.release()
                    return
            except Killed:
                pass
            except BaseException as e:  # noqa: BLE001
                failures.append(e)
            finally:
                turns.end(launch)

        turns.running |= set(range(launches))
        threads = [threading.Thread(target=live, args=(launch,), daemon=True) for launch in range(launches)]
        for thread in threads:
            thread.start()
        left = [*order]
        while turns.give(*(left.pop(0) if left else (0, False)), kill):
            pass
        for thread in threads:
            thread.join(SECONDS)
        if failures:
            raise failures[0]
    with processes(1) as [last]:  # all others are dead or have released it
        lease = lease_of(bucket, None, last, launches)
        assert lease.try_to_take() is None, "the lease of dead launches is not to be had"
        lease.release()
    assert not bucket.objects, "an object is left behind"
    return had[0]


def dead(launch: int) -> bytes:
    """The lease of a process of this machine that was killed."""
    with processes(1) as [process]:
        return json.dumps({**record_of(process, launch), "beat": 3}).encode()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    there=st.sampled_from(["nothing", "dead", "dead"]),
    order=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([False] * 15 + [True])), min_size=30, max_size=60),
    launches=st.integers(2, 3),
)
def test_one_launch_at_a_time_has_the_lease(there: str, order: list[tuple[int, bool]], launches: int) -> None:
    """In whatever order they ask, and whichever is killed; afterwards the lease is free and nothing is left of it."""
    play(dead(99) if there == "dead" else None, order, launches)


def test_two_launches_that_see_a_dead_holder_do_not_both_take_over() -> None:
    """The first takes it over before the second, which has seen the dead holder too, makes its next request."""
    for first_requests in range(1, 8):
        both_see_it = [(0, False), (1, False)] * 2
        play(dead(99), [*both_see_it, *[(0, False)] * first_requests, *[(1, False)] * 9], 2)
