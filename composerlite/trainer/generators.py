"""The random generators that a data loader and its samplers hold themselves, and their states as plain values."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["generator_state", "generators_of", "put_back", "set_generator_state"]


def generators_of(loader: Any) -> list[Any]:
    """The generators that ``loader`` and its samplers hold as attributes, each once."""
    found: dict[int, Any] = {}
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for holder in holders:
        attributes: Mapping[str, Any] = getattr(holder, "__dict__", {})
        for value in attributes.values():
            if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
                found[id(value)] = value
    return list(found.values())


@contextlib.contextmanager
def put_back(loader: Any) -> Generator[None]:
    """Within it anybody may iterate over ``loader``: its generators stand afterwards as before."""
    before = [(generator, generator_state(generator)) for generator in generators_of(loader)]
    try:
        yield
    finally:
        for generator, state in before:
            set_generator_state(generator, state)


def generator_state(generator: Any) -> Any:
    """Where ``generator`` stands, as tensors and plain values."""
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
