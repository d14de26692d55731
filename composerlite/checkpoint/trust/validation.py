"""The user's own check of files before they are read."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from composerlite.errors import ConfigError, CorruptCheckpointError

__all__ = ["validate"]

_VALIDATION = "CHECKPOINT_VALIDATION_FUNCTION"


def validate(path: Path) -> None:
    """Ask the function that ``CHECKPOINT_VALIDATION_FUNCTION`` names, if it names one, whether ``path`` may be read.

    Raises:
        CorruptCheckpointError: it says no.
        ConfigError: it cannot be imported.
    """
    name = os.environ.get(_VALIDATION)
    if name and not _function(name)(path, None):  # None: the file as a whole, as Composer calls it
        raise CorruptCheckpointError(f"checkpoint {str(path)!r} was refused by {name}, which {_VALIDATION} names.")


@functools.cache
def _function(name: str) -> Callable[[Path, None], bool]:
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"{_VALIDATION}={name!r} cannot be imported: {e}. Want 'package.module.function', a function of "
            "(path, specs) that returns whether the file may be read."
        ) from e
    if not callable(found):
        raise ConfigError(f"{_VALIDATION}={name!r} is {type(found).__name__} and no function.")
    return cast("Callable[[Path, None], bool]", found)
