"""Class names are unique, and the API pages describe arguments and results."""

import ast
import collections
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import composerlite

_PACKAGE = Path(composerlite.__file__).parent


def test_a_class_name_stands_for_one_thing() -> None:
    """A name that somebody looks up leads to one class of the package."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path in sorted(_PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(_PACKAGE)}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, f"rename all but one: {twice}"


_ALIKE = {("state", "logger"), ("event", "state"), ("event", "state", "logger")}
"""Parameters of the methods that events call: they are described where callbacks and algorithms are."""
_API = re.compile(r"^::: (\S+)(?:\n((?: +.*\n?)*))?", re.M)


def _on_api_pages() -> Iterator[tuple[str, Any]]:
    """Yield the public objects of the API pages with their names."""
    for page in sorted((_PACKAGE.parent / "docs" / "api").glob("composerlite*.md")):
        for path, options in _API.findall(page.read_text(encoding="utf-8")):
            try:
                module = importlib.import_module(path)
            except ModuleNotFoundError:  # an entry for one object
                home, _, name = path.rpartition(".")
                yield path, getattr(importlib.import_module(home), name)
                continue
            members = re.search(r"members: \[(.*?)\]", options)
            for name in members[1].split(", ") if members else module.__all__:
                yield f"{path}.{name}", getattr(module, name)


def _documented() -> Iterator[tuple[str, Callable[..., Any], str, bool]]:
    """Yield name, function and docstring of functions, methods and constructors; true: it is a constructor."""
    seen: set[int] = set()
    for name, found in _on_api_pages():
        if id(found) in seen:
            continue
        seen.add(id(found))
        if not inspect.isclass(found):
            if inspect.isroutine(found) and found.__doc__:
                yield name, found, found.__doc__, False
            continue
        if "__init__" in vars(found) and found.__doc__ and not getattr(found, "_is_protocol", False):
            yield name, found.__init__, found.__doc__, True
        for method, value in vars(found).items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if not method.startswith(("_", "test_")) and inspect.isfunction(function) and function.__doc__:
                yield f"{name}.{method}", function, function.__doc__, False


def test_what_the_api_pages_show_says_what_it_takes_and_returns() -> None:
    """A reader of an API page finds each argument described, where there are several, and the result."""
    offenders: list[str] = []
    count = 0
    for name, function, doc, is_constructor in _documented():
        signature = inspect.signature(function)
        parameters = tuple(one for one in signature.parameters if one not in ("self", "cls"))
        if len(parameters) < 2 or parameters in _ALIKE:
            continue
        count += 1
        if "Args:" not in doc and "Attributes:" not in doc:
            offenders.append(f"{name}{parameters}: no Args")
        is_without_result = is_constructor or signature.return_annotation in (None, "None", "Generator[None]")
        if not is_without_result and "Returns:" not in doc and "Yields:" not in doc:
            offenders.append(f"{name} -> {signature.return_annotation}: no Returns or Yields")
    assert count > 250
    assert not offenders, "\n".join(offenders)
