"""Logged values as plain Python values, as JSON, and as text for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch


def plain(value: Any) -> Any:
    """Return a tensor or array of one element as a number, a larger one as a copy, and any other value unchanged.

    Training may change a tensor in place after the call of the logger, so a reference is not enough.
    """
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.detach().cpu().clone()
    if isinstance(value, np.generic | np.ndarray):
        return value.item() if value.size == 1 else value.copy()
    return value


def jsonable(value: Any, *, strict: bool = False) -> Any:
    """Return ``value`` as dicts, lists, numbers and strings.

    Args:
        value: tensors and arrays become numbers or lists; objects of unknown classes become text.
        strict: JSON has no NaN and no infinity: replace these numbers by ``'nan'``, ``'inf'`` and ``'-inf'``.
    """
    value = plain(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(name): jsonable(inner, strict=strict) for name, inner in items}
    if isinstance(value, list | tuple):
        return [jsonable(inner, strict=strict) for inner in cast("Sequence[Any]", value)]
    if isinstance(value, float) and strict and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, int | float | str) else str(value)


def to_json(value: Any, *, strict: bool = False) -> str:
    """Return ``value`` as one line of JSON. See :func:`jsonable` for the arguments."""
    return json.dumps(jsonable(value, strict=strict))


def shown(values: Mapping[str, Any]) -> list[str]:
    """Return ``values`` as texts for people, such as ``['loss 0.7625', 'MulticlassAccuracy 0.5104']``.

    Losses are first, then metrics, then the rest. ``loss/train/total`` is called ``loss``, and metrics are called as in
    the model. Numbers have four significant digits. Values other than numbers and short texts are skipped.
    """
    texts: list[tuple[int, str]] = []
    for name, value in values.items():
        value = plain(value)
        if not isinstance(value, int | float | str) or "\n" in str(value):
            continue
        order = 0 if name.startswith("loss/") else 1 if name.startswith("metrics/") else 2
        if name == "loss/train/total":
            name = "loss"
        elif order == 1:
            name = name.split("/", 2)[-1]
        else:
            name = name.replace("loss/train/", "loss/", 1)
        texts.append((order, f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"))
    return [text for _, text in sorted(texts, key=lambda pair: pair[0])]


def fitting(parts: Sequence[str], width: int) -> str:
    """Join as many ``parts`` as fit into ``width`` characters, and count the others: ``'loss 0.5, lr 0.1, +3'``."""
    for count in range(min(len(parts), width // 4), 0, -1):  # a part and its comma have at least five characters
        left = len(parts) - count
        text = ", ".join([*parts[:count], *([f"+{left}"] if left else [])])
        if len(text) <= width:
            return text
    return f"+{len(parts)}"


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, ``'0:12'``, or with hours, ``'1:03:45'``."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")
