"""Arguments of the trainer that can be wrong, each with the rule it breaks."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar, cast, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from composerlite.core import (
    Algorithm,
    AlgorithmPass,
    Callback,
    DataSpec,
    Evaluator,
    LoggerDestination,
    SchedulePredicate,
    State,
    TimeInput,
    create_interval_scheduler,
)
from composerlite.core.data import length_of
from composerlite.core.measured import check_metric_exists
from composerlite.core.numerics import MAX_SEED
from composerlite.errors import ConfigError, UnknownArgumentError, did_you_mean, naming
from composerlite.models import ComposerModel
from composerlite.other_trainers import way_here
from composerlite.trainer.data.held import shared_states

__all__ = [
    "Arguments",
    "FitSettings",
    "as_list",
    "check_apart",
    "check_callbacks",
    "check_compile_config",
    "check_data",
    "check_flags",
    "check_interval",
    "check_log_level",
    "check_model",
    "check_names",
    "check_own_files",
    "check_passes",
    "check_plateau",
    "check_ratio",
    "check_restored",
    "check_seed",
    "check_subset",
    "is_several",
    "microbatch_size",
    "uses_cuda_graphs",
]

T = TypeVar("T")


class Arguments:
    """Some arguments of the trainer's constructor, checked: the base of dataclasses whose fields have their names."""

    __slots__ = ()

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Pick these settings from all ``arguments`` of the constructor."""
        return cls(**{one.name: arguments[one.name] for one in fields(cast("Any", cls))})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings(Arguments):
    """Arguments of the trainer that a call of ``fit`` may replace for itself and those after it.

    Raises:
        ConfigError: one breaks its rule.
    """

    train_dataloader_label: str
    train_subset_num_batches: int
    spin_dataloaders: bool
    scale_schedule_ratio: float
    step_schedulers_every_batch: bool | None
    eval_interval: TimeInput | SchedulePredicate
    eval_subset_num_batches: int

    def __post_init__(self) -> None:
        check_subset(self.train_subset_num_batches, argument="train_subset_num_batches")
        check_subset(self.eval_subset_num_batches, argument="eval_subset_num_batches")
        check_interval(self.eval_interval, argument="eval_interval")
        check_ratio(self.scale_schedule_ratio)

    def replaced(self, arguments: Mapping[str, Any]) -> FitSettings:
        """Return these with those of ``fit``'s ``arguments`` that were given: ``None`` is none."""
        given = {one.name: arguments[one.name] for one in fields(self) if arguments[one.name] is not None}
        return replace(self, **given)


