"""Reading a run: the files that it is made of, overrides, interpolation, and the line of every key."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from composerlite.config.defaults import compose
from composerlite.config.origin import Origin, YamlPath
from composerlite.config.overrides import apply, parse_override
from composerlite.config.parse import parse
from composerlite.config.resolving import from_environment, resolve
from composerlite.config.schema import RunConfig

__all__ = ["load_config"]


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that ``file`` describes, with ``overrides`` such as ``"optimizer.lr=1e-3"`` applied, checked.

    Nothing is built and torch is not imported: names and arguments of classes are checked by ``build_trainer``.

    Raises:
        ConfigError: a file cannot be read, or a key, value, override or interpolation is wrong. The message names
            the file and line, or the override.
    """
    given = [parse_override(override) for override in overrides]
    composed = compose(Path(file), given)
    values, places = composed.document.values, composed.document.places
    set_by: dict[YamlPath, str] = {}
    for override in given:
        if override not in composed.choices:
            apply(override, values, places, set_by)
    origin = Origin(composed.files, places, set_by, {})
    resolved = resolve(values, origin)
    return parse(resolved, dataclasses.replace(origin, written=from_environment(values)))
