"""Replacement of modules in a model, and of their parameters in the optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from composerlite.errors import ConfigError
from composerlite.utils.helpers import ensure_tuple

__all__ = ["ReplacementFunction", "count_module_instances", "replace_module_classes", "update_params_in_optimizer"]

ReplacementFunction: TypeAlias = Callable[[nn.Module, int], nn.Module | None]
"""Function of a module and its number in its class. Returns the replacement, or ``None`` to keep the module."""

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def count_module_instances(module: nn.Module, module_class: type[nn.Module] | tuple[type[nn.Module], ...]) -> int:
    """Count the modules of ``module_class`` in ``module``, including ``module``.

    Args:
        module: the model.
        module_class: a class, or a tuple of classes.

    Returns:
        The number.
    """
    return sum(isinstance(part, module_class) for part in module.modules())


def replace_module_classes(
    module: nn.Module,
    policies: Mapping[type[nn.Module], ReplacementFunction],
    optimizers: Optimizers | None = None,
    recurse_on_replacements: bool = False,
    indices: dict[type[nn.Module], int] | None = None,
) -> dict[nn.Module, nn.Module]:
    """Replace modules in ``module`` by class.

    Args:
        module: the model, changed in place. The module itself is not replaced.
        policies: replacement functions by class. A policy applies to subclasses, too.
        optimizers: optimizer in which parameters of old modules are replaced by parameters of new modules.
        recurse_on_replacements: also apply the policies to new modules and their submodules.
        indices: first number of each class.

    Returns:
        New module by replaced module.
    """
    counts = dict.fromkeys(policies, 0) if indices is None else indices
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    replaced: dict[nn.Module, nn.Module] = {}
    waiting = _places_of_modules(module)
    while waiting:
        old = next(iter(waiting))
        places = waiting.pop(old)
        for kind in [kind for kind in policies if isinstance(old, kind)]:
            new = policies[kind](old, counts[kind])
            counts[kind] += 1
            if new is None:
                continue
            like = next(itertools.chain(old.parameters(), old.buffers()), first)
            replaced[old] = new if like is None else new.to(like.device)
            for parent, name in places:
                setattr(parent, name, new)
            if recurse_on_replacements:
                waiting.update({new: places, **_places_of_modules(new)})
            break
    if optimizers is not None:
        for old, new in replaced.items():
            update_params_in_optimizer(old.parameters(), new.parameters(), optimizers)
    return replaced


def _places_of_modules(module: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return pairs (parent, name) by module, for all modules in ``module``."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        if path:
            places.setdefault(inner, []).append((module.get_submodule(parent), name))
    return places


def update_params_in_optimizer(
    old_params: Iterable[nn.Parameter], new_params: Iterable[nn.Parameter], optimizers: Optimizers
) -> None:
    """Replace ``old_params`` by ``new_params`` in the optimizer, in the same group. Parameters in both are kept.

    Args:
        old_params: parameters of the optimizer.
        new_params: parameters of the model.
        optimizers: the optimizer, or a sequence of one.

    Raises:
        ConfigError: there are several optimizers, or the old parameters are in several groups or in none.
    """
    (optimizer, *more) = ensure_tuple(optimizers)
    if more:
        raise ConfigError(f"optimizers: got {1 + len(more)}, and only one is supported.")
    old, new = list(old_params), list(new_params)
    kept = {id(parameter) for parameter in old} & {id(parameter) for parameter in new}
    removed = [parameter for parameter in old if id(parameter) not in kept]
    added = [parameter for parameter in new if id(parameter) not in kept]
    groups = optimizer.param_groups
    gone = {id(parameter) for parameter in removed}
    holders = [group for group in groups if gone & {id(parameter) for parameter in group["params"]}]
    if added and len(groups) > 1 and len(holders) != 1:
        raise ConfigError(
            f"the replaced parameters are in {len(holders)} of the optimizer's {len(groups)} groups, so the group of "
            "the new parameters is unclear. Build the optimizer after the change of the model."
        )
    for group in holders:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]
    for parameter in removed:
        optimizer.state.pop(parameter, None)
    if added:
        (holders or groups)[0]["params"] += added
