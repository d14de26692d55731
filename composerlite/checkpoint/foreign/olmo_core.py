"""Steps of OLMo-core: ``model_and_optim``, beside the train state of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from composerlite.checkpoint.foreign.taken import Counts, Taken, generators
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict

_TAKEN = ("global_step", "global_train_tokens_seen", "data_loader", "epoch", "world_size", "rng", "max_steps")


def is_olmo_core(contents: StateDict) -> bool:
    """Return true for a step of OLMo-core: each rank saved a ``global_step``."""
    train: Any = contents.get("train")
    ranks = cast("list[Any]", train) if isinstance(train, list) else []
    return bool(ranks) and all(isinstance(one, Mapping) and "global_step" in one for one in ranks)


def taken_from_olmo_core(contents: StateDict, source: str) -> Taken:
    """Take weights, optimizer, step, epoch, tokens and generators. OLMo-core saves no scheduler."""
    ranks = cast("list[StateDict]", contents["train"])
    first = ranks[0]
    loader: Any = first.get("data_loader")
    seen = cast("StateDict", loader).get("batches_processed") if isinstance(loader, Mapping) else None
    epoch = first.get("epoch")  # counted from one
    progress = Counts(
        first["global_step"],
        epoch - 1 if isinstance(epoch, int) else None,
        seen,
        token=first.get("global_train_tokens_seen", 0),
    )
    rng = None
    try:
        if all("rng" in one for one in ranks):
            rng = [
                generators(*(_state(one["rng"], key) for key in ("python", "numpy", "torch", "cuda"))) for one in ranks
            ]
    except (KeyError, TypeError, ValueError) as e:
        raise IncompatibleCheckpointError(f"{source}: its 'train' has no states of generators: {e}") from e
    left = [f"train/{key}" for key in first if key not in _TAKEN and first[key]]
    return Taken(contents.get("model"), contents.get("optim"), None, progress, rng, left)


def _state(generators: StateDict, key: str) -> Any:
    saved = generators.get(key)
    return None if saved is None else saved["state"]
