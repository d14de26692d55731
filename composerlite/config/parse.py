"""Parsing of plain values into a :class:`RunConfig`; finds unknown and missing keys and wrong types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from composerlite.config.hints import fits, in_words
from composerlite.config.origin import Origin, YamlPath, dotted
from composerlite.config.schema import (
    OF_THE_FILE,
    PARTS,
    Component,
    Evaluation,
    EvaluatorArguments,
    Loader,
    LoaderArguments,
    RunConfig,
    TrainerArguments,
)
from composerlite.errors import ConfigError, did_you_mean
from composerlite.other_trainers import way_here

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    D = TypeVar("D", bound=DataclassInstance)

_COMPONENT = (
    "expected a mapping with 'name: module:attr' (or a name that docs/configuration.md lists) and its arguments"
)


def parse(values: dict[str, Any], origin: Origin) -> RunConfig:
    """``values``, the whole YAML with every interpolation resolved, as a checked :class:`RunConfig`.

    Raises:
        ConfigError: unknown keys (all of them at once), missing keys, values of the wrong type.
    """
    flat = _names(TrainerArguments)
    _reject_unknown(values, {*PARTS, *OF_THE_FILE, *flat}, (), origin)
    if not isinstance(values.get("variables", {}), dict | None):
        says = origin.says(("variables",), values["variables"])
        raise ConfigError(f"{says}: expected a mapping from names to values.")
    for key, example in (("model", "{name: my_task:MyModel}"), ("train_loader", "{…}"), ("max_duration", "5ep")):
        if values.get(key) is None:
            raise ConfigError(f"{origin.where((key,))}: {key!r} is missing. Add a line such as '{key}: {example}'.")
    return RunConfig(
        model=_component(values["model"], ("model",), origin),
        train_loader=_loader(values["train_loader"], ("train_loader",), origin),
        eval_loaders=list(_evaluations(values.get("eval_loader"), origin)),
        optimizer=_optional_component(values, "optimizer", origin),
        scheduler=_optional_component(values, "scheduler", origin),
        algorithms=list(_components(values.get("algorithms"), "algorithms", origin)),
        callbacks=list(_components(values.get("callbacks"), "callbacks", origin)),
        loggers=list(_components(values.get("loggers"), "loggers", origin)),
        trainer=_typed(TrainerArguments, {key: values[key] for key in flat if key in values}, (), origin),
        origin=origin,
        values=values,
    )


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────
def _component(value: Any, path: YamlPath, origin: Origin) -> Component:
    """``{name: …, **arguments}``."""
    if not isinstance(value, dict) or "name" not in value:
        raise ConfigError(f"{origin.says(path, value)}: {_COMPONENT}.")
    if not isinstance(value["name"], str):
        place = (*path, "name")
        raise ConfigError(f"{origin.says(place, value['name'])}: expected text, such as 'module:attr'.")
    arguments = {str(key): argument for key, argument in value.items() if key != "name"}
    return Component(value["name"], arguments, path)


def _optional_component(values: Mapping[str, Any], key: str, origin: Origin) -> Component | None:
    return None if values.get(key) is None else _component(values[key], (key,), origin)


def _components(value: Any, key: str, origin: Origin) -> Iterator[Component]:
    """A mapping from names to arguments, or a list of such mappings and bare names where one is needed twice."""
    if value is None:
        return
    entries = value if isinstance(value, list) else [value]
    for index, entry in enumerate(entries):
        place = (key, str(index)) if isinstance(value, list) else (key,)
        entry = {entry: None} if isinstance(entry, str) else entry
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{origin.says(place, entry)}: expected 'name: {{arguments}}', as a mapping or as items of a list."
            )
        for name, arguments in entry.items():
            path = (*place, str(name))
            if arguments is not None and not isinstance(arguments, dict):
                raise ConfigError(
                    f"{origin.says(path, arguments)}: expected arguments as 'key: value' lines, or nothing."
                )
            yield Component(str(name), {str(k): v for k, v in (arguments or {}).items()}, path)


def _loader(value: Any, path: YamlPath, origin: Origin, *, taken: Iterable[str] = ()) -> Loader | Component:
    """A data set with a DataLoader around it; or, with ``name`` beside it, what makes the loader itself.

    ``taken`` are keys of the same mapping that are no longer in ``value``, for the list in a message.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{origin.says(path, value)}: expected a mapping with 'dataset:'.")
    if "name" in value:
        return _component(value, path, origin)
    if "dataset" not in value:
        raise ConfigError(
            f"{origin.where(path)}: {dotted(path)} has no 'dataset'. Add 'dataset: {{name: module:attr}}', or 'name: "
            "module:attr' for a function that makes the loader itself."
        )
    _reject_unknown(value, {"dataset", *_names(LoaderArguments), *taken}, path, origin)
    arguments = {key: argument for key, argument in value.items() if key != "dataset"}
    dataset = _component(value["dataset"], (*path, "dataset"), origin)
    return Loader(dataset, _typed(LoaderArguments, arguments, path, origin), path)


