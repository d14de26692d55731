"""What is imported when a checkpoint names it.

The lower layers look here and know none of the packages: who knows one adds its name. ``import composerlite`` adds
those that it has.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ALGORITHMS", "ALGORITHM_PACKAGES"]

ALGORITHM_PACKAGES: list[str] = []
"""Packages whose import makes algorithms known, in the order in which they are asked."""

ALGORITHMS: dict[str, type[Any]] = {}
"""The classes of algorithms that have been imported, by name: each adds itself."""
