"""LibcloudObjectStore: the contract of every store on the drivers of folders and of S3, and what it refuses."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from storage.servers.scripted_http import Answer, running_scripted
from storage.servers.seaweedfs import S3Server

from composerlite.errors import ConfigError, ObjectStoreTransientError
from composerlite.storage import ObjectStore, open_store
from composerlite.storage.stores.libcloud import LibcloudObjectStore
from composerlite.testing.contracts import ObjectStoreContract

pytest.importorskip("libcloud", reason="the package apache-libcloud is not installed: pip install apache-libcloud")
pytest.importorskip("fasteners", reason="the package fasteners is not installed: pip install fasteners")


class TestLibcloudOnAFolder(ObjectStoreContract):
    @pytest.fixture
    def store(self, quick_folder: Path) -> Generator[LibcloudObjectStore]:
        (quick_folder / "bucket").mkdir()
        with LibcloudObjectStore("local", "bucket", provider_kwargs={"key": str(quick_folder)}) as store:
            yield store

    @pytest.fixture
    def missing_bucket(self, quick_folder: Path) -> Generator[LibcloudObjectStore]:
        with LibcloudObjectStore("local", "missing", provider_kwargs={"key": str(quick_folder)}) as store:
            yield store


def s3_arguments(server: S3Server) -> dict[str, Any]:
    host, _, port = server.endpoint_url.removeprefix("http://").partition(":")
    access = {"key": server.access_key, "secret": server.secret_key}
    return {**access, "host": host, "port": int(port), "secure": False, "region": server.region}


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server) -> Iterator[str]:
    """A new bucket, and Libcloud as SeaweedFS takes it: the service refuses the version that it adds to requests."""
    from libcloud.common.aws import AWSRequestSignerAlgorithmV4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AWSRequestSignerAlgorithmV4, "get_request_params", lambda _, params, *a, **k: params)
        yield s3_server.new_bucket()


class TestLibcloudOnS3(ObjectStoreContract):
    @pytest.fixture
    def store(self, s3_server: S3Server, bucket: str) -> Generator[LibcloudObjectStore]:
        with LibcloudObjectStore("S3", bucket, provider_kwargs=s3_arguments(s3_server), prefix="below") as store:
            yield store

    @pytest.fixture
    def missing_bucket(self, s3_server: S3Server) -> Generator[LibcloudObjectStore]:
        with LibcloudObjectStore("s3", "no-such-bucket", provider_kwargs=s3_arguments(s3_server)) as store:
            yield store

    @pytest.mark.soak  # a thousand requests, one by one
    def test_long_listings_are_complete(self, store: ObjectStore, prefix: str) -> None:
        super().test_long_listings_are_complete(store, prefix)


# ── what it is told ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"provider": "s3_us_wst"}, "Did you mean 's3_us_west'"),
        ({"provider": "s3", "key_environ": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
        ({"provider": "s3", "provider_kwargs": {"region": "mars"}}, "provider 's3' does not accept"),
        ({"provider": "s3"}, "provider 's3' does not accept"),
        ({"provider": "local", "provider_kwargs": {"key": "/no/such/folder"}}, "not a directory"),
        ({"provider": "local", "chunk_size": 0}, "chunk_size=0"),
        ({}, "libcloud://bucket names no provider"),
    ],
)
def test_arguments_that_are_wrong_are_found_at_once(arguments: dict[str, Any], message: str) -> None:
    """An unknown provider, a variable that is not set, and what a driver does not take are a ConfigError."""
    with pytest.raises(ConfigError, match=message):
        LibcloudObjectStore.at("bucket", **arguments)


def test_keys_come_from_the_environment(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A URI, the arguments of the driver and two environment variables open a store; a prefix is before all names."""
    monkeypatch.setenv("MY_KEY", s3_server.access_key)
    monkeypatch.setenv("MY_SECRET", s3_server.secret_key)
    kwargs = {k: v for k, v in s3_arguments(s3_server).items() if k not in ("key", "secret")}
    both = {"provider": "S3", "key_environ": "MY_KEY", "secret_environ": "MY_SECRET", "provider_kwargs": kwargs}
    with (
        open_store(f"libcloud://{bucket}/x/a", **both) as store,
        open_store(f"libcloud://{bucket}/x", **both, prefix="/x/") as below,
    ):
        store.put_bytes("x/a", b"1")
        assert [info.name for info in below.list_objects()] == ["a"]
        assert below.read_range("a", 0, 9) == b"1"
        assert below.get_uri("a") == store.get_uri("x/a") == f"libcloud://{bucket}/x/a"


