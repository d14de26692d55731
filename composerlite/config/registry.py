"""Names in YAML: ``speed_monitor`` is a class of composerlite, ``module:attr`` is anything of the user's own."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_type_hints

from composerlite.config.hints import fits, in_words
from composerlite.config.origin import Origin, dotted
from composerlite.config.schema import Component
from composerlite.errors import ConfigError, did_you_mean

Family: TypeAlias = Literal["optimizer", "scheduler", "algorithm", "callback", "logger"]
"""The kinds of object that composerlite has names for."""

_FAMILIES: Mapping[Family, tuple[str, str, str]] = MappingProxyType(
    {
        # family: package, base class, what the class names end in and the names in YAML do not
        "optimizer": ("composerlite.optim", "torch.optim:Optimizer", ""),
        "scheduler": ("composerlite.optim", "composerlite.optim:ComposerScheduler", "Scheduler"),
        "algorithm": ("composerlite.algorithms", "composerlite.core:Algorithm", ""),
        "callback": ("composerlite.callbacks", "composerlite.core:Callback", ""),
        "logger": ("composerlite.loggers", "composerlite.core:LoggerDestination", "Logger"),
    }
)

_LIBRARIES = ("composerlite", "torch")
"""They have names of ours, and are the ones that run already."""

# Spellings that the capitals of a class name would cut in the wrong places, or that nobody would type.
_SPELLINGS = {
    "AdamW": "Adamw",
    "Annealing": "",
    "CutMix": "Cutmix",
    "CutOut": "Cutout",
    "JSONL": "Jsonl",
    "MLFlow": "Mlflow",
    "MixUp": "Mixup",
    "NaN": "Nan",
    "OOM": "Oom",
    "WandB": "Wandb",
}


@functools.cache
def registered(family: Family) -> Mapping[str, type]:
    """The classes of ``family`` that composerlite has, by their names in YAML."""
    package_name, base_name, suffix = _FAMILIES[family]
    package = importlib.import_module(package_name)
    base = import_attribute(base_name)
    classes = [getattr(package, name) for name in package.__all__]
    return {
        _snake_case(cls.__name__.removesuffix(suffix)): cls
        for cls in classes
        if inspect.isclass(cls) and issubclass(cls, base) and cls is not base and not inspect.isabstract(cls)
    }


@functools.cache
def known_classes(family: Family) -> Mapping[str, type]:
    """The classes of ``family`` that have names in YAML: those of composerlite, and the optimizers of ``torch.optim``.

    The latter by their class names in small letters, without LBFGS, which the trainer refuses.
    """
    if family != "optimizer":
        return registered(family)
    from torch import optim

    classes = [cls for cls in vars(optim).values() if inspect.isclass(cls) and issubclass(cls, optim.Optimizer)]
    of_torch = {cls.__name__.lower(): cls for cls in classes if cls not in (optim.Optimizer, optim.LBFGS)}
    return {**dict(sorted(of_torch.items())), **registered(family)}


def find(component: Component, family: Family | None, origin: Origin, *, positional: int = 0) -> Callable[..., Any]:
    """Find the class or function ``component``; the result takes ``positional`` more arguments in front.

    ``family`` says which names without ':' are known; ``None`` stands for none. Nothing is built yet, but names and
    arguments are checked, so that a mistake in the last line of a file is found before the data is loaded.

    Raises:
        ConfigError: there is no such class or function, it cannot be called, an argument is unknown or missing; and
            from the returned function, where the constructor refuses a value.
    """
    place = f"{origin.where((*component.path, 'name'))}: {dotted(component.path)}: "
    if ":" in component.name:
        try:
            target = import_attribute(component.name)
        except ConfigError as e:
            raise ConfigError(f"{place}{e}") from e
        if not callable(target):
            raise ConfigError(
                f"{place}{component.name!r} is a {type(target).__name__} and cannot be called. Name a class or a "
                "function."
            )
    elif family is None:
        raise ConfigError(
            f"{place}{component.name!r}: expected 'module:attr', a class or function in a module of yours."
        )
    elif (name := _spelled(component.name, family)) in (known := known_classes(family)):
        target = known[name]
    else:
        raise ConfigError(
            f"{place}there is no {family} {component.name!r}.{did_you_mean(component.name, known)} Something of your "
            "own is named 'module:attr'."
        )
    _check_arguments(target, component, origin, positional)
    return functools.partial(_build, target, component, origin)


def import_attribute(name: str) -> Any:
    """The attribute that ``'module:attr'`` names; ``attr`` may have dots.

    Raises:
        ConfigError: there is no such module, or nothing of that name in it. Other errors of the module's code pass.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{name!r}: expected 'module:attr', such as 'my_task:MyModel'.")
    _check_not_another(module_name)
    try:
        value = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is not None and (module_name == e.name or module_name.startswith(f"{e.name}.")):
            raise ConfigError(
                f"{name!r}: there is no module {e.name!r} beside the YAML file, in the current directory or installed."
            ) from e
        raise ConfigError(f"{name!r}: the module {module_name!r} imports {e.name!r}, which is not installed.") from e
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [known for known in vars(value) if not known.startswith("_")]
            raise ConfigError(f"{name!r}: {module_name!r} has no {part!r}.{did_you_mean(part, public)}")
        value = getattr(value, part)
    return value


