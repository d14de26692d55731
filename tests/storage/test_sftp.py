"""SFTPObjectStore: the contract of every store on two servers, what it refuses, and what lost connections leave."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from storage.servers.sftp import SFTPServer, running_sftp

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage import ObjectStore, Transfer, open_store
from composerlite.storage.stores.sftp import SFTPObjectStore
from composerlite.testing.contracts import ObjectStoreContract


class TestSFTPObjectStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, sftp_server: SFTPServer) -> Generator[SFTPObjectStore]:
        with SFTPObjectStore(sftp_server.host, **sftp_server.store_kwargs) as store:
            yield store

    @pytest.fixture
    def missing_bucket(self, sftp_server: SFTPServer) -> Generator[SFTPObjectStore]:
        with SFTPObjectStore(sftp_server.host, **sftp_server.store_kwargs, cwd="missing") as store:
            yield store

    @pytest.mark.soak  # a thousand requests, one by one
    def test_long_listings_are_complete(self, store: ObjectStore, prefix: str) -> None:
        super().test_long_listings_are_complete(store, prefix)


@pytest.fixture(scope="module")
def kwargs(sftp_server: SFTPServer) -> dict[str, Any]:
    return {**sftp_server.store_kwargs, "cwd": sftp_server.new_folder()}


def fault(server: SFTPServer, **changed: Any) -> SFTPObjectStore:
    return SFTPObjectStore(server.host, **{**server.store_kwargs, **changed})


# ── who may log in, and where ────────────────────────────────────────────────────────────────────────────────────────
def test_an_unknown_host_is_refused(sftp_server: SFTPServer, tmp_path: Path) -> None:
    """A host whose key is not known is not talked to; the error says how to add the key."""
    (tmp_path / "known").touch()
    with (
        fault(sftp_server, known_hosts_filename=tmp_path / "known") as store,
        pytest.raises(PermissionError, match=rf"not known.*ssh-keyscan -p {sftp_server.port} 127\.0\.0\.1 >> .*known"),
    ):
        store.check_writable("run/")


def test_a_host_with_another_key_is_refused(sftp_server: SFTPServer, tmp_path: Path) -> None:
    """A host that shows another key than the known one is not talked to."""
    other = sftp_server.other_key_file.with_suffix(".pub").read_text()
    (tmp_path / "known").write_text(f"[127.0.0.1]:{sftp_server.port} {other}")
    with (
        fault(sftp_server, known_hosts_filename=tmp_path / "known") as store,
        pytest.raises(PermissionError, match="another key"),
    ):
        store.check_writable("run/")


def test_a_host_may_be_trusted_blindly(sftp_server: SFTPServer, tmp_path: Path) -> None:
    """Who asks for it talks to any host."""
    (tmp_path / "known").touch()
    trusting = {"known_hosts_filename": tmp_path / "known", "missing_host_key_policy": "AutoAddPolicy"}
    with fault(sftp_server, **trusting) as store:
        store.check_writable("run/")


@pytest.mark.parametrize("wrong", ["key", "user", "nothing"])
def test_a_wrong_login_is_no_permission(sftp_server: SFTPServer, wrong: str) -> None:
    """A wrong key, a wrong user and no key at all are PermissionError, which is not tried again."""
    changed = {
        "key": {"key_filename": sftp_server.other_key_file},
        "user": {"username": "somebody"},
        "nothing": {"key_filename": None, "connect_kwargs": {"allow_agent": False, "look_for_keys": False}},
    }
    with (
        fault(sftp_server, **changed[wrong]) as store,
        pytest.raises(PermissionError, match=f"{sftp_server.port}.*key"),
    ):
        store.check_writable("run/")


def test_files_that_are_missing_are_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key file or a file of known hosts that is not there is a ConfigError, with where its name came from."""
    with pytest.raises(ConfigError, match="key_filename"):
        SFTPObjectStore("host", key_filename=tmp_path / "missing")
    monkeypatch.setenv("COMPOSERLITE_SFTP_KNOWN_HOSTS_FILE", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="COMPOSERLITE_SFTP_KNOWN_HOSTS_FILE"):
        SFTPObjectStore("host")
    with pytest.raises(ConfigError, match="RejectPolicy"):
        SFTPObjectStore("host", missing_host_key_policy="RejectPolcy")


