"""Imports on first use: names of packages, and classes that a checkpoint names.

The lower layers look here and know none of the packages: who knows one adds its name. ``import composerlite`` adds
those that it has.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ALGORITHMS", "ALGORITHM_PACKAGES", "ModulesOfOtherNames", "lazy_names", "uncollected"]

ALGORITHM_PACKAGES: list[str] = []
"""Packages whose import makes algorithms known, in the order in which they are asked."""

ALGORITHMS: dict[str, type[Any]] = {}
"""The classes of algorithms that have been imported, by name: each adds itself."""


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Keep the garbage collector away, in the main thread: from an import, whose objects live on, and from lists.

    What is made is looked through again and again, and all that was there before: all of torch, of thousands of ranks.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of ``package``, which import a name when it is first used (PEP 562).

    Args:
        package: its name, ``__name__``.
        homes: names by the module that they are in; ``None``: what the package imports under ``if TYPE_CHECKING:``, so
            that each name is said once for type checkers and for Python.
    """

    @functools.cache
    def home_of() -> dict[str, str]:
        by_home = _imported_for_types(package) if homes is None else homes
        return {name: home for home, names in by_home.items() for name in names}

    def get(name: str) -> Any:
        home = None if name.startswith("__") else home_of().get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home == package:  # a module of its own
            return importlib.import_module(f"{package}.{name}")
        return getattr(__import__(home, fromlist=[name]), name)

    return get, lambda: list(importlib.import_module(package).__all__)


def _imported_for_types(package: str) -> dict[str, list[str]]:
    """The names that ``package`` imports under ``if TYPE_CHECKING:``, by the module that they are in."""
    loader: Any = importlib.import_module(package).__loader__
    source = loader.get_source(package)
    if source is None:
        raise ImportError(f"{package} has no source file, which says where its names are: install it with its sources.")
    blocks = [one.body for one in ast.parse(source).body if isinstance(one, ast.If)]
    return {
        line.module: [alias.name for alias in line.names]
        for block in blocks
        for line in block
        if isinstance(line, ast.ImportFrom) and line.module is not None
    }


class ModulesOfOtherNames:
    """Finds modules that have no file: each gives names of other modules, which are imported when they are used.

    A finder and loader of modules, as :pep:`451` has them. Where there is a file of that name, the file is the module.

    Args:
        package: whose modules they are.
        table: module within ``package`` that holds ``PATHS``: names by home, by module. It is imported when a module is
            looked for that has no file.
    """

    def __init__(self, package: str, table: str) -> None:
        self._prefix = f"{package}."
        self._table = f"{package}.{table}"

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Spec of the module ``fullname``; ``None`` if it is not in the table."""
        if not fullname.startswith(self._prefix) or fullname == self._table or not self._names_by_home(fullname):
            return None
        inner = f"{fullname.removeprefix(self._prefix)}."
        loader: Any = self  # importlib.abc.Loader in all but name: its module takes time to import
        return ModuleSpec(fullname, loader, is_package=any(name.startswith(inner) for name in self._paths()))

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give ``module`` its names."""
        homes = self._names_by_home(module.__name__)
        names = sorted(name for of_home in homes.values() for name in of_home)
        get, listed = lazy_names(module.__name__, homes)
        vars(module).update(__all__=names, __getattr__=get, __dir__=listed)

    def _names_by_home(self, fullname: str) -> dict[str, list[str]]:
        homes = self._paths().get(fullname.removeprefix(self._prefix), {})
        return {f"{self._prefix}{home}": names.split() for home, names in homes.items()}

    def _paths(self) -> Mapping[str, Mapping[str, str]]:
        return importlib.import_module(self._table).PATHS
