"""State, events, time, data and the base classes of algorithms, callbacks and loggers.

Modules that need torch are imported on first use: :class:`Time` works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.core.event import Event
from composerlite.core.interval import SchedulePredicate, create_interval_scheduler
from composerlite.core.parallelism import ParallelismConfig
from composerlite.core.progress import read_time, span
from composerlite.core.time import Time, TimeInput, Timestamp, TimeUnit, ensure_time
from composerlite.on_demand import lazy_names
from composerlite.types import JSON, Batch
from composerlite.types import Stateful as Serializable

if TYPE_CHECKING:
    from composerlite.core.algorithm import Algorithm
    from composerlite.core.callback import Callback, Logger, LoggerDestination
    from composerlite.core.data import DataSpec, Evaluator, ensure_data_spec, ensure_evaluator, move_to_device
    from composerlite.core.engine import AlgorithmPass, Engine, Trace, algorithms_of
    from composerlite.core.measured import metric_values
    from composerlite.core.numerics import Precision, get_precision_context, seed_all
    from composerlite.core.state.optimizer_state import clean_name
    from composerlite.core.state.state import State

__all__ = [
    "JSON",
    "Algorithm",
    "AlgorithmPass",
    "Batch",
    "Callback",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "Logger",
    "LoggerDestination",
    "ParallelismConfig",
    "Precision",
    "SchedulePredicate",
    "Serializable",
    "State",
    "Time",
    "TimeInput",
    "TimeUnit",
    "Timestamp",
    "Trace",
    "algorithms_of",
    "clean_name",
    "create_interval_scheduler",
    "ensure_data_spec",
    "ensure_evaluator",
    "ensure_time",
    "get_precision_context",
    "metric_values",
    "move_to_device",
    "read_time",
    "seed_all",
    "span",
]

__getattr__, __dir__ = lazy_names(__name__)
