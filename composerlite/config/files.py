"""Reading of YAML files, and merging of the files in a ``defaults:`` list, in the form of Hydra (docs/adr/0020)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composerlite.config.origin import YamlPath, path_of, yaml_nodes
from composerlite.errors import ConfigError, did_you_mean

_EXPECTED = "expected a list such as [base, {model: gpt}, _self_]"


class Override(NamedTuple):
    """A ``KEY=VALUE`` argument: the text, the key, and the value parsed as YAML."""

    text: str
    key: str
    value: Any


def _read(file: Path) -> tuple[dict[str, Any], dict[YamlPath, str]]:
    """Read a YAML file. Returns the unresolved values and the line of each value.

    Raises:
        ConfigError: the file cannot be read, is not valid YAML, or is not a mapping.
    """
    places: dict[YamlPath, str] = {}
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        places = {path: f"{file}:{line}" for path, line, _ in yaml_nodes(root)}
        values = OmegaConf.create(text)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: cannot be read: {e}. Give the path of a YAML file.") from e
    except (yaml.YAMLError, OmegaConfBaseException) as e:
        mark, problem = getattr(e, "problem_mark", None), getattr(e, "problem", None) or str(e).splitlines()[0]
        where = f"{file}:{mark.line + 1}" if mark else places.get(path_of(getattr(e, "full_key", None)), file)
        raise ConfigError(f"{where}: not valid YAML: {problem}. A value with '{{' at its start needs quotes.") from e
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, DictConfig):
        raise ConfigError(f"{file}: expected 'key: value' lines at the top level, such as 'max_duration: 5ep'.")
    plain: Any = OmegaConf.to_container(values, resolve=False)
    return plain, places


class Files:
    """The files of a run, merged in order; later files win.

    Attributes:
        values: the merged values, unresolved.
        places: the file and line of each value.
        included: each file, with the place of the name in a ``defaults:`` list.
        overrides: the overrides without selections of files.
    """

    def __init__(self, file: Path, overrides: Sequence[Override]) -> None:
        """Merge ``file`` with the files in the ``defaults:`` list, recursively.

        Args:
            file: the file of the run.
            overrides: all overrides. ``GROUP=NAME`` selects a file of a group.

        Raises:
            ConfigError: a file cannot be read or is included twice; a ``defaults:`` list is malformed; a key is a
                list in one file and a mapping in another.
        """
        self.values: Any = OmegaConf.create({})
        self.places: dict[YamlPath, str] = {}
        self.included: dict[Path, str] = {}
        self._selections = {o.key: o for o in overrides if _file_names(o.value) is not None}
        self._groups: set[str] = set()
        self._add(Path(os.path.normpath(file)), (), str(file))
        self.overrides = [o for o in overrides if o.key not in self._groups or _file_names(o.value) is None]

    def _add(self, file: Path, package: YamlPath, where: str) -> None:
        """Merge ``file`` and the files in the ``defaults:`` list.

        Args:
            file: the file.
            package: the key for the values of the file; empty for the top level.
            where: the place with the name of the file, for messages.
        """
        if file in self.included:
            raise ConfigError(f"{where}: {file} is included already, at {self.included[file]}. Include a file once.")
        self.included[file] = where
        values, places = _read(file)
        entries = values.pop("defaults", [])
        if not isinstance(entries, list) or entries.count("_self_") > 1:
            raise ConfigError(f"{places[('defaults',)]}: defaults={entries!r}: {_EXPECTED}.")
        for part in reversed(package):
            values = {part: values}
        for index, entry in enumerate(entries if "_self_" in entries else [*entries, "_self_"]):
            if entry != "_self_":
                self._add_entry(entry, file.parent, package, places[("defaults", str(index))])
                continue
            try:
                self.values = OmegaConf.merge(self.values, values)
            except (OmegaConfBaseException, TypeError) as e:
                rule = f"a list and a mapping cannot be merged: use the same form for {', '.join(values)} in all files"
                raise ConfigError(f"{file}: {rule} ({str(e).splitlines()[0]}).") from e
            self.places |= {package[:end]: f"{file}:1" for end in range(1, len(package) + 1)}
            self.places |= {(*package, *path): place for path, place in places.items()}

    def _add_entry(self, entry: Any, folder: Path, package: YamlPath, where: str) -> None:
        """Add the files of an ``entry``: ``group/name`` or ``{group: name}``, relative to ``folder``."""
        selectable = isinstance(entry, dict) and len(entry) == 1
        group, value = next(iter(entry.items())) if selectable else os.path.split(str(entry))
        names, parts = _file_names(value), Path(str(group)).parts
        package = (*package, *parts) if ".." not in parts else parts[-1:] if selectable else ()
        folder = folder / str(group)
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        if selectable:
            key = "/".join(package)
            self._groups.add(key)
            if key in self._selections:
                names, where = _file_names(self._selections[key].value), f"override {self._selections[key].text!r}"
            if names == ["???"]:
                raise ConfigError(f"{where}: {key!r} has to be chosen: {key}=NAME.{did_you_mean('', known)}")
        if names is None or not (selectable or isinstance(entry, str)):
            raise ConfigError(f"{where}: defaults: {entry!r}: {_EXPECTED}.")
        for name in names:
            file = Path(os.path.normpath(folder / f"{name.removesuffix('.yaml')}.yaml"))
            if not file.is_file():
                raise ConfigError(f"{where}: there is no file {str(file)!r}.{did_you_mean(name, known)}")
            self._add(file, package, where)


def _file_names(value: Any) -> list[str] | None:
    """Return the file names in ``value``: a text, a list of texts, or null for none. ``None`` for other values."""
    names = [] if value is None else value if isinstance(value, list) else [value]
    return names if all(isinstance(name, str) and name for name in names) else None
