"""S3: the contract on a real service, a second one, and what users get wrong."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from storage.servers.moto import moto_server  # noqa: F401
from storage.servers.scripted_http import Answer, ScriptedServer, running_scripted
from storage.servers.seaweedfs import S3Server

pytest.importorskip("boto3", reason="the package boto3 is not installed: pip install boto3")

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage import Transfer, open_store
from composerlite.storage.stores.s3 import S3ObjectStore
from composerlite.testing.contracts import ObjectStoreContract

_KEYS: dict[str, Any] = {"aws_access_key_id": "AKIATEST", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
_ETAG = {"ETag": '"e"'}
_DONE = Answer(200, headers=_ETAG)
_PAGE = Answer(200, b"<html>Sign in</html>", {"Content-Type": "text/html"})
_STARTED = Answer(
    200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>", {"ETag": '"e"'}
)


def _refused(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>why</Message></Error>".encode())


@pytest.fixture(autouse=True, scope="module")
def _no_settings() -> Generator[None]:
    """No credentials and no addresses from the machine that the tests run on."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "S3_")):
                patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        yield


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server) -> str:
    return s3_server.new_bucket()


@pytest.fixture(scope="module")
def store(s3_server: S3Server, bucket: str) -> Generator[S3ObjectStore]:
    with S3ObjectStore(bucket, **s3_server.store_kwargs) as store:
        yield store


@pytest.fixture(scope="module")
def script() -> Generator[ScriptedServer]:
    """A service that answers what a test says."""
    with running_scripted() as server:
        yield server


@pytest.fixture(scope="module")
def scripted(script: ScriptedServer) -> Generator[S3ObjectStore]:
    """The bucket ``b`` of that service."""
    with S3ObjectStore("b", endpoint_url=script.url, **_KEYS) as store:
        yield store


class TestS3OnSeaweedFS(ObjectStoreContract):
    """The contract on the service itself."""

    @pytest.fixture
    def store(self, store: S3ObjectStore) -> S3ObjectStore:
        return store

    @pytest.fixture
    def missing_bucket(self, s3_server: S3Server) -> Generator[S3ObjectStore]:
        with S3ObjectStore("no-such-bucket", **s3_server.store_kwargs) as store:
            yield store


