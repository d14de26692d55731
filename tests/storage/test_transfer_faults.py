"""Transfers to a real S3 service through a network that fails on purpose, with all bytes counted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from storage.servers.seaweedfs import S3Server

from composerlite.errors import ConfigError, ObjectStoreTransientError
from composerlite.storage import RetryPolicy, Transfer, open_store
from composerlite.testing import FaultProxy, NetworkFaults

MiB = 1 << 20
PART = 5 * MiB
SIZE = 80 * MiB + 54_321
QUICK = RetryPolicy(attempts=10, first_delay_seconds=0.01, longest_delay_seconds=0.1)
FAULTS = NetworkFaults(
    unavailable=0.2, resets=0.06, truncations=0.04, lost_answers=0.02, stalls=0.05, delays=0.1, stall_seconds=2.0
)
UPLOAD = """
import json, sys
from pathlib import Path
from composerlite.storage import RetryPolicy, Transfer, open_store
store_kwargs, uri, name, path = json.loads(sys.argv[1])
retry = RetryPolicy(attempts=10, first_delay_seconds=0.01, longest_delay_seconds=0.1)
with open_store(uri, **store_kwargs) as store, Transfer(store, threads=3, part_bytes=5 << 20, retry=retry) as transfer:
    transfer.upload(name, Path(path))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 17 parts."""
    path = tmp_path_factory.mktemp("source") / "file"
    path.write_bytes(random.Random(11).randbytes(SIZE))
    return path


@pytest.fixture(scope="module")
def small(source: Path) -> Path:
    """A file of 5 parts."""
    path = source.with_name("small")
    path.write_bytes(source.read_bytes()[: 5 * PART])
    return path


class Bucket:
    """A bucket of the service, looked at from beside, and a proxy in front of it."""

    def __init__(self, server: S3Server, name: str, proxy: FaultProxy) -> None:
        self.uri = f"s3://{name}"
        self.name = name
        self.proxy = proxy
        self.client: Any = server.client()
        self.kwargs: dict[str, Any] = {**server.store_kwargs, "endpoint_url": proxy.url, "read_timeout_seconds": 10.0}

    def transfer(self, *, threads: int = 3, timeout_seconds: float = 10.0, retry: RetryPolicy = QUICK) -> Transfer:
        timeouts = {"read_timeout_seconds": timeout_seconds, "connect_timeout_seconds": timeout_seconds}
        store = open_store(self.uri, **{**self.kwargs, **timeouts})
        return Transfer(store, threads=threads, retry=retry, part_bytes=PART)

    def digest(self, name: str) -> str:
        digest = hashlib.sha256()
        for piece in self.client.get_object(Bucket=self.name, Key=name)["Body"].iter_chunks(MiB):
            digest.update(piece)
        return digest.hexdigest()

    def multiparts(self) -> list[str]:
        return [upload["Key"] for upload in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]


@pytest.fixture
def bucket(s3_server: S3Server, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket whose name, and so its faults, are the same in every run; a test may choose another seed."""
    name = f"faults-{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}"
    address = urlsplit(s3_server.endpoint_url)
    with FaultProxy(str(address.hostname), int(address.port or 0), seed=getattr(request, "param", 11)) as proxy:
        bucket = Bucket(s3_server, name, proxy)
        bucket.client.create_bucket(Bucket=name)
        yield bucket
        bucket.client.close()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.mark.parametrize("bucket", [3], indirect=True)  # meets all kinds of faults
def test_an_upload_comes_through(bucket: Bucket, source: Path) -> None:
    """R7: 503s, resets in mid-body, stalls and lost answers cost less than 30 % of the bytes, and leave no parts."""
    bucket.proxy.faults = FAULTS
    with bucket.transfer() as transfer:
        transfer.upload("run/a", source)
    assert bucket.digest("run/a") == sha256(source)
    assert bucket.multiparts() == []
    assert bucket.proxy.bytes_up <= 1.3 * SIZE
    assert min(bucket.proxy.happened[kind] for kind in ("unavailable", "resets", "truncations", "stalls")) > 0


