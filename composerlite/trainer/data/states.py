"""Copies of states that a checkpoint can hold: states of generators, and results of ``state_dict()``."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

from composerlite.types import items_of, with_items

__all__ = ["NotPlainError", "generator_state", "native", "portable", "same", "set_generator_state"]

_PLAIN = (bool, int, float, str, bytes)
_NUMPY = "__numpy__"


class NotPlainError(Exception):
    """A state has a value of a type that checkpoints do not hold. The message is the type."""


def generator_state(generator: Any) -> Any:
    """Return the state of ``generator`` as tensors and plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return portable(generator.bit_generator.state)
    return portable(generator.get_state(legacy=False))


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of ``generator`` to a result of :func:`generator_state`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, internal, gauss = state
        generator.setstate((version, tuple(internal), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = native(state)
    else:
        generator.set_state(native(state))


def portable(value: Any) -> Any:
    """Return a copy of ``value`` for a checkpoint, with marked tensors in place of arrays.

    Raises:
        NotPlainError: ``value`` contains something other than numbers, text, tensors, arrays, dicts, lists and tuples.
    """
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
    """Return the value that :func:`portable` has copied, as a new copy."""
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
