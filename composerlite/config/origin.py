"""Origin of each value of a configuration: file and line, for messages and for its annotated text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import yaml

YamlPath = tuple[str, ...]
"""The keys and list positions that lead to a value."""
T = TypeVar("T")


def dotted(path: Sequence[str]) -> str:
    """``path`` as overrides write it: ``train_loader.dataset.split``."""
    return ".".join(path)


def path_of(key: str | None) -> YamlPath:
    """``'eval_loader[0].batch_size'`` in its parts."""
    return tuple(part for part in re.split(r"[.\[\]]+", key or "") if part)


def nearest(known: Mapping[YamlPath, T], path: YamlPath) -> T | None:
    """Return the entry for ``path``, or else for its nearest ancestor; the top level has none."""
    return next((known[path[:end]] for end in range(len(path), 0, -1) if path[:end] in known), None)


def walk(value: Any, path: YamlPath = ()) -> Iterator[tuple[YamlPath, Any]]:
    """Yield ``value``, which is at ``path``, and all that is in it, each with its path."""
    yield path, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from walk(inner, (*path, str(key)))


def replaced(value: Any, by: Callable[[YamlPath, Any], Any], path: YamlPath = ()) -> Any:
    """A copy of ``value``, which is at ``path``, with ``by`` called for it and all that is in it.

    What ``by`` returns stands for what it was given; if that is the same object, what is in it is looked at.
    """
    if (other := by(path, value)) is not value:
        return other
    if isinstance(value, dict):
        return {key: replaced(inner, by, (*path, str(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [replaced(inner, by, (*path, str(index))) for index, inner in enumerate(value)]
    return value


@dataclass(frozen=True)
class SourceLine:
    """A line of a file, counted from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Origin:
    """Origins of a configuration's values.

    Attributes:
        files: those that were merged, that of the run first.
        places: of each key and list item, where the file stands that said it last.
        overrides: given on the command line, by the values that they set.
        written: the values that depend on environment variables, as the files write them. Their values are
            never shown: they may be secret.
    """

    files: Sequence[Path]
    places: Mapping[YamlPath, SourceLine]
    overrides: Mapping[YamlPath, str]
    written: Mapping[YamlPath, str]

    def where(self, path: YamlPath = ()) -> str:
        """Return the origin of the value at ``path``: ``'digits.yaml:12'`` or ``"override 'lr=x'"``.

        Falls back on what encloses the value, and on the file of the run.
        """
        said = {**self.places, **{given: f"override {text!r}" for given, text in self.overrides.items()}}
        return str(nearest(said, path) or self.files[0])

    def says(self, path: YamlPath, value: Any) -> str:
        """The beginning of a message about the ``value`` at ``path``: ``'digits.yaml:12: seed=1.5'``."""
        return f"{self.where(path)}: {dotted(path)}={self.shown(path, value)!r}"

    def shown(self, path: YamlPath, value: Any) -> Any:
        """``value``, which is at ``path``, with all that depends on the environment as it is written."""
        return replaced(value, lambda at, inner: nearest(self.written, at) or inner, path)

    def as_yaml(self, values: Mapping[str, Any]) -> str:
        """``values``, which are all, as YAML that gives the same run. What depends on the environment is as written."""
        from omegaconf import OmegaConf

        def escaped(path: YamlPath, value: Any) -> Any:
            if path in self.written:
                return self.written[path]
            return value.replace("${", r"\${") if isinstance(value, str) and "${" in value else value

        return OmegaConf.to_yaml(OmegaConf.create(replaced(dict(values), escaped)))

    def annotated(self, values: Mapping[str, Any]) -> str:
        """:meth:`as_yaml` with a comment behind each value: the file and line, or the override, that says it."""
        import yaml

        text = self.as_yaml(values)
        lines = text.splitlines()
        wanted = [(mark, self.where(path)) for path, mark in _ends(yaml.compose(text, Loader=yaml.SafeLoader), ())]
        width = min(max(len(lines[line]) for line, _ in wanted), 60)
        for line, where in wanted:
            lines[line] = f"{lines[line]:<{width}}  # {where}"
        return "\n".join(lines) + "\n"


def _ends(node: yaml.Node, path: YamlPath) -> Iterator[tuple[YamlPath, int]]:
    """Yield every leaf value and the line, counted from 0, on which it ends."""
    import yaml

    if isinstance(node, yaml.MappingNode) and node.value:
        for key, value in node.value:
            yield from _ends(value, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode) and node.value:
        for index, value in enumerate(node.value):
            yield from _ends(value, (*path, str(index)))
    else:
        yield path, node.end_mark.line
