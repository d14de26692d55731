"""What mkdocs does not do by itself, as a hook that mkdocs.yml names.

The documentation is Markdown that reads well in the repository, too, so README, CHANGELOG, CONTRIBUTING and the README
of ``configs/`` stay where they are, and links lead to files. Here these become pages (README is the home of the site),
each file of ``configs/`` becomes a page that shows it, and links between all of them lead to the pages. A link to
anything else outside ``docs/`` stays as it is, and mkdocs complains.

A pattern in ``nav``, such as ``adr/0*.md``, stands for the files that it matches. Search ranks guides above the
reference, and leaves out decisions and other internals. The footer has the version and a link to the repository.

Charts are put into the page as SVG, with the style sheet's colours in place of their own, so that they follow the light
and the dark scheme. Ranges of numbers in tables are kept on one line; on narrow screens long names break after ``_``.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from composerlite._version import VERSION

sys.path.insert(0, str(Path(__file__).parent))
import composer_names

ROOT = Path(__file__).resolve().parents[2]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "configs/README.md": "configs.md",
}
SHOWN = {
    path.relative_to(ROOT).as_posix(): f"files/{path.relative_to(ROOT).as_posix()}.md"
    for path in sorted((ROOT / "configs").rglob("*"))
    if path.suffix in (".py", ".sbatch", ".yaml")
}

NOT_SEARCHED = ("adr/", "files/", "architecture.md", "contributing.md")
REFERENCE = ("api/", "changelog.md", "glossary.md", "migration/", "performance.md", "reliability.md", "scaling.md")

_LANGUAGES = {".py": "python", ".sbatch": "bash", ".yaml": "yaml"}
_COMMENTS = re.compile(r"\A(?:\s*<!--.*?-->)+\s*", re.DOTALL)
_CHART = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?:\.\./)*(?P<path>images/[\w-]+\.svg)" ?/?>')
_NOT_DRAWN = re.compile(r"\A.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", re.DOTALL)
_IDS = re.compile(r"""(?<=\bid=")|(?<=href="#)|(?<=url\(#)""")
_COLOURS = {
    "#ffffff": "none",
    "#000000": "currentColor",
    "#555555": "var(--chart-error)",
    "#2b2d42": "var(--chart-limit)",
    "#8d99ae": "var(--chart-peer)",
    "#c8553d": "var(--chart-ours)",
}
"""Colours of the charts that ``benchmarks/report.py`` draws, and what they are on a page."""
_RANGE = re.compile(r"(?<=\d)–(?=[\d−])")
_CODE_IN_CELL = re.compile(r"(?<=<td><code>)[^<]+(?=</code></td>)")
_LINK = re.compile(r"\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the patterns in ``nav``, and write the footer."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = config.extra.get("repository") or project.get("urls", {}).get("Repository")
    link = f' · <a href="{repository}">Repository</a>' if repository else ""
    config.copyright = f"{project['name']} {VERSION} · {project['license']} license{link}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not below ``docs/``."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for source, page in SHOWN.items():
        path = ROOT / source
        text = f"# {source}\n\n~~~~{_LANGUAGES[path.suffix]}\n{path.read_text()}~~~~\n"
        files.append(File.generated(config, page, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Have links to files of the repository lead to their pages, and the page begin with its title."""
    here = page.file.src_uri
    source = {made: source for source, made in {**PAGES, **SHOWN}.items()}.get(here, f"docs/{here}")

    def to_page(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["path"]))
        found = target.removeprefix("docs/") if target.startswith("docs/") else {**PAGES, **SHOWN}.get(target)
        if found is None:
            return link[0]
        return f"]({posixpath.relpath(found, posixpath.dirname(here) or '.')}{link['anchor'] or ''})"

    if here == "index.md":
        page.meta["hide"] = ["navigation"]
    if here.startswith(NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}
    elif here.startswith(REFERENCE):
        page.meta["search"] = {"boost": 0.3}
    if here == "migration/composer.md":
        markdown = markdown.replace("<!-- names: the site lists them here -->", composer_names.section())
    return _LINK.sub(to_page, _COMMENTS.sub("", markdown))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Put charts and breaks of lines into the page, and mark the home page for the style sheet."""
    html = _RANGE.sub("\u2060–\u2060", _CHART.sub(_chart, html))
    if not page.file.src_uri.startswith("api/"):
        html = _CODE_IN_CELL.sub(lambda code: code[0].replace("_", "_<wbr>"), html)
    return f'<div class="home">\n{html}\n</div>' if page.file.src_uri == "index.md" else html


def _chart(image: re.Match[str]) -> str:
    path = ROOT / "docs" / image["path"]
    drawn = _IDS.sub(f"{path.stem}-", _NOT_DRAWN.sub("", path.read_text()))
    for colour, there in _COLOURS.items():
        drawn = drawn.replace(colour, there)
    drawn = re.sub(r' (?:width|height)="[\d.]+pt"', "", drawn, count=2)
    label = f'<svg class="chart" role="img" aria-label="{image["alt"]}"'
    return f'<span class="chart">{drawn.replace("<svg", label, 1)}</span>'


def _expanded(nav: Any, folder: Path) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(entry, folder) for title, entry in nav.items()}
    if not isinstance(nav, list):
        return nav
    expanded: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            expanded += [path.relative_to(folder).as_posix() for path in sorted(folder.glob(entry))]
        else:
            expanded.append(_expanded(entry, folder))
    return expanded
