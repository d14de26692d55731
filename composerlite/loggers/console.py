"""ConsoleLogger: what is logged, as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from composerlite.core import (
    Event,
    LoggerDestination,
    SchedulePredicate,
    TimeInput,
    TimeUnit,
    create_interval_scheduler,
)
from composerlite.errors import checked_arguments
from composerlite.loggers.stream import StreamInput, open_stream
from composerlite.loggers.values import to_json, to_text

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["ConsoleLogger"]


@final
class ConsoleLogger(LoggerDestination):
    """Writes one line per interval with the latest value of every metric logged since the last line.

    Besides, there is a line for each evaluation, and one at the end of an epoch (or of training) where metrics were
    logged that no line has shown yet. Names under ``time/`` are left out, since each line begins with epoch and batch.
    Only global rank 0 writes.

    Args:
        log_interval: how often; an int counts epochs. A function ``(state, event) -> bool`` is asked at each
            ``BATCH_END``, ``EPOCH_END`` and ``ITERATION_END``.
        stream: where to: ``'stderr'``, ``'stdout'`` or an open text file, which is not closed.
        log_traces: also write which algorithms ran.

    Raises:
        ConfigError: an interval that cannot be read, or an unknown stream.
    """

    @checked_arguments
    def __init__(
        self,
        log_interval: TimeInput | SchedulePredicate = "1ba",
        stream: StreamInput = "stderr",
        log_traces: bool = False,
    ) -> None:
        # Without the end of training as an extra moment: what is left then is written at FIT_END, once.
        if not callable(log_interval):
            self._is_due = create_interval_scheduler(log_interval, False, checkpoint_events=False)
        else:
            self._is_due = log_interval
        self._stream = open_stream(stream)
        self._with_traces = log_traces
        self._unwritten: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            if not name.startswith("time/"):
                self._unwritten[name] = value

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._write(f"[config] {to_json(hyperparameters)}")

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self._write(f"[table] {name}")
        for row in (columns, *rows):
            self._write("    " + " | ".join(str(cell) for cell in row))

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self._with_traces:
            self._write(f"[trace] {to_json(traces)}")

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._is_due(state, Event.BATCH_END):
            self._write_train(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self._is_due(state, Event.EPOCH_END) or any(name.startswith("metrics/") for name in self._unwritten):
            self._write_train(state)

    def iteration_end(self, state: State, logger: Logger) -> None:
        if self._is_due(state, Event.ITERATION_END):
            self._write_train(state)

    def eval_end(self, state: State, logger: Logger) -> None:
        prefix = f"metrics/{state.dataloader_label}/"
        found = {name: value for name, value in self._unwritten.items() if name.startswith(prefix)}
        for name in found:
            del self._unwritten[name]
        if found:
            self._write(f"[{state.dataloader_label}] batch {int(state.timestamp.batch)}: {to_text(found)}")

    def fit_end(self, state: State, logger: Logger) -> None:
        self._write_train(state)

    def _write_train(self, state: State) -> None:
        if self._unwritten:
            end, now = state.max_duration, state.timestamp
            batch = int(now.batch)
            epoch = int(now.epoch) + (1 if int(now.batch_in_epoch) > 0 else 0)  # that of the last batch, from 1
            epochs = f"/{end.value}" if end is not None and end.unit is TimeUnit.EPOCH else ""
            batches = f"/{end.value}" if end is not None and end.unit is TimeUnit.BATCH else ""
            self._write(f"[train] epoch {epoch}{epochs}, batch {batch}{batches}: {to_text(self._unwritten)}")
            self._unwritten.clear()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
