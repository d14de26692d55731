"""A run's settings as loggers get them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composerlite.config.origin import dotted
from composerlite.config.schema import RunConfig

__all__ = ["hyperparameters"]


def hyperparameters(config: RunConfig) -> dict[str, Any]:
    """Every setting by its name, such as ``'optimizer.lr'``, and the Trainer's own defaults.

    What depends on the environment is as the file writes it, ``${oc.env:NAME}``: loggers send what they get to others.
    """
    defaults = {name: value for name, value in vars(config.trainer).items() if value is not None}
    shown = {key: config.origin.shown((key,), value) for key, value in config.values.items() if key != "variables"}
    return {**{name: value for name, value in defaults.items() if name not in shown}, **dict(_flat(shown, ()))}


def _flat(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Values without parts of their own, and lists of such, by their dotted names."""
    parts = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        parts = enumerate(value)
    if not parts:
        yield dotted(path), value
    for key, inner in parts:
        yield from _flat(inner, (*path, str(key)))