def as_list(value: T | Iterable[T] | None, *kinds: type[Any], argument: str) -> list[T]:
    """``value`` as a list: nothing, one thing, or several.

    Raises:
        ConfigError: something in it is of none of the ``kinds``.
    """
    if value is None:
        return []
    items = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
    for item in items:
        if isinstance(item, type) or not isinstance(item, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            hint = " Did you pass the class instead of an object of it?" if isinstance(item, type) else ""
            raise ConfigError(f"{argument}: {item!r} is not of type {names}.{hint}")
    return items  # type: ignore[return-value]


def is_several(eval_dataloader: Any) -> bool:
    """Return true if a list of what to evaluate on was passed, rather than a list of batches."""
    kinds = (Evaluator, DataSpec, DataLoader)
    return isinstance(eval_dataloader, list | tuple) and any(isinstance(item, kinds) for item in eval_dataloader)


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Check that ``callbacks`` have no method of another trainer's, which nothing would call, and no half of a state.

    One that also has the method of this trainer may be meant for both.

    Raises:
        ConfigError: one has such a method; the message says what it is called here. Or its state would be saved and
            not restored.
    """
    for callback in callbacks:
        kind = type(callback)
        check_restored(callback, Callback)
        for name in (name for name in dir(kind) if name.startswith("on_")):
            way = way_here("Callback", name)
            if way is None or getattr(kind, way) is not getattr(Callback, way):
                continue
            if kind.run_event is Callback.run_event:
                arguments = _ARGUMENTS.get(way, "self, state, logger")
                raise ConfigError(
                    f"{kind.__name__} has a method {name!r}, which nothing calls: here it is {way}({arguments})."
                )


def check_restored(one: Callback | Algorithm, base: type[Callback | Algorithm]) -> None:
    """Check that ``one`` takes back the state that it gives.

    Raises:
        ConfigError: it has ``state_dict`` of its own, and ``load_state_dict`` of ``base``, which does nothing.
    """
    kind = type(one)
    if kind.state_dict is not base.state_dict and kind.load_state_dict is base.load_state_dict:
        raise ConfigError(
            f"{kind.__name__} has state_dict() and no load_state_dict(state_dict): what it saves is never restored. "
            "Add the other, or leave out both."
        )


_ARGUMENTS = {"state_dict": "self", "load_state_dict": "self, state_dict"}


def check_data(spec: DataSpec, *, argument: str) -> None:
    """Check that there is something in ``spec``, as far as that is known before it is iterated over.

    Raises:
        ConfigError: the data set is empty, or no batch of it is full where only full ones are taken.
    """
    loader: Any = spec.dataloader
    if not isinstance(loader, DataLoader):
        if length_of(loader) == 0:
            raise ConfigError(f"{argument}: this {type(loader).__name__} has no batch: its length is 0.")
        return
    if length_of(loader.dataset) == 0:
        raise ConfigError(
            f"{argument}: the data set {type(loader.dataset).__name__} is empty: its length is 0. Check the path and "
            "the filter that it is made with."
        )
    if loader.drop_last and loader.batch_size is not None and length_of(loader) == 0:
        raise ConfigError(
            f"{argument}: {length_of(loader.dataset)} samples make no batch of {loader.batch_size}, and drop_last=True "
            "leaves out smaller ones. Pass a smaller batch_size, or drop_last=False."
        )


def check_apart(spec: DataSpec, train: DataSpec | None, *, argument: str) -> None:
    """Check that iterating over ``spec`` leaves the position in the training data as it is.

    Raises:
        ConfigError: both have a loader, sampler or iterable data set that says where it is.
    """
    if train is not None and (shared := shared_states(train.dataloader, spec.dataloader)):
        name = type(shared[0]).__name__
        raise ConfigError(
            f"{argument}: its {name} is also that of the train_dataloader and keeps one position for both: with each "
            f"evaluation training would lose its place, and so would a resume. Give it a {name} of its own."
        )


def check_own_files(loggers: Iterable[LoggerDestination]) -> None:
    """Check that each of ``loggers`` has a place of its own, where it knows one. Called after ``INIT``.

    Raises:
        ConfigError: two write one file.
    """
    owners: dict[str, LoggerDestination] = {}
    for logger in loggers:
        if logger.place is None:
            continue
        other = owners.setdefault(logger.place, logger)
        if other is not logger:
            raise ConfigError(
                f"loggers: {type(other).__name__} and {type(logger).__name__} both write {logger.place!r}. Give each a "
                "filename of its own."
            )


def check_model(model: nn.Module) -> ComposerModel:
    """``model`` if the trainer can train it.

    Raises:
        ConfigError: it is not a ComposerModel.
    """
    if not isinstance(model, ComposerModel):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        hint = " Did you pass the class instead of an object of it?" if isinstance(model, type) else ""
        raise ConfigError(
            f"model={name} is not a ComposerModel: the trainer needs its loss.{hint} Subclass ComposerModel "
            "(forward(batch), loss(outputs, batch)), or wrap a classifier: ComposerClassifier(module, num_classes=…)."
        )
    return model


def check_flags(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check the ``arguments`` of ``function`` that are true or false by default.

    Raises:
        ConfigError: one is neither: the text 'false' would count as true.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(parameter.default, bool) and not isinstance(arguments[name], bool):
            raise ConfigError(f"{name}={arguments[name]!r}: expected True or False.")


def check_subset(value: int, *, argument: str) -> int:
    """``value`` if it limits a number of batches: positive, or -1 for all.

    Raises:
        ConfigError: it is neither.
    """
    if not _is_int(value) or value == 0 or value < -1:
        raise ConfigError(f"{argument}={value!r}: expected a positive number of batches, or -1 for all.")
    return value


def check_interval(value: TimeInput | SchedulePredicate, *, argument: str) -> TimeInput | SchedulePredicate:
    """``value`` if it says when something happens.

    Raises:
        ConfigError: it cannot be read.
    """
    with naming(argument, value):
        create_interval_scheduler(value)
    return value


def check_ratio(value: float) -> float:
    """``value`` if it can scale a schedule.

    Raises:
        ConfigError: not a positive number.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"scale_schedule_ratio={value!r}: expected a positive number.")
    return value


