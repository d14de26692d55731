"""The states of the random generators of python, numpy, torch and the accelerator."""

from __future__ import annotations

import contextlib
import io
import logging
import random
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from composerlite import dist

log = logging.getLogger(__name__)
_ACCELERATORS = ("cuda", "mps", "xpu")

_preserved: dict[str, Any] | None = None


def capture() -> dict[str, Any]:
    """Return the states of the generators of this rank, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        # As a tensor: torch.load opens no numpy arrays by default.
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).copy()), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if (kind := _accelerator()) is not None and (kind != "cuda" or torch.cuda.is_initialized()):
        module = torch.get_device_module(kind)
        state[kind] = module.get_rng_state()
        if module.device_count() > 1 and dist.get_local_world_size() == 1:  # the model may use several devices
            state[f"{kind}_devices"] = [module.get_rng_state(number) for number in range(module.device_count())]
    return state


def _accelerator() -> str | None:
    """Return the type of the accelerator; ``None`` without an accelerator."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


@contextlib.contextmanager
def preserved() -> Generator[dict[str, Any]]:
    """Restore the generators at the end of the block. Checkpoints within the block have the states from before.

    In nested blocks, checkpoints have the states from before the outermost block.

    Yields:
        The states before the block, as :func:`capture` returns them.
    """
    global _preserved
    outer, before = _preserved, capture()
    _preserved = before if outer is None else outer
    try:
        yield before
    finally:
        _preserved = outer
        restore([before])


def of_training() -> dict[str, Any]:
    """Return the states for a checkpoint: the current states, or within :func:`preserved` the states from before."""
    return capture() if _preserved is None else _preserved


def packed(state: Mapping[str, Any]) -> torch.Tensor:
    """Pack a result of :func:`capture` into a tensor of bytes, for other ranks and for sharded checkpoints."""
    data = io.BytesIO()
    torch.save(dict(state), data)
    return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def unpacked(state: torch.Tensor) -> dict[str, Any]:
    """Return the states that :func:`packed` has packed."""
    return torch.load(io.BytesIO(bytes(state.numpy())), weights_only=True)


def restore(states: Sequence[dict[str, Any] | torch.Tensor], rank: int = 0) -> None:
    """Restore the generators of this rank.

    A rank beyond the ranks of the saved run keeps its seed, and a warning is logged.

    Args:
        states: of each rank of the saved run, as :func:`capture` or :func:`packed` returned them.
        rank: of this process.
    """
    if rank >= len(states):
        log.warning("the checkpoint has generators for %d ranks: rank %d keeps its seed", len(states), rank)
        return
    state = states[rank]
    state = unpacked(state) if isinstance(state, torch.Tensor) else state
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.asarray(keys), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if (kind := _accelerator()) is not None:
        module = torch.get_device_module(kind)
        for number, one in enumerate(state.get(f"{kind}_devices", ())[: module.device_count()]):
            module.set_rng_state(one, number)
        if kind in state:
            module.set_rng_state(state[kind])
    for name in _ACCELERATORS:
        if name in state and name != kind:
            log.warning(
                "the checkpoint was saved on a GPU that this run does not have: its %s generator is not restored",
                name.upper(),
            )
