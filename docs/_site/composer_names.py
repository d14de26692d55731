"""The public names of Composer, beside those of composerlite: a part of docs/migration/composer.md.

``composer_names.toml`` has Composer's names by module, of one version. A name that can be imported here from the module
that it has there works, or differs as the file says; of one that cannot, the file says why it is left out.
``make migration`` writes the page.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "migration" / "composer.md"
BEGIN, END = "<!-- names: written by `make migration` -->\n", "<!-- end of names -->\n"

_FILE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COMPOSERS = {module: names.split() for module, names in _FILE["modules"].items()}
DIFFERS = _FILE["differs"]
REASONS = {name: reason for reason, names in _FILE["left_out"].items() for name in names.split()}


def here(module: str, name: str) -> object | None:
    """What ``name`` of Composer's ``module`` is here, if it is anything."""
    try:
        found = importlib.import_module("composerlite" if module == "." else f"composerlite.{module}")
    except ModuleNotFoundError:
        return None
    return getattr(found, name, None)


def by_package() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Each first package of Composer, and its modules by name that it says there, the package's own names first."""
    packages: dict[str, dict[str, list[str]]] = {}
    for module, names in COMPOSERS.items():
        packages.setdefault(module.partition(".")[0] or ".", {})[module] = names
    yield from sorted(packages.items())


def section() -> str:
    """The part of the page."""
    lines = [BEGIN.rstrip("\n"), ""]
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
    return "\n".join(lines) + END


def page(text: str) -> str:
    """``text`` with the part of today in it."""
    before, _, rest = text.partition(BEGIN)
    return before + section() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    sys.stdout.write(f"{PAGE}\n")
