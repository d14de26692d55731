"""Leases: a second launch of a run waits for the end of the first launch, or is refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked
from scarce import forbid_threads
from storage.local_store import LocalObjectStore
from tiny_training import trainer

from composerlite.checkpoint.place import lease as module
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.lease import take_leases, this_process
from composerlite.checkpoint.place.place import Folder
from composerlite.errors import RunInUseError
from composerlite.storage import Transfer, open_store

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
        message = rf"process {first.pid} on .* is alive.*Stop that process if it is another launch of this run"
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


def take_without_threads(folder: str) -> None:
    forbid_threads()
    lease = Bucket(Transfer(LocalObjectStore(folder)), "saves").lock("run")
    with pytest.raises(OSError, match=r"run\.lease: no thread can be started to renew the lease.*ulimit -u"):
        take_leases({"run": lease}, "run 'run'", 0)


def test_a_process_that_gets_no_threads_gets_no_lease_in_a_bucket(tmp_path: Path) -> None:
    """It could not renew the lease. The error names the limit, and the next launch on this machine does not wait."""
    done = run_forked(take_without_threads, str(tmp_path), cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    with Transfer(LocalObjectStore(tmp_path)) as transfer:
        lease = Bucket(transfer, "saves").lock("run")
        take_leases({"run": lease}, "run 'run'", 0)
        lease.release()


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As some network file systems are: the run starts, and the log says that a second launch would start as well."""

    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lease = Folder(tmp_path).lock("run")
    take_leases({"run": lease}, "run 'run'", 0)
    assert "No locks available. A second launch of this run is not refused" in caplog.text
    assert lease.lost_to is None
    lease.release()


def test_runs_of_different_names_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """They may share a folder: while the lease of one is held, that of the other is had at once."""
    with held("folder", str(tmp_path)):
        lease = Folder(tmp_path).lock("other")
        take_leases({"other": lease}, "run 'other'", 0)
        with pytest.raises(RunInUseError):
            take_leases({"run": Folder(tmp_path).lock("run")}, "run 'run'", 0)
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


# ── other machines, and what looks like this one ─────────────────────────────────────────────────────────────────────
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


BECOME_ANOTHER_USER = """
    import os
    transfer.read_all("saves/.run.lease")  # from here on nothing more is imported
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
"""
TRY_AS_ANOTHER_USER = TRY_BUCKET.replace("    print(", f"{BECOME_ANOTHER_USER}    print(", 1)
HIDDEN_PROCESSES = "mount -t proc -o hidepid=2 proc /proc"
HIDDEN_NAMESPACE = "mount -t tmpfs none /proc/$$/ns"


def tried_behind(mount: str, program: str, bucket: str) -> str:
    """What ``program`` says where ``mount`` was called before, for it alone."""
    behind = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    try:
        done = subprocess.run([*behind, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare program")
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    command = [*behind, sys.executable, "-c", program, bucket]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_lease_is_not_taken_from_a_process_that_the_system_hides(bucket: str) -> None:
    """Two users of a machine whose /proc shows each its own processes (``hidepid=2``): the other one's are not dead."""
    with held("bucket", bucket) as holder:
        told = tried_behind(HIDDEN_PROCESSES, TRY_AS_ANOTHER_USER, bucket)
    assert f"process {holder.pid} on" in told, "a living holder's lease was taken"


def test_a_lease_is_not_taken_where_the_process_namespace_is_not_known(bucket: str) -> None:
    """A number that is free here may be a living process of another container that cannot read its namespace either."""
    unknown = {"id": "x", "process": f"process {1 << 30} on here", "pid": 1 << 30, "boot": "unknown"}
    with Transfer(open_store(bucket)) as transfer:
        transfer.put_bytes("saves/.run.lease", json.dumps(unknown).encode())
    assert f"process {1 << 30} on" in tried_behind(HIDDEN_NAMESPACE, TRY_BUCKET, bucket)


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


def test_a_deleted_lease_is_written_again_unless_the_holder_was_silent(bucket: str) -> None:
    """After a long silence another launch may have taken the lease, trained and ended."""
    name = "saves/.run.lease"
    with Transfer(open_store(bucket)) as transfer:
        lease = Bucket(transfer, "saves").lock("run")
        take_leases({"run": lease}, "run 'run'", 0)
        transfer.delete(name)
        for _ in range(2):
            lease.confirm(max_age=0)
        assert lease.lost_to is None
        assert transfer.exists(name)
        transfer.delete(name)
        lease._renewed_at -= 20
        lease.confirm(max_age=0)
        assert lease.lost_to is not None
        lease.release()
        assert not transfer.exists(name)


def test_a_silent_holder_of_two_leases_is_waited_for_once(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relaunch on another machine does not wait for each name of the run."""
    monkeypatch.setattr(module, "DEAD_SECONDS", 3)
    with Transfer(open_store(bucket)) as transfer:
        place = Bucket(transfer, "saves")
        leases = {name: place.lock(name) for name in ("files", "link", "more")}
        for name in leases:
            transfer.put_bytes(f"saves/.{name}.lease", b'{"process": "process 1 on elsewhere", "id": "x"}')
        began = time.monotonic()
        take_leases(leases, "run 'run'", 20)
        assert 3 < time.monotonic() - began < 6
        assert all(lease.taken_over for lease in leases.values())
        for lease in leases.values():
            lease.release()
        assert list(transfer.list("")) == []


def test_leases_of_one_process_share_the_object(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beats, no lease is lost to its own process, and the last release removes the object."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    with Transfer(open_store(bucket)) as transfer:
        leases = [Bucket(transfer, "saves").lock("run") for _ in range(3)]
        for lease in leases:
            take_leases({"run": lease}, "run 'run'", 0)
        time.sleep(1)
        for lease in leases:
            assert lease.lost_to is None
            assert transfer.exists("saves/.run.lease")
            lease.release()
        assert not transfer.exists("saves/.run.lease")


def test_a_lease_that_may_not_be_read_is_no_other_process(oci_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write to a bucket of Oracle and not read, which it tells as 'not found', gets a PermissionError soon."""
    for name, value in oci_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = oci_server.new_bucket()
    oci_server.fail(bucket, "hide")
    with open_store(f"oci://{bucket}") as store, Transfer(store) as transfer:
        lease = Bucket(transfer, "saves").lock("run")
        with pytest.raises(PermissionError, match=rf"oci://{bucket}/saves/\.run\.lease: .* read"):
            take_leases({"run": lease}, "run 'run'", 30)


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
