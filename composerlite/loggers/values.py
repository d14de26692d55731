"""Logged values as plain Python values and as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from composerlite.core import Time, TimeUnit

__all__ = ["out_of", "plain", "to_json", "to_text"]


def plain(value: Any) -> Any:
    """``value`` as a number where it is a tensor or an array of one element, else as it is.

    Tensors of more elements are copied, since training may change them in place after they were logged.
    """
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.detach().cpu().clone()
    if isinstance(value, np.generic | np.ndarray):
        return value.item() if value.size == 1 else value.copy()
    return value


def _jsonable(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, int | float):
        return value
    return str(value)


def to_json(value: Any) -> str:
    """``value`` as JSON on one line. Tensors and arrays become numbers or lists, unknown objects their text."""
    return json.dumps(value, default=_jsonable)


def _short(value: Any) -> str:
    value = plain(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def to_text(values: Mapping[str, Any]) -> str:
    """``name=value`` pairs for people, with six significant digits."""
    return " ".join(f"{name}={_short(value)}" for name, value in values.items())


def out_of(end: Time | None, unit: TimeUnit) -> str:
    """``'/10'`` where training ends at 10 of ``unit``, for people; else nothing."""
    return f"/{end.value}" if end is not None and end.unit is unit else ""
