"""Building of the trainer's objects from the user's arguments."""

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
from torch.optim.lr_scheduler import LRScheduler

from composerlite import dist
from composerlite.core import (
    Algorithm,
    Callback,
    DataSpec,
    Evaluator,
    Logger,
    LoggerDestination,
    SchedulePredicate,
    State,
    Time,
    TimeInput,
    TimeUnit,
)
from composerlite.core.state.optimizer_state import lost_parameters
from composerlite.devices import Device
from composerlite.errors import ConfigError, naming
from composerlite.models import ComposerModel
from composerlite.optim import ComposerScheduler, DecoupledSGDW, compile_composer_scheduler
from composerlite.trainer.checks import as_list, check_callbacks, check_data, check_restored, is_several
from composerlite.types import Batch

if TYPE_CHECKING:
    from composerlite.callbacks import CheckpointSaver
    from composerlite.core import ParallelismConfig
    from composerlite.trainer.ranks.parallel import Parallel

__all__ = [
    "bars_stopped_by_errors",
    "build_evaluators",
    "build_optimizer",
    "build_parts",
    "build_schedulers",
    "check_zero",
    "deepspeed_config",
    "eval_metrics",
    "given_duration",
    "given_rates",
    "is_later",
    "limited",
    "parallelism",
    "resolve_run_name",
    "scaled_duration",
    "zero",
]

log = logging.getLogger(__name__)

_RENAMED = {"save_interval": "save_interval", "save_async": "asynchronous"}
_MEMORY_FAILURES = 3
"""Consecutive saves that may fail for lack of memory: those on the disk are not affected."""


def resolve_run_name(run_name: str | None, *, autoresume: bool) -> tuple[str, bool]:
    """The given name, that of the environment, or a new one; and whether somebody has given it.

    Of the environment: ``COMPOSER_RUN_NAME``, ``RUN_NAME``, and with ``autoresume`` the identity of the job, where the
    scheduler gives one that stays the same when the job is started again.

    Raises:
        ConfigError: with ``autoresume`` and no name, a relaunch could not find its run again; or a name with a slash or
            a null character.
    """
    if run_name is not None and not (isinstance(run_name, str) and run_name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"run_name={run_name!r}: expected a name, or None for that of the environment or a new one.")
    name = run_name or os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")
    if name is None and autoresume:
        name = _job_name(os.environ)
    if name is None:
        if autoresume:
            raise ConfigError(
                "autoresume=True needs a run_name that is the same at each launch: pass run_name='…' or set RUN_NAME. "
                "This is no job of a scheduler that would give it one."
            )
        return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}", False
    if "/" in name or name in (".", ".."):
        raise ConfigError(f"run_name={name!r} names folders: it cannot contain '/'.")
    if "\0" in name:
        raise ConfigError(f"run_name={name!r} has a null character in it, which no file can have in its name.")
    return name, True


def _job_name(environment: Mapping[str, str]) -> str | None:
    """A name for the run from what a scheduler says of the job, if that stays the same when the job is restarted."""
    if job := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"slurm-{job}-{environment.get('SLURM_ARRAY_TASK_ID', '0')}"
    if job := environment.get("SLURM_JOB_ID"):  # a requeued job keeps its number
        return f"slurm-{job}"
    if task := environment.get("SKYPILOT_TASK_ID"):  # a recovered managed job keeps it
        return task.replace("/", "-")
    index, host = environment.get("JOB_COMPLETION_INDEX"), environment.get("HOSTNAME", "")
    if index and host.endswith(f"-{index}"):  # a pod of an Indexed Job of Kubernetes is called after the job
        return host.removesuffix(f"-{index}")
    return None


