"""ConsoleLogger: metrics as lines of text, and the streams that people read."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

from composerlite import dist
from composerlite.core import (
    Event,
    LoggerDestination,
    SchedulePredicate,
    TimeInput,
    TimeUnit,
    create_interval_scheduler,
)
from composerlite.errors import ConfigError, checked_arguments, did_you_mean
from composerlite.loggers.values import out_of, to_json, to_text

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["ConsoleLogger", "StreamInput", "TextStream", "is_terminal", "open_stream"]


class TextStream(Protocol):
    """Something to write text to: any text file will do."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


StreamInput: TypeAlias = "TextStream | str"
"""A stream, or ``'stderr'`` or ``'stdout'``."""


@final
class _Silence:
    """The stream of the ranks that have nothing to say."""

    def write(self, text: str, /) -> object:
        return len(text)

    def flush(self) -> object:
        return None


def open_stream(stream: StreamInput) -> TextStream:
    """``stream`` on global rank 0; a stream that drops everything on the other ranks, so that lines come once.

    Raises:
        ConfigError: a name other than ``'stderr'`` and ``'stdout'``.
    """
    named: dict[str, TextStream] = {"stderr": sys.stderr, "stdout": sys.stdout}
    if isinstance(stream, str):
        if stream not in named:
            raise ConfigError(f"stream={stream!r}: want an open text file or a name.{did_you_mean(stream, named)}")
        stream = named[stream]
    return stream if dist.get_global_rank() == 0 else _Silence()


def is_terminal(stream: TextStream) -> bool:
    """Tell whether ``stream`` is a terminal that can redraw a line."""
    isatty = getattr(stream, "isatty", None)  # a stream of one's own may have write and flush only
    return isatty is not None and isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


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
            where = f"epoch {epoch}{out_of(end, TimeUnit.EPOCH)}, batch {batch}{out_of(end, TimeUnit.BATCH)}"
            self._write(f"[train] {where}: {to_text(self._unwritten)}")
            self._unwritten.clear()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
