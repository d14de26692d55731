"""Everything that a run's YAML may say, collected from the code: the page and the schema are made of this."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Union, get_args, get_type_hints

from composerlite.config.hints import as_json_schema, in_words
from composerlite.config.registry import Family, registered
from composerlite.config.schema import EvaluatorArguments, LoaderArguments, TrainerArguments

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "NEEDED",
    "Named",
    "Setting",
    "evaluator_settings",
    "families",
    "loader_settings",
    "meanings",
    "summary",
    "trainer_settings",
]

_OF_YAML = {"None": "null", "True": "true", "False": "false"}


def summary(documented: object) -> str:
    """The first paragraph of a docstring, as Markdown."""
    return _markdown((inspect.getdoc(documented) or "").split("\n\n")[0])


def meanings(documented: object, names: Collection[str]) -> dict[str, str]:
    """What the section ``Args:`` says of each of ``names``, as Markdown; or which other one's text names it.

    Those that it does not know are left out.
    """
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(documented) or "", re.MULTILINE | re.DOTALL)
    if section is None:
        return {}
    entries = re.split(r"^ {4}(?=\w)", section[1], flags=re.MULTILINE)
    any_name = "|".join(map(re.escape, names))
    begins = re.compile(rf"(?:^|(?<=\. ))((?:(?:{any_name}), )*(?:{any_name})): ")
    found: dict[str, str] = {}
    for entry in entries:
        parts = begins.split(" ".join(entry.split()))[1:]  # one line may tell of several
        for several, text in zip(parts[::2], parts[1::2], strict=True):
            found |= dict.fromkeys(several.split(", "), _markdown(text))
    for name in names:
        teller = next((other for other, text in found.items() if f"`{name}`" in text), None)
        if name not in found and teller is not None:
            found[name] = f"see `{teller}`."
    return found


def _markdown(text: str) -> str:
    text = " ".join(text.split())
    text = re.sub(r"`([^`<]+?)\s*<([^`>]+)>`_+", r"[\1](\2)", text)
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = text.replace("``", "`").strip()
    return re.sub(r"`(None|True|False)`", lambda found: f"`{_OF_YAML[found[1]]}`", text)


NEEDED = inspect.Parameter.empty
"""The default of what has none."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A key, or an argument of a class.

    Attributes:
        words: its type, for someone who writes YAML.
        schema: its type, as a JSON Schema.
        default: a plain value, or :data:`NEEDED`.
        meaning: what the docstring says, as Markdown; may be empty.
    """

    name: str
    words: str
    schema: Mapping[str, Any]
    default: Any
    meaning: str


@dataclasses.dataclass(frozen=True)
class Named:
    """A class that has a name in YAML, and its arguments."""

    name: str
    summary: str
    settings: list[Setting]


def trainer_settings() -> list[Setting]:
    """The arguments of the Trainer."""
    from composerlite.callbacks import CheckpointSaver
    from composerlite.trainer import Trainer

    names = [field.name for field in dataclasses.fields(TrainerArguments)]
    texts = {f"save_{name}": text for name, text in _of_saver(CheckpointSaver, names).items()}
    texts |= meanings(Trainer, inspect.signature(Trainer).parameters) | meanings(TrainerArguments, names)
    return [
        dataclasses.replace(setting, default=NEEDED) if setting.name == "max_duration" else setting
        for setting in _of_fields(TrainerArguments, texts)
    ]


def _of_saver(saver: type, names: Collection[str]) -> dict[str, str]:
    """What the saver says of its arguments, in terms of those of the Trainer, which has the same behind ``save_``."""
    texts = meanings(saver, inspect.signature(saver).parameters)
    texts |= {"async": texts["asynchronous"], "interval": texts["save_interval"]}

    def renamed(found: re.Match[str]) -> str:
        return f"`save_{found[1]}`" if f"save_{found[1]}" in names else found[0]

    return {name: re.sub(r"`(\w+)`", renamed, text) for name, text in texts.items()}


def loader_settings() -> list[Setting]:
    """The arguments of a loader."""
    names = [field.name for field in dataclasses.fields(LoaderArguments)]
    return _of_fields(LoaderArguments, meanings(LoaderArguments, names))


def evaluator_settings() -> list[Setting]:
    """What a loader of ``eval_loader`` may have besides."""
    from composerlite.core import Evaluator

    return _of_fields(EvaluatorArguments, meanings(Evaluator, inspect.signature(Evaluator).parameters))


def families() -> dict[Family, list[Named]]:
    """The classes that have names, by what they are."""
    return {
        family: [
            Named(name, summary(cls), _of_class(cls, leave_out=1 if family == "optimizer" else 0))
            for name, cls in sorted(registered(family).items())
        ]
        for family in get_args(Family)
    }


def _of_fields(schema: type[DataclassInstance], texts: Mapping[str, str]) -> list[Setting]:
    hints = get_type_hints(schema)
    return [
        Setting(
            field.name,
            in_words(hints[field.name]),
            as_json_schema(hints[field.name]) or {},
            NEEDED if field.default is dataclasses.MISSING else field.default,
            texts.get(field.name, ""),
        )
        for field in dataclasses.fields(schema)
    ]


def _of_class(cls: type, *, leave_out: int) -> list[Setting]:
    """The arguments that YAML can give, without the first ``leave_out``."""
    parameters = list(inspect.signature(cls).parameters.values())[leave_out:]
    texts = meanings(cls, [p.name for p in parameters])
    settings: list[Setting] = []
    for parameter in parameters:
        hint = _hint(parameter, cls.__init__)
        words, schema = in_words(hint), as_json_schema(hint)
        if schema not in (None, {"type": "null"}) and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            default = _plain(parameter.default)
            settings.append(Setting(parameter.name, words, schema, default, texts.get(parameter.name, "")))
    return settings


def _hint(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """The type, less what has a name that only type checkers import; ``Any`` if nothing is left."""
    from composerlite import core

    names = {**vars(collections.abc), **{name: getattr(core, name) for name in core.__all__}, "timedelta": timedelta}
    names |= getattr(inspect.unwrap(function), "__globals__", {})
    found: list[Any] = []
    for option in re.split(r" \| (?![^\[]*\])", str(parameter.annotation)):
        annotated: Any = SimpleNamespace(__annotations__={"x": option})
        with contextlib.suppress(NameError):
            found.append(get_type_hints(annotated, globalns=names)["x"])
    return Union[tuple(found)] if found else Any  # noqa: UP007


def _plain(value: Any) -> Any:
    """A default as YAML would write it."""
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value
