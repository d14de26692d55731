"""Random numbers for libraries that draw them in the background, away from those that training draws."""

from __future__ import annotations

import random
import sys
from typing import final

__all__ = ["draw_apart"]


@final
class _Apart(random.SystemRandom):
    """Stands in a library for the module ``random``."""

    Random = random.Random
    SystemRandom = random.SystemRandom


_apart = _Apart()


def draw_apart(*packages: str) -> None:
    """Have the loaded modules of ``packages`` draw random numbers from the system, and not from ``random``.

    Python has one generator for the whole process, which is seeded and is a part of what a resumed run restores. An
    upload that draws from it, for a separator or a pause, in another thread and at any time, makes two runs differ.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and getattr(module, "random", None) is random:
            module.random = _apart  # type: ignore[attr-defined]
