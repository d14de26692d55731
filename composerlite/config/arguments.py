"""Arguments of classes and functions, read from their signatures; pydantic checks the types of values."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any, Union

import pydantic
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit, SchemaError

import composerlite
from composerlite.config.origin import Origin, YamlPath, dotted
from composerlite.errors import ConfigError, did_you_mean
from composerlite.other_trainers import way_here

_TYPES = {"Any": Any, "Iterable": Iterable, "Mapping": Mapping, "Path": Path, "Sequence": Sequence}
_ALIASES = {"TimeInput": int | str, "IgnoreKeys": list[str] | None}
"""The part of two type aliases of composerlite with a form in YAML."""


@dataclass(frozen=True)
class Component:
    """An object to build.

    Attributes:
        name: a registered name of ``family``, or ``module:attr``.
        arguments: keyword arguments; a nested component is built first.
        path: the place in the YAML.
        family: the key with the registered names, such as ``'callbacks'``; empty if there are none.
    """

    name: str
    arguments: dict[str, Any]
    path: YamlPath
    family: str = ""


def arguments_of(function: Callable[..., Any], skip: int = 0) -> dict[str, Parameter]:
    """Return the arguments of ``function`` by name, without the first ``skip``. Their annotations are evaluated.

    An argument of kind ``VAR_KEYWORD`` allows any other argument, as does a function in C without a signature.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except ValueError:
        return {"arguments": Parameter("arguments", Parameter.VAR_KEYWORD)}
    names = getattr(inspect.unwrap(function.__init__ if isinstance(function, type) else function), "__globals__", {})
    return {
        parameter.name: parameter.replace(annotation=_type_of(parameter.annotation, names))
        for parameter in parameters
        if parameter.kind not in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL)
    }


@functools.cache
def arguments_in_source(module: str, class_name: str) -> dict[str, Parameter]:
    """Return the keyword arguments of a class of composerlite from the source, without an import of torch."""
    tree = ast.parse(Path(composerlite.__path__[0], module).read_text(encoding="utf-8"))
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    init = next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    found: dict[str, Parameter] = {}
    for argument, value in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True):
        hint = _type_of(ast.unparse(argument.annotation), {}) if argument.annotation else Any
        default = Parameter.empty if value is None else ast.literal_eval(value)
        found[argument.arg] = Parameter(argument.arg, Parameter.KEYWORD_ONLY, annotation=hint, default=default)
    return found


def _type_of(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Evaluate an ``annotation``. Options with unknown names are dropped; ``Any`` if no option is left."""
    if not isinstance(annotation, str):
        return Any if annotation is Parameter.empty else annotation
    options: list[Any] = []
    for option in re.split(r" \| (?![^\[]*\])", annotation):
        try:
            options.append(_type_of(eval(option, {**_TYPES, **names, **_ALIASES}), names))
        except (AttributeError, NameError, TypeError):
            continue  # a class imported for type checkers: YAML has no value of it
    return Union[tuple(options)] if options else Any  # noqa: UP007


class _YamlSchema(GenerateJsonSchema):
    """JSON Schema without the options of a type that have no form in YAML, such as functions."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:
        """Leave ``schema`` out."""
        raise PydanticOmit


def _adapter(hint: Any) -> pydantic.TypeAdapter[Any]:
    try:
        return pydantic.TypeAdapter(hint, config={"strict": True, "arbitrary_types_allowed": True})
    except (PydanticUserError, SchemaError, NameError, TypeError):  # a type without a check, such as some protocols
        return pydantic.TypeAdapter(Any)


def options_of(hint: Any) -> list[dict[str, Any]]:
    """Return the JSON Schemas of the values of a type: ``[]`` if YAML has no such value, ``[{}]`` for any value."""
    try:
        schema = _adapter(hint).json_schema(schema_generator=_YamlSchema)
    except (PydanticOmit, PydanticUserError):
        return []
    return [option for option in schema.get("anyOf", [schema]) if "$ref" not in json.dumps(option)] or [{}]


def check_names(
    known: Mapping[str, Parameter], given: Mapping[str, Any], path: YamlPath, origin: Origin, others: Iterable[str] = ()
) -> None:
    """Check that ``given`` has no unknown and no missing arguments.

    Args:
        known: the arguments of the class or function.
        given: the arguments in the YAML.
        path: the place of ``given`` in the YAML.
        origin: the lines of the YAML.
        others: further valid keys.

    Raises:
        ConfigError: lists all unknown arguments, or all missing arguments.
    """
    open_ended = any(argument.kind is Parameter.VAR_KEYWORD for argument in known.values())
    names = sorted({*known, *others})
    lines: list[str] = []
    for key in map(str, given):
        if key in names or open_ended:
            continue
        hint = did_you_mean(key, names).partition(" Known: ")[0]
        if not path and (way := way_here("Trainer", key)) is not None:
            hint = f" Here it is {way}."
        inside = f" in {dotted(path)!r}" if path else ""
        lines.append(f"{origin.where((*path, key))}: unknown key {key!r}{inside}.{hint}")
    if lines:
        raise ConfigError("\n".join([*lines, f"Known: {', '.join(names)}."]))
    required = [a.name for a in known.values() if a.default is Parameter.empty and a.kind is not Parameter.VAR_KEYWORD]
    if missing := [name for name in required if name not in given]:
        raise origin.error(path, f"{', '.join(missing)} is missing. Known: {', '.join(names)}.")


def check_types(known: Mapping[str, Parameter], given: Mapping[str, Any], path: YamlPath, origin: Origin) -> None:
    """Check the types of the arguments in ``given``. Text is valid for a path or an enum, a list for a tuple.

    Raises:
        ConfigError: an argument has the wrong type. The message has the line and the expected type.
    """
    for name, value in given.items():
        options = options_of(known[name].annotation) if name in known else []
        if not options or isinstance(value, Component):
            continue
        try:
            _adapter(known[name].annotation).validate_json(json.dumps(value, default=str))
        except pydantic.ValidationError:
            expected = " or ".join(str(option.get("enum") or option.get("type", "anything")) for option in options)
            # "from None": pydantic's error quotes values from the environment
            raise origin.value_error((*path, name), value, f"expected {expected}.") from None
