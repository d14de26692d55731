"""Types of arguments: whether a value of YAML is of one, and how to say and describe it to who writes YAML."""

from __future__ import annotations

import types
from collections.abc import Iterable
from collections.abc import Mapping as MappingABC
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any, Union, get_args, get_origin


def fits(value: Any, hint: Any) -> bool:
    """Return true if ``value``, as YAML gives it, is of the type that ``hint`` describes. Nothing is converted."""
    arguments = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if hint is float else hint)


_NAMES: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "integer"),
    float: ("a number", "number"),
    str: ("text", "string"),
    bool: ("true or false", "boolean"),
    list: ("a list", "array"),
    dict: ("a mapping", "object"),
    None: ("null", "null"),
}
"""What YAML has: in words, and in a JSON Schema."""


def in_words(hint: Any) -> str:
    """``hint`` for someone who writes YAML: ``'a whole number, text or null'``; ``''`` if YAML has nothing for it."""
    words = list(dict.fromkeys(_word(kind, item) for kind, item in _kinds(hint)))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else ""


def as_json_schema(hint: Any) -> dict[str, Any] | None:
    """``hint`` as a JSON Schema; ``None`` if YAML has nothing for it."""
    options: list[dict[str, Any]] = []
    for kind, item in _kinds(hint):
        schema: dict[str, Any] = {} if kind is Any else {"type": _NAMES[kind][1]}
        if kind is list and item is not None:
            schema["items"] = as_json_schema(item) or {}
        if schema not in options:
            options.append(schema)
    if {} in options:
        return {}
    return None if not options else options[0] if len(options) == 1 else {"anyOf": options}


def _word(kind: Any, item: Any) -> str:
    if kind is Any:
        return "anything"
    inner = "" if item is None else in_words(item)
    return f"a list of {inner.removeprefix('a ')}" if inner == "text" else _NAMES[kind][0]


def _kinds(hint: Any) -> Iterable[tuple[Any, Any]]:
    """Return the YAML types that ``hint`` accepts, of lists with the type of their items."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        options = [kind for option in arguments for kind in _kinds(option)]
        return [*(option for option in options if option[0] is not None), *(o for o in options if o[0] is None)]
    if hint is Any or hint in (int, float, str, bool):
        return [(hint, None)]
    if hint is type(None) or hint is None:
        return [(None, None)]
    if hint is Path:
        return [(str, None)]
    if origin in (list, SequenceABC, tuple) or hint in (list, tuple):
        return [(list, arguments[0] if arguments else None)]
    if origin in (dict, MappingABC) or hint is dict:
        return [(dict, None)]
    return []
