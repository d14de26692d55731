"""GCSObjectStore: the contract by both of the service's protocols, and what is refused."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from storage.servers.scripted_http import Answer, running_scripted

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage import ObjectStore, RetryPolicy, Transfer, open_store
from composerlite.storage.stores.gcs import GCSObjectStore
from composerlite.testing.contracts import ObjectStoreContract

pytest.importorskip("google.cloud.storage", reason="the package google-cloud-storage is not installed")
google_crc32c = pytest.importorskip("google_crc32c")  # which comes with it


@pytest.fixture
def json_environment(gcs_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gcs_server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(gcs_server: Any) -> str:
    return gcs_server.new_bucket()


@pytest.fixture
def opened(json_environment: None, bucket: str) -> Iterator[GCSObjectStore]:
    with GCSObjectStore(bucket) as store:
        yield store


class TestContract(ObjectStoreContract):
    """By Google's protocol, against an emulator."""

    @pytest.fixture
    def store(self, opened: GCSObjectStore) -> ObjectStore:  # pyright: ignore[reportIncompatibleMethodOverride]
        return opened

    @pytest.fixture
    def missing_bucket(self, json_environment: None) -> Generator[ObjectStore]:
        with GCSObjectStore("no-such-bucket") as store:
            yield store


@pytest.fixture(scope="module")
def hmac_environment(s3_server: Any) -> dict[str, str]:
    return {
        "GCS_KEY": s3_server.access_key,
        "GCS_SECRET": s3_server.secret_key,
        "GCS_ENDPOINT_URL": s3_server.endpoint_url,
    }


@pytest.fixture(scope="module")
def hmac_store(s3_server: Any, hmac_environment: dict[str, str]) -> Iterator[GCSObjectStore]:
    with _opened_with(hmac_environment, s3_server.new_bucket()) as store:
        yield store


@pytest.fixture(scope="module")
def hmac_missing_bucket(hmac_environment: dict[str, str]) -> Iterator[GCSObjectStore]:
    with _opened_with(hmac_environment, "no-such-bucket") as store:
        yield store


class TestContractWithHMAC(ObjectStoreContract):
    """By the S3 protocol, against a server of it. All tests share a store: its client takes long to make."""

    @pytest.fixture
    def store(self, hmac_store: GCSObjectStore) -> ObjectStore:  # pyright: ignore[reportIncompatibleMethodOverride]
        return hmac_store

    @pytest.fixture
    def missing_bucket(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hmac_missing_bucket: GCSObjectStore
    ) -> ObjectStore:
        return hmac_missing_bucket

    @pytest.mark.soak  # a thousand requests, one by one
    def test_long_listings_are_complete(self, store: ObjectStore, prefix: str) -> None:
        super().test_long_listings_are_complete(store, prefix)


def _opened_with(environment: dict[str, str], bucket: str, **kwargs: Any) -> GCSObjectStore:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return GCSObjectStore(bucket, **kwargs)


@pytest.mark.parametrize("opener", ["opened", "hmac_store"])
def test_a_store_has_its_uri_by_either_protocol(opener: str, request: pytest.FixtureRequest) -> None:
    """What a user opened has the address of its bucket in GCS; a wrong argument is named."""
    store: Any = request.getfixturevalue(opener)
    assert store.get_uri("a") == f"gs://{store.bucket}/{store.prefix}a"
    with pytest.raises(ConfigError, match="no argument 'projct'"):
        GCSObjectStore("b", projct="x")  # pyright: ignore[reportCallIssue]


# ── by Google's protocol ─────────────────────────────────────────────────────────────────────────────────────────
def test_names_are_below_the_prefix(opened: GCSObjectStore, bucket: str) -> None:
    """With a prefix every verb means the names below it, and none returns it."""
    with GCSObjectStore(bucket, "/a/run/") as below:
        below.put_bytes("x", b"1")
        opened.put_bytes("outside", b"2")
        assert [info.name for info in below.list_objects()] == ["x"]
        assert below.get_uri("x") == f"gs://{bucket}/a/run/x"
    assert [info.name for info in opened.list_objects()] == ["a/run/x", "outside"]


def test_a_uri_opens_from_the_environment(json_environment: None, bucket: str) -> None:
    """``gs://`` needs no arguments where the environment says where the service is."""
    with open_store(f"gs://{bucket}/run") as store:
        store.put_bytes("run/a", b"x")
        assert store.get_object_size("run/a") == 1


