"""Reference of a run's YAML, made from the code: a page for people, and a JSON Schema for editors.

``docs/configuration-reference.md`` is the page. The schema knows files that only add to others: it requires nothing.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from types import SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from composerlite.config.hints import as_json_schema, in_words
from composerlite.config.registry import Family, known_classes, registered
from composerlite.config.schema import OF_THE_FILE, PARTS, EvaluatorArguments, LoaderArguments, TrainerArguments

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_OF_YAML = {"None": "null", "True": "true", "False": "false"}


def summary(documented: object) -> str:
    """The first paragraph of a docstring, as Markdown."""
    return _markdown((inspect.getdoc(documented) or "").split("\n\n")[0])


def meanings(documented: object, names: Collection[str]) -> dict[str, str]:
    """Return the text of the section ``Args:`` for each of ``names``, as Markdown, or the name whose text covers it.

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
    """Return the saver's argument texts, in terms of the Trainer's arguments, which have the prefix ``save_``."""
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
    """List the further settings of a loader of ``eval_loader``."""
    from composerlite.core import Evaluator

    return _of_fields(EvaluatorArguments, meanings(Evaluator, inspect.signature(Evaluator).parameters))


def families() -> dict[Family, list[Named]]:
    """The classes of composerlite that have names, by what they are."""
    return {family: _named(family, registered(family)) for family in get_args(Family)}


def _named(family: Family, classes: Mapping[str, type]) -> list[Named]:
    return [
        Named(name, summary(cls), _of_class(cls, leave_out=1 if family == "optimizer" else 0))
        for name, cls in sorted(classes.items())
    ]


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

    if not isinstance(parameter.annotation, str):  # torch's
        given = parameter.annotation
        options = get_args(given) if get_origin(given) in (Union, UnionType) else (given,)
        plain = [one for one in options if as_json_schema(one)]
        return Union[tuple(plain)] if plain else Any  # noqa: UP007
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


# ── the page ───────────────────────────────────────────────────────────────────────────────────────────────────────
_TOP = """\
<!-- Written by `make reference` from the docstrings and signatures of the code: change those, and run it again. -->

# Configuration reference

Every key of a run's YAML file, and every name that composerlite has. How they are used is in
[A run as a YAML file](configuration.md). `composerlite config schema` prints this page, with `--json` a JSON Schema.

## The file
"""
_YOUR_OWN = """
Models, data sets and loaders have no names here: `name: module:attr` is a class or function of any module, and what
stands beside `name` are its arguments.
"""
_TITLES: Mapping[Family, str] = {
    "optimizer": "Optimizers",
    "scheduler": "Schedulers",
    "algorithm": "Algorithms",
    "callback": "Callbacks",
    "logger": "Loggers",
}


def reference_page() -> str:
    """The page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _TOP
    yield from ("| key | what it holds |", "|---|---|")
    yield from (f"| `{key}` | {_cell(meaning)} |" for key, meaning in {**OF_THE_FILE, **PARTS}.items())
    yield "| all others | [arguments of the Trainer](#the-trainer) |"
    yield _YOUR_OWN
    yield "## The Trainer\n\n`max_duration` is needed.\n"
    yield from _table(trainer_settings())
    yield "\n## Loaders\n\nBeside `dataset`, in `train_loader` and `eval_loader`:\n"
    yield from _table(loader_settings())
    yield "\nIn `eval_loader` besides:\n"
    yield from _table(evaluator_settings())
    for family, classes in families().items():
        yield f"\n## {_TITLES[family]}"
        if of_torch := [f"`{name}`" for name in known_classes(family) if name not in registered(family)]:
            yield f"\nThose of `torch.optim`, with their own arguments: {', '.join(of_torch)}."
        for named in classes:
            yield f"\n### `{named.name}`\n\n{named.summary}"
            if named.settings:
                yield ""
                yield from _table(named.settings)


def _table(settings: Iterable[Setting]) -> Iterator[str]:
    yield from ("| name | type | default | meaning |", "|---|---|---|---|")
    for setting in settings:
        default = "needed" if setting.default is NEEDED else f"`{json.dumps(setting.default, ensure_ascii=False)}`"
        yield f"| `{setting.name}` | {setting.words} | {_cell(default)} | {_cell(setting.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


# ── the schema ─────────────────────────────────────────────────────────────────────────────────────────────────────
Schema: TypeAlias = dict[str, Any]

_INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
_OWN: Schema = {"type": "string", "pattern": ":"}
_REFERENCE: Schema = {"$ref": "#/definitions/interpolation"}


def json_schema() -> Schema:
    """A schema of draft 7, which editors know best."""
    known = {family: _named(family, known_classes(family)) for family in get_args(Family)}
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
