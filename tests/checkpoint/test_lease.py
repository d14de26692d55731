"""Leases: a second launch of a run waits for the end of the first launch, or is refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from storage.local_store import LocalObjectStore
from tiny_training import trainer

from composerlite.checkpoint.place import lease as module
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.lease import take_leases, this_process
from composerlite.checkpoint.place.place import Folder
from composerlite.errors import RunInUseError
from composerlite.storage import ObjectStore, Transfer, open_store
from composerlite.testing import Fault, FaultyStore

HOLD = """
import os, sys, time
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.place import Folder
from composerlite.checkpoint.place.lease import take_leases
from composerlite.storage import Transfer, open_store
kind, place = sys.argv[1:]
if kind == "folder":
    lease = Folder(place).lock("run")
else:
    lease = Bucket(Transfer(open_store(place)), "saves").lock("run")
take_leases({"run": lease}, "run 'run'", 0)
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
        yield "folder", str(tmp_path), lambda: Folder(tmp_path).lock("run")
        return
    server = request.getfixturevalue("s3_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{server.new_bucket()}"
    with Transfer(open_store(uri)) as transfer:
        yield "bucket", uri, lambda: Bucket(transfer, "saves").lock("run")


def test_the_second_launch_is_refused_and_told_by_whom(place: Any) -> None:
    """With the process and the machine of the first, and the way out; when the first has ended it gets the run."""
    kind, address, make = place
    lease = make()
    with held(kind, address) as first:
        message = rf"process {first.pid} on .* is still alive.*Stop that process if it is another launch of this run"
        with pytest.raises(RunInUseError, match=message):
            take_leases({"run": lease}, "run 'run'", 0.2)
    take_leases({"run": lease}, "run 'run'", 20)
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
    take_leases({"run": lease}, "run 'run'", 0)
    assert time.monotonic() - began < 5
    lease.release()


def test_a_holder_on_another_machine_is_taken_for_dead_when_it_is_silent(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is taken after a while in which nothing changes; one that goes on is told that it has lost it."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(module, "DEAD_SECONDS", 1.5)
    server = request.getfixturevalue("s3_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with Transfer(open_store(f"s3://{server.new_bucket()}")) as transfer:
        lease = Bucket(transfer, "saves").lock("run")
        name = "saves/.run.lease"
        transfer.put_bytes(name, b'{"process": "process 1 on elsewhere", "id": "x", "beat": 7}')
        with pytest.raises(RunInUseError, match="process 1 on elsewhere"):
            take_leases({"run": lease}, "run 'run'", 0.5)
        take_leases({"run": lease}, "run 'run'", 10)
        assert lease.lost_to is None
        transfer.put_bytes(name, b'{"process": "process 2 on elsewhere", "id": "y", "beat": 1}')
        until = time.monotonic() + 10
        while lease.lost_to is None and time.monotonic() < until:
            time.sleep(0.05)
        assert lease.lost_to == "process 2 on elsewhere"
        lease.release()
        assert transfer.exists(name), "it is another's by now"


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As some network file systems are: the run starts, and the log says that a second launch would start as well."""

    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lease = Folder(tmp_path).lock("run")
    take_leases({"run": lease}, "run 'run'", 0)
    assert "No locks available. A second launch of this run cannot be detected" in caplog.text
    assert lease.lost_to is None
    lease.release()


FILES = "ep{epoch}-ba{batch}-rank{rank}.pt"
"""The default of save_filename."""
TRY = """
import sys
from composerlite.checkpoint.place.place import Folder
holder = Folder(sys.argv[1]).lock(sys.argv[2]).try_to_take()
print(holder or "free")
"""


def tried(folder: Path, name: str = "run") -> str:
    """Return the holder of the lease ``name`` in ``folder``, as another process sees it, or 'free'."""
    command = [sys.executable, "-c", TRY, str(folder), name]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def copy_the_folder(folder: Path) -> None:
    """A backup of the run, by its own process."""
    shutil.copytree(folder, folder.with_name("copy"))


def read_the_lease(folder: Path) -> None:
    """What an editor of a notebook does, or a search for words."""
    for path in folder.rglob(".*.lease"):
        path.read_bytes()


def have_a_second_trainer(folder: Path) -> None:
    """Of the same run, which is closed before the first."""
    with trainer(save_folder=folder, autoresume=True):
        pass


def start_a_program(folder: Path) -> None:
    """It inherits what is not closed."""
    subprocess.run([sys.executable, "-c", "pass"], check=True, close_fds=False)


def end_a_worker(folder: Path) -> None:
    """As a data loader does at the end of an epoch."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    "act",
    [copy_the_folder, read_the_lease, have_a_second_trainer, start_a_program, end_a_worker],
    ids=lambda x: x.__name__,
)
def test_nothing_that_a_process_does_beside_loses_its_lease(act: Callable[[Path], None], tmp_path: Path) -> None:
    """A second launch is refused as long as the first one's trainer is open, and let in when it is closed."""
    folder = tmp_path / "saves"
    with trainer(save_folder=folder, autoresume=True):
        act(folder)
        assert tried(folder, FILES).startswith(f"process {os.getpid()} on ")
    assert tried(folder, FILES) == "free"


OUTLIVED = """
import os, signal, sys
from composerlite.checkpoint.place.place import Folder
from composerlite.checkpoint.place.lease import take_leases
take_leases({"run": Folder(sys.argv[1]).lock("run")}, "run 'run'", 0)
if (worker := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
print(worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_outlives_its_killed_parent_holds_no_lease(tmp_path: Path) -> None:
    """The relaunch gets the run although a data loader's worker of the first launch hangs on."""
    with subprocess.Popen(
        [sys.executable, "-c", OUTLIVED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert parent.wait(60) == -signal.SIGKILL
        os.kill(worker, 0)  # it lives
        assert tried(tmp_path) == "free"


TRY_BUCKET = """
import sys
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.storage import Transfer, open_store
with Transfer(open_store(sys.argv[1])) as transfer:
    lease = Bucket(transfer, "saves").lock("run")
    print(lease.try_to_take() or "free")
    lease.release()
"""
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a bucket that programs started here reach."""
    server = request.getfixturevalue("s3_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.new_bucket()}"


@pytest.fixture
def container() -> list[str]:
    """What a command is run with, so that it has process numbers of its own and this machine's name, as pods have."""
    try:
        done = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare program")
    if done.returncode != 0:
        pytest.skip(f"no process namespace can be made here: {done.stderr.strip()}")
    return CONTAINER


def test_a_lease_is_not_taken_from_a_container_that_lives(bucket: str, container: list[str]) -> None:
    """Containers have one machine's name and each its own process numbers: 'not here' does not mean dead."""
    with held("bucket", bucket):
        command = [*container, sys.executable, "-c", TRY_BUCKET, bucket]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "process" in told, "a living holder's lease was taken"


def test_only_a_process_number_of_this_boot_tells_that_a_holder_is_dead(bucket: str) -> None:
    """The lease of a dead holder is free at once; a holder that may be alive is waited for."""
    own = {**this_process(os.getpid()), "id": "x"}
    cases = [
        ({"pid": 1 << 30}, True),
        ({}, True),
        ({"pid": os.getppid()}, False),
        ({"pid": 1 << 30, "boot": "another"}, False),
    ]
    with Transfer(open_store(bucket)) as transfer:
        for change, is_free in cases:
            lease = Bucket(transfer, "saves").lock("run")
            transfer.put_bytes("saves/.run.lease", json.dumps({**own, **change}).encode())
            assert (lease.try_to_take() is None) is is_free, change
            lease.release()


def test_a_holder_that_was_suspended_is_told_before_it_publishes(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a beat: ``confirm`` asks the store if the last beat is more than ten seconds old, and only then."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 1000)
    other = json.dumps({"process": "process 1 on elsewhere", "id": "x"}).encode()
    with Transfer(open_store(bucket)) as transfer:
        lease = Bucket(transfer, "saves").lock("run")
        take_leases({"run": lease}, "run 'run'", 0)
        lease.confirm()
        transfer.put_bytes("saves/.run.lease", other)
        lease.confirm()
        assert lease.lost_to is None
        lease._renewed_at -= 10
        lease.confirm()
        assert lease.lost_to == "process 1 on elsewhere"
        lease.release()
        assert transfer.read_all("saves/.run.lease") == other


@pytest.mark.parametrize("there", ["no lease", "the lease of a dead process"])
def test_of_two_launches_at_once_one_gets_the_lease(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second launch makes all its requests right before one request of the first launch, in turn before each."""
    own = this_process(os.getpid())
    records = {"first": {**own, "id": "1"}, "second": {**own, "id": "2", "pid": os.getppid()}}
    acting = ["first"]
    monkeypatch.setattr(module, "this_process", lambda pid: records[acting[-1]])
    monkeypatch.setattr(module, "start_threads", lambda *_, **__: [SimpleNamespace(join=lambda timeout: None)])
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        store = LocalObjectStore(folder)
        if there != "no lease":
            store.put_bytes("saves/.run.lease", json.dumps({**own, "pid": 1 << 30, "id": "dead"}).encode())
        told: dict[str, str | None] = {}

        def take_beside(store: ObjectStore = store, told: dict[str, str | None] = told) -> None:
            acting.append("second")
            second = Bucket(Transfer(store), "saves").lock("run")
            told["second"] = second.try_to_take()
            second.release()
            acting.pop()

        faulty = FaultyStore(store, Fault(after=number, error=None, first=take_beside))
        first = Bucket(Transfer(faulty), "saves").lock("run")
        told["first"] = first.try_to_take()
        first.release()
        assert [*told.values()].count(None) == 1, (number, told)
        if "second" not in told:
            assert number >= 3
            return


def test_garbage_in_the_place_of_a_lease_is_nobody(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is there: the run starts, and no exception of a parser ends it."""
    monkeypatch.setattr(module, "DEAD_SECONDS", 0.3)
    with Transfer(open_store(bucket)) as transfer:
        for data in (
            b"",
            b"null",
            b"[1]",
            b"3",
            b'"x"',
            b'{"process": 1}',
            b'{"process": [], "pid": "x", "id": {}}',
            b"\xff",
            b"x" * 5000,
        ):
            transfer.put_bytes("saves/.run.lease", data)
            lease = Bucket(transfer, "saves").lock("run")
            take_leases({"run": lease}, "run 'run'", 20)
            lease.release()