def test_a_large_file_goes_in_chunks(opened: GCSObjectStore, tmp_path: Path) -> None:
    """A file of several chunks arrives whole."""
    (tmp_path / "source").write_bytes(data := os.urandom(1 << 20) * 40)
    told: list[tuple[int, int]] = []
    opened.upload_object("big", tmp_path / "source", lambda done, total: told.append((done, total)))
    opened.download_object("big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert told == [(40 << 20, 40 << 20)]


def test_training_keeps_its_random_numbers(opened: GCSObjectStore) -> None:
    """An upload, whose separators are drawn by chance, leaves the generator of training as it was."""
    before = random.getstate()
    opened.put_bytes("a", b"x")
    assert random.getstate() == before


def test_a_service_account_is_used(
    gcs_server: Any, bucket: str, answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The credentials of the file that the environment names are used, and refused ones are PermissionError."""
    _set_service_account(tmp_path, answers.endpoint_url, monkeypatch)
    answers.body = b'{"access_token": "t", "expires_in": 3600, "token_type": "Bearer"}'
    answers.headers = {"Content-Type": "application/json"}
    with GCSObjectStore(bucket, endpoint_url=gcs_server.endpoint_url) as store:
        store.put_bytes("a", b"x")
    assert answers.requests == ["POST /token"]
    answers.status, answers.body = 400, b'{"error": "invalid_grant", "error_description": "Invalid JWT"}'
    with (
        GCSObjectStore(bucket, endpoint_url=gcs_server.endpoint_url) as store,
        pytest.raises(
            PermissionError, match=rf"gs://{bucket}/a: write: .*invalid_grant.*GOOGLE_APPLICATION_CREDENTIALS"
        ),
    ):
        store.put_bytes("a", b"x")


def _set_service_account(folder: Path, token_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "client_email": "test@test",
        "private_key": key.decode(),
        "token_uri": f"{token_server}/token",
        "project_id": "test",
    }
    (folder / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(folder / "account.json"))


# ── by the S3 protocol ───────────────────────────────────────────────────────────────────────────────────────────
def test_an_hmac_key_names_objects_in_gs(s3_server: Any, hmac_environment: dict[str, str]) -> None:
    """With a key of the environment objects are still those of ``gs://``, below the prefix."""
    bucket = s3_server.new_bucket()
    with _opened_with(hmac_environment, bucket, prefix="a/run") as store:
        store.put_bytes("x", b"1")
        assert store.get_uri("x") == f"gs://{bucket}/a/run/x"
        assert [info.name for info in store.list_objects()] == ["x"]
        assert not store.creates_atomically
        with pytest.raises(FileNotFoundError, match=f"gs://{bucket}/a/run/y"):
            store.get_object_size("y")


def test_a_wrong_hmac_key_is_refused(s3_server: Any, hmac_environment: dict[str, str]) -> None:
    """A secret that is wrong is PermissionError before training starts."""
    with (
        _opened_with({**hmac_environment, "GCS_SECRET": "wrong"}, s3_server.new_bucket()) as store,
        pytest.raises(PermissionError, match="gs://"),
    ):
        store.check_writable("run")


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["GCS_KEY", "GCS_SECRET"])
def test_half_an_hmac_key_is_a_config_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key without its secret, and a secret without its key, are refused."""
    monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError, match="GCS_KEY and GCS_SECRET both"):
        GCSObjectStore("b")


def test_missing_credentials_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no credentials, opening is PermissionError and says how to get some."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(PermissionError, match=r"gs://b/: open: .*gcloud auth application-default login"):
        GCSObjectStore("b")


def test_a_missing_credentials_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of credentials that is not there is PermissionError with its path."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(PermissionError, match=str(tmp_path / "none.json")):
        GCSObjectStore("b")


@pytest.mark.parametrize("endpoint_url", ["nonsense", "ftp://host", "http://127.0.0.1:1/x y"])
def test_a_wrong_endpoint_is_a_config_error(endpoint_url: str) -> None:
    """An address that is none is refused before anything is sent."""
    with pytest.raises(ConfigError, match="endpoint_url"):
        GCSObjectStore("b", endpoint_url=endpoint_url)


def test_a_missing_package_is_named() -> None:
    """Without its package, opening the store says which extra has it."""
    code = "import sys; sys.modules['google.cloud.storage'] = None; from composerlite.storage import open_store; open_store('gs://b')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError" in done.stderr
    assert "pip install 'composerlite[gcs]'" in done.stderr


# ── faults of the service ────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def failing(answers: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[GCSObjectStore]:
    """A store whose service is the one that the test lets fail."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", answers.endpoint_url)
    answers.headers = {"x-goog-generation": "1"}
    with GCSObjectStore("b") as store:
        yield store


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (503, ObjectStoreTransientError),
        (500, ObjectStoreTransientError),
        (429, ObjectStoreTransientError),
        (408, ObjectStoreTransientError),
        (0, ObjectStoreTransientError),
        (401, PermissionError),
        (403, PermissionError),
        (404, FileNotFoundError),
        (400, ObjectStoreError),
    ],
)
def test_faults_are_told_apart(
    answers: Any, failing: GCSObjectStore, tmp_path: Path, status: int, error: type[Exception]
) -> None:
    """Each verb raises what the fault means, at the first attempt, with the name of the object."""
    (tmp_path / "source").write_bytes(b"x")
    (tmp_path / "big").write_bytes(bytes(9 << 20))
    answers.status = status
    uses = [
        lambda: failing.put_bytes("run/a", b"x"),
        lambda: failing.upload_object("run/a", tmp_path / "source"),
        lambda: failing.upload_object("run/a", tmp_path / "big"),
        lambda: failing.download_object("run/a", tmp_path / "copy"),
        lambda: failing.read_range("run/a", 0, 5),
        lambda: failing.read_tail("run/a", 5),
        lambda: failing.read_versioned("run/a"),
        lambda: failing.list_level("run/a"),
        lambda: failing.get_object_size("run/a"),
        lambda: failing.list_objects("run/a"),
        lambda: failing.check_writable("run/a"),
    ]
    if status != 404:
        uses.append(lambda: failing.delete_object("run/a"))
    for use in uses:
        answers.requests.clear()
        with pytest.raises(error, match="gs://b/run/a") as caught:
            use()
        assert caught.type is error
        assert len(answers.requests) == 1
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("status", [404, 410])
def test_a_session_that_the_service_has_lost_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """An upload whose session the service has lost, which it says with 404 or 410, is sent again."""
    (tmp_path / "big").write_bytes(bytes(size := 9 << 20))
    checksum = b'{"crc32c": "%s"}' % base64.b64encode(google_crc32c.value(bytes(size)).to_bytes(4, "big"))
    with running_scripted(Answer(503)) as service:
        begun, done = Answer(200, headers={"Location": f"{service.url}/session"}), Answer(200, checksum)
        service.script(begun, Answer(status), begun, done)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", service.url)
        with GCSObjectStore("b") as store, Transfer(store, retry=RetryPolicy(first_delay_seconds=0.001)) as transfer:
            transfer.upload("run/a", tmp_path / "big")
        assert [request.method for request in service.requests] == ["POST", "PUT", "POST", "PUT"]


