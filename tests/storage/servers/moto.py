"""moto's server: a second implementation of S3, in memory. It takes any credentials."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from storage.servers.seaweedfs import S3Server

READY_SECONDS = 30.0


@contextlib.contextmanager
def running_moto() -> Generator[S3Server]:
    """A service on a free port of loopback, gone afterwards."""
    for package in ("moto", "flask", "boto3"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed: pip install 'moto[s3,server]'")
    for _ in range(3):
        with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
            port = random.Random().randrange(22_000, 32_000)  # not of the seeded generator: several start at once
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=Path("/"))
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
            if _is_listening(process, port):
                yield S3Server(f"http://127.0.0.1:{port}", process.pid)
                return
            log.seek(0)
            print(f"moto:\n{log.read()[-2000:].decode(errors='replace')}")  # noqa: T201
    pytest.fail("moto did not start; its log is above")


@pytest.fixture(scope="session")
def moto_server() -> Generator[S3Server]:
    """One moto for all tests of this process."""
    with running_moto() as server:
        yield server


def _is_listening(process: subprocess.Popen[bytes], port: int) -> bool:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                time.sleep(0.1)  # one that found the port taken has ended by now
                return process.poll() is None
        time.sleep(0.05)
    return False
