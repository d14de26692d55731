"""The vocabulary of training: time, events, state, and what takes part in it.

The names below are imported when they are first used: a :class:`Time` can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composerlite.core.algorithm import Algorithm
    from composerlite.core.callback import Callback, Logger, LoggerDestination
    from composerlite.core.data import (
        DataSpec,
        Evaluator,
        count_samples,
        count_tokens,
        ensure_data_spec,
        ensure_evaluator,
        move_to_device,
        split_batch,
    )
    from composerlite.core.engine import AlgorithmPass, Engine, Trace, Traces, algorithms_of, callbacks_of
    from composerlite.core.event import Event
    from composerlite.core.interruption import BatchAbandonedError, EvaluationAbandonedError, Interruption
    from composerlite.core.interval import AutoInterval, IntervalScheduler, SchedulePredicate, create_interval_scheduler
    from composerlite.core.measured import MeasuredMetrics, check_metric_exists, gives_one_value, metric_values
    from composerlite.core.numerics import (
        MAX_SEED,
        Precision,
        configure_deterministic_mode,
        ensure_precision,
        get_precision_context,
        get_random_seed,
        seed_all,
        seed_context,
        seed_of_rank,
        seed_torch,
    )
    from composerlite.core.parallelism import FSDPConfig, ParallelismConfig, TPConfig, ensure_parallelism
    from composerlite.core.state.optimizer_state import clean_name, lost_parameters
    from composerlite.core.state.run_state import RunState
    from composerlite.core.state.state import State
    from composerlite.core.time import Time, TimeInput, Timestamp, TimeUnit, ensure_time
    from composerlite.types import JSON, Batch, CheckpointNews, CheckpointStep
    from composerlite.types import Stateful as Serializable

__all__ = [
    "JSON",
    "MAX_SEED",
    "Algorithm",
    "AlgorithmPass",
    "AutoInterval",
    "Batch",
    "BatchAbandonedError",
    "Callback",
    "CheckpointNews",
    "CheckpointStep",
    "DataSpec",
    "Engine",
    "EvaluationAbandonedError",
    "Evaluator",
    "Event",
    "FSDPConfig",
    "Interruption",
    "IntervalScheduler",
    "Logger",
    "LoggerDestination",
    "MeasuredMetrics",
    "ParallelismConfig",
    "Precision",
    "RunState",
    "SchedulePredicate",
    "Serializable",
    "State",
    "TPConfig",
    "Time",
    "TimeInput",
    "TimeUnit",
    "Timestamp",
    "Trace",
    "Traces",
    "algorithms_of",
    "callbacks_of",
    "check_metric_exists",
    "clean_name",
    "configure_deterministic_mode",
    "count_samples",
    "count_tokens",
    "create_interval_scheduler",
    "ensure_data_spec",
    "ensure_evaluator",
    "ensure_parallelism",
    "ensure_precision",
    "ensure_time",
    "get_precision_context",
    "get_random_seed",
    "gives_one_value",
    "lost_parameters",
    "metric_values",
    "move_to_device",
    "seed_all",
    "seed_context",
    "seed_of_rank",
    "seed_torch",
    "split_batch",
]

_HOMES = {
    "composerlite.core.algorithm": ("Algorithm",),
    "composerlite.core.callback": ("Callback", "Logger", "LoggerDestination"),
    "composerlite.core.data": (
        "DataSpec",
        "Evaluator",
        "count_samples",
        "count_tokens",
        "ensure_data_spec",
        "ensure_evaluator",
        "move_to_device",
        "split_batch",
    ),
    "composerlite.core.engine": ("AlgorithmPass", "Engine", "Trace", "Traces", "algorithms_of", "callbacks_of"),
    "composerlite.core.event": ("Event",),
    "composerlite.core.interruption": ("BatchAbandonedError", "EvaluationAbandonedError", "Interruption"),
    "composerlite.core.interval": (
        "AutoInterval",
        "IntervalScheduler",
        "SchedulePredicate",
        "create_interval_scheduler",
    ),
    "composerlite.core.measured": ("MeasuredMetrics", "check_metric_exists", "gives_one_value", "metric_values"),
    "composerlite.core.state.optimizer_state": ("clean_name", "lost_parameters"),
    "composerlite.core.parallelism": ("FSDPConfig", "ParallelismConfig", "TPConfig", "ensure_parallelism"),
    "composerlite.core.numerics": (
        "MAX_SEED",
        "Precision",
        "configure_deterministic_mode",
        "ensure_precision",
        "get_precision_context",
        "get_random_seed",
        "seed_all",
        "seed_context",
        "seed_of_rank",
        "seed_torch",
    ),
    "composerlite.core.state.run_state": ("RunState",),
    "composerlite.core.state.state": ("State",),
    "composerlite.core.time": ("Time", "TimeInput", "TimeUnit", "Timestamp", "ensure_time"),
    "composerlite.types": ("Batch", "CheckpointNews", "CheckpointStep", "JSON"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "Serializable":
        return importlib.import_module("composerlite.types").Stateful
    if name not in _HOME_OF:
        raise AttributeError(f"module 'composerlite.core' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
