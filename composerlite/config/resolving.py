"""Interpolation: ``${variables.x}`` and ``${oc.env:NAME}``, and which values depend on the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composerlite.config.document import unresolved
from composerlite.config.origin import Origin, YamlPath
from composerlite.config.overrides import path_of
from composerlite.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

__all__ = ["from_environment", "resolve"]

_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\b")
_NOBODY = "${composerlite.unknown"
"""Begins an interpolation that cannot be resolved."""


def resolve(values: DictConfig, origin: Origin) -> dict[str, Any]:
    """``values`` as plain dicts and lists with every interpolation replaced by what it stands for.

    Raises:
        ConfigError: an interpolation stands for nothing, or a value is ``???`` and nobody has set it.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        return OmegaConf.to_container(values, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except MissingMandatoryValue as e:
        where = origin.where(path_of(e.full_key))
        raise ConfigError(f"{where}: {e.full_key} is '???': it has to be set, such as by {e.full_key}=VALUE.") from e
    except OmegaConfBaseException as e:
        raise ConfigError(_unresolvable(e, unresolved(values), origin)) from e


def _unresolvable(error: OmegaConfBaseException, raw: Mapping[Any, Any], origin: Origin) -> str:
    """What is wrong, with the place and the way out."""
    problem = str(error).splitlines()[0].rstrip(".")
    key, hint = f"{error.full_key}", ""
    texts = dict(_texts(raw, ()))
    written = texts.get(path_of(key), "")
    if (name := re.search(r"Environment variable '(.+)' not found", problem)) is not None:
        text = re.compile(rf"\$\{{\s*oc\.env\s*:\s*{re.escape(name[1])}\s*\}}")
        key = next((".".join(path) for path, value in texts.items() if text.search(value)), key)
        problem = f"the environment has no variable {name[1]!r}"
        hint = f" Set it, or give a value for want of it: ${{oc.env:{name[1]},VALUE}}."
    elif any(_ENVIRONMENT.search(text) for text in texts.values()) and not _quotes_only(problem, written):
        problem = f"{written!r} cannot be filled in: {type(error).__name__}"
    elif (variable := re.search(r"variables\.(\w+)", problem)) is not None:
        known = raw.get("variables")
        names = [str(name) for name in known] if isinstance(known, dict) else []
        hint = did_you_mean(variable[1], names) if names else " There are no variables."
    elif problem.startswith("Unsupported interpolation type"):
        hint = " A variable of the environment is ${oc.env:NAME}, or ${oc.env:NAME,VALUE} with a value for want of it."
    return f"{origin.where(path_of(key))}: {key}: {problem}.{hint}"


def _quotes_only(problem: str, written: str) -> bool:
    """Whether OmegaConf's message names nothing but what stands in ``written``: else it may tell a secret."""
    named = re.fullmatch(r"(?:Interpolation key '(.+)' not found|Unsupported interpolation type (.+))", problem)
    return named is not None and (named[1] or named[2]) in written


def from_environment(values: DictConfig) -> dict[YamlPath, str]:
    """The values that depend on environment variables, directly or through other values: how each is written."""
    from omegaconf import OmegaConf

    raw = unresolved(values)
    texts = [(path, text) for path, text in _texts(raw, ()) if "${" in text]
    if not any(_ENVIRONMENT.search(text) for _, text in texts):
        return {}
    # What can be resolved where no variable can be, depends on none.
    without = OmegaConf.create(_replaced(raw))
    return {path: text for path, text in texts if not _can_be_resolved(without, path)}


def _can_be_resolved(values: DictConfig, path: Sequence[str]) -> bool:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    found: Any = values
    try:
        for part in path:
            found = found[int(part)] if OmegaConf.is_list(found) else found[_key(found, part)]
        if OmegaConf.is_config(found):
            OmegaConf.to_container(found, resolve=True)
    except OmegaConfBaseException:
        return False
    return True


def _key(mapping: Any, text: str) -> Any:
    """The key that is written so: YAML has numbers among keys, too."""
    return next(key for key in mapping if str(key) == text)


def _replaced(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner) for inner in value]
    return _ENVIRONMENT.sub(_NOBODY, value) if isinstance(value, str) else value


def _texts(value: Any, path: YamlPath) -> Iterator[tuple[YamlPath, str]]:
    """Every text in ``value``, which is at ``path``."""
    if isinstance(value, str):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _texts(inner, (*path, str(key)))
