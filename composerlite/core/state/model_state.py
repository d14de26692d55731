"""The weights of a model to checkpoint contents and back."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence
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

_LEAVING_OUT = (
    "Build the model of that run, or leave keys out with load_ignore_keys=['state/model/<name>'] and "
    "load_strict_model_weights=False."
)
log = logging.getLogger(__name__)


def model_state(model: nn.Module) -> StateDict:
    """The tensors of ``model`` by the names that checkpoints give them. They are not copied."""
    return _cleaned(model.state_dict())


def frozen_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters of ``model`` that are not trained, as checkpoints have them.

    Args:
        model: the model.

    Returns:
        Names of the frozen parameters.
    """
    return [clean_name(name) for name, parameter in model.named_parameters() if not parameter.requires_grad]


def set_frozen_parameters(model: nn.Module, names: Collection[str]) -> None:
    """Freeze the parameters of ``model`` that are in ``names``, and let the others be trained.

    Args:
        model: the model.
        names: result of :func:`frozen_parameters`.
    """
    names = frozenset(names)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad is (clean_name(name) in names):
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None


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
    kinds = [
        f"{name}: {value.dtype} in the checkpoint, {tensor.dtype} in the model"
        for name, value, tensor in both
        if isinstance(value, torch.Tensor) and _kind(value.dtype) != _kind(tensor.dtype)
    ]
    if _changes_what_it_loads(model):
        kinds = []
    problems: list[str] = []
    if missing and strict:
        problems.append(f"missing in the checkpoint ({len(missing)}): {', '.join(missing)}")
    if unexpected and strict:
        problems.append(f"not in the model ({len(unexpected)}): {', '.join(unexpected)}")
    if shapes:
        problems.append(f"of another shape ({len(shapes)}): {'; '.join(shapes)}")
    if kinds:
        problems.append(f"of another kind of numbers ({len(kinds)}): {'; '.join(kinds)}")
    if no_tensors:
        problems.append(f"no tensors ({len(no_tensors)}): {', '.join(no_tensors)}")
    if not problems:
        return []
    way_out = (
        "Build the model of that run, or pass load_strict_model_weights=False to load the names that agree."
        if strict and not shapes and not kinds
        else _LEAVING_OUT
    )
    return [f"{source} does not fit the model.\n  {chr(10).join(problems)}\n{way_out}"]


def _kind(dtype: torch.dtype) -> str:
    """Name the kind of numbers, within which a conversion changes their precision alone. Masks are of 0 and 1."""
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def model_places(model: nn.Module, saved: StateDict) -> StateDict:
    """The tensors of ``model`` by their names in ``saved``; none where a hook of the model changes what is loaded."""
    if _changes_what_it_loads(model):
        return {}
    own = model_state(model)
    return {name: own[clean_name(name)] for name in saved if clean_name(name) in own}


def _changes_what_it_loads(model: nn.Module) -> bool:
    return any(_changes_what_is_loaded(hook) for module in model.modules() for hook in load_hooks(module))


def _changes_what_is_loaded(hook: Any) -> bool:
    """Tell hooks of the user from those of ``fully_shard``, which only keep the parameters sharded."""
    return not str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed.fsdp.")


def load_model(model: nn.Module, saved: StateDict, *, strict: bool, source: str) -> None:
    """Load ``saved`` or say everything that does not fit.

    Raises:
        IncompatibleCheckpointError: see :func:`model_problems`, before a single weight is changed; or numbers do not
            fit, which may have been read into the model: they are out of the range of its type, or differ for one
            weight that has several names.
    """
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
        dist.shards.make_fillable(live, value)
    if not _changes_what_it_loads(model) and (problems := _problems_of_numbers(both)):
        raise IncompatibleCheckpointError(
            f"{source} does not fit the model.\n  {chr(10).join(problems)}\n{_LEAVING_OUT}"
        )
    model.load_state_dict(
        with_versions(
            {own[name][0]: like_live(value, own[name][1]) for name, value in saved.items() if name in own}, model
        ),
        strict=False,
    )


def _problems_of_numbers(both: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
    """List the weights whose numbers would be lost. Of each: its name, its value in the checkpoint, the live tensor."""
    lost = [
        f"{name}: {value.dtype} in the checkpoint, {live.dtype} in the model"
        for name, value, live in both
        if _is_lossy(value, live)
    ]
    loaded = {name: (value, live) for name, value, live in both}
    tied = dist.tied_names({name: live for name, (_, live) in loaded.items()})
    different = [", ".join(names) for names in tied if not _are_equal([loaded[name] for name in names])]
    problems = [f"out of the range of the model's type ({len(lost)}): {'; '.join(lost)}"] if lost else []
    if different:
        told = f"one weight in the model and different ones in the checkpoint ({len(different)})"
        problems.append(f"{told}: {'; '.join(different)}")
    return problems


def _is_lossy(value: torch.Tensor, live: torch.Tensor) -> bool:
    """Check if numbers of ``value`` are none, or others, in the type of ``live``, which is of the same kind."""
    if value.dtype == live.dtype or not dist.is_dense(value):
        return False
    own = dist.local_shard(value).local
    made = own.to(live.dtype)
    if not (own.is_floating_point() or own.is_complex()):
        return not torch.equal(made.to(own.dtype), own)
    return not bool(_is_finite(made).all()) and bool((_is_finite(own) & ~_is_finite(made)).any())


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor)


def _are_equal(loaded: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Check that all have the same bits in the type of the live tensor: also where those are no numbers."""
    values = [like_live(value, live) for value, live in loaded if dist.is_dense(value)]
    bits = [_bits(dist.local_shard(value).local.to("cpu", loaded[0][1].dtype)) for value in values]
    return all(torch.equal(bits[0], other) for other in bits[1:])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
