"""The public names of Composer and their status in composerlite, for the page on migration from Composer.

``composer_names.toml`` lists Composer's names by module, how supported names differ, and why others are left out.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

_FILE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COMPOSERS = {module: names.split() for module, names in _FILE["modules"].items()}
DIFFERS = _FILE["differs"]
REASONS = {name: reason for reason, names in _FILE["left_out"].items() for name in names.split()}


def here(module: str, name: str) -> object | None:
    """Return the object that composerlite has for ``name`` of Composer's ``module``, or None."""
    try:
        found = importlib.import_module("composerlite" if module == "." else f"composerlite.{module}")
    except ModuleNotFoundError:
        return None
    return getattr(found, name, None)


def by_package() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield each top-level package of Composer with the names of its modules."""
    packages: dict[str, dict[str, list[str]]] = {}
    for module, names in COMPOSERS.items():
        packages.setdefault(module.partition(".")[0] or ".", {})[module] = names
    yield from sorted(packages.items())


def section() -> str:
    """Return the section of the page as Markdown."""
    lines: list[str] = []
    for package, modules in by_package():
        every = sorted({name for names in modules.values() for name in names}, key=str.lower)
        works = [name for name in every if any(here(m, name) is not None for m in modules if name in modules[m])]
        title = "composer" if package == "." else f"composer.{package}"
        lines += [f"### {title}", ""]
        if same := [f"`{name}`" for name in works if name not in DIFFERS]:
            lines += [f"Works: {', '.join(same)}.", ""]
        rows = [f"| `{name}` | differs: {DIFFERS[name]} |" for name in works if name in DIFFERS]
        gone: dict[str, list[str]] = {}
        for name in every:
            if name not in works:
                gone.setdefault(REASONS[name], []).append(f"`{name}`")
        rows += [f"| {', '.join(names)} | left out: {reason} |" for reason, names in gone.items()]
        if rows:
            lines += ["| name | |", "|---|---|", *rows, ""]
    return "\n".join(lines)
