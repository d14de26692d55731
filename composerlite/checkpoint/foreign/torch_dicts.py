"""Files of plain torch: the state dict of a model, and dicts with a model and an optimizer in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from composerlite.checkpoint.foreign.keys import KeyMap, as_tensor, is_weight, picked
from composerlite.checkpoint.foreign.taken import Counts, Taken
from composerlite.types import StateDict

_MODELS = ("model", "state_dict", "model_state_dict", "model_state")
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_state")
_OF_TORCHTITAN = ("optimizer", "lr_scheduler", "train_state", "dataloader")
_SCHEDULERS = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")


def is_torch_dict(contents: StateDict) -> bool:
    """Return true for a dict with one model in it, under one of the usual names."""
    return len(_under(contents, _MODELS)) == 1


def taken_from_torch_dict(contents: StateDict, source: str) -> Taken:
    """Take the model, one optimizer and one scheduler. Counts of steps need ``load_key_map``: names of keys differ."""
    parts = [_under(contents, names) for names in (_MODELS, _OPTIMIZERS, _SCHEDULERS)]
    model, optimizer, scheduler = (next(iter(part.values())) if len(part) == 1 else None for part in parts)
    used = {key for part in parts if len(part) == 1 for key in part}
    return Taken(model, optimizer, scheduler, left=[key for key in contents if key not in used])


def _under(contents: StateDict, names: tuple[str, ...]) -> StateDict:
    return {name: contents[name] for name in names if isinstance(contents.get(name), Mapping) and contents[name]}


def is_torchtitan(contents: StateDict) -> bool:
    """Return true for a checkpoint of torchtitan: weights at the top, beside the parts of the trainer."""
    return isinstance(contents.get("train_state"), Mapping) and "step" in contents["train_state"]


def taken_from_torchtitan(contents: StateDict, source: str) -> Taken:
    """Take weights, optimizer, scheduler and step."""
    weights = {key: value for key, value in contents.items() if key not in _OF_TORCHTITAN}
    optimizer, scheduler = (contents.get(key) for key in _OF_TORCHTITAN[:2])
    left = [key for key in _OF_TORCHTITAN[3:] if key in contents]
    return Taken(weights, optimizer, scheduler, Counts(contents["train_state"]["step"]), left=left)


def is_state_dict(contents: StateDict) -> bool:
    """Return true for a dict with tensors, or arrays of numpy, by name, and extra state."""
    values = {str(name): as_tensor(value) for name, value in contents.items()}
    return any(isinstance(value, Tensor) for value in values.values()) and all(
        is_weight(name, value) for name, value in values.items()
    )


def taken_from_state_dict(contents: StateDict, source: str) -> Taken:
    """Take ``contents`` as the weights of the model."""
    return Taken(contents)


def taken_by_map(contents: Any, key_map: KeyMap, source: str) -> Taken:
    """Take each part from the key in ``key_map``.

    Raises:
        ConfigError: there is no such key.
    """
    parts = picked(contents, key_map, source)
    progress = None
    if parts.keys() & {"epoch", "batch"}:
        progress = Counts(parts.get("batch", 0), parts.get("epoch"))
    return Taken(parts.get("model", {}), parts.get("optimizer"), parts.get("scheduler"), progress)
