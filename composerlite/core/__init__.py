"""The vocabulary of training: time, events, state, and what takes part in it.

What needs torch is imported when it is first used: a :class:`Time` can be read without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.core.event import Event
from composerlite.core.interval import (
    AutoInterval,
    IntervalScheduler,
    SchedulePredicate,
    create_interval_scheduler,
    ends_with_this_batch,
    interval_of,
    is_never,
    is_of_one_rank,
    is_once,
    time_of,
)
from composerlite.core.parallelism import FSDPConfig, ParallelismConfig, TPConfig, ensure_parallelism
from composerlite.core.progress import Span, read_time, span
from composerlite.core.time import Time, TimeInput, Timestamp, TimeUnit, ensure_time
from composerlite.on_demand import lazy_names
from composerlite.types import JSON, Batch, CheckpointNews, CheckpointStep
from composerlite.types import Stateful as Serializable

if TYPE_CHECKING:
    from composerlite.core.algorithm import Algorithm
    from composerlite.core.callback import Callback, Logger, LoggerDestination
    from composerlite.core.data import (
        DataSpec,
        Evaluator,
        batch_get,
        batch_set,
        count_samples,
        count_tokens,
        ensure_data_spec,
        ensure_evaluator,
        move_to_device,
        split_batch,
    )
    from composerlite.core.engine import AlgorithmPass, Engine, Trace, Traces, algorithms_of, callbacks_of
    from composerlite.core.interruption import BatchAbandonedError, EvaluationAbandonedError, Interruption
    from composerlite.core.measured import (
        MeasuredMetrics,
        check_metric_exists,
        gives_one_value,
        metric_values,
        note_not_finite,
        note_unread_losses,
        read_losses,
    )
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
    from composerlite.core.state.loss_reading import LossReading
    from composerlite.core.state.model_state import frozen_parameters, set_frozen_parameters
    from composerlite.core.state.optimizer_state import clean_name, lost_parameters
    from composerlite.core.state.run_state import RunState, by_class
    from composerlite.core.state.state import State

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
    "LossReading",
    "MeasuredMetrics",
    "ParallelismConfig",
    "Precision",
    "RunState",
    "SchedulePredicate",
    "Serializable",
    "Span",
    "State",
    "TPConfig",
    "Time",
    "TimeInput",
    "TimeUnit",
    "Timestamp",
    "Trace",
    "Traces",
    "algorithms_of",
    "batch_get",
    "batch_set",
    "by_class",
    "callbacks_of",
    "check_metric_exists",
    "clean_name",
    "configure_deterministic_mode",
    "count_samples",
    "count_tokens",
    "create_interval_scheduler",
    "ends_with_this_batch",
    "ensure_data_spec",
    "ensure_evaluator",
    "ensure_parallelism",
    "ensure_precision",
    "ensure_time",
    "frozen_parameters",
    "get_precision_context",
    "get_random_seed",
    "gives_one_value",
    "interval_of",
    "is_never",
    "is_of_one_rank",
    "is_once",
    "lost_parameters",
    "metric_values",
    "move_to_device",
    "note_not_finite",
    "note_unread_losses",
    "read_losses",
    "read_time",
    "seed_all",
    "seed_context",
    "seed_of_rank",
    "seed_torch",
    "set_frozen_parameters",
    "span",
    "split_batch",
    "time_of",
]

__getattr__, __dir__ = lazy_names(__name__)
