"""The JSON Schema of a run's YAML, for editors. It knows files that only add to others: nothing is required in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from composerlite.config.reference.settings import (
    NEEDED,
    Named,
    Setting,
    evaluator_settings,
    families,
    loader_settings,
    trainer_settings,
)
from composerlite.config.schema import OF_THE_FILE, PARTS

__all__ = ["json_schema"]

Schema: TypeAlias = dict[str, Any]

_INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
_OWN: Schema = {"type": "string", "pattern": ":"}
_REFERENCE: Schema = {"$ref": "#/definitions/interpolation"}


def json_schema() -> Schema:
    """A schema of draft 7, which editors know best."""
    known = families()
    loader, evaluation = loader_settings(), [*loader_settings(), *evaluator_settings()]
    parts: dict[str, Schema] = {
        "model": _component([]),
        "train_loader": _loader(loader),
        "eval_loader": {"anyOf": [_loader(evaluation), {"type": "array", "items": _loader(evaluation)}]},
        "optimizer": _component(known["optimizer"]),
        "scheduler": _component(known["scheduler"]),
        "algorithms": _components(known["algorithm"]),
        "callbacks": _components(known["callback"]),
        "loggers": _components(known["logger"]),
    }
    entry: Schema = {"anyOf": [{"type": "string"}, {"type": "object", "maxProperties": 1}]}
    of_file: dict[str, Schema] = {"defaults": {"type": "array", "items": entry}, "variables": {"type": "object"}}
    texts = {**OF_THE_FILE, **PARTS}
    described = {key: {"description": texts[key], **_or_nothing(part)} for key, part in {**of_file, **parts}.items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A run of composerlite",
        **_object({**described, **_properties(trainer_settings())}),
        "definitions": {"interpolation": _INTERPOLATION},
    }


def _object(properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _or_nothing(schema: Schema) -> Schema:
    """``schema``, ``null``, or an interpolation that gives it."""
    return {"anyOf": [schema, {"type": "null"}, _REFERENCE]}


def _properties(settings: Iterable[Setting]) -> dict[str, Schema]:
    properties: dict[str, Schema] = {}
    for setting in settings:
        schema: Schema = {} if setting.schema == {} else {"anyOf": [dict(setting.schema), _REFERENCE]}
        if setting.meaning:
            schema["description"] = setting.meaning
        if setting.default is not NEEDED:
            schema["default"] = setting.default
        properties[setting.name] = schema
    return properties


def _component(classes: Iterable[Named]) -> Schema:
    """``{name: …, **arguments}``; without a name, what another file's gets besides."""
    classes = list(classes)
    name: Schema = {"anyOf": [{"enum": [named.name for named in classes]}, _OWN, _REFERENCE]} if classes else _OWN
    return {
        "type": "object",
        "properties": {"name": name},
        "allOf": [
            {
                "if": {"properties": {"name": {"const": named.name}}, "required": ["name"]},
                "then": {**_object({"name": {}, **_properties(named.settings)}), "description": named.summary},
            }
            for named in classes
        ]
        or [True],
    }


def _components(classes: Iterable[Named]) -> Schema:
    """A mapping from names to arguments, or a list of such mappings and names."""
    arguments = {
        named.name: {"description": named.summary, **_or_nothing(_object(_properties(named.settings)))}
        for named in classes
    }
    mapping: Schema = {**_object(arguments), "patternProperties": {":": {}}}
    names: Schema = {"anyOf": [{"enum": list(arguments)}, _OWN, _REFERENCE]}
    return {"anyOf": [mapping, {"type": "array", "items": {"anyOf": [names, mapping]}}]}


def _loader(settings: Iterable[Setting]) -> Schema:
    """A data set and a DataLoader's arguments; with a name, what makes the loader itself."""
    dataset = {"dataset": {"description": "The data set.", **_or_nothing(_component([]))}}
    return {
        "type": "object",
        "if": {"required": ["name"]},
        "then": {"properties": {"name": _OWN}},
        "else": _object({**dataset, **_properties(settings)}),
    }
