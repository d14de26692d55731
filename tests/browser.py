"""A page as Chromium shows it: what is in it, what it looks like, what it asked for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

__all__ = ["QUIET", "Shown", "browser_program", "open_page"]

SECONDS = 120
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_CONSOLE = re.compile(r"CONSOLE[(:]\d+[)\]] ?(.*)")
_OWN = re.compile(r"^(https?://)?([\w-]+\.)*(google|googleapis|gstatic|gvt1)\.com[:/]")
"""What the browser asks for itself, whatever it shows: is there a newer one, what time is it."""
QUIET = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-default-apps --disable-extensions "
    "--disable-domain-reliability --disable-client-side-phishing-detection --metrics-recording-only --mute-audio"
)


@dataclass(frozen=True)
class Shown:
    """What became of a page: its document after its script has run, its picture, console messages, requests."""

    dom: str
    picture: Path
    console: list[str]
    requests: list[str]


def open_page(page: Path, folder: Path, *, size: tuple[int, int] = (1100, 2400), flags: Sequence[str] = ()) -> Shown:
    """Show ``page`` in a new browser that gets everything through a server of ours; files go to ``folder``."""
    program = browser_program()
    requests: list[str] = []
    server = _Server(page.read_bytes(), requests)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    picture = folder / "page.png"
    try:
        done = subprocess.run(
            [
                program,
                *QUIET.split(),
                f"--user-data-dir={folder / 'profile'}",
                f"--proxy-server=127.0.0.1:{server.server_port}",
                f"--window-size={size[0]},{size[1]}",
                f"--screenshot={picture}",
                "--enable-logging=stderr",
                "--dump-dom",
                *flags,
                "http://report.test/report.html",
            ],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.returncode == 0, done.stderr
    asked = [request for request in requests if not _OWN.match(request)]
    return Shown(done.stdout, picture, _CONSOLE.findall(done.stderr), asked)


def browser_program() -> str:
    """The browser: what ``CHROME`` names, or what is installed. Without one the test is skipped."""
    found = [os.environ.get("CHROME"), *map(shutil.which, _NAMES)]
    program = next((path for path in found if path), None)
    if program is None:
        pytest.skip("there is no Chromium: install one, or name one in CHROME, to see pages tested")
    return program


class _Server(ThreadingHTTPServer):
    """Gives the page, takes note of what is asked for, and gives nothing else."""

    daemon_threads = True

    def __init__(self, page: bytes, requests: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.page = page
        self.requests = requests


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        is_page = self.path == "http://report.test/report.html"
        self.send_response(200 if is_page else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.server.page if is_page else b"")

    def do_CONNECT(self) -> None:
        self.server.requests.append(self.path)
        self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the standard library
        pass
