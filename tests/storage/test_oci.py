"""OCIObjectStore: the contract, against a stand-in that the real SDK talks to, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from storage.servers.scripted_http import Answer, running_scripted

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage import ObjectStore, open_store
from composerlite.testing.contracts import ObjectStoreContract

pytest.importorskip("oci", reason="the package oci is not installed: pip install oci")

from composerlite.storage.stores.oci import OCIObjectStore


@pytest.fixture
def bucket(oci_server: Any) -> str:
    return oci_server.new_bucket()


@pytest.fixture
def kwargs(oci_server: Any) -> dict[str, Any]:
    return {"config_file": oci_server.config_file, "endpoint_url": oci_server.endpoint_url}


@pytest.fixture
def opened(bucket: str, kwargs: dict[str, Any]) -> Iterator[OCIObjectStore]:
    with OCIObjectStore(bucket, **kwargs) as store:
        yield store


class TestContract(ObjectStoreContract):
    """The whole bucket."""

    @pytest.fixture
    def store(self, opened: OCIObjectStore) -> ObjectStore:  # pyright: ignore[reportIncompatibleMethodOverride]
        return opened

    @pytest.fixture
    def missing_bucket(self, kwargs: dict[str, Any]) -> Generator[ObjectStore]:
        with OCIObjectStore("no-such-bucket", **kwargs) as store:
            yield store


def test_names_are_below_the_prefix(bucket: str, kwargs: dict[str, Any], opened: OCIObjectStore) -> None:
    """With a prefix every verb means the names below it, and none returns it."""
    with OCIObjectStore(bucket, "/a/run/", **kwargs) as below:
        below.put_bytes("x", b"1")
        opened.put_bytes("outside", b"2")
        below.start_parts("y")
        assert [info.name for info in below.list_objects()] == ["x"]
        assert [upload.name for upload in below.unfinished_parts("")] == ["y"]
        assert below.get_uri("x") == f"oci://{bucket}/a/run/x"
    assert [info.name for info in opened.list_objects()] == ["a/run/x", "outside"]


def test_a_uri_opens_from_the_environment(oci_server: Any, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``oci://`` needs no arguments where the environment names the configuration file."""
    for name, value in oci_server.environment.items():
        monkeypatch.setenv(name, value)
    with open_store(f"oci://{bucket}/run") as store:
        store.put_bytes("run/a", b"x")
        assert store.get_object_size("run/a") == 1


def test_many_unfinished_uploads_are_all_found(oci_server: Any, opened: OCIObjectStore) -> None:
    """More uploads and parts than the service lists at once are all found. Parts that are there are not sent again."""
    for number in range(120):
        opened.start_parts(f"run/{number:03}")
    found = opened.unfinished_parts("run/")
    assert [upload.name for upload in found] == [f"run/{number:03}" for number in range(120)]
    for number in range(1, 121):
        found[0].send(number, memoryview(b"%d" % number))
    (again, *_) = opened.unfinished_parts("run/000")
    before = len(oci_server.requests)
    for number in range(1, 121):
        again.send(number, memoryview(b"%d" % number))
    assert len(oci_server.requests) == before + 2  # two pages of parts
    again.send(120, memoryview(b"other"))
    assert len(oci_server.requests) == before + 3


def test_a_commit_without_all_parts_is_refused(opened: OCIObjectStore) -> None:
    """Completing an upload of which a part is missing makes no object, and says which."""
    upload = opened.start_parts("run/a")
    upload.send(2, memoryview(b"x"))
    with pytest.raises(ObjectStoreError, match=r"run/a: complete the upload: part 1 of"):
        upload.complete(count=2)
    assert list(opened.list_objects()) == []


def test_a_forgotten_upload_is_not_found(opened: OCIObjectStore) -> None:
    """Completing what the service has forgotten is FileNotFoundError."""
    upload = opened.start_parts("run/a")
    upload.send(1, memoryview(b"x"))
    upload.abort()
    with pytest.raises(FileNotFoundError, match="run/a"):
        upload.complete(count=1)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────
def test_an_unknown_key_is_refused(oci_server: Any, bucket: str) -> None:
    """A key that the service does not know is PermissionError, with the bucket and the way out."""
    with (
        OCIObjectStore(
            bucket, config_file=oci_server.stranger_config_file, endpoint_url=oci_server.endpoint_url
        ) as store,
        pytest.raises(PermissionError, match=rf"oci://{bucket}/run.check-\w+: check that .* key_file"),
    ):
        store.check_writable("run")


