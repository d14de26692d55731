"""One YAML file: its values as they are written, and the line of every key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composerlite.config.origin import Place, YamlPath
from composerlite.errors import ConfigError

if TYPE_CHECKING:
    import yaml
    from omegaconf import DictConfig

__all__ = ["Document", "paths_below", "read", "unresolved"]


@dataclass(frozen=True)
class Document:
    """What a file, or several that were merged, say."""

    values: DictConfig
    places: Mapping[YamlPath, Place]


def read(file: Path) -> Document:
    """The file, with its interpolations as they are written.

    Raises:
        ConfigError: it is not there, or is not a mapping in YAML.
    """
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
    _refuse_package(text, file)
    return Document(values, {path: Place(file, line) for path, line in _lines(root, ())})


def _refuse_package(text: str, file: Path) -> None:
    """Hydra reads a comment at the top of a file, which would go unheard here."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*#\s*@package\b", line):
            raise ConfigError(
                f"{file}:{number}: '@package' of Hydra cannot be used here. The values of a file go to where its "
                "folder says: those of model/gpt.yaml below 'model'."
            )
        if line.strip() and not line.lstrip().startswith("#"):
            return


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


def unresolved(values: DictConfig) -> dict[Any, Any]:
    """``values`` as plain dicts and lists, with interpolations as text."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(values, resolve=False)  # type: ignore[return-value]


def paths_below(value: Any, path: YamlPath) -> Iterator[YamlPath]:
    """The path of every key and list item in ``value``, which is at ``path``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, str(key))
        yield from paths_below(item, (*path, str(key)))
