"""Checks of the trainer's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar, cast, final

from torch import nn
from torch.utils.data import DataLoader

from composerlite.core import Algorithm, Callback, DataSpec, LoggerDestination, TimeInput
from composerlite.core.data import length_of
from composerlite.core.interval import SchedulePredicate, create_interval_scheduler
from composerlite.errors import ConfigError, naming
from composerlite.models import ComposerModel
from composerlite.other_trainers import way_here
from composerlite.trainer.data.held import shared_states

__all__ = [
    "Arguments",
    "FitSettings",
    "as_list",
    "check_apart",
    "check_data",
    "check_flags",
    "check_interval",
    "check_methods",
    "check_model",
    "check_subset",
    "is_whole",
    "microbatch_size",
    "require",
]

T = TypeVar("T")


def require(condition: bool, message: str) -> None:
    """Raise a :class:`ConfigError` with ``message`` if ``condition`` is false."""
    if not condition:
        raise ConfigError(message)


def is_whole(value: object) -> bool:
    """Return true for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


class Arguments:
    """Base of dataclasses whose fields are arguments of the trainer's constructor."""

    __slots__ = ()

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Build the dataclass from all ``arguments`` of the constructor."""
        return cls(**{item.name: arguments[item.name] for item in fields(cast("Any", cls))})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings(Arguments):
    """Arguments of the constructor that a call of ``fit`` may replace, for this call and the next calls.

    Raises:
        ConfigError: an argument breaks its rule.
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
        ratio: Any = self.scale_schedule_ratio
        require(
            isinstance(ratio, int | float) and not isinstance(ratio, bool) and ratio > 0,
            f"scale_schedule_ratio={ratio!r}: expected a positive number.",
        )

    def replaced(self, arguments: Mapping[str, Any]) -> FitSettings:
        """Return these settings with the ``arguments`` of ``fit`` that are not ``None``."""
        given = {item.name: arguments[item.name] for item in fields(self) if arguments[item.name] is not None}
        return replace(self, **given)


def as_list(value: T | Iterable[T] | None, *kinds: type[Any], argument: str) -> list[T]:
    """Return ``value``, a single item, several items or ``None``, as a list.

    Args:
        value: argument of the trainer.
        kinds: allowed classes of the items.
        argument: name of the argument, for errors.

    Raises:
        ConfigError: an item has another class.
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


def check_methods(parts: Iterable[Callback | Algorithm | LoggerDestination]) -> None:
    """Check the methods of callbacks, algorithms and loggers.

    Raises:
        ConfigError: a part has ``state_dict`` without ``load_state_dict``, or a callback has a method of another
            trainer's callbacks. The message has the name of this package's method.
    """
    for part in parts:
        kind, base = type(part), Algorithm if isinstance(part, Algorithm) else Callback
        require(
            kind.state_dict is base.state_dict or kind.load_state_dict is not base.load_state_dict,
            f"{kind.__name__} has state_dict() and no load_state_dict(state_dict): the saved state is never restored. "
            "Add load_state_dict, or remove state_dict.",
        )
        if base is Algorithm or kind.run_event is not Callback.run_event:  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            continue
        for name in (name for name in dir(kind) if name.startswith("on_")):
            own = way_here("Callback", name)
            if own is not None and getattr(kind, own) is getattr(Callback, own):
                arguments = {"state_dict": "self", "load_state_dict": "self, state_dict"}.get(
                    own, "self, state, logger"
                )
                raise ConfigError(
                    f"{kind.__name__} has a method {name!r}, which is never called: here it is {own}({arguments})."
                )


def check_data(spec: DataSpec, *, argument: str) -> None:
    """Check that the loader has batches, as far as its length is known.

    Raises:
        ConfigError: the dataset is empty, or has no full batch with ``drop_last=True``.
    """
    loader: Any = spec.dataloader
    if not isinstance(loader, DataLoader):
        require(length_of(loader) != 0, f"{argument}: this {type(loader).__name__} has no batch: its length is 0.")
        return
    require(
        length_of(loader.dataset) != 0,
        f"{argument}: the dataset {type(loader.dataset).__name__} is empty: its length is 0. Check path and filter.",
    )
    require(
        not (loader.drop_last and loader.batch_size is not None and length_of(loader) == 0),
        f"{argument}: {length_of(loader.dataset)} samples make no batch of {loader.batch_size}, and drop_last=True "
        "leaves out smaller batches. Pass a smaller batch_size, or drop_last=False.",
    )


def check_apart(spec: DataSpec, train: DataSpec | None, *, argument: str) -> None:
    """Check that an iteration over ``spec`` does not change the position in the training data.

    Raises:
        ConfigError: both share a loader, sampler or iterable dataset that keeps its position.
    """
    if train is not None and (shared := shared_states(train.dataloader, spec.dataloader)):
        name = type(shared[0]).__name__
        raise ConfigError(
            f"{argument}: its {name} is also the {name} of the train_dataloader and keeps one position: each "
            f"evaluation, and a resume, would lose the position of training. Use a separate {name}."
        )


def check_model(model: nn.Module) -> ComposerModel:
    """Return ``model`` if the trainer can train the model.

    Raises:
        ConfigError: ``model`` is not a ComposerModel.
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
    """Check the ``arguments`` of ``function`` whose default is true or false.

    Raises:
        ConfigError: an argument is not a bool; the text 'false' would count as true.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(parameter.default, bool):
            value = arguments[name]
            require(isinstance(value, bool), f"{name}={value!r}: expected True or False.")


def check_subset(value: int, *, argument: str) -> int:
    """Return a number of batches if ``value`` is positive or -1.

    Raises:
        ConfigError: ``value`` is another value.
    """
    message = f"{argument}={value!r}: expected a positive number of batches, or -1 for all."
    require(is_whole(value) and (value > 0 or value == -1), message)
    return value


def check_interval(value: TimeInput | SchedulePredicate, *, argument: str) -> None:
    """Check an interval.

    Raises:
        ConfigError: ``value`` is neither a time nor a function.
    """
    with naming(argument, value):
        create_interval_scheduler(value)


def microbatch_size(value: int | str | None) -> tuple[int | None, bool]:
    """Return samples per forward pass (``None`` for the whole batch), and whether to find the size automatically.

    Raises:
        ConfigError: ``value`` is neither a positive number nor ``'auto'``.
    """
    if value == "auto":
        return None, True
    require(
        value is None or (isinstance(value, int) and is_whole(value) and value > 0),
        f"device_train_microbatch_size={value!r}: expected a positive number of samples, 'auto' or None.",
    )
    return cast("int | None", value), False
