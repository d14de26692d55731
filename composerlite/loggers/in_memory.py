"""InMemoryLogger: logged values in dicts."""

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
    """Keeps logged values in dicts of this process, for notebooks and tests. Checkpoints do not contain the values.

    Args:
        log_traces: also keep the algorithms that ran.

    Attributes:
        data: values of each metric with their timestamps, oldest first. Tensors of one element become numbers.
        most_recent_values: last value of each metric.
        most_recent_timestamps: timestamp of the last value of each metric.
        hyperparameters: settings of the run by name.
        tables: ``(columns, rows)`` of the last table of each name.
        traces: values of each ``'<algorithm>/<event>'`` with their timestamps.

    Example:
        .. code-block:: python

            memory = InMemoryLogger()
            Trainer(model=model, loggers=memory, train_dataloader=loader, max_duration="1ep").fit()
            print(memory.most_recent_values["loss/train/total"])
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
        """Return the values of a metric and their times, as arrays of equal length.

        Args:
            metric: name of the metric.

        Returns:
            The values under the name of the metric, and the fields of :class:`Timestamp` (``'batch'``, ``'epoch'``,
            ``'total_wct'`` in seconds, …).

        Raises:
            ConfigError: the metric was not logged.
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
        """Return the timestamp of the run, at batch ``step`` if given."""
        now = Timestamp() if self._state is None else self._state.timestamp
        return now if step is None or now.batch == step else now.copy(batch=step)