def _evaluations(value: Any, origin: Origin) -> Iterator[Evaluation]:
    """Parse one loader, or a list of loaders with a label each."""
    if value is None:
        return
    seen: set[str] = set()
    for index, entry in enumerate(value if isinstance(value, list) else [value]):
        path = ("eval_loader", str(index)) if isinstance(value, list) else ("eval_loader",)
        own = _names(EvaluatorArguments)
        mine = {key: item for key, item in entry.items() if key in own} if isinstance(entry, dict) else {}
        rest = {key: item for key, item in entry.items() if key not in own} if isinstance(entry, dict) else entry
        arguments = _typed(EvaluatorArguments, mine, path, origin)
        if arguments.label in seen:
            raise ConfigError(
                f"{origin.where(path)}: two loaders of eval_loader have the label {arguments.label!r}. Give each its "
                "own 'label:'."
            )
        seen.add(arguments.label)
        yield Evaluation(_loader(rest, path, origin, taken=own), arguments)


# ── checking ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _names(schema: type[DataclassInstance]) -> list[str]:
    return [field.name for field in dataclasses.fields(schema)]


def _reject_unknown(values: Mapping[Any, Any], known: Iterable[str], path: YamlPath, origin: Origin) -> None:
    known = set(known)
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        inside = f" in {dotted(path)!r}" if path else ""
        lines: list[str] = []
        for key in unknown:
            near = did_you_mean(key, known).partition(" Known: ")[0]
            if not path and (way := way_here("Trainer", key)) is not None:
                near = f" Here it is {way}."
            lines.append(f"{origin.where((*path, key))}: unknown key {key!r}{inside}.{near}")
        raise ConfigError("\n".join([*lines, f"Known: {', '.join(sorted(known))}."]))


def _typed(schema: type[D], values: Mapping[str, Any], path: YamlPath, origin: Origin) -> D:
    """``schema`` filled with ``values``, whose keys are known, after each has been checked against its field."""
    hints = get_type_hints(schema)
    for key, value in values.items():
        if not fits(value, hints[key]):
            place = (*path, key)
            quotes = ""
            if isinstance(value, str) and place in origin.written:
                quotes = " Variables of the environment are text: ${oc.decode:${oc.env:NAME}} reads one as YAML."
            elif fits("", hints[key]) and not isinstance(value, list):
                quotes = f" For text that YAML reads as something else, write {key}: 'text'"
                quotes += f", or {dotted(place)}='\"text\"' in a shell." if place in origin.overrides else "."
            raise ConfigError(f"{origin.says(place, value)}: expected {in_words(hints[key])}.{quotes}")
    for field in dataclasses.fields(schema):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ConfigError(f"{origin.where(path)}: {dotted(path)} has no {field.name!r}, which it needs.")
    return schema(**values)
