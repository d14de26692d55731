"""From what the user passed to the objects that the trainer works with."""

from __future__ import annotations

import copy
import fnmatch
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from composerlite.core import (
    Algorithm,
    Callback,
    DataSpec,
    Evaluator,
    LoggerDestination,
    SchedulePredicate,
    State,
    Time,
    TimeInput,
    TimeUnit,
    ensure_evaluator,
)
from composerlite.errors import ConfigError
from composerlite.models import ComposerModel
from composerlite.optim import ComposerScheduler, DecoupledSGDW, compile_composer_scheduler
from composerlite.types import Batch

__all__ = [
    "as_list",
    "build_evaluators",
    "build_optimizer",
    "build_schedulers",
    "check_model",
    "check_parts",
    "check_subset",
    "eval_metrics",
    "microbatch_size",
    "resolve_run_name",
    "scaled_duration",
]

log = logging.getLogger(__name__)
T = TypeVar("T")


def as_list(value: T | Iterable[T] | None, kind: type[Any] | tuple[type[Any], ...], *, argument: str) -> list[T]:
    """``value`` as a list: nothing, one thing, or several.

    Raises:
        ConfigError: something in it is not a ``kind``.
    """
    if value is None:
        return []
    items = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
    for item in items:
        if not isinstance(item, kind):
            names = getattr(kind, "__name__", str(kind))
            hint = " Did you pass the class instead of an object of it?" if isinstance(item, type) else ""
            raise ConfigError(f"{argument}: {item!r} is not a {names}.{hint}")
    return items  # type: ignore[return-value]


def check_model(model: nn.Module) -> ComposerModel:
    """``model`` if the trainer can train it.

    Raises:
        ConfigError: it is not a ComposerModel.
    """
    if not isinstance(model, ComposerModel):
        raise ConfigError(
            f"model={type(model).__name__} is not a ComposerModel: the trainer needs its loss. Subclass ComposerModel "
            "(forward(batch), loss(outputs, batch)), or wrap a classifier: ComposerClassifier(module, num_classes=…)."
        )
    return model


def check_subset(value: int, *, argument: str) -> int:
    """``value`` if it limits a number of batches: positive, or -1 for all.

    Raises:
        ConfigError: it is neither.
    """
    if value == 0 or value < -1:
        raise ConfigError(f"{argument}={value}: want a positive number of batches, or -1 for all.")
    return value


def microbatch_size(value: int | str | None) -> tuple[int | None, bool]:
    """(samples per forward pass or ``None`` for all, whether to find the size automatically).

    Raises:
        ConfigError: neither a positive number nor ``'auto'``.
    """
    if value == "auto":
        return None, True
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value, False
    raise ConfigError(f"device_train_microbatch_size={value!r}: want a positive number of samples, 'auto' or None.")


def resolve_run_name(run_name: str | None, *, autoresume: bool) -> str:
    """The given name, that of the environment, or a new one.

    Raises:
        ConfigError: with ``autoresume`` and no name, a relaunch could not find its run again; or a name with a slash.
    """
    name = run_name or os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")
    if name is None:
        if autoresume:
            raise ConfigError(
                "autoresume=True needs a run_name that is the same at each launch: pass run_name='…' or set RUN_NAME."
            )
        return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    if "/" in name or name in (".", ".."):
        raise ConfigError(f"run_name={name!r} names folders: it cannot contain '/'.")
    return name


def build_optimizer(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, model: nn.Module
) -> torch.optim.Optimizer:
    """The one optimizer of the run.

    Raises:
        ConfigError: more than one, or one that needs a closure, or one that trains none of the model's parameters.
    """
    given = as_list(optimizers, torch.optim.Optimizer, argument="optimizers")
    if len(given) > 1:
        raise ConfigError(
            f"optimizers: {len(given)} were given and one is supported. Use one with several param groups."
        )
    if not given:
        log.warning("no optimizer was given: training with DecoupledSGDW(lr=0.1)")
        return DecoupledSGDW(list(model.parameters()), lr=0.1)
    if isinstance(given[0], torch.optim.LBFGS):
        raise ConfigError("optimizers: LBFGS evaluates the model within its step, which a trained batch cannot do.")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in own for group in given[0].param_groups for p in group["params"]):
        raise ConfigError(
            "optimizers: none of the optimizer's parameters is the model's. Build it from model.parameters() of the "
            "model that you pass, after any surgery."
        )
    return given[0]


