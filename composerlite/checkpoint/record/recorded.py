"""Values that come from files, checked at the one place where JSON becomes an object.

The files may be damaged, of another program, or planted: a path in them must not lead out of its folder, a number must
be one that training can have counted, and whatever is wrong must be a ``ValueError`` that says what, never another
exception and never a value that fails later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeAlias, TypeVar, cast

__all__ = ["Amount", "RelativePath", "json_object", "recorded", "relative_path"]

MANIFESTS = ".manifest"
_LARGEST = 2**63  # excluded
_LONGEST_PATH, _LONGEST_PART = 4096, 255
_Check: TypeAlias = Callable[[Any], Any]
T = TypeVar("T")

_PATH: Final = "path"
_AMOUNT: Final = "amount"
RelativePath: TypeAlias = Annotated[str, _PATH]
"""A path inside a folder: see :func:`relative_path`."""
Amount: TypeAlias = Annotated[int | float, _AMOUNT]
"""A number that is finite."""


def relative_path(value: object) -> str:
    """``value`` if it is the path of a file inside a folder, its parts apart by slashes.

    Raises:
        ValueError: it is something else, leads out of the folder, to the records of other checkpoints, or no file
            system can have it; the message says which rule it breaks.
    """
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is no path")
    parts = [part for part in value.split("/") if part not in ("", ".")]  # which change nothing
    try:
        encoded = [os.fsencode(part) for part in parts]
    except UnicodeEncodeError as e:
        raise ValueError(f"{_short(value)} is no path: it has characters that no file name can have") from e
    if not parts or ".." in parts or value.startswith("/") or not value.endswith(parts[-1]):
        rule = "want the path of a file inside the folder, relative to it, without '..'"
    elif any(ord(character) < 32 or ord(character) == 127 for character in value):
        rule = "it has control characters"
    elif "\\" in value and (value.startswith("\\") or ".." in value.split("\\")):
        rule = "it leads out of the folder where backslashes separate folders"
    elif MANIFESTS in parts:
        rule = f"{MANIFESTS!r} holds the records of checkpoints, and none of their files"
    elif sum(map(len, encoded)) + len(parts) > _LONGEST_PATH or max(map(len, encoded)) > _LONGEST_PART:
        rule = f"file systems take {_LONGEST_PART} bytes in a part and {_LONGEST_PATH} in all"
    else:
        return value
    raise ValueError(f"path {_short(value)}: {rule}")


def json_object(data: bytes | str) -> dict[str, Any]:
    """The object that ``data`` holds as JSON.

    Raises:
        ValueError: it is no JSON, something else than an object, or nested too deeply.
    """
    try:
        found: object = json.loads(data)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    if not isinstance(found, dict):
        raise ValueError(f"it holds {type(found).__name__} and no object")
    return cast("dict[str, Any]", found)


def recorded(kind: type[T], fields: object) -> T:
    """The dataclass ``kind`` of JSON ``fields``, each of which is checked against its annotation.

    Numbers of type ``int`` must not be negative, nor larger than 64 bits hold.

    Raises:
        ValueError: a field is missing, not known or of another type; the message names it.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"{_short(fields)} is no object")
    given = cast("Mapping[str, Any]", fields)
    checks = _checks_of(kind)
    if unknown := [name for name in given if name not in checks]:
        raise ValueError(f"field {_short(unknown[0])} is not known")
    values: dict[str, Any] = {}
    for name, (check, needed) in checks.items():
        if name in given:
            try:
                values[name] = check(given[name])
            except ValueError as e:
                raise ValueError(f"field {name!r}: {e}") from e
        elif needed:
            raise ValueError(f"field {name!r} is missing")
    return kind(**values)


@functools.cache
def _checks_of(kind: type[Any]) -> Mapping[str, tuple[_Check, bool]]:
    """By field: what checks its value, and whether it must be there."""
    hints = typing.get_type_hints(kind, include_extras=True)
    missing = dataclasses.MISSING
    return {
        field.name: (_check_of(hints[field.name]), field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    }


def _check_of(hint: Any) -> _Check:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return {_PATH: relative_path, _AMOUNT: _amount}[arguments[1]]
    if origin in (typing.Union, types.UnionType):
        return functools.partial(_any_of, [_check_of(argument) for argument in arguments])
    if origin is tuple:
        return functools.partial(_each, _check_of(arguments[0]))
    if dataclasses.is_dataclass(hint):
        return functools.partial(recorded, cast("type[Any]", hint))
    if origin is not None:  # Mapping
        return functools.partial(_by_name, _check_of(arguments[1]))
    return {int: _count, float: _number}.get(hint, functools.partial(_exactly, hint))


def _any_of(checks: list[_Check], value: object) -> Any:
    failed: ValueError | None = None
    for check in checks:
        try:
            return check(value)
        except ValueError as e:
            failed = failed or e
    assert failed is not None
    raise failed


def _each(check: _Check, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{_short(value)} is no list")
    return tuple(check(item) for item in cast("list[object]", value))


def _by_name(check: _Check, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{_short(value)} is no object")
    return {name: check(item) for name, item in cast("dict[str, object]", value).items()}


def _exactly(kind: type[Any], value: object) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{_short(value)} is not of type {kind.__name__}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{_short(value)} is no whole number from 0 on that 64 bits hold")
    return value


def _number(value: object) -> int | float:
    if type(value) in (int, float):
        number = cast("int | float", value)
        with contextlib.suppress(OverflowError):
            float(number)
            return number
    raise ValueError(f"{_short(value)} is no number, or too large for one")


def _amount(value: object) -> int | float:
    number = _number(value)
    if not math.isfinite(number):
        raise ValueError(f"{_short(value)} is not finite")
    return number


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of too many digits, or what is nested too deeply
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"
