"""Where each value of a configuration was written, for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Origin", "Place", "YamlPath", "dotted"]

YamlPath = tuple[str, ...]
"""The keys and list positions that lead to a value."""


def dotted(path: Sequence[str]) -> str:
    """``path`` as overrides write it: ``train_loader.dataset.split``."""
    return ".".join(path)


@dataclass(frozen=True)
class Place:
    """A line of a file, counted from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Origin:
    """Who has said what.

    Attributes:
        files: those that were merged, that of the run first.
        places: of each key and list item, where the file stands that said it last.
        overrides: given on the command line, by the values that they set.
        written: the values that depend on environment variables, as the files write them. What they are is told to
            nobody: it may be secret.
    """

    files: Sequence[Path]
    places: Mapping[YamlPath, Place]
    overrides: Mapping[YamlPath, str]
    written: Mapping[YamlPath, str]

    def where(self, path: YamlPath = ()) -> str:
        """Who is to be asked about the value at ``path``: ``'digits.yaml:12'`` or ``"override 'lr=x'"``.

        Falls back on what encloses the value, and on the file of the run.
        """
        for end in range(len(path), 0, -1):
            if (override := self.overrides.get(path[:end])) is not None:
                return f"override {override!r}"
            if (place := self.places.get(path[:end])) is not None:
                return str(place)
        return str(self.files[0])

    def says(self, path: YamlPath, value: Any) -> str:
        """The beginning of a message about the ``value`` at ``path``: ``'digits.yaml:12: seed=1.5'``."""
        return f"{self.where(path)}: {dotted(path)}={self.shown(path, value)!r}"

    def shown(self, path: YamlPath, value: Any) -> Any:
        """``value``, which is at ``path``, with all that depends on the environment as it is written."""
        for end in range(len(path), 0, -1):
            if (text := self.written.get(path[:end])) is not None:
                return text
        if isinstance(value, dict):
            return {key: self.shown((*path, str(key)), inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.shown((*path, str(index)), inner) for index, inner in enumerate(value)]
        return value
