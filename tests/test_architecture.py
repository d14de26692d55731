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
LARGE_FOLDERS: dict[str, int] = {}
"""Folders with more modules than that, and how many they have at most. No folder and no module is added here."""

PLACES = {"Bucket", "Folder", "LocalPlace", "RemotePlace"}


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    """Each module of the package by its path, parsed."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


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


CHANGES: dict[str, tuple[str, ...]] = {
    "write_manifest": ("put", "send", "take", "put_bytes", "write_bytes", "write_text", "atomic_write"),
    "remove_manifest": ("delete", "delete_all", "quarantine", "unlink", "rename", "replace"),
}
KEEPS_THE_PATH = {"record_path", "name_of", "reversed", "list", "str"}


def changes_of_manifests(tree: ast.Module, verbs: tuple[str, ...]) -> Iterator[str]:
    """Name the functions that call one of ``verbs`` for the path of a manifest or of a step's marker."""
    if not any(isinstance(node, ast.Name) and node.id in {"record_path", "MARKER"} for node in ast.walk(tree)):
        return
    named = {"MARKER", "commits", "found.commits"}

    def is_one(node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            kind = ast.unparse(node.func).rpartition(".")[2]
            return kind == "record_path" or (kind in KEEPS_THE_PATH and any(map(is_one, node.args)))
        if isinstance(node, ast.BinOp):  # below a folder; with a suffix it is another path
            return isinstance(node.op, ast.Div) and is_one(node.right)
        if isinstance(node, ast.JoinedStr):
            return isinstance(last := node.values[-1], ast.FormattedValue) and is_one(last.value)
        return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in named

    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    ends = {function.name: function.body[-1] for function in functions}
    properties = {name for name, end in ends.items() if isinstance(end, ast.Return) and end.value and is_one(end.value)}
    of_all = named | {f"self.{name}" for name in properties}
    for function in functions:
        named = set(of_all)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value and is_one(node.value):
                named.update(map(ast.unparse, node.targets if isinstance(node, ast.Assign) else [node.target]))
            elif isinstance(node, ast.For | ast.comprehension) and is_one(node.iter):
                named.add(ast.unparse(node.target))
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(value=of, attr=verb), args=args) if verb in verbs:
                    if any(map(is_one, [of, *args])):
                        yield function.name
                case _:
                    pass


@pytest.mark.parametrize("function", CHANGES)
def test_one_function_writes_manifests_and_one_removes_them(function: str) -> None:
    """Whatever makes a checkpoint exist, or exist no more, calls it; it stands beside the commit."""
    for verb in CHANGES[function]:
        for call in (f"place.{verb}(record_path(name))", f"record = root / record_path(name); record.{verb}(data)"):
            assert list(changes_of_manifests(ast.parse(f"def f(): {call}"), CHANGES[function])) == ["f"], call
    found = {f"{path}: {name}" for path, tree in trees() for name in changes_of_manifests(tree, CHANGES[function])}
    assert found == set(), f"these change manifests themselves: let them call {function}"
    defined = [path for path, tree in trees() for node in tree.body if getattr(node, "name", "") == function]
    assert defined == ["checkpoint/place/commit.py"]


def test_manifests_are_written_in_one_place() -> None:
    """Only the commit turns a manifest into bytes."""
    writers = {
        path
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("manifest.to_json")
    }
    assert writers == {"checkpoint/place/commit.py"}


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
