"""composerlite: a small PyTorch trainer built around checkpointing.

The names below are imported when first used, so that ``import composerlite`` costs what ``import torch`` costs.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from composerlite.on_demand import ALGORITHM_PACKAGES, ModulesOfOtherNames, uncollected

if TYPE_CHECKING:
    from composerlite.core import (
        Algorithm,
        Callback,
        DataSpec,
        Engine,
        Evaluator,
        Event,
        Logger,
        State,
        Time,
        Timestamp,
        TimeUnit,
    )
    from composerlite.models import ComposerModel
    from composerlite.trainer import Trainer

    __version__: str

__all__ = [
    "Algorithm",
    "Callback",
    "ComposerModel",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "Logger",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trainer",
    "__version__",
]

ALGORITHM_PACKAGES.append("composerlite.algorithms")
sys.meta_path.append(ModulesOfOtherNames("composerlite", "composer_paths"))
_HOME = {"Trainer": "composerlite.trainer", "ComposerModel": "composerlite.models"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from composerlite._version import VERSION

        return VERSION
    if name not in __all__:
        raise AttributeError(f"module 'composerlite' has no attribute {name!r}")
    with uncollected():
        return getattr(importlib.import_module(_HOME.get(name, "composerlite.core")), name)


def __dir__() -> list[str]:
    return __all__
