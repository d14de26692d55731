"""From what the user passed to the objects that the trainer works with."""

from __future__ import annotations

import copy
import fnmatch
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from composerlite import dist
from composerlite.callbacks import CheckpointSaver
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
from composerlite.loggers import ConsoleLogger, ProgressBarLogger
from composerlite.models import ComposerModel
from composerlite.optim import ComposerScheduler, DecoupledSGDW, compile_composer_scheduler
from composerlite.storage import ObjectStore
from composerlite.trainer.checks import as_list, check_ratio, is_several
from composerlite.types import Batch

if TYPE_CHECKING:
    from composerlite.core import ParallelismConfig
    from composerlite.trainer.parallel import Parallel

__all__ = [
    "build_evaluators",
    "build_optimizer",
    "build_schedulers",
    "check_parts",
    "check_zero",
    "deepspeed_config",
    "eval_metrics",
    "in_a_store",
    "limited",
    "output_loggers",
    "parallelism",
    "resolve_run_name",
    "saver",
    "scaled_duration",
    "zero",
]

log = logging.getLogger(__name__)

_RENAMED = {"save_interval": "save_interval", "save_async": "asynchronous"}


def in_a_store(uri: str, loggers: Iterable[LoggerDestination]) -> tuple[str, ObjectStore | None]:
    """``uri`` as a name in the store of the logger that uploads there, which has settings of its own; else as it is."""
    for logger in loggers:
        if logger.uploader is not None:
            store = logger.uploader.transfer.store
            root = store.get_uri("x").removesuffix("x")
            if uri.startswith(root):
                return uri.removeprefix(root), store
    return uri, None


def resolve_run_name(run_name: str | None, *, autoresume: bool) -> str:
    """The given name, that of the environment, or a new one.

    Raises:
        ConfigError: with ``autoresume`` and no name, a relaunch could not find its run again; or a name with a slash.
    """
    if run_name is not None and not (isinstance(run_name, str) and run_name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"run_name={run_name!r}: want a name, or None for that of the environment or a new one.")
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
    given: Any = eval_dataloader if is_several(eval_dataloader) else [eval_dataloader]
    evaluators = [  # copies: the user's own may be passed again, to a trainer with other settings
        copy.copy(ensure_evaluator(e)).with_defaults(subset_num_batches=subset_num_batches, eval_interval=eval_interval)
        for e in given
    ]
    labels = [evaluator.label for evaluator in evaluators]
    if doubled := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(
            f"eval_dataloader: several evaluators have the label {', '.join(doubled)}; give each its own."
        )
    return evaluators


def limited(evaluator: Evaluator, subset_num_batches: int) -> Evaluator:
    """A copy of ``evaluator`` that stops after so many batches."""
    evaluator = copy.copy(evaluator)
    evaluator.subset_num_batches = subset_num_batches
    return evaluator


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
    check_ratio(ratio)
    if max_duration is None:
        return None
    try:
        time = Time.from_input(max_duration, TimeUnit.EPOCH)
    except ConfigError as e:
        raise ConfigError(f"max_duration={max_duration!r}: {e}") from e
    if time.value <= 0:
        raise ConfigError(f"max_duration={max_duration!r}: want more than zero.")
    if ratio == 1.0:
        return time
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


def output_loggers(arguments: Mapping[str, Any]) -> list[LoggerDestination]:
    """The progress bar or the lines on the console that the trainer's ``arguments`` ask for."""
    given: dict[str, Any] = {"stream": arguments["console_stream"], "log_traces": arguments["log_traces"]}
    interval, to_console = arguments["console_log_interval"], arguments["log_to_console"]
    if arguments["progress_bar"]:
        return [ProgressBarLogger(log_to_console=to_console or None, console_log_interval=interval, **given)]
    return [ConsoleLogger(log_interval=interval, **given)] if to_console else []


def saver(arguments: Mapping[str, Any]) -> CheckpointSaver:
    """The saver that the trainer's arguments ``save_…`` describe. They are its own, with that before their names."""
    given = {
        _RENAMED.get(name, name.removeprefix("save_")): value
        for name, value in arguments.items()
        if name.startswith("save_") and name != "save_metrics"
    }
    return CheckpointSaver(**given)


def parallelism(value: Mapping[str, Any] | ParallelismConfig | None) -> ParallelismConfig | None:
    """How the model is spread over the ranks, checked against their number; ``None`` for a whole copy on each."""
    if value is None:
        return None
    from composerlite.core import ensure_parallelism

    config = ensure_parallelism(value)
    if config is not None:
        config.degrees(dist.get_world_size())
    return config


def deepspeed_config(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """What DeepSpeed is told, as the trainer's ``arguments`` say; ``None`` where it does not train.

    Raises:
        ConfigError: it cannot be read, or contradicts another argument.
    """
    value = arguments["deepspeed_config"]
    if value is None:
        return None
    for other in ("parallelism_config", "ddp_sync_strategy", "compile_config"):
        if arguments[other] is not None:
            raise ConfigError(
                f"deepspeed_config={value!r} contradicts {other}={arguments[other]!r}: DeepSpeed spreads the model in "
                "its own way. Give one of the two."
            )
    from composerlite.trainer.zero_config import read_config

    return read_config(value)


def zero(state: State, spec: DataSpec | None) -> Parallel | None:
    """DeepSpeed with the model of ``state``, if that is to train it; ``spec`` are the data, if they are known."""
    if state.deepspeed_config is None:
        return None
    from composerlite.trainer.zero import ZeRO  # what takes long to import

    return ZeRO(state, state.deepspeed_config, _batch_size(spec))


def check_zero(state: State, spec: DataSpec) -> None:
    """See that what DeepSpeed was told is still so, with the data ``spec``.

    Raises:
        ConfigError: a number of samples or the precision is another now.
    """
    if state.deepspeed_config is not None:
        from composerlite.trainer.zero_config import check_batches

        check_batches(state.deepspeed_config, state, _batch_size(spec))


def _batch_size(spec: DataSpec | None) -> int | None:
    """Samples per batch of one rank, where the loader says it."""
    size = None if spec is None else getattr(spec.dataloader, "batch_size", None)
    return size if isinstance(size, int) else None
