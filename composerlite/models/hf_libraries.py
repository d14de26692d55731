"""The libraries of Hugging Face: optional, and imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from composerlite.errors import ConfigError

__all__ = ["peft_library", "transformers_library"]


def transformers_library(wanted_by: str) -> Any:
    """The package ``transformers``.

    Raises:
        ConfigError: it is not installed. ``wanted_by`` is named in the message.
    """
    return _library("transformers", wanted_by)


def peft_library(wanted_by: str) -> Any:
    """The package ``peft``. Raises as :func:`transformers_library`."""
    return _library("peft", wanted_by)


def _library(name: str, wanted_by: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ConfigError(
            f"{wanted_by}: {name} cannot be imported: {e}. pip install 'composerlite[huggingface]'"
        ) from e