def check_seconds(value: float, *, argument: str) -> float:
    """``value`` if it is a time to wait.

    Raises:
        ConfigError: not a number, or less than none.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{argument}={value!r}: expected a number of seconds, 0 or more.")
    return float(value)


def check_seed(value: int) -> int:
    """``value`` if it can seed every generator.

    Raises:
        ConfigError: not a whole number that numpy takes as a seed.
    """
    if not _is_int(value) or not 0 <= value <= MAX_SEED:
        raise ConfigError(f"seed={value!r}: expected a whole number from 0 to {MAX_SEED}.")
    return value


def check_names(value: Sequence[str] | None, *, argument: str) -> list[str]:
    """``value`` as a list of names.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(n, str) for n in value):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{argument}={value!r}: expected a list of names.")
    return list(value)


def check_passes(value: AlgorithmPass | Sequence[AlgorithmPass] | None) -> list[AlgorithmPass]:
    """Algorithm passes as a list.

    Raises:
        ConfigError: one cannot be called.
    """
    passes = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for one in passes:
        if not callable(one):
            raise ConfigError(f"algorithm_passes: {one!r} is not a function (algorithms, event) -> algorithms.")
    return passes  # type: ignore[return-value]


def check_plateau(state: State) -> None:
    """Check that a ``ReduceLROnPlateau`` has a metric to follow, and the learning rate to itself.

    Raises:
        ConfigError: nothing is evaluated, its loss is not computed, or another scheduler would undo its steps.
    """
    followed = [getattr(one, "metric", None) for one in state.schedulers if isinstance(one, ReduceLROnPlateau)]
    if not followed:
        return
    if not state.evaluators:
        raise ConfigError(
            "schedulers: ReduceLROnPlateau follows the loss of the first evaluator, and there is none. Pass "
            "eval_dataloader."
        )
    for name in filter(None, followed):
        check_metric_exists(name, state, argument="ReduceLROnPlateau: metric")
        if name.startswith("train/") and all(one.label != "train" for one in state.evaluators):
            raise ConfigError(
                f"ReduceLROnPlateau(metric={name!r}): expected a metric of evaluation, such as 'eval/loss'."
            )
    label = state.evaluators[0].label
    if None in followed and "loss" not in state.eval_metrics.get(label, {}):
        raise ConfigError(
            f"schedulers: ReduceLROnPlateau follows the loss of the evaluator {label!r}, which does not compute it. "
            f"Pass Evaluator(label={label!r}, metric_names=['loss', …])."
        )
    if any(isinstance(scheduler, LambdaLR) for scheduler in state.schedulers):
        raise ConfigError(
            "schedulers: ReduceLROnPlateau and a schedule that sets the learning rate at each step contradict each "
            "other: the second would undo what the first has done. Pass one of them."
        )


def check_log_level(value: str) -> str:
    """The name of a level of ``logging``.

    Raises:
        ConfigError: there is no such level.
    """
    levels = [name for name in logging.getLevelNamesMapping() if name != "NOTSET"]
    if str(value).upper() not in levels:
        raise ConfigError(f"python_log_level={value!r} does not exist.{did_you_mean(str(value).upper(), levels)}")
    return value.upper()


def check_compile_config(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Arguments for ``torch.compile``.

    Raises:
        ConfigError: not a dict, or one with a key that is no argument.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"compile_config={value!r}: expected a dict of arguments of torch.compile, {{}} for its defaults."
        )
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    for name in value:
        if name not in known:
            raise UnknownArgumentError(f"compile_config: torch.compile has no {name!r}.{did_you_mean(name, known)}")
    return dict(value)


def uses_cuda_graphs(compile_config: Mapping[str, Any] | None) -> bool:
    """Return true if a model that is compiled so replays CUDA graphs on a GPU, in memory that it uses again."""
    given = compile_config or {}
    options: Any = given.get("options") or {}
    return given.get("mode") in ("reduce-overhead", "max-autotune") or bool(options.get("triton.cudagraphs"))


def microbatch_size(value: int | str | None) -> tuple[int | None, bool]:
    """(samples per forward pass or ``None`` for all, whether to find the size automatically).

    Raises:
        ConfigError: neither a positive number nor ``'auto'``.
    """
    if value == "auto":
        return None, True
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value, False
    raise ConfigError(f"device_train_microbatch_size={value!r}: expected a positive number of samples, 'auto' or None.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