def build_optimizer(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, model: nn.Module
) -> torch.optim.Optimizer:
    """The one optimizer of the run.

    Raises:
        ConfigError: more than one, or one that needs a closure, or one that trains none of the model's parameters, or
            others than those.
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
    if lost := lost_parameters(given[0], model):
        raise ConfigError(
            f"optimizers: it trains what is not the model's, and no checkpoint would have it: {'; '.join(lost)}. "
            "Make it a parameter of the model, model.name = torch.nn.Parameter(…), also where only the loss uses it."
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


def given_rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """The learning rate of each group, as the script has given it: before any schedule."""
    return tuple(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)


def build_evaluators(
    eval_dataloader: Iterable[Batch] | DataSpec | Evaluator | Sequence[Evaluator] | Mapping[str, Any] | None,
    *,
    eval_interval: TimeInput | SchedulePredicate,
    subset_num_batches: int,
) -> list[Evaluator]:
    """The evaluators, with the trainer's settings where they have none of their own.

    Loaders without a label are ``'eval'``, ``'eval_1'``, ``'eval_2'``, … in their order.

    Raises:
        ConfigError: two of one label, or one with no data.
    """
    if eval_dataloader is None or eval_dataloader == []:
        return []
    given: Any = eval_dataloader if is_several(eval_dataloader) else [eval_dataloader]
    taken = {one.label for one in given if isinstance(one, Evaluator)}
    free = (label for label in ("eval", *(f"eval_{i}" for i in range(1, len(given) + 1))) if label not in taken)
    evaluators = [  # copies: the user's own may be passed again, to a trainer with other settings
        (copy.copy(one) if isinstance(one, Evaluator) else Evaluator(label=next(free), dataloader=one)).with_defaults(
            subset_num_batches=subset_num_batches, eval_interval=eval_interval
        )
        for one in given
    ]
    for evaluator in evaluators:
        check_data(evaluator.dataloader, argument=f"eval_dataloader {evaluator.label!r}")
    labels = [evaluator.label for evaluator in evaluators]
    if doubled := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(
            f"eval_dataloader: several evaluators have the label {', '.join(doubled)}; give each its own."
        )
    return evaluators


def limited(evaluator: Evaluator, subset_num_batches: int) -> Evaluator:
    """Copy of ``evaluator`` that stops after ``subset`` batches."""
    evaluator = copy.copy(evaluator)
    evaluator.subset_num_batches = subset_num_batches
    return evaluator


def eval_metrics(model: ComposerModel, evaluator: Evaluator, device: Device) -> dict[str, Any]:
    """The model's metrics that ``evaluator`` asks for, its own copies, on ``device``, and the model's loss.

    The loss is computed from what ``eval_forward`` gives: by default where the model says that its ``loss`` takes
    that, else where the evaluator names it.

    Raises:
        ConfigError: it asks for one that the model has not.
    """
    from composerlite.trainer.eval_loss import NAME, EvalLoss  # torchmetrics takes long to import

    available: dict[str, Any] = dict(model.get_metrics(is_train=False))
    is_named = evaluator.metric_names is not None and NAME in evaluator.metric_names
    if NAME not in available and (is_named or getattr(model, "has_eval_loss", False)):
        dtype = torch.float32 if device.type == "mps" else torch.float64  # which has no float64
        available = {NAME: EvalLoss(is_required=is_named, dtype=dtype), **available}
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


def is_later(end: Time, stopped: Time | None) -> bool:
    """Return true if ``end`` is another one than the run had when it was ``stopped``, and not an earlier one."""
    return stopped is not None and (end.unit is not stopped.unit or end > stopped)


def scaled_duration(time: Time, ratio: float, *, argument: str = "max_duration") -> Time:
    """``time`` times ``scale_schedule_ratio``.

    Raises:
        ConfigError: it would be zero.
    """
    scaled = time if ratio == 1.0 else time * ratio
    if ratio != 1.0 and int(scaled) == 0:
        raise ConfigError(f"scale_schedule_ratio={ratio} makes {argument}={time} zero.")
    return scaled


def given_duration(max_duration: TimeInput | None, ratio: float) -> Time | None:
    """``max_duration`` of the constructor, times ``scale_schedule_ratio``.

    Raises:
        ConfigError: it cannot be read, or is zero or less.
    """
    if max_duration is None:
        return None
    with naming("max_duration", max_duration):
        time = Time.from_input(max_duration, TimeUnit.EPOCH)
    if time.value <= 0:
        raise ConfigError(f"max_duration={max_duration!r}: expected more than zero.")
    return scaled_duration(time, ratio)


def build_parts(
    arguments: Mapping[str, Any],
) -> tuple[list[Algorithm], list[Callback], list[LoggerDestination]]:
    """Algorithms, callbacks and loggers: those of the user, and what the trainer's other ``arguments`` ask for."""
    algorithms: list[Algorithm] = as_list(arguments["algorithms"], Algorithm, argument="algorithms")
    callbacks: list[Callback] = as_list(arguments["callbacks"], Callback, argument="callbacks")
    loggers: list[LoggerDestination] = as_list(arguments["loggers"], LoggerDestination, argument="loggers")
    check_callbacks([*callbacks, *loggers])
    for algorithm in algorithms:
        check_restored(algorithm, Algorithm)
    loggers += _output_loggers(arguments)
    if (profiler := arguments["profiler"]) is not None:
        callbacks[:0] = _profiling(profiler)  # first: it sees what the other callbacks do
    if arguments["save_folder"] is not None and not _has_saver_for(arguments["save_folder"], callbacks):
        callbacks.append(_saver(arguments))  # last: it saves what the other callbacks have done
    if arguments["save_memory_interval"] is not None:
        callbacks.append(_memory_saver(arguments, callbacks))
    elif arguments["save_memory_replication"] is not None:
        raise ConfigError(
            f"save_memory_replication={arguments['save_memory_replication']!r} is for checkpoints in memory: give "
            "save_memory_interval as well."
        )
    if arguments["autoresume"] or callbacks:
        from composerlite.callbacks import PreemptionHandler

        if arguments["autoresume"] and not any(isinstance(callback, PreemptionHandler) for callback in callbacks):
            callbacks.append(PreemptionHandler())  # the run saves when it is preempted
        callbacks.sort(key=lambda one: isinstance(one, PreemptionHandler))  # it listens until the others have ended
    return algorithms, callbacks, loggers


