"""Optimizer state keyed by parameter name, so that checkpoints do not depend on the order of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from composerlite import dist
from composerlite._torch_compat import has_load_hooks
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import items_of, with_items

__all__ = [
    "clean_name",
    "like_live",
    "load_named_optimizer_state",
    "lost_parameters",
    "named_optimizer_state",
    "optimizer_places",
    "optimizer_problems",
]


_FACTORED = ("Adafactor", "LBFGS")
"""Optimizers of torch with state in other shapes than the parameters."""


def clean_name(name: str) -> str:
    """Return a parameter name without the prefixes of ``torch.compile``."""
    return name.replace("_orig_mod.", "")


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return parameter names by group; ``optimizer.<group>.<index>`` for a parameter that is not in the model."""
    by_id = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    return [
        [by_id.get(id(parameter), f"optimizer.{g}.{i}") for i, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def _named_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for group, names in zip(optimizer.param_groups, _names(optimizer, model), strict=True):
        yield from zip(names, group["params"], strict=True)


def lost_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Describe the parameters that ``optimizer`` trains and ``model`` does not have. No checkpoint would have them.

    Args:
        optimizer: the optimizer.
        model: the model.

    Returns:
        Descriptions of the parameters.
    """
    own = {id(parameter) for parameter in model.parameters()}
    return [
        f"parameter {i} of group {g}, of the shape {tuple(parameter.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
        if parameter.requires_grad and id(parameter) not in own
    ]


def named_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with parameter names instead of numbers. Tensors are not copied."""
    state_dict = optimizer.state_dict()
    names = _names(optimizer, model)
    name_of = {
        number: name
        for group, group_names in zip(state_dict["param_groups"], names, strict=True)
        for number, name in zip(group["params"], group_names, strict=True)
    }
    return {
        **state_dict,
        "state": {name_of[number]: value for number, value in state_dict["state"].items()},
        "param_groups": [{**g, "params": n} for g, n in zip(state_dict["param_groups"], names, strict=True)],
    }


def optimizer_problems(
    optimizer: torch.optim.Optimizer, model: nn.Module, state_dict: dict[str, Any], *, source: str
) -> list[str]:
    """List the reasons not to load ``state_dict``: different groups, parameters in a group, or shapes of state.

    Args:
        optimizer: the optimizer to load into.
        model: the model with the parameters.
        state_dict: result of :func:`named_optimizer_state`.
        source: path or URI of the checkpoint.

    Returns:
        A message, or nothing if the state can be loaded.
    """
    names = _names(optimizer, model)
    saved = state_dict["param_groups"]
    fix = "Pass the optimizer of that run, or load_ignore_keys=['state/optimizers'] to start with a fresh one."
    kind = type(optimizer).__qualname__
    if len(saved) != len(names):
        return [f"{source}: {kind} was saved with {len(saved)} parameter groups and has {len(names)} now. {fix}"]
    problems: list[str] = []
    for index, (group, group_names) in enumerate(zip(saved, names, strict=True)):
        missing = sorted(set(group_names) - set(group["params"]))
        unexpected = sorted(set(group["params"]) - set(group_names))
        if missing:
            problems.append(f"group {index} has no saved state for: {', '.join(missing)}")
        if unexpected:
            problems.append(f"group {index} was saved with other parameters: {', '.join(unexpected)}")
    known = {name for group_names in names for name in group_names}
    if not problems and (foreign := sorted(state_dict["state"].keys() - known)):
        problems.append(f"the checkpoint has state for parameters in no group: {', '.join(foreign)}")
    problems += _other_shapes(optimizer, model, state_dict["state"])
    return [f"{source}: {kind} does not fit. {'; '.join(problems)}. {fix}"] if problems else []


def _other_shapes(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Describe the tensors in ``saved`` with another shape than the state to replace.

    Before the first step of a parameter the state does not exist. For optimizers of torch and of this package, saved
    tensors must then have the shape of the parameter.
    """
    if _has_own_load(optimizer):
        return []
    kind = type(optimizer)
    is_known = kind.__module__.startswith(("torch.optim.", "composerlite.optim.")) and kind.__name__ not in _FACTORED
    live, found = optimizer_places(optimizer, model), list[str]()
    for name, parameter in _named_parameters(optimizer, model):
        for key, value in saved.get(name, {}).items():
            own = live.get(name, {}).get(key)
            if own is None and is_known and not is_lazy(parameter) and isinstance(value, torch.Tensor):
                own = parameter if value.numel() > 1 else value
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and value.shape != own.shape:
                shapes = f"{tuple(value.shape)} in the checkpoint, {tuple(own.shape)} now"
                found.append(f"{key} of {name} has another shape: {shapes}")
    return found


def _has_own_load(optimizer: torch.optim.Optimizer) -> bool:
    """Return true if the optimizer overrides or hooks ``load_state_dict``, so tensors may be transformed."""
    return type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict or has_load_hooks(optimizer)


def optimizer_places(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the live tensors and containers of ``optimizer``, by parameter name and key.

    Empty for an optimizer with its own ``load_state_dict`` or load hooks.

    Args:
        optimizer: the optimizer.
        model: the model with the parameters.
        saved: saved state by parameter name. For parameters on devices or distributed over ranks, and before their
            first step, new tensors are allocated; a load makes these tensors the state.

    Returns:
        Tensors and containers by parameter name and key.
    """
    if _has_own_load(optimizer):
        return {}
    places: dict[str, dict[str, Any]] = {}
    for name, parameter in _named_parameters(optimizer, model):
        if parameter in optimizer.state:  # reading a missing key of the defaultdict would add the key
            state = optimizer.state[parameter]
            places[name] = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) or items_of(v)}
        elif saved is not None and (dist.is_distributed_tensor(parameter) or parameter.device.type != "cpu"):
            places[name] = _new_as(parameter, dict(saved.get(name, {})))
    return places


def _new_as(parameter: torch.Tensor, saved: Any) -> Any:
    """Return ``saved`` with a new tensor, placed like ``parameter``, for each tensor of the shape of ``parameter``."""
    if not isinstance(saved, torch.Tensor):
        return with_items(saved, lambda _, item: _new_as(parameter, item))
    if saved.shape != parameter.shape:
        return None
    if dist.is_distributed_tensor(parameter):
        return dist.empty_shard_like(parameter, saved.dtype)
    plain = type(parameter) is nn.Parameter and saved.dim() > 0  # step counts have no dimensions and their own device
    return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False) if plain else None