# ── a second service ─────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("checksum", ["crc32", "md5"])
@pytest.mark.parametrize("service", ["s3_server", "moto_server"])
def test_every_verb_on_two_services_with_both_checksums(
    request: pytest.FixtureRequest, tmp_path: Path, service: str, checksum: Any
) -> None:
    """The verbs do the same on another implementation, below a prefix, with either checksum."""
    server: S3Server = request.getfixturevalue(service)
    bucket, name, data = server.new_bucket(), "run/ep1.pt", os.urandom(100_000)
    with S3ObjectStore(bucket, "team/a", checksum=checksum, **server.store_kwargs) as store:
        store.check_writable("run")
        (tmp_path / "source").write_bytes(data)
        store.upload_object(name, tmp_path / "source")
        store.download_object(name, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == data
        assert store.read_range(name, 99_990, 100) == data[99_990:]
        assert store.read_range(name, 100_000, 100) == b""
        store.put_bytes("run/once", b"1", create_only=True)
        with pytest.raises(FileExistsError, match="run/once"):
            store.put_bytes("run/once", b"2", create_only=True)
        assert store.read_tail(name, 10) == (100_000, data[-10:])
        _, version = store.read_versioned("run/once")
        store.swap_bytes("run/once", b"3", version)
        with pytest.raises(FileExistsError, match="run/once"):
            store.swap_bytes("run/once", b"4", version)
        assert store.read_versioned("run/once")[0] == b"3"
        assert [info.name for info in store.list_level("run/")[0]] == [name, "run/once"]
        assert store.list_level() == ([], ["run/"])
        first, second = os.urandom(store.least_part_bytes), b"end"
        store.start_parts("run/parts").send(1, memoryview(first))
        (found,) = store.unfinished_parts("run/")
        found.send(1, memoryview(first))
        found.send(2, memoryview(second))
        found.complete(count=2)
        assert store.read_range("run/parts", len(first) - 1, 9) == first[-1:] + second
        assert [info.name for info in store.list_objects("run/")] == [name, "run/once", "run/parts"]
        assert store.get_uri(name) == f"s3://{bucket}/team/a/{name}"
        store.delete_object(name)
        with pytest.raises(FileNotFoundError, match=re.escape(name)):
            store.get_object_size(name)
    with S3ObjectStore(bucket, **server.store_kwargs) as store:
        assert [info.name for info in store.list_objects()] == ["team/a/run/once", "team/a/run/parts"]


def test_a_large_file_is_sent_in_parts(store: S3ObjectStore, s3_server: S3Server, tmp_path: Path) -> None:
    """A file above 64 MiB becomes one object of several parts, is told of as they arrive, and comes back."""
    data = os.urandom(1 << 20) * 65 + b"end"
    (tmp_path / "source").write_bytes(data)
    told: list[tuple[int, int]] = []
    store.upload_object("large", tmp_path / "source", lambda done, total: told.append((done, total)))
    assert 1 <= len(told) <= 9  # parts that arrive together are told of at once
    assert told == sorted(set(told))
    assert told[-1] == (len(data), len(data))
    head = s3_server.client().head_object(Bucket=store.bucket, Key=f"{store.prefix}large")
    assert head["ETag"].endswith('-9"')  # the number of parts, as S3 notes it
    store.download_object("large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


def test_a_transfer_ends_what_a_dead_process_began(store: S3ObjectStore, tmp_path: Path) -> None:
    """After a transfer there is no unfinished upload of that name, and the object has the bytes of the file."""
    part = store.least_part_bytes
    (tmp_path / "source").write_bytes(data := os.urandom(3 * part + 5))
    store.start_parts("go-on").send(1, memoryview(data)[:part])
    with Transfer(store, part_bytes=part) as transfer:
        transfer.upload("go-on", tmp_path / "source")
    assert store.unfinished_parts("go-on") == []
    assert store.read_range("go-on", 0, len(data)) == data


# ── who may do what ──────────────────────────────────────────────────────────────────────────────────────────────
def test_a_wrong_bucket_is_not_found(s3_server: S3Server) -> None:
    """A bucket that is not there is named by the check that is made before training."""
    with (
        S3ObjectStore("no-such-bucket", **s3_server.store_kwargs) as store,
        pytest.raises(FileNotFoundError, match=r"s3://no-such-bucket/run.*NoSuchBucket"),
    ):
        store.check_writable("run")


@pytest.mark.parametrize(
    "wrong", [{"aws_access_key_id": "AKIAWRONG"}, {"aws_secret_access_key": "wrong"}, {"aws_access_key_id": ""}]
)
def test_wrong_credentials_are_a_permission_error(
    s3_server: S3Server,
    bucket: str,
    wrong: dict[str, str],
) -> None:
    """A wrong key or secret is a PermissionError of every verb, and never 'not found'."""
    with S3ObjectStore(bucket, **{**s3_server.store_kwargs, **wrong}) as store:
        for use in _uses(store):
            with pytest.raises(PermissionError, match=bucket):
                use()


def test_missing_credentials_are_a_permission_error(s3_server: S3Server, bucket: str) -> None:
    """Without credentials the error says which variables to set."""
    with S3ObjectStore(bucket, endpoint_url=s3_server.endpoint_url) as store:
        for use in _uses(store):
            with pytest.raises(PermissionError, match="AWS_ACCESS_KEY_ID"):
                use()


def test_a_key_that_may_only_read_is_noticed_before_training(
    s3_server: S3Server,
    store: S3ObjectStore,
    bucket: str,
) -> None:
    """A read-only key reads, and is refused by the check and by a write, which leave nothing."""
    store.put_bytes("read-only/a", b"x")
    with S3ObjectStore(bucket, **s3_server.read_only_kwargs) as reader:
        assert reader.read_range("read-only/a", 0, 9) == b"x"
        for use in (
            lambda: reader.check_writable("read-only"),
            lambda: reader.put_bytes("read-only/b", b""),
            lambda: reader.put_bytes("read-only/b", b"", create_only=True),
            lambda: reader.start_parts("read-only/b"),
            lambda: reader.delete_object("read-only/a"),
        ):
            with pytest.raises(PermissionError, match="read-only"):
                use()
    assert [info.name for info in store.list_objects("read-only")] == ["read-only/a"]
    assert store.unfinished_parts("read-only") == []


def test_unsigned_requests_carry_no_credentials(s3_server: S3Server, bucket: str) -> None:
    """``unsigned`` needs no credentials and sends none; a bucket that is not public refuses it."""
    with (
        S3ObjectStore(bucket, unsigned=True, endpoint_url=s3_server.endpoint_url) as store,
        pytest.raises(PermissionError),
    ):
        store.read_range("a", 0, 1)
    with (
        running_scripted(Answer(206, b"x", _ETAG)) as server,
        S3ObjectStore("b", unsigned=True, endpoint_url=server.url) as store,
    ):
        assert store.read_range("a", 0, 1) == b"x"
        assert "authorization" not in server.requests[0].headers


def test_a_profile_is_used(
    s3_server: S3Server,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``profile_name`` takes keys and address of that profile; one that does not exist is a ConfigError."""
    (tmp_path / "config").write_text(
        f"[profile run]\naws_access_key_id={s3_server.access_key}\naws_secret_access_key={s3_server.secret_key}\n"
        f"region=us-east-1\nendpoint_url={s3_server.endpoint_url}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with S3ObjectStore(bucket, profile_name="run") as store:
        store.check_writable("profile")
    with pytest.raises(ConfigError, match="other"):
        S3ObjectStore(bucket, profile_name="other")


def test_credentials_that_cannot_be_renewed_are_a_permission_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that hands out expired credentials is no reason to try again."""
    expired = {"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b", "SessionToken": "c"}
    (tmp_path / "expired.json").write_text(json.dumps({**expired, "Expiration": "2020-01-01T00:00:00Z"}))
    (tmp_path / "config").write_text(f"[default]\ncredential_process=cat {tmp_path}/expired.json\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with (
        running_scripted(_DONE) as server,
        S3ObjectStore("b", endpoint_url=server.url) as store,
        pytest.raises(PermissionError, match="expired"),
    ):
        store.put_bytes("a", b"x")


@pytest.mark.parametrize("variable", ["S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_environment_says_where_and_who(
    s3_server: S3Server,
    bucket: str,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A URI alone opens the store, with address and keys from the environment: what is put there is in that bucket."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(variable if name == "S3_ENDPOINT_URL" else name, value)
    with open_store(f"s3://{bucket}/run/a") as store:
        store.check_writable("run")
        store.put_bytes(f"run/{variable}", b"of the environment")
    body = s3_server.client().get_object(Bucket=bucket, Key=f"run/{variable}")["Body"].read()
    assert body == b"of the environment"


def test_acl_and_session_token_reach_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canned ACL goes with every write, the session token with every request."""
    monkeypatch.setenv("S3_CANNED_ACL", "bucket-owner-full-control")
    with running_scripted(_DONE, _STARTED) as server:
        for acl, sent in ((None, "bucket-owner-full-control"), ("private", "private")):
            server.requests.clear()
            with S3ObjectStore(
                "b", endpoint_url=server.url, aws_session_token="token", canned_acl=acl, **_KEYS
            ) as store:
                store.put_bytes("a", b"x")
                store.start_parts("a")
            assert [request.headers["x-amz-acl"] for request in server.requests] == [sent, sent]
            assert {request.headers["x-amz-security-token"] for request in server.requests} == {"token"}


# ── what services answer ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("status", "code", "expected", "says"),
    [
        (400, "ExpiredToken", PermissionError, "ExpiredToken"),
        (403, "RequestTimeTooSkewed", PermissionError, "clock"),
        (403, "AccessDenied", PermissionError, "not allowed"),
        (403, "SomethingNew", PermissionError, "not allowed"),
        (401, "Unauthorized", PermissionError, "not allowed"),
        (404, "NoSuchBucket", FileNotFoundError, "bucket"),
        (429, "TooMany", ObjectStoreTransientError, "429"),
        (500, "InternalError", ObjectStoreTransientError, "500"),
        (503, "SlowDown", ObjectStoreTransientError, "SlowDown"),
        (400, "RequestTimeout", ObjectStoreTransientError, "RequestTimeout"),
        (400, "BadDigest", ObjectStoreTransientError, "BadDigest"),
        (409, "OperationAborted", ObjectStoreTransientError, "OperationAborted"),
        (400, "EntityTooLarge", ObjectStoreError, "EntityTooLarge"),
        (501, "NotImplemented", ObjectStoreError, "NotImplemented"),
    ],
)
def test_answers_become_the_errors_of_every_store(
    script: ScriptedServer, scripted: S3ObjectStore, status: int, code: str, expected: type[Exception], says: str
) -> None:
    """What a service answers is one of our errors, with object, operation and cause, after one request."""
    script.script(_refused(status, code))
    with pytest.raises(expected, match=rf"(?s)s3://b/run/a: write: .*{says}") as caught:
        scripted.put_bytes("run/a", b"x")
    assert isinstance(caught.value, ObjectStoreTransientError) == (expected is ObjectStoreTransientError)
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("status", "expected"), [(404, FileNotFoundError), (403, PermissionError), (400, PermissionError)]
)
def test_answers_without_a_reason_are_told_apart(
    script: ScriptedServer, scripted: S3ObjectStore, status: int, expected: type[Exception]
) -> None:
    """An answer to HEAD has no body: a refusal is not taken for 'not found'."""
    script.script(Answer(status))
    with pytest.raises(expected, match="s3://b/a"):
        scripted.get_object_size("a")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(200, b"half", _ETAG, claims_bytes=8), id="cut short"),
        pytest.param(Answer(200, b"", _ETAG, claims_bytes=8), id="nothing"),
    ],
)
def test_damaged_answers_are_transient_and_leave_no_file(
    script: ScriptedServer, scripted: S3ObjectStore, answer: Answer, tmp_path: Path
) -> None:
    """A download that was cut short or changed is tried again by who can, and leaves no file."""
    script.script(answer)
    with pytest.raises(ObjectStoreTransientError, match=r"s3://b/a: (read|get the size)"):
        scripted.download_object("a", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_a_late_answer_is_transient_and_leaves_no_file(script: ScriptedServer, tmp_path: Path) -> None:
    """So is a download that stalls for longer than the time out."""
    script.script(Answer(200, b"late", _ETAG, after_seconds=2))
    with (
        S3ObjectStore("b", endpoint_url=script.url, read_timeout_seconds=0.5, **_KEYS) as store,
        pytest.raises(ObjectStoreTransientError, match=r"s3://b/a: (read|get the size)"),
    ):
        store.download_object("a", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(200, b"<ListBu", claims_bytes=90), id="cut short"),
        pytest.param(Answer(200, b"50\r\n<ListBu", {"Transfer-Encoding": "chunked"}), id="a chunk cut short"),
        pytest.param(Answer(200, b"", claims_bytes=90), id="nothing"),
        pytest.param(Answer(200, b""), id="empty"),
        pytest.param(Answer(200, b"<html>no</html>"), id="of another"),
        pytest.param(Answer(200, b"<html>no</wrong>"), id="no XML"),
    ],
)
def test_damaged_listings_are_transient(script: ScriptedServer, scripted: S3ObjectStore, answer: Answer) -> None:
    """A listing that is cut short, or is none, is not an empty one."""
    script.script(answer)
    with pytest.raises(ObjectStoreTransientError, match=r"s3://b/a: list"):
        scripted.list_objects("a")


@pytest.mark.parametrize("status", [200, 206])
def test_a_range_that_is_cut_short_is_transient(script: ScriptedServer, scripted: S3ObjectStore, status: int) -> None:
    """A range is never shorter than the object allows."""
    script.script(Answer(status, b"half", _ETAG, claims_bytes=8))
    with pytest.raises(ObjectStoreTransientError, match=r"s3://b/a: read"):
        scripted.read_range("a", 0, 8)


def test_a_service_without_ranges_is_read_anyway(script: ScriptedServer, scripted: S3ObjectStore) -> None:
    """Where the whole object comes instead of a range, the range is taken out of it."""
    script.script(Answer(200, b"0123456789", _ETAG))
    assert scripted.read_range("a", 3, 4) == b"3456"
    assert scripted.read_tail("a", 4) == (10, b"6789")


def test_a_tail_is_one_request(script: ScriptedServer, scripted: S3ObjectStore) -> None:
    """The size of the object is in the answer to the request for its last bytes; an answer cut short is transient."""
    script.script(Answer(206, b"6789", {**_ETAG, "Content-Range": "bytes 6-9/10"}))
    assert scripted.read_tail("a", 4) == (10, b"6789")
    assert [request.headers["range"] for request in script.requests] == ["bytes=-4"]
    script.script(Answer(206, b"67", {**_ETAG, "Content-Range": "bytes 6-9/10"}))
    with pytest.raises(ObjectStoreTransientError, match=r"s3://b/a: read: .* 2 bytes are missing"):
        scripted.read_tail("a", 4)


def test_a_level_is_one_request(script: ScriptedServer, scripted: S3ObjectStore) -> None:
    """The service groups names by folder, and the object by which a console shows an empty folder is left out."""
    contents = "".join(f"<Contents><Key>{key}</Key><Size>0</Size></Contents>" for key in ("run/", "run/a"))
    folders = "<CommonPrefixes><Prefix>run/ep1/</Prefix></CommonPrefixes>"
    body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}{folders}</ListBucketResult>"
    script.script(Answer(200, body.encode()))
    objects, below = scripted.list_level("run/")
    assert ([info.name for info in objects], below) == (["run/a"], ["run/ep1/"])
    assert "delimiter=%2F" in script.requests[0].path
    assert len(script.requests) == 1


@pytest.mark.parametrize(("etag", "swapped"), [('"e"', True), ('"other"', False)])
def test_a_service_that_cannot_swap_atomically_is_noticed(etag: str, swapped: bool) -> None:
    """If the service refuses ``If-Match``, the next attempt reads the version, compares it, and writes."""
    answers = _refused(501, "NotImplemented"), Answer(200, b"old", {"ETag": etag}), _DONE
    with (
        running_scripted(*answers) as server,
        S3ObjectStore("b", endpoint_url=server.url, **_KEYS) as store,
        Transfer(store) as transfer,
    ):
        assert store.swaps_atomically
        if swapped:
            transfer.swap_bytes("a", b"new", '"e"')
        else:
            with pytest.raises(FileExistsError, match="a: swap"):
                transfer.swap_bytes("a", b"new", '"e"')
        assert not store.swaps_atomically
        assert server.requests[0].headers["if-match"] == '"e"'
        assert [request.method for request in server.requests][:2] == ["PUT", "GET"]
        assert sum(request.method == "PUT" for request in server.requests) == (2 if swapped else 1)


@pytest.mark.parametrize("there", [True, False])
def test_a_service_that_cannot_create_atomically_is_noticed(there: bool) -> None:
    """Where a conditional write is refused, the next attempt looks before it writes, and the store says so."""
    answers = _refused(501, "NotImplemented"), _DONE if there else Answer(404), _DONE
    with (
        running_scripted(*answers) as server,
        S3ObjectStore("b", endpoint_url=server.url, **_KEYS) as store,
        Transfer(store) as transfer,
    ):
        assert store.creates_atomically
        if there:
            with pytest.raises(FileExistsError, match="a"):
                transfer.put_bytes("a", b"x", create_only=True)
        else:
            transfer.put_bytes("a", b"x", create_only=True)
        assert not store.creates_atomically
        assert sum(request.method == "PUT" for request in server.requests) == (1 if there else 2)


def test_an_upload_in_parts_creates_with_a_condition(script: ScriptedServer, scripted: S3ObjectStore) -> None:
    """The service decides which of two uploads is first: the request that completes one tells it to."""
    script.script(_STARTED, _STARTED, Answer(404), _refused(412, "PreconditionFailed"))
    upload = scripted.start_parts("a")
    upload.send(1, memoryview(b"x"))
    with pytest.raises(FileExistsError, match="s3://b/a: complete"):
        upload.complete(count=1, create_only=True)
    assert script.requests[-1].headers["if-none-match"] == "*"


def test_a_page_of_a_proxy_is_no_success(script: ScriptedServer, scripted: S3ObjectStore, tmp_path: Path) -> None:
    """A page of HTML with status 200 is not the service's: nothing counts as written, read or deleted."""
    (tmp_path / "source").write_bytes(b"x")
    for verb, use in {
        "write": lambda: scripted.put_bytes("a", b"x"),
        "create": lambda: scripted.put_bytes("a", b"x", create_only=True),
        "upload": lambda: scripted.upload_object("a", tmp_path / "source"),
        "read": lambda: scripted.read_range("a", 0, 4),
        "read:": lambda: scripted.read_tail("a", 4),
        "swap": lambda: scripted.swap_bytes("a", b"x", "version"),
        "get the size": lambda: scripted.download_object("a", tmp_path / "copy"),
        "list": lambda: scripted.list_objects("a"),
        "delete": lambda: scripted.delete_object("a"),
        "check": lambda: scripted.check_writable("a"),
        "start": lambda: scripted.start_parts("a"),
    }.items():
        script.script(_PAGE)
        with pytest.raises(ObjectStoreTransientError, match=f"s3://b/a.*: {verb}.*not from an S3 service"):
            use()
    script.script(_STARTED, _STARTED, _PAGE)
    upload = scripted.start_parts("a")
    upload.send(1, memoryview(b"x"))
    with pytest.raises(ObjectStoreTransientError, match=r"s3://b/a: complete.*not from an S3 service"):
        upload.complete(count=1)
    assert not (tmp_path / "copy").exists()


def test_an_end_that_fails_behind_a_good_status_is_noticed(script: ScriptedServer, scripted: S3ObjectStore) -> None:
    """A service may answer 'good' and tell the failure in the body: the object is not there."""
    script.script(_STARTED, _STARTED, Answer(200, _refused(500, "InternalError").body))
    upload = scripted.start_parts("a")
    upload.send(1, memoryview(b"x"))
    with pytest.raises(ObjectStoreTransientError, match="InternalError"):
        upload.complete(count=1)


def test_a_part_that_was_not_sent_is_missed(script: ScriptedServer, scripted: S3ObjectStore) -> None:
    """An upload with a gap is not ended."""
    script.script(_STARTED)
    upload = scripted.start_parts("a")
    upload.send(2, memoryview(b"x"))
    with pytest.raises(ObjectStoreError, match="part 1 of 2"):
        upload.complete(count=2)


def test_a_large_upload_that_is_refused_is_aborted(
    script: ScriptedServer, scripted: S3ObjectStore, tmp_path: Path
) -> None:
    """The first part that is refused ends the upload, and its parts do not stay."""
    with (tmp_path / "source").open("wb") as file:
        file.truncate(65 << 20)
    no_uploads = Answer(200, b"<ListMultipartUploadsResult/>")
    script.script(no_uploads, _STARTED, _refused(403, "AccessDenied"))
    with pytest.raises(PermissionError, match="send part"):
        scripted.upload_object("a", tmp_path / "source")
    assert script.requests[-1].method == "DELETE"


def test_who_may_write_but_not_abort_may_write(
    script: ScriptedServer, scripted: S3ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that may put objects and nothing else passes the check; the log says what it may not."""
    script.script(_STARTED, _refused(403, "AccessDenied"))
    scripted.check_writable("run")
    assert script.requests[0].path.startswith("/b/run.check-")
    assert "could not remove the check object" in caplog.text


# ── the way there ────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_service_that_does_not_listen_is_transient_at_once() -> None:
    """Nobody listens at the address: ObjectStoreTransientError with the address, without waiting."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with (
            S3ObjectStore("b", endpoint_url=url, **_KEYS) as store,
            pytest.raises(ObjectStoreTransientError, match=re.escape(url)),
        ):
            store.check_writable("run")
    assert time.monotonic() - started < 20


def test_a_service_that_does_not_answer_is_transient_in_time() -> None:
    """Somebody listens and never accepts: the wait is as long as was asked for."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(8)
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        started = time.monotonic()
        with (
            S3ObjectStore("b", endpoint_url=url, read_timeout_seconds=0.5, **_KEYS) as store,
            pytest.raises(ObjectStoreTransientError, match=r"(?i)timeout"),
        ):
            store.check_writable("run")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("endpoint", "host", "path"),
    [
        ("http://cwobject.com", "bucket.cwobject.com", "/a"),
        ("http://objects.example.com", "objects.example.com", "/bucket/a"),
    ],
)
def test_buckets_are_addressed_as_the_service_wants(endpoint: str, host: str, path: str) -> None:
    """CoreWeave has the bucket in the host's name, any other service that is no Amazon in the path."""
    with (
        running_scripted(_DONE) as proxy,
        S3ObjectStore(
            "bucket", endpoint_url=endpoint, client_config={"proxies": {"http": proxy.url}}, **_KEYS
        ) as store,
    ):
        store.put_bytes("a", b"x")
        assert proxy.requests[0].headers["host"] == host
        assert proxy.requests[0].path.endswith(f"{host}{path}")


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"aws_access_key_id": "a"}, "aws_secret_access_key"),
        ({"endpoint_url": "localhost:9000"}, "localhost:9000"),
        ({"client_config": {"no_such": 1}}, "no_such"),
        ({"checksum": "sha1"}, "sha1"),
        ({"prefix": "a/../b"}, "name"),
        ({"end_point": "x"}, "endpoint_url"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], says: str) -> None:
    """An argument that cannot be is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=says):
        S3ObjectStore("bucket", **wrong)


def test_prefix_and_name_together_are_a_name() -> None:
    """What stores do not take is refused before anything is sent, also where only the whole is too long."""
    with S3ObjectStore("bucket", "p" * 1000, **_KEYS) as store:
        for use in (lambda: store.put_bytes("n" * 30, b""), lambda: store.check_writable("a/../b")):
            with pytest.raises(ConfigError, match="name"):
                use()


def test_a_name_no_bucket_can_have_is_named() -> None:
    """A bucket that cannot exist is an error before anything is sent."""
    with S3ObjectStore("no bucket!", **_KEYS) as store, pytest.raises(ConfigError, match="no bucket!"):
        store.check_writable("run")


def test_the_sdk_is_imported_when_a_store_is_opened() -> None:
    """Neither composerlite nor its storage imports boto3."""
    code = (
        "import sys, composerlite, composerlite.storage;"
        "assert not {'boto3', 'botocore'} & set(sys.modules);"
        "import composerlite.storage.stores.s3;"
        "assert 'boto3' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_missing_file_of_this_machine_is_no_missing_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the file with the credentials is gone no verb says "not found": a run would take its checkpoint for absent.

    The error names the file.
    """
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
    with (
        S3ObjectStore("b", endpoint_url="http://127.0.0.1:1", region_name="us-east-1") as store,
        Transfer(store) as transfer,
    ):
        for use in (*_uses(store), lambda: transfer.exists("run/a")):
            with pytest.raises(ObjectStoreError, match=r"s3://b/.*: No such file or directory: '.*/token'"):
                use()


def _uses(store: S3ObjectStore) -> list[Callable[[], object]]:
    return [
        lambda: store.check_writable("run"),
        lambda: store.put_bytes("run/a", b"x"),
        lambda: store.read_range("run/a", 0, 1),
        lambda: store.get_object_size("run/a"),
        lambda: store.list_objects("run"),
        lambda: store.start_parts("run/a"),
    ]
