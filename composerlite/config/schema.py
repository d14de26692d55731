"""The structure of a configuration: the keys, the objects to build, and the arguments of the Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import Parameter
from types import NoneType, SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from composerlite.config.arguments import Component, arguments_in_source, arguments_of, check_names, check_types
from composerlite.config.origin import Origin, YamlPath
from composerlite.errors import ConfigError

COMPONENTS = ("model", "train_loader", "eval_loader", "optimizer", "scheduler", "algorithms", "callbacks", "loggers")
"""The keys with objects to build. All other keys are arguments of the Trainer."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The checked configuration of a run. Nothing is built yet.

    Attributes:
        components: the objects to build, by the keys of :data:`COMPONENTS`; an absent key has none.
        trainer: the plain arguments of the Trainer, with defaults.
        origin: the place of each value.
        values: all values, merged and resolved, possibly with secrets from the environment.
    """

    components: dict[str, list[Component]]
    trainer: SimpleNamespace
    origin: Origin
    values: dict[str, Any]

    @property
    def resolved(self) -> str:
        """YAML of the same run without overrides and other files. Possible secrets are unresolved ``${…}``."""
        return OmegaConf.to_yaml(OmegaConf.create(self.origin.shown((), self.values)))

    @property
    def annotated(self) -> str:
        """:attr:`resolved` with the file and line, or the override, behind each value."""
        return self.origin.annotated(self.resolved)


def data_loader(
    dataset: Any,
    *,
    batch_size: int,
    shuffle: bool = False,
    drop_last: bool = False,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    multiprocessing_context: str | None = None,
    pin_memory: bool = False,
    timeout: float = 0.0,
    collate_fn: str | None = None,
) -> Any:
    """Build the DataLoader of a ``train_loader`` or ``eval_loader`` with a ``dataset``.

    Args:
        dataset: the dataset.
        batch_size: samples in a batch.
        shuffle: draw another order of samples in each epoch.
        drop_last: skip a last batch with fewer samples.
        num_workers: processes for loading batches; 0 loads batches in the training process.
        prefetch_factor: batches loaded ahead by each worker.
        persistent_workers: keep workers from one epoch to the next.
        multiprocessing_context: the start method of workers: ``'fork'``, ``'spawn'`` or ``'forkserver'``.
        pin_memory: copy batches to pinned memory, for faster copies to a GPU.
        timeout: seconds to wait for a batch of a worker; 0 waits without end.
        collate_fn: ``module:attr`` of a function from a list of samples to a batch.

    Returns:
        A ``torch.utils.data.DataLoader``.
    """
    arguments = dict(locals())

    from torch.utils.data import DataLoader

    from composerlite.config.registry import import_attribute

    if collate_fn is not None:
        arguments["collate_fn"] = import_attribute(collate_fn)
    return DataLoader(**arguments)


def evaluator_arguments() -> dict[str, Parameter]:
    """Return the further arguments of a loader below ``eval_loader``."""
    known = arguments_in_source("core/data.py", "Evaluator")
    return {name: argument for name, argument in known.items() if name != "dataloader"}


def trainer_arguments() -> dict[str, Parameter]:
    """Return the arguments of the Trainer with plain values, not only null."""
    known = arguments_in_source("trainer/trainer.py", "Trainer")
    return {name: argument for name, argument in known.items() if argument.annotation not in (Any, NoneType)}


def parse(values: dict[str, Any], origin: Origin) -> RunConfig:
    """Check the structure of ``values``, all resolved values of a configuration, and the arguments of the Trainer.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type.
    """
    known = trainer_arguments()
    check_names(known, values, (), origin, others=("variables", *COMPONENTS))
    check_types(known, values, (), origin)
    for key, example in (("model", "{name: my_task:MyModel}"), ("train_loader", "{…}"), ("max_duration", "5ep")):
        if values.get(key) is None:
            raise ConfigError(f"{origin.where((key,))}: {key!r} is missing. Add a line such as '{key}: {example}'.")
    components = {
        "model": [_component(values["model"], ("model",), origin)],
        "train_loader": [_loader(values["train_loader"], ("train_loader",), origin)],
        "eval_loader": list(_evaluators(values.get("eval_loader"), origin)),
    }
    for key in ("optimizer", "scheduler"):
        value = values.get(key)
        components[key] = [] if value is None else [_component(value, (key,), origin, key)]
    for key in ("algorithms", "callbacks", "loggers"):
        components[key] = list(_components(values.get(key), key, origin))
    trainer = {name: values.get(name, argument.default) for name, argument in known.items()}
    return RunConfig(components=components, trainer=SimpleNamespace(**trainer), origin=origin, values=values)


def _component(value: Any, path: YamlPath, origin: Origin, family: str = "") -> Component:
    """Parse ``{name: …, **arguments}``."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise origin.value_error(path, value, "expected a mapping with a 'name:', such as 'module:attr'.")
    return Component(value["name"], {str(k): v for k, v in value.items() if k != "name"}, path, family)


def _items(value: Any, key: str) -> list[tuple[Any, YamlPath]]:
    """Return each item of a list, or a single value, with the path; an empty list for null."""
    if isinstance(value, list):
        return [(item, (key, str(index))) for index, item in enumerate(value)]
    return [] if value is None else [(value, (key,))]


def _components(value: Any, key: str, origin: Origin) -> Iterator[Component]:
    """Parse a mapping from names to arguments, or a list of such mappings and bare names."""
    for entry, place in _items(value, key):
        entry = {entry: None} if isinstance(entry, str) else entry
        if not isinstance(entry, dict):
            raise origin.value_error(place, entry, "expected 'name: {arguments}', as a mapping or items of a list.")
        for name, arguments in entry.items():
            path = (*place, str(name))
            if not isinstance(arguments, dict | None):
                raise origin.value_error(path, arguments, "expected arguments as 'key: value' lines, or nothing.")
            yield Component(str(name), {str(k): v for k, v in (arguments or {}).items()}, path, key)


def _loader(value: Any, path: YamlPath, origin: Origin, others: Iterable[str] = ()) -> Component:
    """Parse a dataset with the arguments of its DataLoader, or a ``name`` with the arguments of a loader.

    ``others`` are further valid keys, for messages.
    """
    if not isinstance(value, dict):
        raise origin.value_error(path, value, "expected a mapping with 'dataset:', or with 'name:' of a loader.")
    if "name" in value:
        return _component(value, path, origin)
    known = arguments_of(data_loader)
    check_names(known, value, path, origin, others)
    check_types(known, value, path, origin)
    dataset = _component(value["dataset"], (*path, "dataset"), origin)
    return Component("composerlite.config.schema:data_loader", {**value, "dataset": dataset}, path)


def _evaluators(value: Any, origin: Origin) -> Iterator[Component]:
    """Parse a loader, or a list of loaders, into evaluators."""
    known = evaluator_arguments()
    for entry, path in _items(value, "eval_loader"):
        loader = _loader(entry, path, origin, known)
        own = {key: loader.arguments.pop(key) for key in known if key in loader.arguments}
        check_types(known, own, path, origin)
        yield Component("composerlite.core:Evaluator", {"label": "eval", **own, "dataloader": loader}, path)
