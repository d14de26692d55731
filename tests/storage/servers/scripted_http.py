"""An HTTP server that answers what a test says, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Answer:
    """What is sent. ``claims_bytes``: the length that is announced, where it is not that of the body."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    claims_bytes: int | None = None
    after_seconds: float = 0.0


@dataclass(frozen=True)
class Request:
    """What came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class ScriptedServer:
    """Answers one after the other; the last one again and again."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                answer = owner._next(Request(self.command, self.path, headers, body))
                owner._ending.wait(answer.after_seconds)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                length = len(answer.body) if answer.claims_bytes is None else answer.claims_bytes
                if "Transfer-Encoding" not in answer.headers:
                    self.send_header("Content-Length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    with contextlib.suppress(ConnectionError):  # who asked has given up
                        self.wfile.write(answer.body)
                self.close_connection = length != len(answer.body) or "Transfer-Encoding" in answer.headers

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def script(self, *answers: Answer) -> None:
        """Begin anew, with these answers."""
        with self._lock:
            self.answers = list(answers)
            self.requests.clear()

    def _next(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            return self.answers[min(len(self.requests), len(self.answers)) - 1]

    def run(self) -> None:
        self._server.serve_forever(poll_interval=0.01)

    def end(self) -> None:
        self._ending.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def running_scripted(*answers: Answer) -> Generator[ScriptedServer]:
    """A server on a free port of loopback that gives these answers."""
    server = ScriptedServer(list(answers))
    thread = threading.Thread(target=server.run, name="scripted http", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.end()
        thread.join(10)