@pytest.mark.parametrize("config_file", [None, "argument"])
def test_a_missing_configuration_is_a_config_error(
    config_file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a configuration file the error names it and says how to get one."""
    monkeypatch.setenv("OCI_CONFIG_FILE", str(tmp_path / "environment"))
    with pytest.raises(ConfigError, match=rf"{tmp_path}/{config_file or 'environment'}.*oci setup config"):
        OCIObjectStore("b", config_file=config_file and tmp_path / config_file)


@pytest.mark.parametrize(
    ("line", "replacement", "message"),
    [
        ("user=", "", "'user': 'missing'"),
        ("fingerprint=", "fingerprint=zz", "'fingerprint': 'malformed'"),
        ("[DEFAULT]", "[OTHER]", "'user': 'missing'"),
        ("[DEFAULT]", "", "cannot be used"),
    ],
)
def test_a_wrong_configuration_is_a_config_error(
    oci_server: Any, tmp_path: Path, line: str, replacement: str, message: str
) -> None:
    """What is wrong in the configuration file is said, with its path."""
    config = _changed_config(oci_server, tmp_path, line, replacement)
    with pytest.raises(ConfigError, match=message) as caught:
        OCIObjectStore("b", config_file=config)
    assert str(config) in str(caught.value)


def test_a_missing_profile_is_a_config_error(kwargs: dict[str, Any]) -> None:
    """A profile that the configuration file does not have is named, with the file."""
    with pytest.raises(ConfigError, match=rf"{kwargs['config_file']} cannot be used: Profile 'TEAM' not found"):
        OCIObjectStore("b", **kwargs, profile="TEAM")


@pytest.mark.parametrize("content", [None, "no key"])
def test_a_missing_private_key_is_a_config_error(oci_server: Any, tmp_path: Path, content: str | None) -> None:
    """A private key that is not there, or is none, is a ConfigError with its path."""
    key = tmp_path / "key.pem"
    if content is not None:
        key.write_text(content)
    config = _changed_config(oci_server, tmp_path, "key_file=", f"key_file={key}")
    with pytest.raises(ConfigError, match=str(key)):
        OCIObjectStore("b", config_file=config)


def _changed_config(oci_server: Any, folder: Path, line: str, replacement: str) -> Path:
    lines = oci_server.config_file.read_text().splitlines()
    (folder / "config").write_text("\n".join(replacement if old.startswith(line) else old for old in lines))
    return folder / "config"


@pytest.mark.parametrize("endpoint_url", ["nonsense", "ftp://host", "http://127.0.0.1:1/x y"])
def test_a_wrong_endpoint_is_a_config_error(kwargs: dict[str, Any], endpoint_url: str) -> None:
    """An address that is none is refused before anything is sent."""
    with pytest.raises(ConfigError, match="endpoint_url"):
        OCIObjectStore("b", **{**kwargs, "endpoint_url": endpoint_url})


def test_a_missing_package_is_named() -> None:
    """Without its package, opening the store says which extra has it."""
    code = "import sys; sys.modules['oci'] = None; from composerlite.storage import open_store; open_store('oci://b')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError" in done.stderr
    assert "pip install 'composerlite[oci]'" in done.stderr


# ── faults of the service ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("503 ServiceUnavailable", ObjectStoreTransientError),
        ("500 InternalServerError", ObjectStoreTransientError),
        ("429 TooManyRequests", ObjectStoreTransientError),
        ("reset", ObjectStoreTransientError),
        ("401 NotAuthenticated", PermissionError),
        ("403 NotAllowed", PermissionError),
        ("404 NotAuthorizedOrNotFound", PermissionError),
        ("400 InvalidParameter", ObjectStoreError),
    ],
)
def test_faults_are_told_apart(
    oci_server: Any, bucket: str, opened: OCIObjectStore, tmp_path: Path, fault: str, error: type[Exception]
) -> None:
    """Each verb raises what the fault means, at the first attempt, with the name of the object."""
    (tmp_path / "source").write_bytes(b"x")
    upload = opened.start_parts("run/a")
    oci_server.fail(bucket, fault)
    for use in (
        lambda: opened.put_bytes("run/a", b"x"),
        lambda: opened.upload_object("run/a", tmp_path / "source"),
        lambda: opened.read_range("run/a", 0, 5),
        lambda: opened.read_tail("run/a", 5),
        lambda: opened.read_versioned("run/a"),
        lambda: opened.list_level("run/a"),
        lambda: opened.list_objects("run/a"),
        lambda: opened.delete_object("run/a"),
        lambda: opened.check_writable("run/a"),
        lambda: opened.unfinished_parts("run/a"),
        lambda: upload.send(1, memoryview(b"x")),
        lambda: upload.abort(),
    ):
        before = len(oci_server.requests)
        with pytest.raises(error, match=f"oci://{bucket}/run/a") as caught:
            use()
        assert caught.type is error
        assert len(oci_server.requests) == before + 1
    if fault.startswith("404"):
        error = FileNotFoundError  # an answer to HEAD has no code that tells one from the other
    for use in (
        lambda: opened.get_object_size("run/a"),
        lambda: opened.download_object("run/a", tmp_path / "copy"),
    ):
        with pytest.raises(error, match=f"oci://{bucket}/run/a"):
            use()
    assert not (tmp_path / "copy").exists()


def test_a_page_of_a_proxy_is_no_absence(answers: Any, oci_server: Any) -> None:
    """A page of HTML with status 404 is not the service's: nothing is taken for missing, so no run begins anew."""
    answers.status, answers.body = 404, b"\n<!DOCTYPE html><p>Nothing here."
    where: dict[str, Any] = {
        "config_file": oci_server.config_file,
        "endpoint_url": answers.endpoint_url,
        "namespace": "n",
    }
    with OCIObjectStore("b", **where) as store:
        for use in (
            lambda: store.put_bytes("run/a", b"x"),
            lambda: store.read_range("run/a", 0, 5),
            lambda: store.list_objects("run/a"),
            lambda: store.delete_object("run/a"),
            lambda: store.check_writable("run/a"),
            lambda: store.unfinished_parts("run/a"),
        ):
            message = r"(?s)run/a.*: the answer is a page of HTML: .*endpoint_url.*Nothing here"
            with pytest.raises(ObjectStoreError, match=message):
                use()


def test_a_page_of_a_proxy_is_no_success(oci_server: Any, tmp_path: Path) -> None:
    """A page of HTML with status 200 is not the service's: nothing counts as written, read or deleted."""
    (tmp_path / "source").write_bytes(b"x")
    with (
        running_scripted(Answer(200, b"<html>Sign in</html>", {"Content-Type": "text/html"})) as proxy,
        OCIObjectStore("b", config_file=oci_server.config_file, endpoint_url=proxy.url, namespace="n") as store,
        OCIObjectStore("b", config_file=oci_server.config_file, endpoint_url=proxy.url) as asks_for_namespace,
    ):
        for verb, use in {
            "write": lambda: store.put_bytes("run/a", b"x"),
            "create": lambda: store.put_bytes("run/a", b"x", create_only=True),
            "upload": lambda: store.upload_object("run/a", tmp_path / "source"),
            "get the size": lambda: store.download_object("run/a", tmp_path / "copy"),
            "read": lambda: store.read_range("run/a", 0, 20),
            "list": lambda: store.list_objects("run/a"),
            "delete": lambda: store.delete_object("run/a"),
            "check": lambda: store.check_writable("run/a"),
            "start": lambda: store.start_parts("run/a"),
            "list unfinished": lambda: store.unfinished_parts("run/a"),
            "write.*": lambda: asks_for_namespace.put_bytes("run/a", b"x"),
        }.items():
            with pytest.raises(ObjectStoreTransientError, match=f"oci://b/run/a.*: {verb}.*not from Oracle's"):
                use()
    assert not (tmp_path / "copy").exists()


def test_no_wait_is_endless(oci_server: Any, bucket: str, kwargs: dict[str, Any], tmp_path: Path) -> None:
    """A service that does not answer in time is a transient error."""
    with OCIObjectStore(bucket, **kwargs, read_timeout_seconds=1.0) as store:
        store.list_objects()  # the namespace is known from here on
        oci_server.fail(bucket, "stall")
        for use in (
            lambda: store.put_bytes("run/a", b"x"),
            lambda: store.download_object("run/a", tmp_path / "copy"),
            lambda: store.list_objects("run/a"),
        ):
            with pytest.raises(ObjectStoreTransientError, match=f"oci://{bucket}/run/a: .*[Tt]imeout"):
                use()


def test_two_writers_at_once_may_try_again(oci_server: Any, bucket: str, opened: OCIObjectStore) -> None:
    """That another writes the same object at the moment is transient."""
    oci_server.fail(bucket, "409 ConcurrentObjectUpdate")
    with pytest.raises(ObjectStoreTransientError, match="run/a: write: 409"):
        opened.put_bytes("run/a", b"x")


def test_damaged_downloads_are_no_files(oci_server: Any, bucket: str, opened: OCIObjectStore, tmp_path: Path) -> None:
    """A body that ends early is a transient error, and there is no file."""
    opened.put_bytes("run/a", os.urandom(300_000))
    oci_server.fail(bucket, "truncate")
    for use in (
        lambda: opened.download_object("run/a", tmp_path / "copy"),
        lambda: opened.read_range("run/a", 0, 300_000),
    ):
        with pytest.raises(ObjectStoreTransientError, match="run/a: read"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_nobody_listens(bucket: str, kwargs: dict[str, Any]) -> None:
    """A service that is not there is a transient error."""
    with (
        OCIObjectStore(bucket, **{**kwargs, "endpoint_url": "http://127.0.0.1:9"}) as store,
        pytest.raises(ObjectStoreTransientError, match=f"oci://{bucket}/a"),
    ):
        store.get_object_size("a")
