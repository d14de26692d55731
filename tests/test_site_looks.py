"""The site as Chromium lays it out: on a wide screen, a tablet and a phone, light and dark."""

from __future__ import annotations

import functools
import html
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import QUIET, browser_program

ROOT = Path(__file__).parent.parent
WIDTHS = (1360, 768, 390)
PAGES = (
    "index.html",
    "quick-start.html",
    "troubleshooting.html",
    "training.html",
    "save.html",
    "credentials.html",
    "parallelism.html",
    "performance.html",
    "glossary.html",
    "command-line.html",
    "api/composerlite.html",
)
_MEASURE = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, root = page.documentElement;
    const style = (at) => frame.contentWindow.getComputedStyle(at);
    const breaks = ({ wordBreak, overflowWrap }) => wordBreak !== "normal" || overflowWrap !== "normal";
    const title = page.querySelector(".md-content h1"), chart = page.querySelector(".md-content svg.chart");
    const cells = [...page.querySelectorAll(".md-typeset table td code")];
    return {
      page: frame.name, width: frame.width, needs: root.scrollWidth, has: root.clientWidth,
      scheme: page.body.dataset.mdColorScheme,
      heading: style(title).color === style(page.querySelector(".md-content p, .md-content td")).color,
      chart: chart && style(chart).fill === style(chart.closest("article")).color,
      broken: cells.filter((cell) => breaks(style(cell))).length,
    };
  });
  document.body.textContent = "MEASURED" + JSON.stringify(found) + "END";
});
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the built site, with a page that shows all of :data:`PAGES` in all :data:`WIDTHS`."""
    browser_program()
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
        timeout=240,
    )
    frames = [
        f'<iframe name="{page}" src="{page}" width="{width}" height="900"></iframe>'
        for page in PAGES
        for width in WIDTHS
    ]
    (folder / "all.html").write_text(f"<!doctype html><body>{''.join(frames)}<script>{_MEASURE}</script></body>")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/all.html"
    server.shutdown()
    thread.join()
    server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the standard library
        pass


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_pages_fit_their_width(site: str, scheme: str, tmp_path: Path) -> None:
    """No page scrolls sideways, table words stay whole, headings and charts have the colour of text."""
    flags = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "slate" else []
    done = subprocess.run(
        [browser_program(), *QUIET.split(), f"--user-data-dir={tmp_path}", "--dump-dom", *flags, site],
        capture_output=True,
        text=True,
        timeout=120,
    )
    measured = re.search(r"MEASURED(.*)END", done.stdout, re.S)
    assert measured is not None, done.stderr
    found = json.loads(html.unescape(measured[1]))
    assert len(found) == len(PAGES) * len(WIDTHS)
    assert {one["scheme"] for one in found} == {scheme}
    assert [(one["page"], one["width"], one["needs"]) for one in found if one["needs"] > one["has"]] == []
    assert [one["page"] for one in found if one["broken"]] == []
    assert [one["page"] for one in found if not one["heading"]] == []
    assert {one["chart"] for one in found} == {None, True}
