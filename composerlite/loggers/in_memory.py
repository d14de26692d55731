"""InMemoryLogger: everything that is logged, in dicts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

import numpy as np
import numpy.typing as npt

from composerlite.core import Logger, LoggerDestination, State, Timestamp
from composerlite.errors import ConfigError, checked_arguments, did_you_mean
from composerlite.loggers.values import plain


@final
class InMemoryLogger(LoggerDestination):
    """Keeps everything that is logged in this process, for notebooks and tests. Nothing of it is saved.

    Args:
        log_traces: also keep which algorithms ran.

    Attributes:
        data: for each metric its values with the timestamp at which each was logged, oldest first. Tensors of one
            element are kept as numbers.
        most_recent_values: the last value of each metric.
        most_recent_timestamps: when that was logged.
        hyperparameters: settings of the run by name.
        tables: for each table name ``(columns, rows)`` of the last one logged.
        traces: for each ``'<algorithm>/<event>'`` what was logged, with its timestamp.
    """

    @checked_arguments
    def __init__(self, log_traces: bool = False) -> None:
        self._with_traces = log_traces
        self._state: State | None = None
        self.data: dict[str, list[tuple[Timestamp, Any]]] = {}
        self.most_recent_values: dict[str, Any] = {}
        self.most_recent_timestamps: dict[str, Timestamp] = {}
        self.hyperparameters: dict[str, Any] = {}
        self.tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
        self.traces: dict[str, list[tuple[Timestamp, Any]]] = {}

    def init(self, state: State, logger: Logger) -> None:
        self._state = state

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        timestamp = self._now(step)
        for name, value in metrics.items():
            value = plain(value)
            self.data.setdefault(name, []).append((timestamp, value))
            self.most_recent_values[name] = value
            self.most_recent_timestamps[name] = timestamp

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.hyperparameters.update(hyperparameters)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self.tables[name] = (list(columns), [list(row) for row in rows])

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self._with_traces:
            for name, trace in traces.items():
                self.traces.setdefault(name, []).append((self._now(None), trace))

    def get_timeseries(self, metric: str) -> dict[str, npt.NDArray[Any]]:
        """The values of ``metric`` and when each was logged, as arrays of equal length.

        The keys are ``metric`` itself and the fields of :class:`Timestamp` (``'batch'``, ``'epoch'``, ``'total_wct'``
        in seconds, …).

        Raises:
            ConfigError: nothing was logged under that name.
        """
        if metric not in self.data:
            raise ConfigError(f"metric {metric!r} was not logged.{did_you_mean(metric, self.data)}")
        columns: dict[str, list[Any]] = {metric: [value for _, value in self.data[metric]]}
        for timestamp, _ in self.data[metric]:
            for field, value in timestamp.state_dict().items():
                number = value.total_seconds() if isinstance(value, timedelta) else value
                columns.setdefault(field, []).append(number)
        return {name: np.array(column) for name, column in columns.items()}

    def _now(self, step: int | None) -> Timestamp:
        """The timestamp of the run, at batch ``step`` if that was given."""
        now = Timestamp() if self._state is None else self._state.timestamp
        return now if step is None or now.batch == step else now.copy(batch=step)
