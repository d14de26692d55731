"""The place of each configuration value, as a file and line or an override, for errors and ``--print-origins``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from composerlite.errors import ConfigError

YamlPath = tuple[str, ...]
"""The keys and list positions of a nested value, from the top of the file."""


def dotted(path: Sequence[str]) -> str:
    """Return ``path`` in the form of overrides: ``train_loader.dataset.split``."""
    return ".".join(path)


def path_of(key: str | None) -> YamlPath:
    """Split ``'eval_loader[0].batch_size'`` into keys and list positions."""
    return tuple(part for part in re.split(r"[.\[\]]+", key or "") if part)


def walk(value: Any, path: YamlPath = ()) -> Iterator[tuple[YamlPath, Any]]:
    """Yield ``value``, found at ``path``, and every nested value with the path."""
    yield path, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from walk(inner, (*path, str(key)))


def yaml_nodes(node: yaml.Node | None, path: YamlPath = ()) -> Iterator[tuple[YamlPath, int, yaml.Node]]:
    """Yield every value below ``node``: the path, the line of the key or list item counted from 1, the YAML node."""
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, child) for key, child in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), child, child) for index, child in enumerate(node.value)]
    for name, start, child in children:
        yield (*path, name), start.start_mark.line + 1, child
        yield from yaml_nodes(child, (*path, name))


@dataclass(frozen=True)
class Origin:
    """The place of every value of a configuration.

    Attributes:
        files: the merged files, starting with the file of the run.
        places: for each key and list item the last file and line, or the override, with a value for it.
        unresolved: text with ``${…}`` to show in place of a value. The value may be a secret from the environment.
    """

    files: Sequence[Path]
    places: Mapping[YamlPath, str]
    unresolved: Mapping[YamlPath, str]

    def where(self, path: YamlPath = ()) -> str:
        """Return the place of the value at ``path`` or of the nearest parent: ``'digits.yaml:12'``."""
        parents = (path[:end] for end in range(len(path), 0, -1))
        return next((self.places[parent] for parent in parents if parent in self.places), str(self.files[0]))

    def shown(self, path: YamlPath, value: Any) -> Any:
        """Return a copy of ``value``, found at ``path``, with unresolved text in place of possible secrets."""
        for end in range(1, len(path) + 1):
            if path[:end] in self.unresolved:
                return self.unresolved[path[:end]]
        if isinstance(value, dict):
            return {key: self.shown((*path, str(key)), inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.shown((*path, str(index)), inner) for index, inner in enumerate(value)]
        return value

    def error(self, path: YamlPath, message: str) -> ConfigError:
        """Return an error about the key at ``path``, as ``'digits.yaml:12: train_loader.dataset: message'``."""
        return ConfigError(f"{self.where(path)}: {dotted(path)}: {message}")

    def value_error(self, path: YamlPath, value: Any, message: str) -> ConfigError:
        """Return an error about the ``value`` at ``path``, as ``'digits.yaml:12: seed=1.5: message'``."""
        return ConfigError(f"{self.where(path)}: {dotted(path)}={self.shown(path, value)!r}: {message}")

    def annotated(self, text: str) -> str:
        """Return ``text``, the YAML of all values, with the place of each value in a comment behind the value."""
        lines = text.splitlines()
        leaves = [
            (node.end_mark.line, self.where(path))
            for path, _, node in yaml_nodes(yaml.compose(text, Loader=yaml.SafeLoader))
            if isinstance(node, yaml.ScalarNode) or not node.value
        ]
        width = min(max(len(lines[line]) for line, _ in leaves), 60)
        for line, where in leaves:
            lines[line] = f"{lines[line]:<{width}}  # {where}"
        return "\n".join(lines) + "\n"
