"""Loading of a configuration: files are merged, ``KEY=VALUE`` overrides applied, and ``${…}`` resolved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from composerlite.config.files import Files, Override
from composerlite.config.origin import Origin, YamlPath, dotted, path_of, walk
from composerlite.config.schema import RunConfig, parse
from composerlite.errors import ConfigError, did_you_mean


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check the configuration of a run. Builds nothing and does not import torch.

    Names and arguments of classes are checked later, by :func:`build_trainer`.

    Args:
        file: path of a YAML file.
        overrides: ``KEY=VALUE`` strings, applied in order.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: a file cannot be read, or a key, value, override or interpolation is wrong. The message names
            the file and line, or the override.

    Example::

        config = load_config("configs/digits.yaml", ["optimizer.lr=1e-3"])
    """
    files = Files(Path(file), [_parse_override(text) for text in overrides])
    return _resolve_and_parse(files.values, list(files.included), files.places, files.overrides)


def load_kept(kept: Any, overrides: Sequence[str] = ()) -> RunConfig | None:
    """Read the configuration in a checkpoint.

    Building a configuration runs the code of the modules in it, so build only configurations of people you trust.

    Args:
        kept: the value in the checkpoint, under ``settings`` and ``config``.
        overrides: ``KEY=VALUE`` strings, applied in order.

    Returns:
        The checked configuration, or ``None`` if ``kept`` is not a configuration.

    Raises:
        ConfigError: as for :func:`load_config`.
    """
    if not isinstance(kept, dict) or not kept.get("files"):
        return None
    files, values = [Path(file) for file in kept["files"]], OmegaConf.create(yaml.safe_load(kept["yaml"]))
    return _resolve_and_parse(values, files, {}, [_parse_override(text) for text in overrides])


def _parse_override(text: str) -> Override:
    """Split ``KEY=VALUE`` and parse the value as YAML.

    Raises:
        ConfigError: ``text`` has another form, or the value is not valid YAML.
    """
    key, equals, value = text.partition("=")
    if not path_of(key) or not equals or "" in key.split("."):
        raise ConfigError(f"override {text!r}: expected KEY=VALUE, such as max_duration=5ep or optimizer.lr=1e-3.")
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as e:
        if not value.startswith("{"):  # '{run_name}/x' is a good file name but not valid YAML
            raise ConfigError(f"override {text!r}: the value is not valid YAML: {e}") from e
        parsed = {"value": value}
    return Override(text, key, parsed["value"])


def _resolve_and_parse(
    config: DictConfig, files: Sequence[Path], places: dict[YamlPath, str], overrides: Sequence[Override]
) -> RunConfig:
    """Apply ``overrides``, resolve every ``${…}``, and check the result.

    If an environment variable is used anywhere, messages and printed values show every ``${…}`` unresolved.

    Raises:
        ConfigError: an override cannot be applied, an interpolation cannot be resolved, a value is still ``???``, or
            the result is not a valid configuration.
    """
    for override in overrides:
        path, where = path_of(override.key), f"override {override.text!r}"
        if path[0] == "variables":
            variables = config.get("variables")
            known = list(map(str, variables)) if isinstance(variables, DictConfig) else []
            if len(path) == 1 or path[1] not in known:
                name = dotted(path[1:])
                raise ConfigError(f"{where}: the file has no variable {name!r}.{did_you_mean(name, known)}")
        try:
            OmegaConf.update(config, override.key, override.value)
        except (OmegaConfBaseException, TypeError, ValueError) as e:
            raise ConfigError(f"{where}: {override.key!r} cannot be set: {str(e).splitlines()[0]}.") from e
        places |= {path[:end]: where for end in range(1, len(path)) if path[:end] not in places}
        places |= {below: where for below, _ in walk(override.value, path)}
    raw = OmegaConf.to_container(config, resolve=False)
    texts = {path: text for path, text in walk(raw) if isinstance(text, str) and "${" in text}
    is_secret = any("oc.env" in text or r"\${" in text for text in texts.values())
    origin = Origin(files, places, texts if is_secret else {})
    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as e:
        raise origin.error(path_of(e.full_key), f"is '???': set a value, such as by {e.full_key}=VALUE.") from e
    except OmegaConfBaseException as e:
        raise _unresolvable(e, origin, config) from None  # the cause may quote values from the environment
    return parse(values, origin)


def _unresolvable(error: OmegaConfBaseException, origin: Origin, config: DictConfig) -> ConfigError:
    """Return an error about an interpolation, without values from the environment."""
    path, problem = path_of(error.full_key), str(error).splitlines()[0].rstrip(".")
    if (missing := re.search(r"Environment variable '(.+)' not found", problem)) is not None:
        fix = f"Set it, or give a default: ${{oc.env:{missing[1]},VALUE}}"
        return origin.error(path, f"the environment has no variable {missing[1]!r}. {fix}.")
    if origin.unresolved:
        return origin.error(path, f"{origin.unresolved.get(path)!r} cannot be resolved.")
    if (variable := re.search(r"variables\.(\w+)", problem)) is not None:
        problem += "." + did_you_mean(variable[1], config.get("variables") or ())
    return origin.error(path, problem)
