"""The weights of a model to checkpoint contents and back."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from composerlite import dist
from composerlite._torch_compat import EXTRA_STATE, load_hooks, with_versions
from composerlite.core.state.optimizer_state import clean_name, like_live
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict

__all__ = ["load_model", "model_places", "model_problems", "model_state"]

log = logging.getLogger(__name__)


def model_state(model: nn.Module) -> StateDict:
    """The tensors of ``model`` by the names that checkpoints give them. They are not copied."""
    return _cleaned(model.state_dict())


def _cleaned(weights: StateDict) -> StateDict:
    return {clean_name(name): value for name, value in weights.items()}


def _only_in_one(own: StateDict, saved: StateDict) -> tuple[list[str], list[str]]:
    """Names that the checkpoint lacks, and names that the model has not."""
    return [name for name in own if name not in saved], [name for name in saved if name not in own]


def model_problems(model: nn.Module, saved: StateDict, *, strict: bool, source: str) -> list[str]:
    """List the reasons why ``saved`` cannot be loaded into ``model``."""
    own, saved = model_state(model), _cleaned(saved)
    missing, unexpected = _only_in_one(own, saved)
    both = [
        (name, value, own[name])
        for name, value in saved.items()
        if isinstance(own.get(name), torch.Tensor) and not name.endswith(EXTRA_STATE)
    ]
    no_tensors = [name for name, value, _ in both if not isinstance(value, torch.Tensor)]
    shapes = [
        f"{name}: {tuple(value.shape)} in the checkpoint, {tuple(tensor.shape)} in the model"
        for name, value, tensor in both
        if isinstance(value, torch.Tensor) and not is_lazy(tensor) and value.shape != tensor.shape
    ]
    problems: list[str] = []
    if missing and strict:
        problems.append(f"missing in the checkpoint ({len(missing)}): {', '.join(missing)}")
    if unexpected and strict:
        problems.append(f"not in the model ({len(unexpected)}): {', '.join(unexpected)}")
    if shapes:
        problems.append(f"of another shape ({len(shapes)}): {'; '.join(shapes)}")
    if no_tensors:
        problems.append(f"no tensors ({len(no_tensors)}): {', '.join(no_tensors)}")
    if not problems:
        return []
    way_out = (
        "Build the model of that run, or pass load_strict_model_weights=False to load the names that agree."
        if strict and not shapes
        else "Build the model of that run, or leave keys out with load_ignore_keys=['state/model/<name>'] and "
        "load_strict_model_weights=False."
    )
    return [f"{source} does not fit the model.\n  {chr(10).join(problems)}\n{way_out}"]


def model_places(model: nn.Module, saved: StateDict) -> StateDict:
    """The tensors of ``model`` by their names in ``saved``; none where a hook of the model changes what is loaded."""
    if any(_changes_what_is_loaded(hook) for module in model.modules() for hook in load_hooks(module)):
        return {}
    own = model_state(model)
    return {name: own[clean_name(name)] for name in saved if clean_name(name) in own}


def _changes_what_is_loaded(hook: Any) -> bool:
    """Tell hooks of the user from those of ``fully_shard``, which only keep the parameters sharded."""
    return not str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed.fsdp.")


def load_model(model: nn.Module, saved: StateDict, *, strict: bool, source: str) -> None:
    """Load ``saved`` or say everything that does not fit, before a single weight is changed."""
    if problems := model_problems(model, saved, strict=strict, source=source):
        raise IncompatibleCheckpointError("\n".join(problems))
    own = {clean_name(name): (name, value) for name, value in model.state_dict().items()}
    saved = _cleaned(saved)
    missing, unexpected = _only_in_one(own, saved)
    if missing or unexpected:
        log.warning(
            "%s: loaded without strictness; stays as it is: %s; not used: %s",
            source,
            ", ".join(missing) or "nothing",
            ", ".join(unexpected) or "nothing",
        )
    # A state dict has tensors that share the memory of the model's own.
    named = itertools.chain(own.values(), model.named_parameters(), model.named_buffers())
    tensors: StateDict = {clean_name(name): tensor for name, tensor in named}
    both = [
        (name, value, tensors[name])
        for name, value in saved.items()
        if name in own and isinstance(value, torch.Tensor) and isinstance(own[name][1], torch.Tensor)
    ]
    cast = [f"{name} from {value.dtype} to {live.dtype}" for name, value, live in both if value.dtype != live.dtype]
    if cast:
        log.warning("%s: saved in another precision and converted (%d): %s", source, len(cast), ", ".join(cast))
    for _, value, live in both:
        dist.make_fillable(live, value)
    model.load_state_dict(
        with_versions(
            {own[name][0]: like_live(value, own[name][1]) for name, value in saved.items() if name in own}, model
        ),
        strict=False,
    )
