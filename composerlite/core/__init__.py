"""The vocabulary of training: time, events, state, and what takes part in it.

What only runs of several ranks are told is imported when it is used.
"""

from typing import TYPE_CHECKING, Any

from composerlite.core.algorithm import Algorithm
from composerlite.core.auto_interval import AutoInterval
from composerlite.core.callback import Callback
from composerlite.core.data import DataSpec, count_samples, count_tokens, ensure_data_spec, move_to_device, split_batch
from composerlite.core.engine import AlgorithmPass, Engine, Trace, Traces
from composerlite.core.evaluator import Evaluator, ensure_evaluator
from composerlite.core.event import Event
from composerlite.core.interruption import BatchAbandonedError, EvaluationAbandonedError, Interruption
from composerlite.core.interval import IntervalScheduler, SchedulePredicate, create_interval_scheduler
from composerlite.core.logger import Logger, LoggerDestination
from composerlite.core.measured import MeasuredMetrics, check_metric_exists, gives_one_value, metric_values
from composerlite.core.optimizer_state import clean_name
from composerlite.core.precision import Precision, ensure_precision, get_precision_context
from composerlite.core.reproducibility import (
    MAX_SEED,
    configure_deterministic_mode,
    get_random_seed,
    seed_all,
    seed_context,
    seed_torch,
)
from composerlite.core.state import State
from composerlite.core.time import Time, TimeInput, Timestamp, TimeUnit, ensure_time
from composerlite.types import JSON, Batch
from composerlite.types import Stateful as Serializable

if TYPE_CHECKING:
    from composerlite.core.parallelism import FSDPConfig, ParallelismConfig, TPConfig, ensure_parallelism

__all__ = [
    "JSON",
    "MAX_SEED",
    "Algorithm",
    "AlgorithmPass",
    "AutoInterval",
    "Batch",
    "BatchAbandonedError",
    "Callback",
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
    "metric_values",
    "move_to_device",
    "seed_all",
    "seed_context",
    "seed_torch",
    "split_batch",
]

_OF_SEVERAL_RANKS = ("FSDPConfig", "ParallelismConfig", "TPConfig", "ensure_parallelism")


def __getattr__(name: str) -> Any:
    if name not in _OF_SEVERAL_RANKS:
        raise AttributeError(f"module 'composerlite.core' has no attribute {name!r}")
    from composerlite.core import parallelism

    return getattr(parallelism, name)


def __dir__() -> list[str]:
    return __all__
