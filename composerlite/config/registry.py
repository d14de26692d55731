"""Classes by name: ``speed_monitor`` is a class of composerlite, ``module:attr`` any class or function."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import Any

from composerlite.config.arguments import Component, arguments_of, check_names, check_types
from composerlite.config.origin import Origin
from composerlite.errors import ConfigError, did_you_mean

FAMILIES = {
    "optimizer": ("composerlite.optim", "torch.optim:Optimizer", ""),
    "scheduler": ("composerlite.optim", "composerlite.optim:ComposerScheduler", "Scheduler"),
    "algorithms": ("composerlite.algorithms", "composerlite.core:Algorithm", ""),
    "callbacks": ("composerlite.callbacks", "composerlite.core:Callback", ""),
    "loggers": ("composerlite.loggers", "composerlite.core:LoggerDestination", "Logger"),
}
"""Keys of the YAML with registered names: the package, the base class, and the ending to drop from class names."""

_WORDS = ("AdamW", "CutMix", "CutOut", "MLFlow", "MixUp", "NaN", "WandB")
"""Words to keep together in snake_case."""


@functools.cache
def known_classes(family: str) -> Mapping[str, type]:
    """Return the classes of a ``family``, such as ``'callbacks'``, by their names in YAML.

    Optimizers of ``torch.optim`` have their class names in lower case. LBFGS is left out: the Trainer refuses it.
    """
    import torch

    package_name, base_name, suffix = FAMILIES[family]
    package, base = importlib.import_module(package_name), import_attribute(base_name)
    found: dict[str, type] = {}
    for cls in [*vars(torch.optim).values(), *(getattr(package, name) for name in package.__all__)]:
        if not inspect.isclass(cls) or not issubclass(cls, base) or cls in (base, torch.optim.LBFGS):
            continue
        name = cls.__name__.removesuffix(suffix).replace("Annealing", "")
        name = re.sub("|".join(_WORDS), lambda word: word[0].capitalize(), name)
        if cls.__module__.startswith("composerlite"):
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
        found[name.lower()] = cls
    return found


def find(component: Component, origin: Origin) -> Callable[..., Any]:
    """Return the class or function of ``component``, after a check of the arguments and nested components.

    Types are checked for classes of composerlite and torch only: annotations of other code may be inexact.

    Raises:
        ConfigError: the name is unknown or cannot be called; an argument is unknown, missing or of a wrong type.
    """
    name, family, path = component.name, component.family, component.path
    if ":" in name or not family:
        try:
            target = import_attribute(name)
        except ConfigError as e:
            raise origin.error((*path, "name"), str(e)) from e
    else:
        known = known_classes(family)
        target = known.get(name.lower() if family == "optimizer" else name)
        if target is None:
            hint = f"{did_you_mean(name, known)} Your own class is named 'module:attr'."
            raise origin.error(path, f"there is no {family.removesuffix('s')} {name!r}.{hint}")
    if not callable(target):
        raise origin.error(path, f"{name!r} is a {type(target).__name__}. Name a class or a function.")
    arguments = arguments_of(target, skip=1 if family == "optimizer" else 0)
    check_names(arguments, component.arguments, path, origin)
    if is_library(target):
        check_types(arguments, component.arguments, path, origin)
    for argument in component.arguments.values():
        if isinstance(argument, Component):
            find(argument, origin)
    return target


def is_library(target: Callable[..., Any]) -> bool:
    """Return true for classes and functions of composerlite and torch."""
    return str(getattr(target, "__module__", "")).partition(".")[0] in ("composerlite", "torch")


def import_attribute(name: str) -> Any:
    """Return the attribute of ``'module:attr'``; ``attr`` may contain dots.

    Raises:
        ConfigError: the module or the attribute does not exist, or another module of that name is loaded. Other
            errors in the code of the module are passed on.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{name!r}: expected 'module:attr', such as 'my_task:MyModel'.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        places = "beside the YAML file, in the current directory, or installed"
        raise ConfigError(f"{name!r}: {e}. Modules are searched for {places}.") from e
    top = module_name.partition(".")[0]
    loaded, found = getattr(sys.modules[top], "__file__", None), PathFinder.find_spec(top)
    here = found.origin if found else None
    if loaded and here and top != "composerlite" and os.path.realpath(loaded) != os.path.realpath(here):
        reason = f"{top!r} is {here!r} here, but this process has loaded {loaded!r} for another run"
        raise ConfigError(f"{reason}. Rename a module, or train each run in its own process.")
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as e:
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{name!r}: {e}.{did_you_mean(attribute, public)}") from e
