"""Logged values as plain Python values and as text, and how much of it fits on a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from composerlite.core import Time, TimeUnit


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


def shown(values: Mapping[str, Any]) -> list[str]:
    """``values`` for people, each as ``'name value'``: losses first, then metrics, then the others.

    ``loss/train/total`` is ``loss``, and metrics are called as the model calls them. Numbers have four significant
    digits; what is neither a number nor a text is left out.
    """
    texts = [(_place(name), f"{_short_name(name)} {_short(plain(value))}") for name, value in values.items()]
    return [text for _, text in sorted(texts, key=lambda one: one[0]) if "\n" not in text]


def _place(name: str) -> int:
    return 0 if name.startswith("loss/") else 1 if name.startswith("metrics/") else 2


def _short_name(name: str) -> str:
    if name == "loss/train/total":
        return "loss"
    if name.startswith("metrics/"):
        return name.split("/", 2)[-1]
    return name.replace("loss/train/", "loss/", 1)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, int | str) else "\n"


def fitting(parts: Sequence[str], width: int) -> str:
    """``parts`` with commas between them, as many as fit into ``width``; then how many more there are."""
    text, left = "", len(parts)
    for number, part in enumerate(parts):
        longer = f"{text}, {part}" if text else part
        rest = len(parts) - number - 1
        if len(longer) + (len(f", +{rest}") if rest else 0) > width:
            break
        text, left = longer, rest
    if not left:
        return text
    return f"{text}, +{left}" if text else f"+{left}"


def lines_of(head: str, parts: Sequence[str], width: int) -> list[str]:
    """Return ``head`` and all ``parts``, with commas between them, on as many lines of ``width`` as they need."""
    lines: list[str] = []
    while parts:
        count = len(parts)
        while count > 1 and len(head + ", ".join(parts[:count])) > width:
            count -= 1
        lines.append(head + ", ".join(parts[:count]))
        head, parts = "    ", parts[count:]
    return lines


def out_of(end: Time | None, unit: TimeUnit) -> str:
    """``'/10'`` where training ends at 10 of ``unit``, for people; else nothing."""
    return f"/{end.value}" if end is not None and end.unit is unit else ""


def clock(seconds: float) -> str:
    """``seconds`` as minutes and seconds, ``'0:07'``, or with hours, ``'1:02:03'``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def speed(batches: float, seconds: float) -> str:
    """Batches per second, with three significant digits: ``'12.5'``."""
    rate = batches / seconds
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
