"""What the page on the architecture says is so: its walks are those of today, and the structure only gets simpler."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "composerlite"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

MOST_MODULES = 12
LARGE_FOLDERS: dict[str, int] = {}
"""Folders with more modules than that, and how many they have at most. No folder and no module is added here."""

PLACES = {"Bucket", "Folder", "LocalPlace", "RemotePlace"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Each module of the package by its path, parsed."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


# ── the walks ────────────────────────────────────────────────────────────────────────────────────────────────────────
Walk: TypeAlias = tuple[list[int], list[str]]


def walks_in(text: str) -> dict[str, Walk]:
    """By ``save`` and ``load``: the counts of modules, of edges and of those that go up, and the modules in order."""
    walks: dict[str, Walk] = {}
    for what, counts, drawn in re.findall(r"## One (\w+)\n\n([^\n]+)\n\n```text\n(.*?)```", text, re.DOTALL):
        modules = re.findall(r"\b[a-z_0-9]+(?:\.[a-z_0-9]+)+", drawn)
        walks[what] = ([int(count) for count in re.findall(r"\d+", counts)], modules)
    return walks


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    """The walks of today."""
    program = [sys.executable, str(ROOT / "benchmarks" / "walks.py"), "--markdown"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return walks_in(done.stdout)


@pytest.mark.parametrize("what", ["save", "load"])
def test_the_page_draws_the_walks_of_today(what: str, walks: dict[str, Walk]) -> None:
    """The same modules in the same order."""
    assert walks[what][1] == walks_in(PAGE)[what][1], "run `make walks`, and look at what changes"


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_save_and_a_load_go_through_no_more_modules(what: str, walks: dict[str, Walk]) -> None:
    """Nor through more edges, nor up more often: if it has to be, the page says so first."""
    now, drawn = walks[what][0], walks_in(PAGE)[what][0]
    assert len(now) == len(drawn) == 3
    assert all(one <= other for one, other in zip(now, drawn, strict=True)), f"{now}; the page has {drawn}"


# ── structure ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_folder_has_at_most_twelve_modules() -> None:
    """Those in `LARGE_FOLDERS` have more, and get no new ones."""
    paths = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    modules = Counter(str(path.parent) for path in paths)
    assert {folder: count for folder, count in modules.items() if count > LARGE_FOLDERS.get(folder, MOST_MODULES)} == {}
    done = [folder for folder in LARGE_FOLDERS if modules[folder] <= MOST_MODULES]
    assert done == [], "these are small enough now: remove them from LARGE_FOLDERS"


def test_nobody_asks_what_kind_of_place_it_is() -> None:
    """A place has verbs, and is told what to do."""
    asks = [
        f"{path}:{node.lineno}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if any(isinstance(kind, ast.Name) and kind.id in PLACES for kind in ast.walk(node.args[1]))
    ]
    assert asks == []


def test_manifests_are_written_in_one_place() -> None:
    """Only the commit turns a manifest into bytes."""
    writers = {
        path
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("manifest.to_json")
    }
    assert writers == {"checkpoint/place/commit.py"}