def _profiling(profiler: Any) -> list[Callback]:
    """The callbacks of ``profiler``: itself, and those that get its traces."""
    from composerlite.profiler import Profiler, TraceHandler

    own = as_list(profiler, Profiler, argument="profiler")
    return [*own, *as_list([h for one in own for h in one.trace_handlers], TraceHandler, argument="trace_handlers")]


def _has_saver_for(folder: str | Path, callbacks: Sequence[Callback]) -> bool:
    """Return true if one of ``callbacks`` saves full checkpoints to ``folder`` already: one saver is enough there."""
    from composerlite.callbacks import CheckpointSaver

    path = str(folder).rstrip("/")
    savers = [callback for callback in callbacks if isinstance(callback, CheckpointSaver)]
    if any(not saver.weights_only and saver.options.names.folder.rstrip("/") == path for saver in savers):
        log.info("save_folder=%r: a CheckpointSaver among the callbacks saves there, as its own arguments say", path)
        return True
    return False


def _output_loggers(arguments: Mapping[str, Any]) -> list[LoggerDestination]:
    """The progress bar or the lines on the console that the trainer's ``arguments`` ask for."""
    from composerlite.loggers import ConsoleLogger, ProgressBarLogger  # imports rich

    given: dict[str, Any] = {"stream": arguments["console_stream"], "log_traces": arguments["log_traces"]}
    interval, to_console = arguments["console_log_interval"], arguments["log_to_console"]
    if arguments["progress_bar"]:
        return [ProgressBarLogger(log_to_console=to_console or None, console_log_interval=interval, **given)]
    return [ConsoleLogger(log_interval=interval, **given)] if to_console else []


@contextlib.contextmanager
def bars_stopped_by_errors(logger: Logger) -> Generator[None]:
    """Within it an error takes progress bars off the terminal before its traceback is printed."""
    try:
        yield
    except BaseException:
        from composerlite.loggers import ProgressBarLogger

        for destination in logger.destinations:
            if isinstance(destination, ProgressBarLogger):
                destination.stop()
        raise


def _saver(arguments: Mapping[str, Any]) -> CheckpointSaver:
    """The saver that the trainer's arguments ``save_…`` describe. They are its own, with that before their names."""
    from composerlite.callbacks import CheckpointSaver

    given = {
        _RENAMED.get(name, name.removeprefix("save_")): value
        for name, value in arguments.items()
        if name.startswith("save_") and name != "save_metrics" and not name.startswith("save_memory_")
    }
    return CheckpointSaver(latest_remote_file_name=None, **given)


def _memory_saver(arguments: Mapping[str, Any], callbacks: Sequence[Callback]) -> CheckpointSaver:
    """The saver that keeps the newest checkpoint in the memory of this machine, beside those among ``callbacks``.

    Raises:
        ConfigError: nobody would resume from it, or there is no such memory.
    """
    from composerlite.callbacks import CheckpointSaver

    interval, folder = arguments["save_memory_interval"], Path(arguments["save_memory_folder"])
    if not arguments["autoresume"] or not any(isinstance(callback, CheckpointSaver) for callback in callbacks):
        raise ConfigError(
            f"save_memory_interval={interval!r} is for runs that resume by themselves after a crash, beside "
            "checkpoints on a disk: give autoresume=True and a save_folder as well."
        )
    if not folder.is_dir():
        raise ConfigError(
            f"save_memory_folder={str(folder)!r}: there is no such folder. Name one that is kept in memory (tmpfs)."
        )
    same = ("ignore_keys", "staging_bytes", "async", "lazy")
    return CheckpointSaver(
        f"{folder}/composerlite-{os.getuid()}/{{run_name}}",
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


def parallelism(value: Mapping[str, Any] | ParallelismConfig | None) -> ParallelismConfig | None:
    """Return the parallelism of the model, checked against the number of ranks; ``None`` for a replica on each rank."""
    if value is None:
        return None
    from composerlite.core.parallelism import ensure_parallelism

    config = ensure_parallelism(value)
    if config is not None:
        config.degrees(dist.get_world_size())
    return config


def deepspeed_config(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return DeepSpeed's configuration by the trainer's ``arguments``; ``None`` where it does not train.

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
    from composerlite.trainer.ranks.zero_config import read_config

    return read_config(value)


def zero(state: State, spec: DataSpec | None) -> Parallel | None:
    """DeepSpeed with the model of ``state``, if that is to train it; ``spec`` are the data, if they are known."""
    if state.deepspeed_config is None:
        return None
    from composerlite.trainer.ranks.zero import ZeRO  # what takes long to import

    return ZeRO(state, state.deepspeed_config, _batch_size(spec))


def check_zero(state: State, spec: DataSpec) -> None:
    """Check that DeepSpeed's settings still fit the data ``spec``.

    Raises:
        ConfigError: a number of samples or the precision is another now.
    """
    if state.deepspeed_config is not None:
        from composerlite.trainer.ranks.zero_config import check_batches

        check_batches(state.deepspeed_config, state, _batch_size(spec))


def _batch_size(spec: DataSpec | None) -> int | None:
    """Samples per batch of one rank, where the loader says it."""
    size = None if spec is None else getattr(spec.dataloader, "batch_size", None)
    return size if isinstance(size, int) else None
