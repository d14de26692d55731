"""Where each value of a configuration was written, for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Origin", "YamlPath", "dotted"]

YamlPath = tuple[str, ...]
"""The keys and list positions that lead to a value."""


def dotted(path: Sequence[str]) -> str:
    """``path`` as overrides write it: ``train_loader.dataset.split``."""
    return ".".join(path)


@dataclass(frozen=True)
class Origin:
    """The file of a configuration, the line of each of its keys, and the overrides given on the command line."""

    file: Path
    lines: Mapping[YamlPath, int]
    overrides: Mapping[YamlPath, str]

    def where(self, path: YamlPath = ()) -> str:
        """Who is to be asked about the value at ``path``: ``'digits.yaml:12'`` or ``"override 'lr=x'"``.

        Falls back on what encloses the value, and on the file.
        """
        for end in range(len(path), 0, -1):
            if (override := self.overrides.get(path[:end])) is not None:
                return f"override {override!r}"
            if (line := self.lines.get(path[:end])) is not None:
                return f"{self.file}:{line}"
        return str(self.file)
