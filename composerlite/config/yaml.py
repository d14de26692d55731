"""Reading a run's YAML file: overrides, interpolation, and the line of every key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composerlite.config.origin import Origin, YamlPath
from composerlite.config.parse import parse
from composerlite.config.schema import RunConfig
from composerlite.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import yaml
    from omegaconf import DictConfig

__all__ = ["load_config"]


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that ``file`` describes, with ``overrides`` such as ``"optimizer.lr=1e-3"`` applied, checked.

    Nothing is built and torch is not imported: names and arguments of classes are checked by ``build_trainer``.

    Raises:
        ConfigError: the file cannot be read, or a key, value, override or interpolation is wrong. The message names
            the file and line, or the override.
    """
    from omegaconf import OmegaConf

    file = Path(file)
    values, lines = _read(file)
    given: dict[YamlPath, str] = {}
    for override in overrides:
        _apply(override, values, lines, given)
    origin = Origin(file, lines, given)
    return parse(_resolve(values, origin), origin, text=OmegaConf.to_yaml(values, resolve=True))


def _read(file: Path) -> tuple[DictConfig, dict[YamlPath, int]]:
    import yaml
    from omegaconf import DictConfig, OmegaConf

    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise ConfigError(f"{file}: there is no such file. Give the path of a YAML file.") from e
    except (IsADirectoryError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file} is not a YAML file: {e}.") from e
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = OmegaConf.create(text)
    except yaml.MarkedYAMLError as e:
        line = file if e.problem_mark is None else f"{file}:{e.problem_mark.line + 1}"
        quote = " A value that starts with '{' needs quotes." if "flow mapping" in f"{e.context}" else ""
        raise ConfigError(f"{line}: not valid YAML: {e.problem}.{quote}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{file}: not valid YAML: {e}") from e
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, DictConfig):
        raise ConfigError(f"{file}: want 'key: value' lines at the top level, such as 'max_duration: 5ep'.")
    return values, dict(_lines(root, ()))


def _lines(node: yaml.Node, path: YamlPath) -> Iterator[tuple[YamlPath, int]]:
    """The path of every key and list item below ``node``, with its line counted from 1."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, str(key.value)), key.start_mark.line + 1
            yield from _lines(value, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, str(index)), item.start_mark.line + 1
            yield from _lines(item, (*path, str(index)))


def _apply(override: str, values: DictConfig, lines: Mapping[YamlPath, int], given: dict[YamlPath, str]) -> None:
    """Set one value, and remember in ``given`` what the file does not have and this override made."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, equals, text = override.partition("=")
    path = _path(key)
    if not path or not equals:
        raise ConfigError(f"override {override!r}: want KEY=VALUE, such as max_duration=5ep or optimizer.lr=1e-3.")
    if path[0] == "variables":
        known = _variables(values)
        if len(path) == 1 or path[1] not in known:
            name = ".".join(path[1:])
            raise ConfigError(f"override {override!r}: the file has no variable {name!r}.{did_you_mean(name, known)}")
    try:
        parsed = OmegaConf.from_dotlist([f"value={text}"])
    except yaml.YAMLError as e:
        if not text.startswith("{"):
            raise ConfigError(f"override {override!r}: the value is not valid YAML: {e}") from e
        parsed = OmegaConf.create({"value": text})  # '{run_name}/x' is a fine name and no YAML
    value: Any = OmegaConf.to_container(parsed)["value"]  # type: ignore[index, call-overload]
    try:
        OmegaConf.update(values, key, value)
    except (OmegaConfBaseException, IndexError, TypeError, ValueError) as e:
        raise ConfigError(f"override {override!r}: {key!r} cannot be set: {str(e).splitlines()[0]}") from e
    made = [path[:end] for end in range(1, len(path)) if path[:end] not in lines]
    given.update(dict.fromkeys((*made, path, *_paths_below(value, path)), override))


def _variables(values: DictConfig) -> list[str]:
    """The names under ``variables:``."""
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(values, resolve=False)
    variables = content.get("variables")
    return [str(name) for name in variables] if isinstance(variables, dict) else []


def _path(key: str | None) -> YamlPath:
    """``'eval_loader[0].batch_size'`` in its parts."""
    return tuple(part for part in re.split(r"[.\[\]]+", key or "") if part)


def _paths_below(value: Any, path: YamlPath) -> Iterator[YamlPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, str(key))
        yield from _paths_below(item, (*path, str(key)))


def _resolve(values: DictConfig, origin: Origin) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(values, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as e:
        problem = str(e).splitlines()[0].rstrip(".")
        variable = re.search(r"variables\.(\w+)", problem)
        hint = did_you_mean(variable[1], _variables(values)) if variable is not None else ""
        raise ConfigError(f"{origin.where(_path(e.full_key))}: {e.full_key}: {problem}.{hint}") from e