def build_schedulers(
    schedulers: Sequence[ComposerScheduler | LRScheduler], state: State, *, scale_schedule_ratio: float
) -> list[LRScheduler]:
    """torch schedulers over ``state``'s optimizer.

    Raises:
        ConfigError: a torch scheduler of another optimizer.
    """
    built: list[LRScheduler] = []
    for scheduler in schedulers:
        if not isinstance(scheduler, LRScheduler):
            built.append(compile_composer_scheduler(scheduler, state, scale_schedule_ratio))
        elif scheduler.optimizer is not state.optimizers[0]:
            raise ConfigError(f"schedulers: {type(scheduler).__name__} was built for another optimizer than the run's.")
        else:
            built.append(scheduler)
    return built


def build_evaluators(
    eval_dataloader: Iterable[Batch] | DataSpec | Evaluator | Sequence[Evaluator] | Mapping[str, Any] | None,
    *,
    eval_interval: TimeInput | SchedulePredicate,
    subset_num_batches: int,
) -> list[Evaluator]:
    """The evaluators, with the trainer's settings where they have none of their own.

    Raises:
        ConfigError: two of one label.
    """
    if eval_dataloader is None or eval_dataloader == []:
        return []
    several = isinstance(eval_dataloader, list | tuple) and any(isinstance(e, Evaluator) for e in eval_dataloader)
    given: Any = eval_dataloader if several else [eval_dataloader]
    evaluators = [
        ensure_evaluator(e).with_defaults(subset_num_batches=subset_num_batches, eval_interval=eval_interval)
        for e in given
    ]
    labels = [evaluator.label for evaluator in evaluators]
    if doubled := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(
            f"eval_dataloader: several evaluators have the label {', '.join(doubled)}; give each its own."
        )
    return evaluators


def eval_metrics(model: ComposerModel, evaluator: Evaluator, device: torch.device) -> dict[str, Any]:
    """The model's metrics that ``evaluator`` asks for, its own copies, on ``device``.

    Raises:
        ConfigError: it asks for one that the model has not.
    """
    available = model.get_metrics(is_train=False)
    if evaluator.metric_names is None:
        chosen = available
    else:
        chosen = {n: m for n, m in available.items() if any(fnmatch.fnmatchcase(n, g) for g in evaluator.metric_names)}
        for glob in evaluator.metric_names:
            if not any(fnmatch.fnmatchcase(name, glob) for name in available):
                raise ConfigError(
                    f"Evaluator(label={evaluator.label!r}, metric_names=[{glob!r}]): the model has no such metric. It "
                    f"has: {', '.join(available) or 'none'}."
                )
    return {name: copy.deepcopy(metric).to(device) for name, metric in chosen.items()}


def scaled_duration(max_duration: TimeInput | None, ratio: float) -> TimeInput | None:
    """``max_duration`` times ``scale_schedule_ratio``."""
    if ratio <= 0:
        raise ConfigError(f"scale_schedule_ratio={ratio}: want a positive number.")
    if max_duration is None or ratio == 1.0:
        return max_duration
    time = Time.from_input(max_duration, TimeUnit.EPOCH)
    scaled = time * ratio
    if int(scaled) == 0:
        raise ConfigError(f"scale_schedule_ratio={ratio} makes max_duration={time} zero.")
    return scaled


def check_parts(algorithms: Any, callbacks: Any, loggers: Any) -> tuple[list[Algorithm], list[Callback], list[Any]]:
    """Algorithms, callbacks and loggers as lists, each of its kind."""
    return (
        as_list(algorithms, Algorithm, argument="algorithms"),
        as_list(callbacks, Callback, argument="callbacks"),
        as_list(loggers, LoggerDestination, argument="loggers"),
    )