@pytest.mark.parametrize("bucket", ["user:secret@host", "host:port", "user@", "host:22:23"])
def test_an_address_that_is_none_is_refused(bucket: str) -> None:
    """What is no ``user@host:port`` is a ConfigError that does not repeat a password."""
    with pytest.raises(ConfigError, match="sftp://") as caught:
        SFTPObjectStore.at(bucket)
    assert "secret" not in str(caught.value)


def test_a_uri_and_the_environment_are_enough(sftp_server: SFTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is opened by its URI, with the key and the known hosts from the environment, and tells the same URI."""
    for name, value in sftp_server.environment.items():
        monkeypatch.setenv(name, value)
    name = f"{sftp_server.new_folder()}/run/ep1.pt"
    with open_store(f"sftp://{sftp_server.bucket}/{name}") as store:
        store.put_bytes(name, b"x")
        assert store.get_uri(name) == f"sftp://{sftp_server.bucket}/{name}"
    assert (sftp_server.root / name).read_bytes() == b"x"


def test_nobody_answers() -> None:
    """A port where nobody listens may be a server that starts again: transient."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with (
            SFTPObjectStore("127.0.0.1", taken.getsockname()[1], "user", "password") as store,
            pytest.raises(ObjectStoreTransientError, match="127"),
        ):
            store.list_objects()


# ── what a server may do to an upload ────────────────────────────────────────────────────────────────────────────────
def test_a_server_that_dies_leaves_no_object(tmp_path: Path) -> None:
    """An upload that loses its server is transient; afterwards no object is there, and the same store goes on.

    What it left is an unfinished upload, which is removed when it is old enough.
    """
    (tmp_path / "source").write_bytes(data := os.urandom(4 << 20))
    with running_sftp(folder=tmp_path, options=("--die-after-bytes=1000000",)) as server:
        store = fault(server)
        with pytest.raises(ObjectStoreTransientError, match=r"sftp://.*/run/a: upload: "):
            store.upload_object("run/a", tmp_path / "source")
    with store, running_sftp(port=server.port, folder=tmp_path) as server, Transfer(store) as transfer:
        assert list(store.list_objects()) == []
        (left,) = (server.root / "run").iterdir()
        store.upload_object("run/a", tmp_path / "source")
        assert store.read_range("run/a", 0, 5 << 20) == data
        assert [upload.name for upload in store.unfinished_parts("run/")] == ["run/a"]
        assert transfer.abort_stale("run/", timedelta(days=1)) == []  # perhaps another process still writes it
        os.utime(left, (0, left.stat().st_mtime - 25 * 3600))
        assert len(transfer.abort_stale("run/", timedelta(days=1))) == 1
        assert [path.name for path in (server.root / "run").iterdir()] == ["a"]


def test_a_server_that_stalls_is_not_waited_for(tmp_path: Path) -> None:
    """An answer that does not come in time is transient, and does not disturb the next verb."""
    with (
        running_sftp(options=("--stall-after-bytes=10",)) as server,
        fault(server, answer_timeout=3.0) as store,
    ):
        store.check_writable("")  # logs in
        begun = time.monotonic()
        with pytest.raises(ObjectStoreTransientError, match=r"sftp://.*/a: write: "):
            store.put_bytes("a", bytes(20))
        assert time.monotonic() - begun < 6.0  # once, and not again to clean up
        store.put_bytes("a", bytes(20))
        assert [info.name for info in store.list_objects()] == ["a"]


@pytest.mark.parametrize("at", [0, 1_000_000, 2_999_999])
def test_a_write_that_fails_is_noticed(tmp_path: Path, at: int) -> None:
    """One write of many that the server refuses, wherever it is, fails the upload, and nothing of it is left."""
    (tmp_path / "source").write_bytes(bytes(3_000_000))
    with running_sftp(options=(f"--fail-after-bytes={at}",)) as server, fault(server) as store:
        with pytest.raises(ObjectStoreError, match="no space"):
            store.upload_object("a", tmp_path / "source")
        assert list(server.root.iterdir()) == []
        store.upload_object("a", tmp_path / "source")
        assert store.get_object_size("a") == 3_000_000


