"""Folders of the Trainer of transformers, ``checkpoint-N``, and of ``save_state`` of accelerate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from composerlite.checkpoint.foreign.taken import Counts, Taken, generators
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict

_STATE = "trainer_state.json"
_OF_RANK = re.compile(r"(?:rng_state|random_states)(?:_(\d+))?\.(?:pth|pkl)")


def is_transformers(contents: StateDict) -> bool:
    """Return true for a checkpoint of the Trainer of transformers."""
    return _STATE in contents or "optimizer.pt" in contents


def taken_from_transformers(contents: StateDict, source: str) -> Taken:
    """Take weights, optimizer, scheduler, step and generators."""
    counts = _counts(contents[_STATE], source) if _STATE in contents else None
    return _taken(contents, source, counts, [f"log_history in {_STATE}"], ("python", "numpy", "cpu", "cuda"))


def _counts(state: Any, source: str) -> Counts:
    if not isinstance(state, Mapping) or "global_step" not in state:
        raise IncompatibleCheckpointError(f"{source}: its {_STATE} has no 'global_step'.")
    state = cast("StateDict", state)
    epoch = state.get("epoch")
    whole = int(epoch) if isinstance(epoch, int | float) and 0 <= epoch < 1 << 53 else None
    return Counts(state["global_step"], whole)


def is_accelerate(contents: StateDict) -> bool:
    """Return true for a checkpoint of ``Accelerator.save_state``."""
    return "optimizer.bin" in contents or any(str(key).startswith("random_states_") for key in contents)


def taken_from_accelerate(contents: StateDict, source: str) -> Taken:
    """Take weights, optimizer, scheduler and generators. The folder has no counts of steps."""
    keys = ("random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed")
    return _taken(contents, source, None, [], keys)


def _taken(
    contents: StateDict, source: str, counts: Counts | None, left: list[str], keys: tuple[str, str, str, str]
) -> Taken:
    ranks: dict[int, StateDict] = {}
    for name, value in contents.items():
        if (match := _OF_RANK.fullmatch(str(name))) is not None:
            try:
                ranks[int(match[1] or 0)] = generators(*(value.get(key) for key in keys))
            except (AttributeError, TypeError, ValueError) as e:
                raise IncompatibleCheckpointError(f"{source}: {name} has no states of generators: {e}") from e
    optimizer, scheduler = (contents.get(f"{one}.pt", contents.get(f"{one}.bin")) for one in ("optimizer", "scheduler"))
    rng = [ranks[rank] for rank in sorted(ranks)] if ranks and len(ranks) == max(ranks) + 1 else None
    left += ["scaler.pt"] if "scaler.pt" in contents else []
    return Taken(contents.get("model"), optimizer, scheduler, counts, rng, left)
