"""Weights of a model: checkpoint contents, comparison, loading."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from composerlite import dist
from composerlite._torch_compat import EXTRA_STATE, load_hooks, with_versions
from composerlite.core.state.optimizer_state import clean_name, like_live
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict

__all__ = ["frozen_parameters", "load_model", "model_places", "model_problems", "model_state", "set_frozen_parameters"]

_SKIP_KEYS = (
    "Build the model of that run, or skip keys with load_ignore_keys=['state/model/<name>'] and "
    "load_strict_model_weights=False."
)
log = logging.getLogger(__name__)


def model_state(model: nn.Module) -> StateDict:
    """Return the tensors of ``model`` by the names in checkpoints. The tensors are not copied."""
    return _cleaned(model.state_dict().items())


def frozen_parameters(model: nn.Module) -> list[str]:
    """Return the names of the frozen parameters of ``model``, as in checkpoints.

    Args:
        model: the model.

    Returns:
        Names of the frozen parameters.
    """
    return [clean_name(name) for name, parameter in model.named_parameters() if not parameter.requires_grad]


def set_frozen_parameters(model: nn.Module, names: Collection[str]) -> None:
    """Freeze the parameters of ``model`` in ``names`` and unfreeze all others.

    Args:
        model: the model.
        names: result of :func:`frozen_parameters`.
    """
    names = frozenset(names)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad is (clean_name(name) in names):
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None


def _cleaned(weights: Iterable[tuple[str, Any]]) -> StateDict:
    return {clean_name(name): value for name, value in weights}


def model_problems(model: nn.Module, saved: StateDict, *, strict: bool, source: str) -> list[str]:
    """List the reasons not to load ``saved`` into ``model``.

    Args:
        model: the model.
        saved: weights by name.
        strict: missing and unexpected names are reasons.
        source: path or URI of the checkpoint.

    Returns:
        A message, or nothing if the weights can be loaded.
    """
    own, saved = model_state(model), _cleaned(saved.items())
    shapes, kinds, others = list[str](), list[str](), list[str]()
    has_hooks = _has_load_hooks(model)
    for name, value in saved.items():
        tensor = own.get(name)
        if not isinstance(tensor, torch.Tensor) or name.endswith(EXTRA_STATE):
            continue
        if not isinstance(value, torch.Tensor):
            others.append(name)
            continue
        if not is_lazy(tensor) and value.shape != tensor.shape:
            shapes.append(f"{name}: {tuple(value.shape)} in the checkpoint, {tuple(tensor.shape)} in the model")
        if not has_hooks and _kind(value.dtype) != _kind(tensor.dtype):
            kinds.append(f"{name}: {value.dtype} in the checkpoint, {tensor.dtype} in the model")
    found = {
        "missing in the checkpoint": [name for name in own if name not in saved] if strict else [],
        "not in the model": [name for name in saved if name not in own] if strict else [],
        "of another shape": shapes,
        "of another kind of numbers": kinds,
        "not tensors": others,
    }
    problems = [f"{what} ({len(names)}): {'; '.join(names)}" for what, names in found.items() if names]
    if not problems:
        return []
    fix = _SKIP_KEYS
    if strict and not shapes and not kinds:
        fix = "Build the model of that run, or pass load_strict_model_weights=False to load the common names only."
    return [_misfit(source, problems, fix)]


def _misfit(source: str, problems: Iterable[str], fix: str) -> str:
    return "\n  ".join([f"{source} does not fit the model.", *problems]) + f"\n{fix}"


def _kind(dtype: torch.dtype) -> str:
    """Return the kind of numbers. A conversion within a kind changes the precision only; booleans are integers."""
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def model_places(model: nn.Module, saved: StateDict) -> StateDict:
    """Return the live tensors of ``model`` by their names in ``saved``; empty if a load hook may transform weights."""
    if _has_load_hooks(model):
        return {}
    own = model_state(model)
    return {name: own[clean_name(name)] for name in saved if clean_name(name) in own}


def _has_load_hooks(model: nn.Module) -> bool:
    """Return true if the model has load hooks other than the hooks of ``fully_shard``, which keep weights sharded."""
    hooks = [getattr(hook, "hook", hook) for module in model.modules() for hook in load_hooks(module)]
    return not all(str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.") for hook in hooks)


def load_model(model: nn.Module, saved: StateDict, *, strict: bool, source: str) -> None:
    """Load ``saved`` into ``model``, or raise an error with all differences.

    Args:
        model: the model.
        saved: weights by name.
        strict: names must be the same.
        source: path or URI of the checkpoint, for errors.

    Raises:
        IncompatibleCheckpointError: names, shapes or kinds of numbers differ, and no weight was changed; or a number
            overflows the type of the model, or the names of a tied weight have different values.
    """
    if problems := model_problems(model, saved, strict=strict, source=source):
        raise IncompatibleCheckpointError("\n".join(problems))
    state, saved = model.state_dict(), _cleaned(saved.items())
    names = {clean_name(name): name for name in state}
    missing, unexpected = [name for name in names if name not in saved], [name for name in saved if name not in names]
    if missing or unexpected:
        log.warning(
            "%s: loaded with strict=False; kept from the model: %s; skipped in the checkpoint: %s",
            source,
            ", ".join(missing) or "none",
            ", ".join(unexpected) or "none",
        )
    # Parameters may be of a subclass, while the state dict has plain tensors in the same memory.
    tensors = _cleaned([*state.items(), *model.named_parameters(), *model.named_buffers()])
    pairs = [
        (name, value, tensors[name])
        for name, value in saved.items()
        if name in names and isinstance(value, torch.Tensor) and isinstance(state[names[name]], torch.Tensor)
    ]
    cast = [f"{name} from {value.dtype} to {live.dtype}" for name, value, live in pairs if value.dtype != live.dtype]
    if cast:
        log.warning("%s: converted from another precision (%d): %s", source, len(cast), ", ".join(cast))
    for _, value, live in pairs:
        dist.shards.make_fillable(live, value)
    if not _has_load_hooks(model) and (problems := _problems_of_numbers(pairs)):
        raise IncompatibleCheckpointError(_misfit(source, problems, _SKIP_KEYS))
    known = {names[name]: like_live(value, state[names[name]]) for name, value in saved.items() if name in names}
    model.load_state_dict(with_versions(known, model), strict=False)


def _problems_of_numbers(pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
    """List weights with numbers that a load would lose. A pair is a name, the saved value and the live tensor."""
    lossy = [
        f"{name}: {value.dtype} in the checkpoint, {live.dtype} in the model"
        for name, value, live in pairs
        if value.dtype != live.dtype and dist.is_dense(value) and _is_lossy(value, live)
    ]
    loaded = {name: (value, live) for name, value, live in pairs}
    tied = dist.tied_names({name: live for name, (_, live) in loaded.items()})
    different = [", ".join(names) for names in tied if not _are_equal([loaded[name] for name in names])]
    found = {"out of the range of the model's type": lossy, "tied in the model, different in the checkpoint": different}
    return [f"{what} ({len(names)}): {'; '.join(names)}" for what, names in found.items() if names]


def _is_lossy(value: torch.Tensor, live: torch.Tensor) -> bool:
    """Return true if a number of ``value`` overflows or changes in the type of ``live``, which is of the same kind."""
    own = dist.local_shard(value).local
    converted = own.to(live.dtype)
    if not (own.is_floating_point() or own.is_complex()):
        return not torch.equal(converted.to(own.dtype), own)
    return not torch.equal(_is_finite(own), _is_finite(converted))


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor)


def _are_equal(loaded: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Return true if all values have the same bits in the type of the live tensor. NaN equals the same NaN."""
    values = [like_live(value, live) for value, live in loaded if dist.is_dense(value)]
    local = [dist.local_shard(value).local.to("cpu", loaded[0][1].dtype) for value in values]
    bits = [tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for tensor in local]
    return all(torch.equal(bits[0], other) for other in bits[1:])
