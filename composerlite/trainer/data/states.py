"""Copies of states that a checkpoint can hold: those of generators, and what ``state_dict`` of anything gives."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

from composerlite.types import items_of, with_items

__all__ = ["NotPlainError", "generator_state", "native", "portable", "same", "set_generator_state"]

_PLAIN = (bool, int, float, str, bytes)
_NUMPY = "__numpy__"


# ── generators ───────────────────────────────────────────────────────────────────────────────────────────────────────
def generator_state(generator: Any) -> Any:
    """Return the state of ``generator``, as tensors and plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _with_tensors(dict(generator.bit_generator.state))
    return _with_tensors(dict(generator.get_state(legacy=False)))


def set_generator_state(generator: Any, state: Any) -> None:
    """Put ``generator`` where :func:`generator_state` found it."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, internal, gauss = state
        generator.setstate((version, tuple(internal), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state)
    else:
        generator.set_state(_with_arrays(state))


def _with_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """numpy's arrays as tensors: arrays are not among the types that torch.load opens by itself."""
    swap = {np.ndarray: lambda array: torch.from_numpy(array.copy()), dict: _with_tensors}
    return {name: swap.get(type(value), lambda same: same)(value) for name, value in state.items()}


def _with_arrays(state: dict[str, Any]) -> dict[str, Any]:
    swap = {torch.Tensor: lambda tensor: tensor.numpy(), dict: _with_arrays}
    return {name: swap.get(type(value), lambda same: same)(value) for name, value in state.items()}


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class NotPlainError(Exception):
    """A state has something in it that checkpoints do not hold: its type."""


def portable(value: Any) -> Any:
    """A copy of ``value`` that a checkpoint can hold: arrays are tensors, marked as such."""
    if isinstance(value, np.ndarray):
        try:
            return {_NUMPY: torch.from_numpy(np.array(value))}
        except TypeError as e:
            raise NotPlainError(f"numpy array of {value.dtype}") from e
    if isinstance(value, np.generic):
        return portable(value.item())
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if value is None or type(value) in _PLAIN:
        return value
    if type(value) in (dict, list, tuple):
        return with_items(value, lambda _, item: portable(item))
    raise NotPlainError(type(value).__name__)


def native(value: Any) -> Any:
    """Undo :func:`portable`: a new copy, which its owner may change."""
    if isinstance(value, dict) and list(cast("dict[Any, Any]", value)) == [_NUMPY]:
        return cast("Any", value)[_NUMPY].numpy().copy()
    if isinstance(value, torch.Tensor):
        return value.clone()
    return with_items(value, lambda _, item: native(item))


def same(one: Any, other: Any) -> bool:
    """Return true if two states are equal."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if not isinstance(one, dict | list | tuple):
        return bool(one == other)
    mine, others = dict(items_of(cast("Any", one))), dict(items_of(other))
    return mine.keys() == others.keys() and all(same(item, others[key]) for key, item in mine.items())
