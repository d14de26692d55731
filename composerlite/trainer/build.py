"""Builds the trainer's objects from the user's arguments."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import logging
import os
import secrets
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from composerlite.core import (
    Algorithm,
    Callback,
    DataSpec,
    Evaluator,
    Logger,
    LoggerDestination,
    State,
    Time,
    TimeInput,
    TimeUnit,
)
from composerlite.core.interval import SchedulePredicate
from composerlite.core.state.optimizer_state import lost_parameters
from composerlite.devices import Device
from composerlite.errors import ConfigError, naming
from composerlite.models import ComposerModel
from composerlite.optim import DecoupledSGDW
from composerlite.trainer.checks import as_list, check_data, check_methods, require
from composerlite.types import Batch

if TYPE_CHECKING:
    from composerlite.callbacks import CheckpointSaver
    from composerlite.trainer.ranks.parallel import Parallel

__all__ = [
    "bars_stopped_by_errors",
    "build_evaluators",
    "build_optimizer",
    "build_parts",
    "deepspeed_config",
    "eval_metrics",
    "given_duration",
    "resolve_run_name",
    "scaled_duration",
    "zero",
]

log = logging.getLogger(__name__)

_RENAMED = {"save_async": "asynchronous", "save_interval": "save_interval"}
_MEMORY_FAILURES = 3
"""Consecutive saves that may fail because the memory is full. Saves to the disk are not affected."""


def resolve_run_name(run_name: str | None, *, autoresume: bool) -> tuple[str, bool]:
    """Return the name of the run, and whether the script or the environment gave the name.

    Args:
        run_name: argument of the trainer. ``None``: ``COMPOSER_RUN_NAME`` or ``RUN_NAME`` of the environment, with
            ``autoresume`` the job of the scheduler, otherwise a new name.
        autoresume: a relaunch must find the run by its name.

    Raises:
        ConfigError: ``autoresume`` without a name, or a name that is not a file name.
    """
    if run_name is not None and not (isinstance(run_name, str) and run_name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"run_name={run_name!r}: expected a name, or None for a name from the environment.")
    name = run_name or os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")
    if name is None and autoresume:
        name = _job_name(os.environ)
        require(
            name is not None,
            "autoresume=True needs a run_name that is the same at each launch: pass run_name='…' or set RUN_NAME. No "
            "scheduler has given this process the name of a job.",
        )
    if name is None:
        return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}", False
    require("/" not in name and name not in (".", ".."), f"run_name={name!r} names folders: it cannot contain '/'.")
    require("\0" not in name, f"run_name={name!r} has a null character, which no file name can have.")
    return name, True


def _job_name(environment: Mapping[str, str]) -> str | None:
    """Return a name for the run that stays the same when the scheduler restarts the job; ``None`` without a job."""
    if job := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"slurm-{job}-{environment.get('SLURM_ARRAY_TASK_ID', '0')}"
    if job := environment.get("SLURM_JOB_ID"):
        return f"slurm-{job}"
    if task := environment.get("SKYPILOT_TASK_ID"):
        return task.replace("/", "-")
    index, host = environment.get("JOB_COMPLETION_INDEX"), environment.get("HOSTNAME", "")
    if index and host.endswith(f"-{index}"):  # pods of an Indexed Job of Kubernetes are named after the job
        return host.removesuffix(f"-{index}")
    return None


def build_optimizer(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, model: nn.Module
) -> torch.optim.Optimizer:
    """Return the optimizer of the run; ``DecoupledSGDW(lr=0.1)`` if ``optimizers`` is ``None``.

    Raises:
        ConfigError: several optimizers, LBFGS, or an optimizer with other parameters than the model's.
    """
    given = as_list(optimizers, torch.optim.Optimizer, argument="optimizers")
    if not given:
        log.warning("no optimizer was given: training with DecoupledSGDW(lr=0.1)")
        return DecoupledSGDW(list(model.parameters()), lr=0.1)
    require(
        len(given) == 1, f"optimizers: {len(given)} were given and one is supported. Use one with several param groups."
    )
    optimizer = given[0]
    require(
        not isinstance(optimizer, torch.optim.LBFGS),
        "optimizers: LBFGS evaluates the model within its step, which the trainer does not support.",
    )
    own = {id(parameter) for parameter in model.parameters()}
    require(
        any(id(p) in own for group in optimizer.param_groups for p in group["params"]),
        "optimizers: the optimizer has no parameter of the model. Build the optimizer from model.parameters() of the "
        "model that you pass, after any surgery.",
    )
    lost = lost_parameters(optimizer, model)
    require(
        not lost,
        f"optimizers: the optimizer trains parameters that are not in the model, so no checkpoint would have them: "
        f"{'; '.join(lost)}. Register each in the model: model.name = torch.nn.Parameter(…).",
    )
    return optimizer


def build_evaluators(
    eval_dataloader: Iterable[Batch] | DataSpec | Evaluator | Sequence[Evaluator] | Mapping[str, Any] | None,
    *,
    eval_interval: TimeInput | SchedulePredicate,
    subset_num_batches: int,
) -> list[Evaluator]:
    """Return the evaluators. Loaders without a label are ``'eval'``, ``'eval_1'``, ``'eval_2'``, … in order.

    Args:
        eval_dataloader: argument of the trainer.
        eval_interval: interval of evaluators without an interval.
        subset_num_batches: number of batches of evaluators without a number.

    Raises:
        ConfigError: two evaluators have the same label, or an evaluator has no data.
    """
    if eval_dataloader is None or eval_dataloader == []:
        return []
    kinds = (Evaluator, DataSpec, DataLoader)
    is_several = isinstance(eval_dataloader, list | tuple) and any(isinstance(item, kinds) for item in eval_dataloader)
    given: Any = eval_dataloader if is_several else [eval_dataloader]
    taken = {item.label for item in given if isinstance(item, Evaluator)}
    free = (label for label in ("eval", *(f"eval_{i}" for i in range(1, len(given) + 1))) if label not in taken)
    evaluators: list[Evaluator] = []
    for item in given:
        # A copy: the script may pass the same evaluator to a trainer with other settings.
        own = copy.copy(item) if isinstance(item, Evaluator) else Evaluator(label=next(free), dataloader=item)
        evaluators.append(own.with_defaults(subset_num_batches=subset_num_batches, eval_interval=eval_interval))
        check_data(evaluators[-1].dataloader, argument=f"eval_dataloader {own.label!r}")
    labels = [evaluator.label for evaluator in evaluators]
    doubled = sorted({label for label in labels if labels.count(label) > 1})
    require(
        not doubled,
        f"eval_dataloader: several evaluators have the label {', '.join(doubled)}: give each a label of its own.",
    )
    return evaluators


def eval_metrics(model: ComposerModel, evaluator: Evaluator, device: Device) -> dict[str, Any]:
    """Return copies of the model's metrics for ``evaluator`` on ``device``, and the model's loss.

    The loss is included if the evaluator names ``loss``, or if the model has ``has_eval_loss``: its ``loss`` then takes
    the result of ``eval_forward``.

    Raises:
        ConfigError: the evaluator names a metric that the model does not have.
    """
    from composerlite.trainer.eval_loss import NAME, EvalLoss  # torchmetrics takes long to import

    available: dict[str, Any] = dict(model.get_metrics(is_train=False))
    is_named = evaluator.metric_names is not None and NAME in evaluator.metric_names
    if NAME not in available and (is_named or getattr(model, "has_eval_loss", False)):
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        available = {NAME: EvalLoss(is_required=is_named, dtype=dtype), **available}
    chosen = available
    if evaluator.metric_names is not None:
        chosen = {n: m for n, m in available.items() if any(fnmatch.fnmatchcase(n, g) for g in evaluator.metric_names)}
        for pattern in evaluator.metric_names:
            require(
                any(fnmatch.fnmatchcase(name, pattern) for name in available),
                f"Evaluator(label={evaluator.label!r}, metric_names=[{pattern!r}]): the model has no such metric. It "
                f"has: {', '.join(available) or 'none'}.",
            )
    return {name: copy.deepcopy(metric).to(device) for name, metric in chosen.items()}


def scaled_duration(time: Time, ratio: float, *, argument: str = "max_duration") -> Time:
    """Return ``time`` times ``scale_schedule_ratio``.

    Raises:
        ConfigError: the product is zero.
    """
    scaled = time if ratio == 1.0 else time * ratio
    require(ratio == 1.0 or int(scaled) > 0, f"scale_schedule_ratio={ratio} makes {argument}={time} zero.")
    return scaled


def given_duration(max_duration: TimeInput | None, ratio: float) -> Time | None:
    """Return ``max_duration`` of the constructor times ``scale_schedule_ratio``.

    Raises:
        ConfigError: ``max_duration`` is not a positive time.
    """
    if max_duration is None:
        return None
    with naming("max_duration", max_duration):
        time = Time.from_input(max_duration, TimeUnit.EPOCH)
    require(time.value > 0, f"max_duration={max_duration!r}: expected more than zero.")
    return scaled_duration(time, ratio)


def build_parts(arguments: Mapping[str, Any]) -> tuple[list[Algorithm], list[Callback], list[LoggerDestination]]:
    """Return algorithms, callbacks and loggers: the user's, and those of the trainer's other ``arguments``.

    Order of callbacks: the profiler, the user's, savers, :class:`PreemptionHandler`.
    """
    algorithms: list[Algorithm] = as_list(arguments["algorithms"], Algorithm, argument="algorithms")
    callbacks: list[Callback] = as_list(arguments["callbacks"], Callback, argument="callbacks")
    loggers: list[LoggerDestination] = as_list(arguments["loggers"], LoggerDestination, argument="loggers")
    check_methods([*algorithms, *callbacks, *loggers])

    from composerlite.loggers import ConsoleLogger, ProgressBarLogger  # imports rich

    console: dict[str, Any] = {"stream": arguments["console_stream"], "log_traces": arguments["log_traces"]}
    interval, to_console = arguments["console_log_interval"], arguments["log_to_console"]
    if arguments["progress_bar"]:
        loggers.append(ProgressBarLogger(log_to_console=to_console or None, console_log_interval=interval, **console))
    elif to_console:
        loggers.append(ConsoleLogger(log_interval=interval, **console))

    if arguments["profiler"] is not None:
        from composerlite.profiler import Profiler, TraceHandler

        profilers: list[Profiler] = as_list(arguments["profiler"], Profiler, argument="profiler")
        handlers = [handler for profiler in profilers for handler in profiler.trace_handlers]
        callbacks[:0] = [*profilers, *as_list(handlers, TraceHandler, argument="trace_handlers")]
    if arguments["save_memory_replication"] is not None and arguments["save_memory_interval"] is None:
        raise ConfigError(
            f"save_memory_replication={arguments['save_memory_replication']!r} is for checkpoints in memory: give "
            "save_memory_interval as well."
        )
    if arguments["save_folder"] is not None or arguments["save_memory_interval"] is not None:
        callbacks += _savers(arguments, callbacks)
    if arguments["autoresume"] or callbacks:
        from composerlite.callbacks import PreemptionHandler

        if arguments["autoresume"] and not any(isinstance(callback, PreemptionHandler) for callback in callbacks):
            callbacks.append(PreemptionHandler())
        # A signal must not end the process while the other callbacks close.
        callbacks.sort(key=lambda callback: isinstance(callback, PreemptionHandler))
    return algorithms, callbacks, loggers


def _savers(arguments: Mapping[str, Any], callbacks: Sequence[Callback]) -> list[CheckpointSaver]:
    """Return the savers for ``save_folder`` and ``save_memory_folder``.

    Args:
        arguments: arguments of the trainer.
        callbacks: callbacks of the user. A :class:`CheckpointSaver` among them for ``save_folder`` replaces the saver.

    Raises:
        ConfigError: the arguments for checkpoints in memory contradict the others.
    """
    from composerlite.callbacks import CheckpointSaver

    savers: list[CheckpointSaver] = []
    own = [callback for callback in callbacks if isinstance(callback, CheckpointSaver)]
    folder = str(arguments["save_folder"]).rstrip("/")
    if any(not saver.weights_only and saver.options.names.folder.rstrip("/") == folder for saver in own):
        log.info("save_folder=%r: the CheckpointSaver in callbacks saves there, with its own arguments", folder)
    elif arguments["save_folder"] is not None:
        given = {
            _RENAMED.get(name, name.removeprefix("save_")): value
            for name, value in arguments.items()
            if name.startswith("save_") and name != "save_metrics" and not name.startswith("save_memory_")
        }
        savers.append(CheckpointSaver(latest_remote_file_name=None, **given))
    if arguments["save_memory_interval"] is None:
        return savers
    interval, memory = arguments["save_memory_interval"], Path(arguments["save_memory_folder"])
    require(
        bool(arguments["autoresume"] and (savers or own)),
        f"save_memory_interval={interval!r} needs autoresume=True and a save_folder: a run resumes from memory after a "
        "crash, and from the save_folder if the machine is lost.",
    )
    require(
        memory.is_dir(), f"save_memory_folder={str(memory)!r}: no such folder. Name a folder that is in memory (tmpfs)."
    )
    same = ("ignore_keys", "staging_bytes", "async", "lazy")
    in_memory = CheckpointSaver(
        f"{memory}/composerlite-{os.getuid()}/{{run_name}}",
        remote_file_name=None,
        latest_filename=None,
        save_interval=interval,
        num_checkpoints_to_keep=1,
        overwrite=True,
        in_memory=True,
        replication=arguments["save_memory_replication"],
        failure_limit=_MEMORY_FAILURES,
        **{_RENAMED.get(f"save_{name}", name): arguments[f"save_{name}"] for name in same},
    )
    return [*savers, in_memory]


@contextlib.contextmanager
def bars_stopped_by_errors(logger: Logger) -> Generator[None]:
    """Remove progress bars from the terminal if the block raises, before the traceback is printed."""
    try:
        yield
    except BaseException:
        from composerlite.loggers import ProgressBarLogger

        for destination in logger.destinations:
            if isinstance(destination, ProgressBarLogger):
                destination.stop()
        raise


def deepspeed_config(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return DeepSpeed's configuration; ``None`` without ``deepspeed_config``.

    Raises:
        ConfigError: the configuration cannot be read, or contradicts another argument of the trainer.
    """
    value = arguments["deepspeed_config"]
    if value is None:
        return None
    for other in ("parallelism_config", "ddp_sync_strategy", "compile_config"):
        require(
            arguments[other] is None,
            f"deepspeed_config={value!r} contradicts {other}={arguments[other]!r}: DeepSpeed distributes the model "
            "itself. Leave one of the two out.",
        )
    from composerlite.trainer.ranks.zero_config import read_config

    return read_config(value)


def zero(state: State, spec: DataSpec | None) -> Parallel | None:
    """Return DeepSpeed around the model of ``state``; ``None`` without ``state.deepspeed_config``.

    Args:
        state: training state.
        spec: training data; ``None`` if unknown.
    """
    if state.deepspeed_config is None:
        return None
    from composerlite.trainer.ranks.zero import ZeRO  # takes long to import

    size = None if spec is None else getattr(spec.dataloader, "batch_size", None)
    return ZeRO(state, state.deepspeed_config, size if isinstance(size, int) else None)
