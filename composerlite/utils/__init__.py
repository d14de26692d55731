"""The import paths that documentation and scripts use. The code lives in the packages below; names load when used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composerlite.checkpoint import (
        PartialFilePath,
        format_name_with_dist,
        format_name_with_dist_and_time,
        get_save_filename,
        glob_filter,
        load_checkpoint,
        safe_torch_load,
        save_checkpoint,
    )
    from composerlite.core import create_interval_scheduler
    from composerlite.utils import checkpoint, dist, reproducibility

__all__ = [
    "PartialFilePath",
    "checkpoint",
    "create_interval_scheduler",
    "dist",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "get_save_filename",
    "glob_filter",
    "load_checkpoint",
    "reproducibility",
    "safe_torch_load",
    "save_checkpoint",
]

_MODULES = ("checkpoint", "dist", "reproducibility")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"composerlite.utils.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'composerlite.utils' has no attribute {name!r}")
    home = "composerlite.core" if name == "create_interval_scheduler" else "composerlite.checkpoint"
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