def test_an_upload_survives_kills(bucket: Bucket, source: Path) -> None:
    """R7: after kill -9 in the middle another process goes on: at most 1.3 × the bytes in all, no parts left."""
    # With as few as 17 parts the share of bytes sent twice varies with what is drawn: about one seed in eleven would
    # exceed 1.3 here, at 68 parts one in ten thousand (both simulated). The seed fixes which faults this test meets.
    bucket.proxy.faults = FAULTS
    upload_killed_at(0.5, bucket, source)
    assert bucket.digest("run/a") == sha256(source)
    assert bucket.multiparts() == []
    assert bucket.proxy.bytes_up <= 1.3 * SIZE


def upload_killed_at(share: float, bucket: Bucket, source: Path) -> None:
    """Upload ``source`` in a process that is killed when that share has been sent, and then in another."""
    arguments = json.dumps([bucket.kwargs, bucket.uri, "run/a", str(source)])
    command = [sys.executable, "-c", UPLOAD, arguments]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while bucket.proxy.bytes_up < share * source.stat().st_size and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert bucket.multiparts() == ["run/a"]
    again = subprocess.run(command, timeout=240, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(6))
def test_large_transfers_come_through(bucket: Bucket, tmp_path: Path, seed: int) -> None:
    """R7, at length: 356 MB up with kill -9 on the way, and down again, each with at most 1.3 × the bytes."""
    chance = random.Random(seed)  # the faults differ, too: the bucket is named after the test
    source, size = tmp_path / "large", 340 * MiB + chance.randrange(MiB)
    with source.open("wb") as file:
        for at in range(0, size, MiB):
            file.write(chance.randbytes(min(MiB, size - at)))
    bucket.proxy.faults = FAULTS
    upload_killed_at(chance.uniform(0.1, 0.9), bucket, source)
    assert bucket.digest("run/a") == sha256(source)
    assert bucket.multiparts() == []
    assert bucket.proxy.bytes_up <= 1.3 * size
    before = bucket.proxy.bytes_down
    with bucket.transfer() as transfer:
        transfer.download("run/a", tmp_path / "copy")
    assert sha256(tmp_path / "copy") == sha256(source)
    assert bucket.proxy.bytes_down - before <= 1.1 * size
    assert min(bucket.proxy.happened[kind] for kind in ("unavailable", "resets", "truncations", "stalls")) > 0


def test_a_download_comes_through(bucket: Bucket, source: Path, tmp_path: Path) -> None:
    """R7: under such faults a download is byte for byte what was uploaded; it goes on where a connection broke."""
    bucket.client.upload_file(str(source), bucket.name, "run/a")
    bucket.proxy.faults = dataclasses.replace(FAULTS, resets=0.15, truncations=0.15, stalls=0.15)
    with bucket.transfer() as transfer:
        transfer.download("run/a", tmp_path / "copy")
    assert sha256(tmp_path / "copy") == sha256(source)
    assert bucket.proxy.bytes_down <= 1.1 * SIZE
    assert min(bucket.proxy.happened[kind] for kind in ("unavailable", "resets", "truncations", "stalls")) > 0


def test_stalls_end_with_the_time_out(bucket: Bucket, small: Path, tmp_path: Path) -> None:
    """Where nothing moves for longer than the time out, the part or range goes over a new connection."""
    bucket.proxy.faults = NetworkFaults(stalls=0.3, stall_seconds=60.0)
    began = time.monotonic()
    with bucket.transfer(timeout_seconds=1.0) as transfer:
        transfer.upload("run/a", small)
        transfer.download("run/a", tmp_path / "copy")
    assert sha256(tmp_path / "copy") == sha256(small)
    assert bucket.multiparts() == []
    assert bucket.proxy.happened["stalls"] > 1
    assert time.monotonic() - began < 30


