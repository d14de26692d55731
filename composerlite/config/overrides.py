"""``KEY=VALUE`` on the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composerlite.config.document import paths_below, unresolved
from composerlite.config.origin import Place, YamlPath
from composerlite.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Override", "apply", "parse_override", "path_of"]


@dataclass(frozen=True)
class Override:
    """A value for a key, and the argument as it was typed."""

    text: str
    key: str
    value: Any


def parse_override(text: str) -> Override:
    """The argument in its parts.

    Raises:
        ConfigError: it is not ``KEY=VALUE`` with YAML as the value.
    """
    import yaml
    from omegaconf import OmegaConf

    key, equals, value = text.partition("=")
    if key[:1] in ("+", "~"):
        raise ConfigError(
            f"override {text!r}: {key[0]!r} of Hydra is not supported. {key.lstrip('+~')}=VALUE sets what is there and "
            "adds what is not, and null stands for nothing."
        )
    if not path_of(key) or not equals:
        raise ConfigError(f"override {text!r}: want KEY=VALUE, such as max_duration=5ep or optimizer.lr=1e-3.")
    if path_of(key)[0] == "defaults":
        raise ConfigError(f"override {text!r}: the list itself stays as it is. GROUP=NAME chooses the file of a group.")
    try:
        parsed = OmegaConf.from_dotlist([f"value={value}"])
    except yaml.YAMLError as e:
        if not value.startswith("{"):
            raise ConfigError(f"override {text!r}: the value is not valid YAML: {e}") from e
        parsed = OmegaConf.create({"value": value})  # '{run_name}/x' is a fine name and no YAML
    return Override(text, key, unresolved(parsed)["value"])


def apply(override: Override, values: DictConfig, places: Mapping[YamlPath, Place], given: dict[YamlPath, str]) -> None:
    """Set one value, and remember in ``given`` what no file has and this override made.

    Raises:
        ConfigError: there is no such variable or list item.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text, key, value = override.text, override.key, override.value
    path = path_of(key)
    if path[0] == "variables":
        variables = unresolved(values).get("variables")
        known = [str(name) for name in variables] if isinstance(variables, dict) else []
        if len(path) == 1 or path[1] not in known:
            name = ".".join(path[1:])
            raise ConfigError(f"override {text!r}: the file has no variable {name!r}.{did_you_mean(name, known)}")
    try:
        OmegaConf.update(values, key, value)
    except (OmegaConfBaseException, IndexError, TypeError, ValueError) as e:
        raise ConfigError(f"override {text!r}: {key!r} cannot be set: {str(e).splitlines()[0]}") from e
    made = [path[:end] for end in range(1, len(path)) if path[:end] not in places]
    given.update(dict.fromkeys((*made, path, *paths_below(value, path)), text))


def path_of(key: str | None) -> YamlPath:
    """``'eval_loader[0].batch_size'`` in its parts."""
    return tuple(part for part in re.split(r"[.\[\]]+", key or "") if part)
