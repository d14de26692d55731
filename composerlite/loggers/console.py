"""ConsoleLogger: metrics as lines of text."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TypeAlias

from composerlite import dist
from composerlite.core import (
    Event,
    Logger,
    LoggerDestination,
    SchedulePredicate,
    State,
    TimeInput,
    Timestamp,
    TimeUnit,
    create_interval_scheduler,
    span,
)
from composerlite.errors import ConfigError, checked_arguments, did_you_mean
from composerlite.loggers.values import clock, fitting, shown, to_json

_LONGEST_LINE = 120
LONGEST_SILENCE_SECONDS = 30.0
_FOR_OTHER_LOGGERS = ("time/", "checkpoint/", "throughput/", "wall_clock/", "lr-")
"""Prefixes of metrics that are on no line. A line has its own epoch, batch, learning rate, speed and time left."""


class TextStream(Protocol):
    """A text file, or another object with these two methods."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


StreamInput: TypeAlias = "TextStream | str"
"""A stream, or ``'stderr'`` or ``'stdout'``."""


class ConsoleLogger(LoggerDestination):
    """Writes a line of at most 120 characters per interval: progress, loss and speed of training.

    A line has epoch and batch, the loss, the learning rate, batches per second since the last line and the time left.
    Metrics of training and other values since the last line follow as far as they fit: ``+3`` counts the values left
    out. Measurements of the run itself (``time/…``, ``checkpoint/…``, ``throughput/…``) go to other loggers only.

    Each evaluation has a line with all its metrics. An epoch, or training, ends with a line if metrics were logged
    since the last line. A long evaluation writes a line every 30 seconds. Only global rank 0 writes.

    Args:
        log_interval: time between two lines; an int counts epochs. A function ``(state, event) -> bool`` is called at
            each ``BATCH_END``, ``EPOCH_END`` and ``ITERATION_END``.
        stream: ``'stderr'``, ``'stdout'`` or an open text file. The logger does not close the file.
        log_traces: also write the algorithms that ran.

    Raises:
        ConfigError: the interval is invalid, or the stream is unknown.

    Example:
        .. code-block:: python

            Trainer(model=model, loggers=ConsoleLogger("50ba"), progress_bar=False)
    """

    @checked_arguments
    def __init__(
        self,
        log_interval: TimeInput | SchedulePredicate = "1ba",
        stream: StreamInput = "stderr",
        log_traces: bool = False,
    ) -> None:
        if callable(log_interval):
            self._is_due = log_interval
        else:  # the end of training is no extra moment: fit_end() writes the rest
            self._is_due = create_interval_scheduler(log_interval, False, checkpoint_events=False)
        named: dict[str, TextStream] = {"stderr": sys.stderr, "stdout": sys.stdout}
        if isinstance(stream, str):
            if stream not in named:
                raise ConfigError(
                    f"stream={stream!r}: expected an open text file or a name.{did_you_mean(stream, named)}"
                )
            stream = named[stream]
        self._stream = stream
        self._is_silent = dist.get_global_rank() != 0
        self._with_traces = log_traces
        self._unwritten: dict[str, Any] = {}
        self._written_at = time.monotonic()
        self._last: Timestamp | None = None
        self._fit_began: tuple[float, float] | None = None

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._unwritten |= {name: metrics[name] for name in metrics if not name.startswith(_FOR_OTHER_LOGGERS)}

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

    def fit_start(self, state: State, logger: Logger) -> None:
        self._fit_began = time.monotonic(), _fraction_done(state)
        self._last = state.timestamp

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._is_due(state, Event.BATCH_END):
            self._write_train(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self._is_due(state, Event.EPOCH_END) or any(name.startswith("metrics/") for name in self._unwritten):
            self._write_train(state)

    def iteration_end(self, state: State, logger: Logger) -> None:
        if self._is_due(state, Event.ITERATION_END):
            self._write_train(state)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._written_at = time.monotonic()

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if time.monotonic() >= self._written_at + LONGEST_SILENCE_SECONDS:
            length = "" if state.dataloader_len is None else f"/{int(state.dataloader_len)}"
            done = f"evaluated {int(state.eval_timestamp.batch)}{length} batches"
            self._write(f"[{state.dataloader_label}] batch {int(state.timestamp.batch)}: {done}")

    def eval_end(self, state: State, logger: Logger) -> None:
        prefix = f"metrics/{state.dataloader_label}/"
        measured = {name: value for name, value in self._unwritten.items() if name.startswith(prefix)}
        self._unwritten = {name: value for name, value in self._unwritten.items() if name not in measured}
        if measured:
            values = ", ".join(shown(measured))
            self._write(f"[{state.dataloader_label}] batch {int(state.timestamp.batch)}: {values}")

    def fit_end(self, state: State, logger: Logger) -> None:
        self._write_train(state)

    def _write_train(self, state: State) -> None:
        if not self._unwritten:
            return
        now, end = state.timestamp, state.max_duration
        values = shown(self._unwritten)
        if self._last is None or now.batch != self._last.batch:  # else the last line had the same rate and speed
            losses = sum(name.startswith("loss/") for name in self._unwritten)
            values[losses:losses] = [*learning_rate(state), *self._pace(state)]
        self._last = now
        self._unwritten = {}
        epoch = int(now.epoch) + (1 if int(now.batch_in_epoch) > 0 else 0)
        whole = None if end is None else span(end, state)
        batches = f"/{int(whole.value)}" if whole is not None and whole.tick is TimeUnit.BATCH else ""
        head = f"[train] epoch {epoch}{epochs_in_all(state)}, batch {int(now.batch)}{batches}: "
        if values:
            self._write(head + fitting(values, _LONGEST_LINE - len(head)))

    def _pace(self, state: State) -> list[str]:
        """Return the speed since the last line and the time left, as far as they are known."""
        if self._last is None or self._fit_began is None:
            return []
        seconds = (state.timestamp.total_wct - self._last.total_wct).total_seconds()
        batches = int(state.timestamp.batch) - int(self._last.batch)
        parts = [f"{batches / seconds:.4g} batches/s"] if seconds > 0 and batches > 0 else []
        (began, before), done = self._fit_began, _fraction_done(state)
        if before < done < 1.0:
            elapsed = time.monotonic() - began  # includes evaluations and saves: the rest of training has some, too
            parts.append(f"{clock(elapsed / (done - before) * (1.0 - done))} left")
        return parts

    def _write(self, line: str) -> None:
        self._written_at = time.monotonic()
        if not self._is_silent:
            self._stream.write(line + "\n")
            self._stream.flush()


def _fraction_done(state: State) -> float:
    return 0.0 if state.max_duration is None else span(state.max_duration, state).fraction


def epochs_in_all(state: State) -> str:
    """Return ``'/10'`` if training ends after ten epochs, and ``''`` if the end is given in another unit."""
    end = state.max_duration
    return f"/{end.value}" if end is not None and end.unit is TimeUnit.EPOCH else ""


def learning_rate(state: State) -> list[str]:
    """Return a text with the different learning rates of the parameter groups; empty without an optimizer."""
    rates = [f"{float(group['lr']):.4g}" for optimizer in state.optimizers for group in optimizer.param_groups]
    different = list(dict.fromkeys(rates))
    return [f"lr {'/'.join(different[:3])}{'/…' if len(different) > 3 else ''}"] if different else []
