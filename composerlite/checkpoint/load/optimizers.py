"""The state of an optimizer by the names of the parameters: read, prepared for a load, and set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from composerlite.checkpoint.foreign.taken import unflattened
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.types import StateDict

SETTINGS_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
"""Settings that a scheduler adds to the groups of an optimizer when the scheduler is made, before or after a load."""


def optimizer_state(model: nn.Module, optim: Optimizer) -> StateDict:
    """Return the state of ``optim`` on the CPU, this rank's shards only. Parameters without state are left out.

    ``optim`` is unchanged. torch's own function makes a step if the optimizer has no state yet, and a step may change
    the parameters.

    Raises:
        ConfigError: ``optim`` is no optimizer, or has parameters that ``model`` does not have; or the state cannot be
            saved.
    """
    _check(model, optim)
    with _prepared(optim, new_state=False):
        return _state(model, optim)


def optimizer_state_to_fill(
    model: nn.Module, optim: Optimizer, is_stored: Callable[[str], bool], *, strict: bool
) -> StateDict:
    """Return a state of ``optim`` to fill, for the parameters with a state in the checkpoint. ``optim`` is unchanged.

    Args:
        model: the model with the parameters.
        optim: the optimizer. A missing state is that of a step with zero gradients, to be overwritten.
        is_stored: returns true if the checkpoint has a state of the parameter with the given name.
        strict: leave out the state of parameters without a state in the checkpoint.

    Raises:
        ConfigError: as :func:`optimizer_state`.
        IncompatibleCheckpointError: ``optim`` cannot be given a state before its first step.
    """
    state = optimizer_state(model, optim)
    stored = [name for group in state["param_groups"] for name in group["params"] if is_stored(name)]
    kept = {} if strict else state["state"]
    made: StateDict = {}
    if not all(state["state"].get(name) for name in stored):
        with _prepared(optim, new_state=True):
            try:
                made = _state(model, optim)["state"]
            except TypeError as e:
                raise IncompatibleCheckpointError(
                    f"{type(optim).__name__} has a state after its first step only: let it make one, then load. ({e})"
                ) from e
    both = {**made, **state["state"]}
    state["state"] = {**kept, **{name: both[name] for name in stored if name in both}}
    return state


def set_optimizer_state(model: nn.Module, optim: Optimizer, state: StateDict) -> None:
    """Load ``state`` into ``optim``. A parameter without a state in ``state`` has no state afterwards.

    ``state`` has ``state`` and ``param_groups``, or the keys of :func:`flattened`.
    Settings added to the groups by schedulers stay if ``state`` does not have these settings.
    """
    if "param_groups" not in state:
        groups = optimizer_state(model, optim)["param_groups"]
        found = unflattened(state, [group["params"] for group in groups])
        for group, settings in zip(groups, found["param_groups"] or groups, strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
        state = {"state": found["state"], "param_groups": groups}
    before = [{key: group[key] for key in SETTINGS_OF_SCHEDULERS if key in group} for group in optim.param_groups]
    with _prepared(optim, new_state=False):
        set_optimizer_state_dict(model, optim, state, options=StateDictOptions(cpu_offload=True, strict=False))
    for group, added in zip(optim.param_groups, before, strict=True):
        group.update({key: value for key, value in added.items() if key not in group})


def _check(model: nn.Module, optim: Any) -> None:
    """Raise if the state of ``optim`` cannot be saved by the names of the parameters of ``model``."""
    if not hasattr(optim, "param_groups"):
        raise ConfigError(
            f"optim is of the type {type(optim).__name__}: expected one torch.optim.Optimizer. To save several, call "
            "this once for each, with the part of the model that it trains and a directory of its own."
        )
    own, parameters = set(map(id, model.parameters())), _parameters(optim)
    if others := [one for one in parameters if id(one) not in own]:
        raise ConfigError(
            f"{type(optim).__name__}: {len(others)} of its {len(parameters)} parameters are not those of the model, "
            f"one of the shape {tuple(others[0].shape)} for example, and its state is saved by their names in the "
            "model. Make the optimizer of model.parameters(), after anything that replaces these, as to_empty() does."
        )
    if keys := [key for key in optim.state if not isinstance(key, Tensor) or id(key) not in own]:
        shown = f"a tensor of the shape {tuple(keys[0].shape)}" if isinstance(keys[0], Tensor) else repr(keys[0])
        raise ConfigError(
            f"{type(optim).__name__}: the key {shown} of its state is no parameter of the model, by whose names the "
            "state is saved. Keep the value in a group, as optimizer.param_groups[0][name], or with a parameter, as "
            "optimizer.state[parameter][name]."
        )


def _state(model: nn.Module, optim: Optimizer) -> StateDict:
    try:
        return cast("StateDict", get_optimizer_state_dict(model, optim, options=StateDictOptions(cpu_offload=True)))
    except ValueError as e:
        raise ConfigError(
            f"{type(optim).__name__}: its state cannot be saved: {e}. A state may have tensors, numbers, text and "
            "None, and dicts, lists and tuples of these."
        ) from e


def _parameters(optim: Optimizer) -> list[Tensor]:
    return [one for group in optim.param_groups for one in group["params"]]


@contextlib.contextmanager
def _prepared(optim: Optimizer, *, new_state: bool) -> Generator[None]:
    """Control whether torch makes a state for ``optim`` in the block.

    torch makes a state, by a step with zero gradients, if the optimizer has no state and no gradient. With
    ``new_state`` both are removed. Otherwise one parameter gets a zero gradient. The end of the block restores both.
    """
    state, parameters = optim.state, _parameters(optim)
    gradients = [one.grad for one in parameters]
    if new_state:
        optim.state = type(state)(dict)
        for one in parameters:
            one.grad = None
    elif parameters and not state and all(gradient is None for gradient in gradients):
        smallest = min(parameters, key=Tensor.numel)
        smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        if new_state:
            optim.state = state
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient


# ── the layout with the settings of the group at every parameter ────────────────────────────────────────────────────
def flattened(state: StateDict) -> StateDict:
    """Return ``state`` with keys such as ``state.w.exp_avg`` and ``param_groups.w.lr``, as torch flattens it."""
    flat = {f"state.{name}.{key}": value for name, fields in state["state"].items() for key, value in fields.items()}
    for group in state["param_groups"]:
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"})
    return flat