# ── what services answer ─────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("wrong", ["secret", "read only"])
def test_a_wrong_or_weak_key_is_no_permission(s3_server: S3Server, bucket: str, wrong: str) -> None:
    """A wrong secret, and a key that may only read, are PermissionError in the check before training."""
    changed = {
        "secret": {"secret": "wrong"},
        "read only": {"key": s3_server.read_only_access_key, "secret": s3_server.read_only_secret_key},
    }
    kwargs = {**s3_arguments(s3_server), **changed[wrong]}
    with (
        LibcloudObjectStore("s3", bucket, provider_kwargs=kwargs) as store,
        pytest.raises(PermissionError, match=f"check.*{bucket}"),
    ):
        store.check_writable("run/")


def test_nobody_answers(s3_server: S3Server) -> None:
    """A service that does not answer may come back: transient."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        kwargs = {**s3_arguments(s3_server), "port": taken.getsockname()[1]}
        with (
            LibcloudObjectStore("s3", "bucket", provider_kwargs=kwargs) as store,
            pytest.raises(ObjectStoreTransientError, match=r"libcloud://bucket/run/a: .*: s3: "),
        ):
            store.put_bytes("run/a", b"")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n", ObjectStoreTransientError),
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 0\r\n\r\n", ObjectStoreTransientError),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", PermissionError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ntrunc", ObjectStoreTransientError),
        (b"", ObjectStoreTransientError),
    ],
    ids=["503", "429", "403", "truncated", "reset"],
)
def test_answers_are_what_they_mean(s3_server: S3Server, tmp_path: Path, answer: bytes, error: type[Exception]) -> None:
    """Too many requests, a service that is down and a body that ends early are transient; a refusal is not."""
    with answering(answer) as port:
        kwargs = {**s3_arguments(s3_server), "port": port}
        with LibcloudObjectStore("s3", "bucket", provider_kwargs=kwargs) as store:
            with pytest.raises(error):
                store.download_object("a", tmp_path / "copy")
            with pytest.raises(error):
                store.put_bytes("a", b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("provider", ["azure_blobs", "minio", "s3"])
def test_a_page_of_a_proxy_is_no_success(provider: str, tmp_path: Path) -> None:
    """A page of HTML with status 200, which a driver takes for the service's answer, is no written object."""
    (tmp_path / "source").write_bytes(b"x")
    with running_scripted(Answer(200, b"<html>Sign in</html>", {"Content-Type": "text/html"})) as proxy:
        host, _, port = proxy.url.removeprefix("http://").partition(":")
        kwargs = {"key": "a", "secret": "c2VjcmV0", "host": host, "port": int(port), "secure": False}
        with LibcloudObjectStore(provider, "bucket", provider_kwargs=kwargs) as store:
            for use in (
                lambda: store.put_bytes("run/a", b"x"),
                lambda: store.upload_object("run/a", tmp_path / "source"),
                lambda: store.list_objects("run/a"),
                lambda: store.check_writable("run/a"),
            ):
                with pytest.raises(ObjectStoreTransientError, match=f"libcloud://bucket/run/a.*: {provider}: "):
                    use()


def test_an_upload_is_not_waited_for_forever(s3_server: S3Server) -> None:
    """A service that takes an upload and does not answer is transient after the driver's timeout."""
    with answering(None) as port:
        kwargs = {**s3_arguments(s3_server), "port": port, "timeout": 0.5}
        with (
            LibcloudObjectStore("s3", "bucket", provider_kwargs=kwargs) as store,
            pytest.raises(ObjectStoreTransientError, match="timed out"),
        ):
            store.put_bytes("a", b"x")


@contextlib.contextmanager
def answering(answer: bytes | None) -> Generator[int]:
    """A port that gives the same answer, or none, to everybody: but to HEAD, so that there is an object."""
    over = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            request = self.rfile.readline()
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            found = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\n"
            if request.startswith(b"HEAD"):
                self.wfile.write(found)
            elif answer is None:
                over.wait(30)
            else:
                self.wfile.write(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            over.set()
            server.shutdown()
            thread.join()


# ── what drivers lack ────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_driver_without_ranges_reads_what_is_before(tmp_path: Path) -> None:
    """Where a driver knows no ranges they are read all the same. A driver may be one that the user registered."""
    from libcloud.storage.drivers.local import LocalStorageDriver
    from libcloud.storage.providers import DRIVERS, set_driver

    class WithoutRanges(LocalStorageDriver):  # type: ignore[misc]
        def download_object_range_as_stream(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    globals()["WithoutRanges"] = WithoutRanges
    set_driver("without_ranges", __name__, "WithoutRanges")
    (tmp_path / "bucket").mkdir()
    try:
        kwargs = {"key": str(tmp_path)}
        with LibcloudObjectStore("without_ranges", "bucket", chunk_size=4, provider_kwargs=kwargs) as store:
            store.put_bytes("a", b"0123456789")
            assert store.read_range("a", 3, 3) == b"345"
            assert store.read_range("a", 8, 9) == b"89"
            assert store.read_range("a", 0, 1) == b"0"
    finally:
        del DRIVERS["without_ranges"], globals()["WithoutRanges"]
