"""JSON Schema of a configuration for editors, read from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from composerlite.config.arguments import arguments_of, options_of
from composerlite.config.registry import FAMILIES, known_classes
from composerlite.config.schema import data_loader, evaluator_arguments, trainer_arguments

_OWN: dict[str, Any] = {"type": "string", "pattern": ":"}
_INTERPOLATION: dict[str, Any] = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}


def json_schema() -> dict[str, Any]:
    """Return every key and name of a configuration, with types, defaults and meanings, as a JSON Schema of draft 7.

    No key is required: a file may add one value to other files.

    Returns:
        The schema.

    Example::

        Path("schema.json").write_text(json.dumps(json_schema(), default=str))
    """
    from composerlite.callbacks import CheckpointSaver
    from composerlite.core import Evaluator
    from composerlite.trainer import Trainer

    saver = {f"save_{name.removeprefix('save_')}": text for name, text in _meanings(CheckpointSaver).items()}
    loader = _properties(arguments_of(data_loader), _meanings(data_loader))
    evaluation = _loader({**loader, **_properties(evaluator_arguments(), _meanings(Evaluator))})
    entry = {"anyOf": [{"type": "string"}, {"type": "object", "maxProperties": 1}]}
    parts = {
        "defaults": {"type": "array", "items": entry},
        "variables": {"type": "object"},
        "model": {"type": "object", "properties": {"name": _OWN}},
        "train_loader": _loader(loader),
        "eval_loader": {"anyOf": [evaluation, {"type": "array", "items": evaluation}]},
    }
    for family in FAMILIES:
        names = {"anyOf": [{"enum": list(known_classes(family))}, _OWN, _INTERPOLATION]}
        parts[family] = {"type": "object", "properties": {"name": names}}
        if family not in ("optimizer", "scheduler"):
            mapping = _object({name: _or_null(_class_schema(cls)) for name, cls in known_classes(family).items()})
            mapping["patternProperties"] = {":": {}}
            parts[family] = {"anyOf": [mapping, {"type": "array", "items": {"anyOf": [names, mapping]}}]}
    properties = {key: _or_null(schema) for key, schema in parts.items()}
    schema = _object({**properties, **_properties(trainer_arguments(), {**saver, **_meanings(Trainer)})})
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A run of composerlite", **schema}


def _meanings(documented: Callable[..., Any]) -> dict[str, str]:
    """Return the text for each argument in the ``Args:`` section of a docstring."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(documented) or "", re.MULTILINE | re.DOTALL)
    found: dict[str, str] = {}
    for entry in re.split(r"^ {4}(?=\w)", section[1] if section else "", flags=re.MULTILINE):
        names, _, text = " ".join(entry.split()).partition(": ")
        found |= dict.fromkeys(names.split(", "), text)
    return found


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}, _INTERPOLATION]}


def _class_schema(cls: type) -> dict[str, Any]:
    """Return the schema of the arguments of a class, with the first paragraph of the docstring."""
    summary = (inspect.getdoc(cls) or "").split("\n\n")[0]
    return {"description": summary, **_object(_properties(arguments_of(cls), _meanings(cls)))}


def _loader(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataset with a DataLoader, or of a ``name`` with any arguments."""
    return {"type": "object", "if": {"required": ["name"]}, "else": _object(properties)}


def _properties(arguments: dict[str, inspect.Parameter], meanings: dict[str, str]) -> dict[str, Any]:
    """Return the schema, default and meaning of each argument with a form in YAML."""
    properties: dict[str, Any] = {}
    for name, argument in arguments.items():
        options = options_of(argument.annotation)
        if options in ([], [{"type": "null"}]) or argument.kind is argument.VAR_KEYWORD:
            continue
        properties[name] = {"anyOf": [*options, _INTERPOLATION], "description": meanings.get(name, "")}
        if argument.default is not argument.empty:
            properties[name]["default"] = argument.default
    return properties