def test_a_folder_that_cannot_be_written_is_found_by_the_check(tmp_path: Path) -> None:
    """Where writing is forbidden the check raises PermissionError; reading works."""
    with running_sftp(options=("--read-only",)) as server, fault(server) as store:
        (server.root / "a").write_bytes(b"x")
        for prefix in ("", "run/"):
            with pytest.raises(PermissionError, match="read only"):
                store.check_writable(prefix)
        assert store.read_range("a", 0, 9) == b"x"


def test_a_server_without_extensions() -> None:
    """Version 3 of the protocol, bare, is enough to create: one of two processes succeeds."""
    with running_sftp(options=("--plain",)) as server, fault(server) as store:
        store.put_bytes("a", b"first", create_only=True)
        with pytest.raises(FileExistsError):
            store.put_bytes("a", b"second", create_only=True)
        assert store.read_range("a", 0, 9) == b"first"
        assert [path.name for path in server.root.iterdir()] == ["a"]


def test_a_server_that_removes_nothing_can_be_written(caplog: pytest.LogCaptureFixture) -> None:
    """The check passes and says what stays."""
    with running_sftp(options=("--keep",)) as server, fault(server) as store:
        store.check_writable("run/")
    assert "nothing is removed here" in caplog.text


def test_an_object_is_not_a_folder_of_objects(sftp_server: SFTPServer, kwargs: dict[str, Any]) -> None:
    """Where ``a`` is an object ``a/b`` cannot be, and the other way round."""
    with SFTPObjectStore(sftp_server.host, **kwargs) as store:
        store.put_bytes("a", b"")
        store.put_bytes("c/d", b"")
        for name in ("a/b", "c"):
            with pytest.raises(ObjectStoreError):
                store.put_bytes(name, b"")
            with pytest.raises(FileNotFoundError):
                store.get_object_size(name)
            store.delete_object(name)
        assert [info.name for info in store.list_objects()] == ["a", "c/d"]


def test_more_threads_than_channels(sftp_server: SFTPServer, kwargs: dict[str, Any]) -> None:
    """Threads beyond the channels that a server allows wait for one."""
    with SFTPObjectStore(sftp_server.host, **kwargs) as store, ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda n: store.put_bytes(f"many/{n}", bytes(100_000)), range(40)))
        assert len(store.list_objects("many/")) == 40


# ── OpenSSH ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_openssh(openssh_server: SFTPServer, tmp_path: Path) -> None:
    """The server that most have takes and gives objects, replaces them, and lets one of many create."""
    (tmp_path / "source").write_bytes(data := os.urandom((5 << 20) + 3))
    with fault(openssh_server, cwd=str(openssh_server.root)) as store:
        store.check_writable("run/")
        assert list(openssh_server.root.iterdir()) == []
        for _ in range(2):
            store.upload_object("run/ep1/a", tmp_path / "source")
        store.download_object("run/ep1/a", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == data
        assert store.read_range("run/ep1/a", 1_000_000, 100_000) == data[1_000_000:1_100_000]
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(lambda n: creates(store, n), range(8))) == 1
        for name in ("run", "run/ep1/a/b"):
            with pytest.raises(ObjectStoreError):
                store.put_bytes(name, b"")
            with pytest.raises(FileNotFoundError):
                store.get_object_size(name)
            store.delete_object(name)
        assert [info.name for info in store.list_objects("run")] == ["run/ep1/a", "run/one"]
        for name in ("run/ep1/a", "run/one"):
            store.delete_object(name)
        assert list(openssh_server.root.iterdir()) == []


def creates(store: SFTPObjectStore, number: int) -> bool:
    try:
        store.put_bytes("run/one", str(number).encode(), create_only=True)
    except FileExistsError:
        return False
    return True
