"""Two launches of one run: the second waits for the end of the first, or says who that is."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composerlite.checkpoint import BucketLease, FolderLease, RemoteCatalog, take_leases
from composerlite.errors import RunInUseError
from composerlite.storage import Transfer, open_store

HOLD = """
import os, sys, time
from composerlite.checkpoint import BucketLease, FolderLease, RemoteCatalog, take_leases
from composerlite.storage import Transfer, open_store
kind, place = sys.argv[1:]
if kind == "folder":
    lease = FolderLease(place, "run")
else:
    lease = BucketLease(RemoteCatalog(Transfer(open_store(place)), "saves"), "run")
take_leases([lease], "run 'run'", 0)
print(os.getpid(), flush=True)
sys.stdin.read()
lease.release()
"""


@contextlib.contextmanager
def held(kind: str, place: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lease, until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, kind, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(process.pid)
    yield process
    process.communicate(timeout=20)


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A kind of place, its address, and what makes a lease of it."""
    if request.param == "folder":
        yield "folder", str(tmp_path), lambda: FolderLease(tmp_path, "run")
        return
    server = request.getfixturevalue("s3_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{server.new_bucket()}"
    with Transfer(open_store(uri)) as transfer:
        yield "bucket", uri, lambda: BucketLease(RemoteCatalog(transfer, "saves"), "run")


def test_the_second_launch_is_refused_and_told_by_whom(place: Any) -> None:
    """With the process and the machine of the first, and the way out; when the first has ended it gets the run."""
    kind, address, make = place
    lease = make()
    with held(kind, address) as first:
        message = rf"process {first.pid} on .* is alive.*Stop it, or give this run a run_name"
        with pytest.raises(RunInUseError, match=message):
            take_leases([lease], "run 'run'", 0.2)
    take_leases([lease], "run 'run'", 20)
    assert first.returncode == 0
    lease.release()
    lease.release()


def test_a_killed_process_has_no_lease(place: Any) -> None:
    """The next launch on the same machine does not wait."""
    kind, address, make = place
    with held(kind, address) as first:
        first.kill()
    lease = make()
    began = time.monotonic()
    take_leases([lease], "run 'run'", 0)
    assert time.monotonic() - began < 5
    lease.release()


def test_a_holder_on_another_machine_is_taken_for_dead_when_it_is_silent(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is taken after a while in which nothing changes; one that goes on is told that it has lost it."""
    server = request.getfixturevalue("s3_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with Transfer(open_store(f"s3://{server.new_bucket()}")) as transfer:
        remote = RemoteCatalog(transfer, "saves")
        lease = BucketLease(remote, "run", beat_seconds=0.2, dead_seconds=1.5)
        name = "saves/.manifest/.run.lease"
        transfer.put_bytes(name, b'{"host": "elsewhere", "pid": 1, "id": "x", "beat": 7}')
        with pytest.raises(RunInUseError, match="process 1 on elsewhere"):
            take_leases([lease], "run 'run'", 0.5)
        take_leases([lease], "run 'run'", 10)
        assert lease.lost_to is None
        transfer.put_bytes(name, b'{"host": "elsewhere", "pid": 2, "id": "y", "beat": 1}')
        until = time.monotonic() + 10
        while lease.lost_to is None and time.monotonic() < until:
            time.sleep(0.05)
        assert lease.lost_to == "process 2 on elsewhere"
        lease.release()
        assert transfer.exists(name), "it is another's by now"


def test_runs_of_different_names_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """They may share a folder: while the lease of one is held, that of the other is had at once."""
    with held("folder", str(tmp_path)):
        lease = FolderLease(tmp_path, "other")
        take_leases([lease], "run 'other'", 0)
        with pytest.raises(RunInUseError):
            take_leases([FolderLease(tmp_path, "run")], "run 'run'", 0)
        assert lease.lost_to is None
        lease.release()
