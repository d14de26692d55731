"""Packages that are imported when a checkpoint names what they define.

The lower layers look here and know none of them: who knows a package adds its name. ``import composerlite`` adds those
that it has.
"""

from __future__ import annotations

__all__ = ["ALGORITHM_PACKAGES"]

ALGORITHM_PACKAGES: list[str] = []
"""Packages whose import makes algorithms known, in the order in which they are asked."""
