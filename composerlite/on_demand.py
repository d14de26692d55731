"""What is imported when it is first asked for: names of packages, and what a checkpoint names.

The lower layers look here and know none of the packages: who knows one adds its name. ``import composerlite`` adds
those that it has.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["ALGORITHMS", "ALGORITHM_PACKAGES", "lazy_names"]

ALGORITHM_PACKAGES: list[str] = []
"""Packages whose import makes algorithms known, in the order in which they are asked."""

ALGORITHMS: dict[str, type[Any]] = {}
"""The classes of algorithms that have been imported, by name: each adds itself."""


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of ``package``, which import a name when it is first used (PEP 562).

    Args:
        package: its name, ``__name__``.
        homes: names by the module that they are in; one within the package begins with a dot.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home_of[name], package), name)

    return get, lambda: list(importlib.import_module(package).__all__)
