"""Reading a run: the files that it is made of, ``KEY=VALUE`` of the command line, and interpolation.

Interpolations are ``${variables.x}`` and ``${oc.env:NAME}``; values that depend on the environment are marked.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composerlite.config.files import Document, Override, compose, unresolved
from composerlite.config.origin import Origin, YamlPath, dotted, path_of, replaced, walk
from composerlite.config.parse import parse
from composerlite.config.schema import RunConfig
from composerlite.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\b")
_NOBODY = "${composerlite.unknown"
"""Begins an interpolation that cannot be resolved."""


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that ``file`` describes, with ``overrides`` such as ``"optimizer.lr=1e-3"`` applied, checked.

    Nothing is built and torch is not imported: names and arguments of classes are checked by ``build_trainer``.

    Args:
        file: path of a YAML file.
        overrides: ``KEY=VALUE`` strings, applied in order.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: a file cannot be read, or a key, value, override or interpolation is wrong. The message names
            the file and line, or the override.
    """
    given = [_parsed(override) for override in overrides]
    document, files, choices = compose(Path(file), given)
    return _loaded(document, files, [override for override in given if override not in choices])


def kept_config(config: RunConfig) -> dict[str, Any]:
    """``config`` as the checkpoints of its run keep it, in plain values: what :func:`load_kept` reads.

    What depends on the environment is as the file writes it.
    """
    return {"yaml": config.resolved, "files": [str(file.resolve()) for file in config.origin.files]}


def load_kept(kept: Any, overrides: Sequence[str] = ()) -> RunConfig | None:
    """Return the run that :func:`kept_config` described, with ``overrides`` applied; ``None`` if ``kept`` is none.

    It comes from whoever made the checkpoint, and building it runs the code that it names.

    Args:
        kept: configuration of a checkpoint, as :func:`kept_config` returned it.
        overrides: ``KEY=VALUE`` strings, applied in order.

    Returns:
        The checked configuration, or ``None``.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    from omegaconf import DictConfig, OmegaConf

    match kept:
        case {"yaml": str(text), "files": [str(), *_] as files}:
            values = OmegaConf.create(text)
        case _:
            return None
    if not isinstance(values, DictConfig):
        return None
    return _loaded(Document(values, {}), [Path(f"{file}") for file in files], [_parsed(text) for text in overrides])


def _loaded(document: Document, files: Sequence[Path], overrides: Sequence[Override]) -> RunConfig:
    set_by: dict[YamlPath, str] = {}
    for override in overrides:
        set_by |= _applied(override, document)
    origin = Origin(files, document.places, set_by, {})
    resolved = _resolved(document.values, origin)
    return parse(resolved, dataclasses.replace(origin, written=_from_environment(document.values)))


# ── KEY=VALUE ────────────────────────────────────────────────────────────────────────────────────────────────────
def _parsed(text: str) -> Override:
    """The argument in its parts.

    Raises:
        ConfigError: it is not ``KEY=VALUE`` with YAML as the value.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, equals, value = text.partition("=")
    if key[:1] in ("+", "~"):
        raise ConfigError(
            f"override {text!r}: {key[0]!r} of Hydra is not supported. {key.lstrip('+~')}=VALUE sets what is there and "
            "adds what is not, and null stands for nothing."
        )
    if not path_of(key) or not equals or "" in key.split("."):
        raise ConfigError(f"override {text!r}: expected KEY=VALUE, such as max_duration=5ep or optimizer.lr=1e-3.")
    if path_of(key)[0] == "defaults":
        raise ConfigError(f"override {text!r}: the list itself stays as it is. GROUP=NAME chooses the file of a group.")
    try:
        try:
            parsed = OmegaConf.from_dotlist([f"value={value}"])
        except yaml.YAMLError as e:
            if not value.startswith("{"):
                raise ConfigError(f"override {text!r}: the value is not valid YAML: {e}") from e
            parsed = OmegaConf.create({"value": value})  # '{run_name}/x' is a fine name and no YAML
    except OmegaConfBaseException as e:
        raise ConfigError(f"override {text!r}: not a valid interpolation: {str(e).splitlines()[0]}.") from e
    return Override(text, key, unresolved(parsed)["value"])


