"""What the page on the architecture says is so: its walks are those of today, and the structure only gets simpler."""

from __future__ import annotations

import ast
import functools
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


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    """Each module of the package by its path, parsed."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


# ── the walks ────────────────────────────────────────────────────────────────────────────────────────────────────────
Walk: TypeAlias = tuple[list[int], list[str]]


def walks_in(text: str) -> dict[str, Walk]:
    """By ``save`` and ``load``: its counts, and the modules in order."""
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
    """The same modules in the same order, and no more edges; the number of functions varies with time."""
    counts, modules = walks_in(PAGE)[what]
    assert walks[what][1] == modules, "run `make walks`, and look at what changes"
    now = walks[what][0]
    assert len(now) == len(counts) == 5
    assert all(one <= other for one, other in zip(now[:4], counts[:4], strict=True)), f"{now}; the page has {counts}"


# ── structure ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_folder_has_at_most_twelve_modules() -> None:
    """A reader sees a folder at a glance."""
    paths = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    modules = Counter(str(path.parent) for path in paths)
    assert {folder: count for folder, count in modules.items() if count > MOST_MODULES} == {}


PUTS = {"commit_file", "put_decider"}
"""Functions whose call makes a checkpoint exist."""


def users_of(names: set[str]) -> set[str]:
    """Return the modules that use one of the functions ``names``, besides those that define them."""
    used = {
        path
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).rpartition(".")[2] in names
    }
    defined = {path for path, tree in trees() for node in tree.body if getattr(node, "name", "") in names}
    return used - defined


def test_one_module_makes_checkpoints_exist() -> None:
    """Both functions that put a deciding file are in the module of the commit, and few modules call them."""
    defined = {path for path, tree in trees() for node in tree.body if getattr(node, "name", "") in PUTS}
    assert defined == {"checkpoint/place/commit.py"}
    assert users_of(PUTS) == {"checkpoint/place/directory.py", "checkpoint/save/form.py"}


STARTS_THREADS = {
    "Thread",
    "Timer",
    "ThreadPool",
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
    "QueueListener",
    "start_new_thread",
    "to_thread",
    "run_in_executor",
}


def starts_of_threads(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that start threads or make a class of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call | ast.ClassDef):
            made = [node.func] if isinstance(node, ast.Call) else node.bases
            if any(ast.unparse(one).rpartition(".")[2] in STARTS_THREADS for one in made):
                yield node.lineno


def test_one_function_starts_threads() -> None:
    """It says so where the system gives none, and who calls it does the work then. What only tests use may fail."""
    for code in ("threading.Thread(target=f).start()", "with ThreadPool(2) as pool: 1", "class A(Thread): 1"):
        assert list(starts_of_threads(ast.parse(code))) == [1], code
    found = {path for path, tree in trees() if list(starts_of_threads(tree)) and not path.startswith("testing/")}
    assert found == {"threads.py"}, "let them call start_threads, and do without threads where there are none"
