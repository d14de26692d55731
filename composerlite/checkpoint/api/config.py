"""Settings as plain data: to a dict and from one, with single fields replaced by text of a command line."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

from composerlite.errors import ConfigError, UnknownArgumentError, did_you_mean

__all__ = ["Config"]


class Config:
    """Methods that OLMo-core's settings have, for a dataclass whose fields are plain values."""

    CLASS_NAME_FIELD: ClassVar[str] = "_CLASS_"
    """The key of a dict that names the class it is of."""

    @classmethod
    def _names(cls) -> list[str]:
        return [entry.name for entry in dataclasses.fields(cast("Any", cls))]

    @classmethod
    def check_names(cls, names: Collection[str]) -> None:
        """See that there are fields of these ``names``; UnknownArgumentError."""
        known = cls._names()
        for name in names:
            if name not in known:
                raise UnknownArgumentError(f"{cls.__name__} has no field {name!r}.{did_you_mean(name, known)}")

    def as_dict(
        self,
        *,
        exclude_none: bool = False,
        exclude_private_fields: bool = False,
        exclude: Collection[str] | None = None,
        include_class_name: bool = False,
        json_safe: bool = False,
        recurse: bool = True,
    ) -> dict[str, Any]:
        """Return the fields by their names.

        Args:
            exclude_none: leave out those that are ``None``.
            exclude_private_fields: leave out those whose names begin with ``_``.
            exclude: names of fields to leave out.
            include_class_name: add the name of the class, as ``'_CLASS_'``.
            json_safe: paths are text.
            recurse: as OLMo-core has it; no field has fields of its own here.
        """
        found = {name: getattr(self, name) for name in self._names() if name not in (exclude or ())}
        if exclude_none:
            found = {name: value for name, value in found.items() if value is not None}
        if exclude_private_fields:
            found = {name: value for name, value in found.items() if not name.startswith("_")}
        if json_safe:
            found = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in found.items()}
        if include_class_name:
            found[self.CLASS_NAME_FIELD] = f"{type(self).__module__}.{type(self).__qualname__}"
        return found

    def as_config_dict(self) -> dict[str, Any]:
        """Return a dict for JSON and :meth:`from_dict`: the fields that are set, and the name of the class."""
        return self.as_dict(exclude_none=True, exclude_private_fields=True, include_class_name=True, json_safe=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], overrides: Sequence[str] | None = None) -> Self:
        """Make one of what :meth:`as_dict` or OLMo-core's own gave.

        Args:
            data: values by the names of fields.
            overrides: as ``dotlist`` of :meth:`merge`.

        Raises:
            UnknownArgumentError: there is no such field.
            ConfigError: ``'_CLASS_'`` names another class.
        """
        values = dict(data)
        of = str(values.pop(cls.CLASS_NAME_FIELD, cls.__name__))
        if of.rpartition(".")[2] != cls.__name__:
            raise ConfigError(f"{cls.CLASS_NAME_FIELD}={of!r}: expected the settings of a {cls.__name__}.")
        cls.check_names(values)
        return cls(**values).merge(overrides or ())

    def merge(self, dotlist: Sequence[str], prefix: str | None = None, strict: bool = True) -> Self:
        """Return another with some fields replaced.

        Args:
            dotlist: ``'name=value'`` each, also ``'--name=value'``; a name alone is true. ``true``, ``false``, ``null``
                and numbers are what they say, and all else is text.
            prefix: use those only that begin with ``'<prefix>.'``, without it.
            strict: whether an unknown name is an error; else it is left out.

        Raises:
            UnknownArgumentError: there is no such field.
        """
        changes = dict(_parsed(text) for text in dotlist)
        if prefix is not None:
            start = f"{prefix}."
            changes = {name.removeprefix(start): v for name, v in changes.items() if name.startswith(start)}
        if not strict:
            changes = {name: value for name, value in changes.items() if name in self._names()}
        return self.replace(**changes)

    def replace(self, **changes: Any) -> Self:
        """Return another with the fields ``changes``; UnknownArgumentError."""
        self.check_names(changes)
        return cast("Self", dataclasses.replace(cast("Any", self), **changes))

    def copy(self, deep: bool = True) -> Self:
        """Return another with the same values, which are copied too if ``deep``."""
        return copy.deepcopy(self) if deep else copy.copy(self)

    def apply(self, func: Callable[[Config], object]) -> None:
        """Call ``func`` with this."""
        func(self)

    def validate(self) -> None:
        """Do nothing: values are checked where they are used."""


def _parsed(text: str) -> tuple[str, Any]:
    name, is_given, value = text.partition("=")
    name = name.strip(" -").replace("-", "_")
    if not is_given:
        return name, True
    try:
        return name, json.loads(value.lower())
    except ValueError:
        return name, value.strip()
