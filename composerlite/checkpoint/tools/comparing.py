"""Comparison of two checkpoints: keys, shapes, types, and the largest difference of their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from composerlite.checkpoint.foreign.keys import as_tensor
from composerlite.checkpoint.tools.reading import leaves_in, shortened

_STEP = 1 << 24
"""Count of numbers to compare at a time."""


class Change(NamedTuple):
    """Difference of the numbers under a key.

    Attributes:
        key: joined by dots.
        shape: shape of both tensors.
        max_abs: the largest ``|a - b|``.
        norm: the Euclidean norm of ``a - b``.
        relative: ``norm`` divided by the norm of ``a``; infinite if the norm of ``a`` is zero.
    """

    key: str
    shape: tuple[int, ...]
    max_abs: float
    norm: float
    relative: float


@final
class Comparison(NamedTuple):
    """Differences between two flat state dicts.

    Attributes:
        only_a, only_b: keys of one side alone.
        forms: keys with another shape or type, with the type and shape on each side, as text.
        changes: tensors with other numbers, the largest difference first.
        values: keys with other values that are no tensors, with both values as text.
        equal_count: number of equal keys. In tensors, the sign of zero and the kind of NaN make no difference.
    """

    only_a: Sequence[str]
    only_b: Sequence[str]
    forms: Sequence[tuple[str, str, str]]
    changes: Sequence[Change]
    values: Sequence[tuple[str, str, str]]
    equal_count: int

    @property
    def is_none(self) -> bool:
        """True if both sides are equal."""
        return not (self.only_a or self.only_b or self.forms or self.changes or self.values)


def flat(contents: Any) -> dict[str, Any]:
    """Flatten nested dicts and lists to keys joined by dots. Empty containers stay; numeric arrays become tensors."""
    return {".".join(path): as_tensor(value) for path, value in leaves_in(contents)}


def compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compare two checkpoints, each by flat keys."""
    forms: list[tuple[str, str, str]] = []
    changes: list[Change] = []
    values: list[tuple[str, str, str]] = []
    both = [key for key in a if key in b]
    for key in both:
        one, other = a[key], b[key]
        if isinstance(one, Tensor) or isinstance(other, Tensor):
            if (form := _form(one)) != _form(other):
                forms.append((key, form, _form(other)))
            elif (change := _change(key, one, other)).max_abs != 0:
                changes.append(change)
        elif _written(one) != _written(other):
            values.append((key, shortened(one), shortened(other)))
    changes.sort(key=lambda change: (-math.inf if math.isnan(change.max_abs) else -change.max_abs, change.key))
    only_a, only_b = [key for key in a if key not in b], [key for key in b if key not in a]
    return Comparison(only_a, only_b, forms, changes, values, len(both) - len(forms) - len(changes) - len(values))


def _written(value: Any) -> str:
    """Return the whole value as text. ``repr`` of a long array leaves elements out."""
    return f"{value.dtype} {value.tolist()!r}" if isinstance(value, np.ndarray) else repr(value)


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _change(key: str, a: Tensor, b: Tensor) -> Change:
    """Return the difference of two tensors of equal shape and type."""
    shape = tuple(a.shape)
    a, b = (one.detach().to_dense().reshape(-1) for one in (a, b))  # for sparse tensors, too
    largest, squares, size = [0.0], 0.0, 0.0
    for start in range(0, a.numel(), _STEP):
        part = a[start : start + _STEP]
        distance = _distance(part, b[start : start + _STEP])
        largest.append(float(distance.max()))
        squares += float((distance * distance).sum())
        size += float((_wide(part).abs() ** 2).nansum())
    most = math.nan if any(map(math.isnan, largest)) else max(largest)
    norm = math.sqrt(squares)
    return Change(key, shape, most, norm, norm / math.sqrt(size) if size else math.inf)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return ``|a - b|`` in float64, zero for equal numbers only."""
    one, other = _wide(a), _wide(b)
    same = (one == other) | (one.isnan() & other.isnan())
    distance = torch.where(same, 0, one - other).abs()
    if a.dtype not in (torch.int64, torch.uint64):
        return distance
    differs = a.view(torch.int64) != b.view(torch.int64)  # float64 cannot hold all large integers
    return torch.where(differs, distance.clamp(min=1), 0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
