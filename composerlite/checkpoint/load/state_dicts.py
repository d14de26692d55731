"""State dicts of a model and an optimizer, by names of parameters: read, change keys, prepare for a load, and set."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from composerlite import dist
from composerlite._torch_compat import with_versions
from composerlite.checkpoint.foreign.keys import unflattened
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.types import StateDict

log = logging.getLogger(__name__)
_WRAPPED = ("module", "_orig_mod", "_checkpoint_wrapped_module")
"""Attributes for the wrapped module, in this order: of DDP, ``torch.compile``, and activation checkpointing."""
SETTINGS_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
"""Settings that a scheduler adds to the groups of an optimizer when the scheduler is made, before or after a load."""


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def model_state(model: nn.Module) -> StateDict:
    """Return the state of ``model`` on the CPU, this rank's shards only. Tensors may share memory with the model.

    torch's ``get_model_state_dict`` looks up each name twice, and takes longer than the rest of the planning of a save.
    So it is called only for models with tensors on devices, with FSDP1, or with wrapped modules in their names.

    Raises:
        ConfigError: ``model`` is no module, or has tensors on the device ``meta``.
    """
    if not isinstance(cast("object", model), nn.Module):
        raise ConfigError(
            f"model is of the type {type(model).__name__}: expected a torch.nn.Module. Put several into one, as "
            "nn.ModuleDict does; a state dict goes to save_state_dict and load_state_dict."
        )
    # FSDP1, and a ``state_dict`` method that torch has patched into the model, rename keys or move data.
    if "state_dict" not in vars(model) and not any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
        state = model.state_dict()
        if without := [name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]:
            raise ConfigError(
                f"the model has no values in {len(without)} of its tensors, {without[0]!r}, for example: they are "
                "on the device 'meta'. Call model.to_empty(device='cpu') first, then make its optimizer."
            )
        parts = {part for name in state for part in name.split(".")}
        plain = (type(one) is Tensor or dist.is_distributed_tensor(one) for one in state.values())
        if parts.isdisjoint(_WRAPPED) and all(plain) and all(one.device.type == "cpu" for one in state.values()):
            return dict(state)
    return get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))


def set_model_state(model: nn.Module, state: StateDict, *, strict: bool) -> None:
    """Load ``state`` into ``model``, in place. If ``strict`` is true, the names must agree exactly."""
    for name, live in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name in state:
            dist.shards.make_fillable(live)
    set_model_state_dict(model, with_versions(state, model), options=StateDictOptions(cpu_offload=True, strict=strict))


# ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────────────
def optimizer_state(model: nn.Module, optim: Optimizer) -> StateDict:
    """Return the state of ``optim`` on the CPU, this rank's shards only. Parameters without state are left out.

    ``optim`` is unchanged. torch's own function makes a step if the optimizer has no state yet, and a step may change
    the parameters.

    Raises:
        ConfigError: ``optim`` is no optimizer, or has parameters that ``model`` does not have; or the state cannot be
            saved.
    """
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
    if keys := [key for key in cast("dict[Any, Any]", optim.state) if id(key) not in own]:
        shown = f"a tensor of the shape {tuple(keys[0].shape)}" if isinstance(keys[0], Tensor) else repr(keys[0])
        raise ConfigError(
            f"{type(optim).__name__}: the key {shown} of its state is no parameter of the model, by whose names the "
            "state is saved. Keep the value in a group, as optimizer.param_groups[0][name], or with a parameter, as "
            "optimizer.state[parameter][name]."
        )
    return _state(model, optim, new_state=False)


def optimizer_state_to_fill(
    model: nn.Module, optim: Optimizer, is_stored: Callable[[str], bool], *, strict: bool
) -> StateDict:
    """Return a state of ``optim`` to fill, for the parameters with a state in the checkpoint. ``optim`` is unchanged.

    Args:
        model: the model with the parameters.
        optim: the optimizer. A step with zero gradients makes a missing state, for the load to overwrite.
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
        try:
            made = _state(model, optim, new_state=True)["state"]
        except TypeError as e:
            raise IncompatibleCheckpointError(
                f"{type(optim).__name__} has no state before its first step: call step() once, then load. ({e})"
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


def _state(model: nn.Module, optim: Optimizer, *, new_state: bool) -> StateDict:
    try:
        with _prepared(optim, new_state=new_state):
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
    ``new_state``, state and gradients are removed, so torch makes a state. Otherwise, if both are missing, one
    parameter gets a zero gradient, so torch makes no state. The end of the block restores the gradients, and with
    ``new_state`` the state.
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
    """Return ``state`` with keys such as ``state.w.exp_avg`` and ``param_groups.w.lr``, the flat keys of torch."""
    flat = {f"state.{name}.{key}": value for name, fields in state["state"].items() for key, value in fields.items()}
    for group in state["param_groups"]:
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"})
    return flat


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def swap_param_keys(
    state_dict: StateDict,
    key_mapping: Mapping[str, str],
    metadata: Metadata | None = None,
    reverse: bool = False,
    quiet: bool = False,
) -> None:
    """Rename parameters in the state of a model and its optimizer, in place.

    Args:
        state_dict: ``{"model": …, "optim": …}``. The optimizer's state has ``state`` and ``param_groups``, or flat keys
            such as ``state.w.exp_avg`` and ``param_groups.w.lr``.
        key_mapping: new names by present names.
        metadata: index of a checkpoint. An item of ``key_mapping`` is ignored if the model in the checkpoint does not
            have the name in the value of the item.
        reverse: rename the other way, from the values of ``key_mapping`` to its keys.
        quiet: do not log the names.
    """
    names = {
        old: new
        for old, new in key_mapping.items()
        if metadata is None or f"model.{new}" in metadata.state_dict_metadata
    }
    if reverse:
        names = {new: old for old, new in names.items()}
    for old, new in names.items() if not quiet else ():
        log.info("renamed %s to %s", old, new)
    _rename(state_dict.get("model"), names)
    optim = state_dict.get("optim")
    if isinstance(optim, dict):
        optim = cast("StateDict", optim)
        _rename(optim.get("state"), names)
        for group in cast("list[StateDict]", optim.get("param_groups", [])):
            group["params"] = [names.get(name, name) for name in group["params"]]
        flat: dict[str, str] = {}
        for key in filter(lambda key: key.startswith(("state.", "param_groups.")), optim):
            kind, _, rest = key.partition(".")
            name, _, setting = rest.rpartition(".")
            flat[key] = f"{kind}.{names.get(name, name)}.{setting}"
        _rename(optim, flat)


def _rename(state: Any, names: Mapping[str, str]) -> None:
    """Rename keys of a dict, all at the same time: two keys may be swapped. Do nothing if ``state`` is no dict."""
    if isinstance(state, dict):
        items = {names.get(key, key): value for key, value in cast("StateDict", state).items()}
        state.clear()
        state.update(items)


def prune_state_dict(state_dict: StateDict, allowed_keys: set[str]) -> set[str]:
    """Remove all items but those with ``allowed_keys``, in place. Dicts that become empty are removed, too.

    Args:
        state_dict: nested dicts; may contain lists of dicts.
        allowed_keys: keys as in an index: the keys of the dicts and the indices in lists, joined with dots. An allowed
            key of a dict keeps all items in the dict.

    Returns:
        Keys of the removed values, without keys of removed dicts.
    """
    removed: set[str] = set()

    def prune(node: StateDict, prefix: str) -> None:
        for key, value in list(node.items()):
            full = f"{prefix}{key}"
            if full in allowed_keys:
                continue
            inner = _dicts_in(value)
            for place, below in inner:
                prune(below, f"{full}.{place}" if place else f"{full}.")
            if not any(below for _, below in inner):
                if not inner:
                    removed.add(full)
                del node[key]

    prune(state_dict, "")
    return removed


def _dicts_in(value: Any) -> list[tuple[str, StateDict]]:
    """Return the dict ``value``, or the dicts in the list ``value``, each with the prefix of its keys.

    The result is empty if ``value`` is neither a dict nor a list of dicts.
    """
    if isinstance(value, dict):
        return [("", cast("StateDict", value))]
    if isinstance(value, list) and value and all(isinstance(inner, dict) for inner in cast("list[Any]", value)):
        return [(f"{number}.", inner) for number, inner in enumerate(cast("list[StateDict]", value))]
    return []


def merge_state_dicts(lhs: StateDict, rhs: StateDict) -> None:
    """Add the items that only ``rhs`` has to ``lhs``, in place, also in nested dicts and in dicts in lists.

    Args:
        lhs: nested dicts, changed in place.
        rhs: nested dicts.
    """
    for key, value in rhs.items():
        if key not in lhs:
            lhs[key] = value
            continue
        for (_, mine), (_, theirs) in zip(_dicts_in(lhs[key]), _dicts_in(value), strict=False):
            merge_state_dicts(mine, theirs)