def test_a_page_of_a_proxy_is_no_absence(answers: Any, failing: GCSObjectStore, tmp_path: Path) -> None:
    """A page of HTML with status 404 is not the service's: nothing is taken for missing, so no run begins anew."""
    answers.status, answers.body = 404, b"\n<!DOCTYPE html><p>Nothing here."
    for use in (
        lambda: failing.put_bytes("run/a", b"x"),
        lambda: failing.download_object("run/a", tmp_path / "copy"),
        lambda: failing.read_range("run/a", 0, 5),
        lambda: failing.read_tail("run/a", 5),
        lambda: failing.read_versioned("run/a"),
        lambda: failing.list_level("run/a"),
        lambda: failing.get_object_size("run/a"),
        lambda: failing.list_objects("run/a"),
        lambda: failing.delete_object("run/a"),
        lambda: failing.check_writable("run/a"),
    ):
        message = r"(?s)gs://b/run/a.*: the answer is a page of HTML: .*endpoint_url.*Nothing here"
        with pytest.raises(ObjectStoreError, match=message):
            use()


def test_a_page_of_a_proxy_is_no_success(answers: Any, failing: GCSObjectStore, tmp_path: Path) -> None:
    """A page of HTML with status 200 is not the service's: nothing counts as written, read or deleted."""
    answers.body, answers.headers = b"<html>Sign in</html>", {"content-type": "text/html"}
    (tmp_path / "source").write_bytes(b"x")
    for verb, use in {
        "write": lambda: failing.put_bytes("run/a", b"x"),
        "create": lambda: failing.put_bytes("run/a", b"x", create_only=True),
        "upload": lambda: failing.upload_object("run/a", tmp_path / "source"),
        "read": lambda: failing.read_range("run/a", 0, 20),
        "get the size": lambda: failing.download_object("run/a", tmp_path / "copy"),
        "list": lambda: failing.list_objects("run/a"),
        "delete": lambda: failing.delete_object("run/a"),
    }.items():
        with pytest.raises(ObjectStoreTransientError, match=f"gs://b/run/a: {verb}: .*not from Google's service"):
            use()
    with pytest.raises(ObjectStoreError, match=r"gs://b/run/a.*: check"):
        failing.check_writable("run/a")
    assert not (tmp_path / "copy").exists()


def test_no_wait_is_endless(answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that does not answer in time is a transient error."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", answers.endpoint_url)
    answers.delay_seconds = 0.5
    with GCSObjectStore("b", read_timeout_seconds=0.1) as store:
        for use in (
            lambda: store.put_bytes("run/a", b"x"),
            lambda: store.download_object("run/a", tmp_path / "copy"),
            lambda: store.list_objects("run/a"),
            lambda: store.check_writable("run/a"),
        ):
            with pytest.raises(ObjectStoreTransientError, match=r"gs://b/run/a.*: .*[Tt]ime"):
                use()


def test_damaged_downloads_are_no_files(answers: Any, failing: GCSObjectStore, tmp_path: Path) -> None:
    """A body that ends early is a transient error, and there is no file."""
    answers.body = os.urandom(300_000)
    answers.sent_bytes = 100_000
    with pytest.raises(ObjectStoreTransientError, match="run/a: get the size"):
        failing.download_object("run/a", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ObjectStoreTransientError, match="run/a: read"):
        failing.read_range("run/a", 0, 300_000)


def test_a_range_is_taken_out_of_a_whole_object(answers: Any, failing: GCSObjectStore) -> None:
    """A service that does not know ranges sends everything."""
    answers.body = b"0123456789"
    assert failing.read_range("run/a", 2, 3) == b"234"