def like_live(value: Any, live: Any) -> Any:
    """Return ``value``, distributed like ``live`` if ``live`` is a distributed tensor and ``value`` a whole tensor."""
    whole = isinstance(value, torch.Tensor) and not dist.is_distributed_tensor(value)
    return dist.shards.distributed_like(value, live) if whole and dist.is_distributed_tensor(live) else value


def _as_kept(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Return ``saved`` with whole tensors distributed like the live state, or like the parameter."""
    places = optimizer_places(optimizer, model)
    named = _named_parameters(optimizer, model)
    parameters = {name: parameter for name, parameter in named if dist.is_distributed_tensor(parameter)}
    if not parameters:
        return dict(saved)

    def kept(value: Any, live: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            lives = dict(items_of(live))
            return with_items(value, lambda key, item: kept(item, lives.get(key), parameter))
        if live is None and value.dim() > 0 and value.shape == parameter.shape:
            live = parameter
        return like_live(value, live)

    return {
        name: kept(dict(state), places.get(name), parameters[name]) if name in parameters else state
        for name, state in saved.items()
    }


def load_named_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, state_dict: dict[str, Any], *, source: str
) -> None:
    """Load a result of :func:`named_optimizer_state`, for any order of parameters.

    Args:
        optimizer: the optimizer to load into.
        model: the model with the parameters.
        state_dict: result of :func:`named_optimizer_state`.
        source: path or URI of the checkpoint, for errors.

    Raises:
        IncompatibleCheckpointError: groups, parameters or shapes differ. Nothing was changed.
    """
    if problems := optimizer_problems(optimizer, model, state_dict, source=source):
        raise IncompatibleCheckpointError("\n".join(problems))
    names, saved = _names(optimizer, model), state_dict["param_groups"]
    number_of = {name: number for number, name in enumerate(name for group in names for name in group)}
    optimizer.load_state_dict(
        {
            **state_dict,
            "state": {number_of[n]: value for n, value in _as_kept(optimizer, model, state_dict["state"]).items()},
            "param_groups": [
                {  # keep the optimizer's own param_names: they follow its own order
                    **{key: value for key, value in group.items() if key != "param_names"},
                    "params": [number_of[name] for name in group_names],
                }
                for group, group_names in zip(saved, names, strict=True)
            ],
        }
    )