def _applied(override: Override, document: Document) -> dict[YamlPath, str]:
    """Set one value, and return the text of the override for it and for what no file has and this one made.

    Raises:
        ConfigError: there is no such variable or list item, or what should have the key is a single value.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text, key, value = override.text, override.key, override.value
    path = path_of(key)
    if path[0] == "variables":
        variables = unresolved(document.values).get("variables")
        known = [str(name) for name in variables] if isinstance(variables, dict) else []
        if len(path) == 1 or path[1] not in known:
            name = ".".join(path[1:])
            raise ConfigError(f"override {text!r}: the file has no variable {name!r}.{did_you_mean(name, known)}")
    try:
        if refused := _not_a_container(key, path, document.values):
            raise ConfigError(f"override {text!r}: {refused}")
        OmegaConf.update(document.values, key, value)
    except ConfigError:
        raise
    except (OmegaConfBaseException, IndexError, TypeError, ValueError) as e:
        raise ConfigError(f"override {text!r}: {key!r} cannot be set: {str(e).splitlines()[0]}") from e
    made = [path[:end] for end in range(1, len(path)) if path[:end] not in document.places]
    return dict.fromkeys((*made, *(below for below, _ in walk(value, path))), text)


def _not_a_container(key: str, path: YamlPath, values: DictConfig) -> str:
    """Say which value on the way to ``key`` would have to become a dict or a list; nothing if none would."""
    from omegaconf import Container, OmegaConf

    indices = re.findall(r"\[(\d+)\]|[^.\[\]]+", key)
    for end in range(1, len(path)):
        above, name = OmegaConf.select(values, dotted(path[:end])), dotted(path[:end])
        if above is not None and not isinstance(above, Container):
            return (
                f"{name} is of the type {type(above).__name__}, and has no item {path[end]!r}. Set it as a whole: "
                f"{name}=VALUE."
            )
        if above is None and indices[end]:
            return f"{name} is no list, and has no item {path[end]}. Set it as a whole: {name}=[VALUE, …]."
    return ""


# ── interpolation ────────────────────────────────────────────────────────────────────────────────────────────────
def _resolved(values: DictConfig, origin: Origin) -> dict[str, Any]:
    """``values`` as plain dicts and lists with every interpolation replaced by what it stands for.

    Raises:
        ConfigError: an interpolation stands for nothing, or a value is ``???`` and nobody has set it.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        return OmegaConf.to_container(values, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except MissingMandatoryValue as e:
        where = origin.where(path_of(e.full_key))
        raise ConfigError(f"{where}: {e.full_key} is '???': it has to be set, such as by {e.full_key}=VALUE.") from e
    except OmegaConfBaseException as e:
        raise ConfigError(_unresolvable(e, unresolved(values), origin)) from e


def _unresolvable(error: OmegaConfBaseException, raw: Mapping[Any, Any], origin: Origin) -> str:
    """Describe the interpolation that cannot be resolved, with its place and the way out."""
    problem = str(error).splitlines()[0].rstrip(".")
    key, hint = f"{error.full_key}", ""
    texts = {path: text for path, text in walk(raw) if isinstance(text, str)}
    written = texts.get(path_of(key), "")
    if (name := re.search(r"Environment variable '(.+)' not found", problem)) is not None:
        text = re.compile(rf"\$\{{\s*oc\.env\s*:\s*{re.escape(name[1])}\s*\}}")
        key = next((".".join(path) for path, value in texts.items() if text.search(value)), key)
        problem = f"the environment has no variable {name[1]!r}"
        hint = f" Set it, or give a default: ${{oc.env:{name[1]},VALUE}}."
    elif any(_ENVIRONMENT.search(text) for text in texts.values()) and not _quotes_only(problem, written):
        problem = f"{written!r} cannot be filled in: {type(error).__name__}"
    elif (variable := re.search(r"variables\.(\w+)", problem)) is not None:
        known = raw.get("variables")
        names = [str(name) for name in known] if isinstance(known, dict) else []
        hint = did_you_mean(variable[1], names) if names else " There are no variables."
    elif problem.startswith("Unsupported interpolation type"):
        hint = " A variable of the environment is ${oc.env:NAME}, or ${oc.env:NAME,VALUE} with a default."
    return f"{origin.where(path_of(key))}: {key}: {problem}.{hint}"


def _quotes_only(problem: str, written: str) -> bool:
    """Return true if OmegaConf's message quotes only what ``written`` has; if not, it may reveal a secret."""
    named = re.fullmatch(r"(?:Interpolation key '(.+)' not found|Unsupported interpolation type (.+))", problem)
    return named is not None and (named[1] or named[2]) in written


def _from_environment(values: DictConfig) -> dict[YamlPath, str]:
    """The values that depend on environment variables, directly or through other values: how each is written."""
    from omegaconf import OmegaConf

    raw = unresolved(values)
    texts = [(path, text) for path, text in walk(raw) if isinstance(text, str) and "${" in text]
    if not any(_ENVIRONMENT.search(text) for _, text in texts):
        return {}
    # What can be resolved where no variable can be, depends on none.
    without = OmegaConf.create(
        replaced(raw, lambda _, value: _ENVIRONMENT.sub(_NOBODY, value) if isinstance(value, str) else value)
    )
    return {path: text for path, text in texts if not _can_be_resolved(without, path)}


def _can_be_resolved(values: DictConfig, path: Sequence[str]) -> bool:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    found: Any = values
    try:
        for part in path:
            found = found[int(part)] if OmegaConf.is_list(found) else found[_key(found, part)]
        if OmegaConf.is_config(found):
            OmegaConf.to_container(found, resolve=True)
    except OmegaConfBaseException:
        return False
    return True


def _key(mapping: Any, text: str) -> Any:
    """The key that is written so: YAML has numbers among keys, too."""
    return next(key for key in mapping if str(key) == text)