def test_a_dead_network_is_an_error_in_time(bucket: Bucket, small: Path) -> None:
    """When nothing comes through any more an upload fails as one that may pass; later it goes on where it was."""
    retry = RetryPolicy(attempts=2, first_delay_seconds=0.01, longest_delay_seconds=0.01)
    # One part at a time: at half of the bytes two of the five have arrived for certain.
    with bucket.transfer(threads=1, timeout_seconds=1.0, retry=retry) as transfer:

        def vanish(done: int, total: int) -> None:
            bucket.proxy.blackhole = done >= total // 2

        began = time.monotonic()
        with pytest.raises(ObjectStoreTransientError, match="attempts: 2"):
            transfer.upload("run/a", small, vanish)
        assert time.monotonic() - began < 15
        bucket.proxy.blackhole = False
        assert bucket.multiparts() == ["run/a"]
        before = bucket.proxy.bytes_up
        transfer.upload("run/a", small)
    assert bucket.proxy.bytes_up - before < 4 * PART
    assert bucket.digest("run/a") == sha256(small)
    assert bucket.multiparts() == []


def test_lost_answers_create_once(bucket: Bucket) -> None:
    """Objects that are created while answers get lost are there, and no creation is taken for somebody else's."""
    bucket.proxy.faults = NetworkFaults(lost_answers=0.4)
    with bucket.transfer() as transfer:
        for number in range(8):
            transfer.put_bytes(f"run/{number}", f"manifest {number}".encode(), create_only=True)
        for number in range(8):
            with pytest.raises(FileExistsError):
                transfer.put_bytes(f"run/{number}", b"somebody else's", create_only=True)
        assert [transfer.read_all(f"run/{n}") for n in range(8)] == [f"manifest {n}".encode() for n in range(8)]
    assert bucket.proxy.happened["lost_answers"] > 3


def test_a_refusal_is_raised_at_once(bucket: Bucket, s3_server: S3Server, source: Path) -> None:
    """Who may not write gets a PermissionError after a few requests, and no attempts."""
    kwargs = {**s3_server.read_only_kwargs, "endpoint_url": bucket.proxy.url}
    with open_store(bucket.uri, **kwargs) as store, Transfer(store, retry=QUICK) as transfer:
        for write in (lambda: transfer.upload("run/a", source), lambda: transfer.put_bytes("run/b", b"x")):
            with pytest.raises(PermissionError, match="run/"):
                write()
    assert bucket.proxy.requests <= 4


# ── the proxy itself ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_proxy_without_faults_changes_nothing(bucket: Bucket, small: Path, tmp_path: Path) -> None:
    """Bytes come through as they are, and each is counted once."""
    with bucket.transfer() as transfer:
        transfer.upload("run/a", small)
        assert 5 * PART < bucket.proxy.bytes_up < 5 * PART + 100_000
        before = bucket.proxy.bytes_down
        transfer.download("run/a", tmp_path / "copy")
    assert 5 * PART < bucket.proxy.bytes_down - before < 5 * PART + 100_000
    assert (tmp_path / "copy").read_bytes() == small.read_bytes()


def test_the_same_requests_meet_the_same_faults(bucket: Bucket) -> None:
    """What happens depends on the seed and on the requests, not on chance."""
    faults = NetworkFaults(unavailable=0.3, resets=0.2, lost_answers=0.2)
    address = urlsplit(str(bucket.client.meta.endpoint_url))
    seen: list[list[str]] = []
    for seed in (5, 5, 6):
        with FaultProxy(str(address.hostname), int(address.port or 0), faults, seed) as proxy:
            happened: list[str] = []
            with open_store(bucket.uri, **{**bucket.kwargs, "endpoint_url": proxy.url}) as store:
                for number in range(30):
                    try:
                        store.put_bytes(f"run/{number % 10}", b"x")
                        happened.append("")
                    except ObjectStoreTransientError:
                        happened.append(max(proxy.happened, key=lambda kind: proxy.happened[kind]))
                        proxy.happened.clear()
            seen.append(happened)
    assert seen[0] == seen[1] != seen[2]
    assert {"unavailable", "resets", "lost_answers", ""} == set(seen[0])


@pytest.mark.parametrize("wrong", [{"resets": -0.1}, {"resets": 0.6, "stalls": 0.6}])
def test_shares_are_checked(wrong: dict[str, float]) -> None:
    """Shares that cannot be are a ConfigError."""
    with pytest.raises(ConfigError, match="sum of at most 1"):
        NetworkFaults(**wrong)
