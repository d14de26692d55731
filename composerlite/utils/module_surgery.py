"""The documented path of what replaces modules of a model, in its optimizer too."""

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
"""Gets a module and its number among those of its class; returns what is to be in its place, or ``None``."""

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def count_module_instances(module: nn.Module, module_class: type[nn.Module] | tuple[type[nn.Module], ...]) -> int:
    """Count the modules in ``module`` that are of ``module_class``, itself included.

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
    """Replace modules within ``module``, by their class, and return what replaced what.

    Args:
        module: changed in place; it is not replaced itself.
        policies: functions by class, see :data:`ReplacementFunction`. A subclass counts as its class.
        optimizers: takes the parameters of the new modules in place of those of the old.
        recurse_on_replacements: look at new modules, and within them, as well.
        indices: the numbers to begin with, by class.

    Returns:
        New modules by the modules that they replace.
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
    """Return the modules within ``module``, and for each the modules that have it, and by which name."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        if path:
            places.setdefault(inner, []).append((module.get_submodule(parent), name))
    return places


def update_params_in_optimizer(
    old_params: Iterable[nn.Parameter], new_params: Iterable[nn.Parameter], optimizers: Optimizers
) -> None:
    """Replace ``old_params`` by ``new_params`` in the optimizer, in their group. Parameters in both stay.

    Args:
        old_params: parameters of the optimizer.
        new_params: parameters of the model.
        optimizers: the optimizer, or a sequence of one.

    Raises:
        ConfigError: there are several optimizers; the old parameters are in several groups, or in none.
    """
    (optimizer, *more) = ensure_tuple(optimizers)
    if more:
        raise ConfigError(f"optimizers: {1 + len(more)} were given and one is supported.")
    old, new = list(old_params), list(new_params)
    kept = {id(parameter) for parameter in old} & {id(parameter) for parameter in new}
    removed = [parameter for parameter in old if id(parameter) not in kept]
    added = [parameter for parameter in new if id(parameter) not in kept]
    groups = optimizer.param_groups
    gone = {id(parameter) for parameter in removed}
    holders = [group for group in groups if gone & {id(parameter) for parameter in group["params"]}]
    if added and len(groups) > 1 and len(holders) != 1:
        raise ConfigError(
            f"the replaced parameters are in {len(holders)} of the optimizer's {len(groups)} groups, and the new ones "
            "need one. Build the optimizer after the model was changed."
        )
    for group in holders:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]
    for parameter in removed:
        optimizer.state.pop(parameter, None)
    if added:
        (holders or groups)[0]["params"] += added
