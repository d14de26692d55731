"""The state of an optimizer by the names of the parameters: read as it is, made for a load, and set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict

__all__ = ["flattened", "optimizer_state", "optimizer_state_to_fill", "set_optimizer_state"]


def optimizer_state(model: nn.Module, optim: Optimizer) -> StateDict:
    """The state of ``optim``, sharded as it is, in this machine's memory: nothing for a parameter that has none.

    torch would let an optimizer without any state make a step, which changes what is trained.
    """
    with _without_a_step(optim):
        return _state(model, optim)


def optimizer_state_to_fill(
    model: nn.Module, optim: Optimizer, is_stored: Callable[[str], bool], *, strict: bool
) -> StateDict:
    """The state of ``optim`` for a load: of the parameters of which the checkpoint has one. ``optim`` stays as it is.

    Args:
        model: that has the parameters.
        optim: to be loaded. What it lacks is made, of zeros.
        is_stored: says whether the checkpoint has a state of the parameter of a name.
        strict: leave out what only ``optim`` has.

    Raises:
        IncompatibleCheckpointError: ``optim`` cannot be given a state before its first step.
    """
    state = optimizer_state(model, optim)
    stored = [name for group in state["param_groups"] for name in group["params"] if is_stored(name)]
    kept = {} if strict else state["state"]
    made: StateDict = {}
    if not all(state["state"].get(name) for name in stored):
        with _without_state(optim):
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
    """Give ``optim`` the ``state``, in either layout, and no other: nothing to a parameter that has none there."""
    if "param_groups" not in state:
        state = _unflattened(optimizer_state(model, optim)["param_groups"], state)
    with _without_a_step(optim):
        set_optimizer_state_dict(model, optim, state, options=_options(strict=False))


def _options(*, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(cpu_offload=True, strict=strict)


def _state(model: nn.Module, optim: Optimizer) -> StateDict:
    return cast("StateDict", get_optimizer_state_dict(model, optim, options=_options()))


def _parameters(optim: Optimizer) -> list[Tensor]:
    return [one for group in optim.param_groups for one in group["params"]]


@contextlib.contextmanager
def _without_a_step(optim: Optimizer) -> Generator[None]:
    """Within it a gradient tells torch that ``optim`` has no state since it needs none."""
    parameters = _parameters(optim)
    if optim.state or not parameters or any(one.grad is not None for one in parameters):
        yield
        return
    smallest = min(parameters, key=Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


@contextlib.contextmanager
def _without_state(optim: Optimizer) -> Generator[None]:
    """Within it ``optim`` has neither state nor gradients, so that torch makes it a state; both come back."""
    state, gradients = optim.state, [(one, one.grad) for one in _parameters(optim)]
    optim.state = type(state)(dict)
    for one, _ in gradients:
        one.grad = None
    try:
        yield
    finally:
        optim.state = state
        for one, gradient in gradients:
            one.grad = gradient


# ── the layout in which every parameter has the settings of its group ────────────────────────────────────────────────
def flattened(state: StateDict) -> StateDict:
    """``state`` in keys such as ``state.w.exp_avg`` and ``param_groups.w.lr``, as torch flattens it."""
    flat: StateDict = {}
    for name, fields in state["state"].items():
        flat.update(_leaves(fields, f"state.{name}"))
    for group in state["param_groups"]:
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"})
    return flat


def _leaves(fields: StateDict, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _leaves(cast("StateDict", value), f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value


def _unflattened(groups: Sequence[StateDict], flat: StateDict) -> StateDict:
    """The inverse of :func:`flattened`, for these groups of parameters, whose settings it takes from ``flat``."""
    names = {name for group in groups for name in group["params"]}
    state: StateDict = {}
    for key, value in flat.items():
        kind, *parts = key.split(".")
        for end in range(1, len(parts)):
            if kind == "state" and (name := ".".join(parts[:end])) in names:
                fields = state.setdefault(name, {})
                for part in parts[end:-1]:
                    fields = fields.setdefault(part, {})
                fields[parts[-1]] = value
    for group in groups:
        for name in reversed(group["params"]):
            group.update({key: flat.get(f"param_groups.{name}.{key}", group[key]) for key in group if key != "params"})
    return {"state": state, "param_groups": list(groups)}
