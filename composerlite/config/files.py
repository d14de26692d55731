"""The files of a run: their values as they are written, the line of every key, and ``defaults:``, which merges them.

The list ``defaults:`` has Hydra's form: docs/adr/0020.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composerlite.config.origin import SourceLine, YamlPath, dotted, nearest, path_of, walk
from composerlite.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import yaml
    from omegaconf import DictConfig

_WANTED = "expected a list such as [base, {model: gpt}, _self_]"
_SELF = "_self_"


@dataclass(frozen=True)
class Override:
    """A value for a key, and the argument of the command line as it was typed."""

    text: str
    key: str
    value: Any


@dataclass(frozen=True)
class Document:
    """Contents of one configuration file, or of several merged ones."""

    values: DictConfig
    places: Mapping[YamlPath, SourceLine]

    def where(self, path: YamlPath) -> str:
        """The line of the value at ``path``, or of what encloses it."""
        return str(nearest(self.places, path) or "in a file that is merged")


def _read(file: Path) -> Document:
    """The file, with its interpolations as they are written.

    Raises:
        ConfigError: it is not there, or is not a mapping in YAML.
    """
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as e:
        raise ConfigError(f"{file}: there is no such file. Give the path of a YAML file.") from e
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} is not a YAML file, or cannot be read: {e}.") from e
    root: yaml.Node | None = None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = OmegaConf.create(text)
    except yaml.MarkedYAMLError as e:
        line = file if e.problem_mark is None else f"{file}:{e.problem_mark.line + 1}"
        quote = " A value that starts with '{' needs quotes." if "flow mapping" in f"{e.context}" else ""
        raise ConfigError(f"{line}: not valid YAML: {e.problem}.{quote}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{file}: not valid YAML: {e}") from e
    except OmegaConfBaseException as e:
        places = {} if root is None else {path: SourceLine(file, line) for path, line in _lines(root, ())}
        where = nearest(places, path_of(e.full_key)) or file
        raise ConfigError(f"{where}: {e.full_key}: not a valid interpolation: {str(e).splitlines()[0]}.") from e
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, DictConfig):
        raise ConfigError(f"{file}: expected 'key: value' lines at the top level, such as 'max_duration: 5ep'.")
    _refuse_package(text, file)
    return Document(values, {path: SourceLine(file, line) for path, line in _lines(root, ())})


def _refuse_package(text: str, file: Path) -> None:
    """Hydra reads a comment at the top of a file, which would go unheard here."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*#\s*@package\b", line):
            raise ConfigError(
                f"{file}:{number}: '@package' of Hydra is not supported. The values of a file go to where its "
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


# ── the files that a file starts from ───────────────────────────────────────────────────────────────────────────
def compose(file: Path, overrides: Sequence[Override]) -> tuple[Document, list[Path], list[Override]]:
    """``file`` and all files that it starts from, directly or not, merged: of two that say the same the later counts.

    Mappings are merged key by key, all else is replaced as a whole. A file that is named with its folder says what is
    below the key of the folder's name.

    Returns:
        What they say together; the files, that of the run first; the overrides that have chosen a file, not a value.

    Raises:
        ConfigError: a file is missing, is there twice or starts from itself, a list cannot be understood, or files do
            not go together. The message names the file and the line.
    """
    file = Path(os.path.normpath(file))
    files = _Files(file.parent, overrides)
    files.add(file, (), (), str(file))
    for override in overrides:
        if "/" in override.key and override not in files.choices:
            hint = did_you_mean(override.key, files.groups)
            raise ConfigError(f"override {override.text!r}: no defaults list has this group.{hint}")
    return functools.reduce(_merge, files.layers), list(files.seen), files.choices


@dataclass(frozen=True)
class _Entry:
    """An item of a defaults list: names of files in the folder ``group``, or the place of the file's own values."""

    group: str
    names: list[str]
    where: str
    is_group: bool


class _Files:
    """The files of a run, read in the order in which they are merged."""

    def __init__(self, root: Path, overrides: Sequence[Override]) -> None:
        self.layers: list[Document] = []
        self.seen: dict[Path, str] = {}
        self.groups: list[str] = []
        self.choices: list[Override] = []
        self._root = root
        self._overrides = [override for override in overrides if _names(override.value) is not None]

    def add(self, file: Path, package: YamlPath, chain: Sequence[Path], where: str) -> None:
        """``file`` with all that it starts from.

        Args:
            file: which.
            package: the key below which its values go.
            chain: the files that have asked for it, one for the other; ``where`` the last one did.
        """
        if file in chain:
            way = " → ".join(str(step) for step in (*chain[chain.index(file) :], file))
            raise ConfigError(f"{where}: a file cannot start from itself: {way}.")
        if file in self.seen:
            raise ConfigError(f"{where}: {file} is in a defaults list already, at {self.seen[file]}. Name it once.")
        document = _read(file)
        self.seen[file] = where
        entries = list(_entries(document, file))
        document.values.pop("defaults", None)
        own = _packaged(document, package, file)
        for entry in entries:
            if entry.names == [_SELF]:
                self.layers.append(own)
                continue
            folder = self._root / entry.group[1:] if entry.group.startswith("/") else file.parent / entry.group
            below = _below(package, entry)
            names, asked = self._chosen(entry, "/".join(below), folder)
            for name in names:
                self.add(_found(folder, name, asked), below, (*chain, file), asked)
        if not any(entry.names == [_SELF] for entry in entries):
            self.layers.append(own)

    def _chosen(self, entry: _Entry, group: str, folder: Path) -> tuple[list[str], str]:
        """The names of the entry, or those that an override has chosen, and who wants them."""
        if not entry.is_group:
            return entry.names, entry.where
        self.groups.append(group)
        choices = [override for override in self._overrides if override.key == group]
        if choices:
            self.choices += choices
            return _names(choices[-1].value) or [], f"override {choices[-1].text!r}"
        if entry.names == ["???"]:
            hint = did_you_mean("", _files_in(folder))
            raise ConfigError(f"{entry.where}: {group!r} has to be chosen: {group}=NAME.{hint}")
        return entry.names, entry.where


def _below(package: YamlPath, entry: _Entry) -> YamlPath:
    """The key below which the values of the entry's files go, ``package`` being that of the file with the entry."""
    folders = tuple(part for part in entry.group.split("/") if part not in ("", "."))
    if ".." in folders:  # another place on the disk, which says nothing of keys
        return folders[-1:] if entry.is_group else ()
    return folders if entry.group.startswith("/") else (*package, *folders)


def _packaged(document: Document, package: YamlPath, file: Path) -> Document:
    """``document`` with its values below the key ``package``."""
    from omegaconf import OmegaConf

    values: dict[Any, Any] = unresolved(document.values)
    for part in reversed(package):
        values = {part: values}
    places = {package[:end]: SourceLine(file, 1) for end in range(1, len(package) + 1)}
    places |= {(*package, *path): place for path, place in document.places.items() if path[0] != "defaults"}
    return Document(OmegaConf.create(values), places)


def _entries(document: Document, file: Path) -> Iterator[_Entry]:
    """The defaults list of ``document``; nothing if it has none."""
    if "defaults" not in document.values:
        return
    items = unresolved(document.values)["defaults"]
    if not isinstance(items, list):
        raise ConfigError(f"{document.places[('defaults',)]}: defaults={items!r}: {_WANTED}.")
    own = 0
    for index, item in enumerate(items):
        where = str(document.places.get(("defaults", str(index)), file))
        pair: tuple[Any, Any] = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else ("", item)
        group, names = pair[0], _names(pair[1])
        is_group = isinstance(item, dict)
        if not isinstance(group, str) or names is None or not (is_group or isinstance(item, str)):
            raise ConfigError(f"{where}: defaults: {item!r}: {_WANTED}.")
        for text in (group, *names):
            _check_supported(text, where)
        own += names == [_SELF]
        if own > 1 or (is_group and _SELF in names):
            raise ConfigError(f"{where}: defaults: '{_SELF}' stands for this file's own values: {_WANTED}, with one.")
        if not is_group:
            group, _, name = names[0].rpartition("/")
            group = group or ("/" if names[0].startswith("/") else "")
            names = [name]
        yield _Entry(group, names, where, is_group)


def _check_supported(text: str, where: str) -> None:
    for sign, what in (
        ("@", "packages"),
        ("${", "interpolation"),
        ("override ", "override"),
        ("optional ", "optional"),
    ):
        if sign in text:
            raise ConfigError(
                f"{where}: defaults: {text!r}: {what} of Hydra is not supported. See docs/configuration.md."
            )


def _names(value: Any) -> list[str] | None:
    """Names of files, if ``value`` is such: a text, a list of texts, or nothing."""
    names = [] if value is None else value if isinstance(value, list) else [value]
    return names if all(isinstance(name, str) and name for name in names) else None


def _files_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*") if path.suffix in (".yaml", ".yml"))


def _found(folder: Path, name: str, where: str) -> Path:
    """The file that is called ``name`` in ``folder``."""
    file = Path(os.path.normpath(folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")))
    if not file.is_file():
        hint = did_you_mean(name, _files_in(folder)) if folder.is_dir() else " There is no such folder either."
        raise ConfigError(f"{where}: there is no file {str(file)!r}.{hint}")
    return file


def _merge(under: Document, over: Document) -> Document:
    """Merge two documents; ``over`` wins where both set the same key."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    clash = _clash(unresolved(under.values), unresolved(over.values), ())
    if clash is not None:
        raise ConfigError(
            f"{over.where(clash)}: {dotted(clash)} is a list in one file and a mapping in the other, "
            f"{under.where(clash)}. Lists are replaced and mappings merged: write both alike."
        )
    try:
        merged = OmegaConf.merge(under.values, over.values)
    except OmegaConfBaseException as e:
        raise ConfigError(f"{over.where(path_of(e.full_key))}: merging: {str(e).splitlines()[0]}") from e
    assert isinstance(merged, DictConfig)
    places = {**under.places, **over.places}
    return Document(merged, {path: places[path] for path, _ in walk(unresolved(merged)) if path in places})


def _clash(under: Mapping[Any, Any], over: Mapping[Any, Any], path: YamlPath) -> YamlPath | None:
    """Return the path of a value that is a list in one file and a mapping in the other; ``None`` if there is none."""
    for key in under.keys() & over.keys():
        a, b, here = under[key], over[key], (*path, str(key))
        if {type(a), type(b)} == {list, dict}:
            return here
        if isinstance(a, dict) and isinstance(b, dict) and (found := _clash(a, b, here)) is not None:
            return found
    return None