def _check_not_another(module_name: str) -> None:
    """See that a module that is loaded is the one that a new process would load: each YAML file may have its own."""
    loaded = getattr(sys.modules.get(module_name), "__file__", None)
    if loaded is None or module_name.partition(".")[0] in _LIBRARIES:
        return
    folders, name, file = None, "", None
    for part in module_name.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            return
        folders, file = spec.submodule_search_locations, spec.origin
    if file is not None and os.path.realpath(file) != os.path.realpath(loaded):
        raise ConfigError(
            f"{module_name!r} is {file!r} here, and this process has loaded {loaded!r} under that name, as of another "
            "run. Give one of the modules another name, or train each run in a process of its own."
        )


def _spelled(name: str, family: Family) -> str:
    """The name as it is registered: optimizers may be written as their classes, ``AdamW``."""
    return name.lower() if family == "optimizer" else name


def _snake_case(class_name: str) -> str:
    for spelling, plain in _SPELLINGS.items():
        class_name = class_name.replace(spelling, plain)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()


def _check_arguments(target: Callable[..., Any], component: Component, origin: Origin, positional: int) -> None:
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except ValueError:  # some classes written in C tell nothing about their arguments; they check them themselves
        return
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:positional]
    named = [p for p in parameters if p not in by_position and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = {p.name for p in named}
    for argument in component.arguments:
        if argument not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ConfigError(
                f"{origin.where((*component.path, argument))}: {dotted((*component.path, argument))}: "
                f"{component.name!r} has no argument {argument!r}.{did_you_mean(argument, known)}"
            )
    missing = [p.name for p in named if p.default is p.empty and p.name not in component.arguments]
    if missing:
        raise ConfigError(
            f"{origin.where(component.path)}: {dotted(component.path)}: {component.name!r} needs {', '.join(missing)}. "
            f"Arguments: {', '.join(p.name for p in named)}."
        )


def _build(target: Callable[..., Any], component: Component, origin: Origin, *positional: Any) -> Any:
    try:
        return target(*positional, **component.arguments)
    except ConfigError as e:
        raise ConfigError(f"{origin.where(component.path)}: {dotted(component.path)}: {e}") from e
    except (TypeError, ValueError) as e:
        if unfit := _unfit(target, component.arguments):
            name, hint = next(iter(unfit.items()))
            told = origin.says((*component.path, name), component.arguments[name])
            raise ConfigError(f"{told}: expected {in_words(hint)}.") from e
        if ":" in component.name:
            raise  # a bug of the user's code, as far as one can tell
        raise ConfigError(f"{origin.where(component.path)}: {dotted(component.path)}: {type(e).__name__}: {e}") from e


def _unfit(target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the annotations of those ``arguments`` that are of another type."""
    try:
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target)
    except (NameError, TypeError, AttributeError):  # names for type checkers only, or none at all
        return {}
    return {
        name: hints[name]
        for name, value in arguments.items()
        if name in hints and in_words(hints[name]) and not _fits(value, hints[name])
    }


def _fits(value: Any, hint: Any) -> bool:
    try:
        return fits(value, hint)
    except TypeError:  # a hint that no object can be compared with
        return True
