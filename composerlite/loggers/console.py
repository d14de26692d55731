"""ConsoleLogger: metrics as lines of text, and the streams that people read."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Protocol, TypeAlias, final

from composerlite import dist
from composerlite.core import (
    Event,
    Logger,
    LoggerDestination,
    SchedulePredicate,
    State,
    TimeInput,
    TimeUnit,
    create_interval_scheduler,
    span,
)
from composerlite.errors import ConfigError, checked_arguments, did_you_mean
from composerlite.loggers.values import clock, fitting, lines_of, out_of, shown, speed, to_json

_LONGEST_LINE = 120
_LONGEST_SILENCE_SECONDS = 30.0
_ELSEWHERE = ("time/", "checkpoint/", "throughput/", "wall_clock/", "lr-")
"""Beginnings of names that no line shows: each line has epoch and batch, learning rate, speed and time left itself."""


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
            raise ConfigError(f"stream={stream!r}: expected an open text file or a name.{did_you_mean(stream, named)}")
        stream = named[stream]
    return stream if dist.get_global_rank() == 0 else _Silence()


def is_terminal(stream: TextStream) -> bool:
    """Return true if ``stream`` is a terminal that can redraw a line."""
    isatty = getattr(stream, "isatty", None)  # a stream of one's own may have write and flush only
    return isatty is not None and isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


@final
class EpochsAndSeconds:
    """Interval of lines that nobody has asked for: the end of each epoch, and 30 seconds after the last line."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _LONGEST_SILENCE_SECONDS

    def __call__(self, state: State, event: Event) -> bool:
        if event is not Event.EPOCH_END and time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _LONGEST_SILENCE_SECONDS
        return event is not Event.ITERATION_END


@final
class ConsoleLogger(LoggerDestination):
    """Writes one line of at most 120 characters per interval: how far training is, its loss and its speed.

    A line has epoch and batch, the loss, the learning rate, batches per second since the last line and the time left;
    then the metrics of training and whatever else was logged since the last line, as far as it fits: ``+3`` says that
    three more were logged. What checkpoints cost (``checkpoint/…``) and other measurements of the run itself are for
    the other loggers.

    Besides, there is a line for each evaluation, with all its metrics, and one at the end of an epoch (or of training)
    where metrics were logged that no line has shown yet. An evaluation that takes long has a line every 30 seconds.
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
        self._pace: _Pace | None = None
        self._last_batch = -1
        self._silent_since = 0.0

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            if not name.startswith(_ELSEWHERE):
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

    def fit_start(self, state: State, logger: Logger) -> None:
        self._pace = _Pace(state)

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
        self._silent_since = time.monotonic()

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if time.monotonic() >= self._silent_since + _LONGEST_SILENCE_SECONDS:
            length = "" if state.dataloader_len is None else f"/{int(state.dataloader_len)}"
            done = f"evaluated {int(state.eval_timestamp.batch)}{length} batches"
            self._write(f"[{state.dataloader_label}] batch {int(state.timestamp.batch)}: {done}")

    def eval_end(self, state: State, logger: Logger) -> None:
        prefix = f"metrics/{state.dataloader_label}/"
        found = {name: value for name, value in self._unwritten.items() if name.startswith(prefix)}
        for name in found:
            del self._unwritten[name]
        head = f"[{state.dataloader_label}] batch {int(state.timestamp.batch)}: "
        for line in lines_of(head, shown(found), _LONGEST_LINE):  # its values are what it was run for
            self._write(line)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._write_train(state)

    def _write_train(self, state: State) -> None:
        if not self._unwritten:
            return
        head, values = f"[train] {_place(state)}: ", shown(self._unwritten)
        batch = int(state.timestamp.batch)
        if batch != self._last_batch:  # else what comes after the last line of training, and they have not changed
            losses = sum(name.startswith("loss/") for name in self._unwritten)
            values[losses:losses] = [*learning_rate(state), *([] if self._pace is None else self._pace.read(state))]
        self._last_batch = batch
        self._unwritten.clear()
        if values:
            self._write(head + fitting(values, _LONGEST_LINE - len(head)))

    def _write(self, line: str) -> None:
        self._silent_since = time.monotonic()
        self._stream.write(line + "\n")
        self._stream.flush()


@final
class _Pace:
    """Speed of training since the last line, and the time left, measured since ``fit`` began."""

    def __init__(self, state: State) -> None:
        self._began, self._done = time.monotonic(), _fraction_done(state)
        self._last = state.timestamp

    def read(self, state: State) -> list[str]:
        """Both as texts, as far as they are known. What comes next is measured from here."""
        last, now = self._last, state.timestamp
        self._last = now
        seconds = (now.total_wct - last.total_wct).total_seconds()
        batches = int(now.batch) - int(last.batch)
        parts = [f"{speed(batches, seconds)} batches/s"] if seconds > 0 and batches > 0 else []
        done = _fraction_done(state)
        if self._done < done < 1.0:
            elapsed = time.monotonic() - self._began  # evaluations and saves take their part of what is left, too
            parts.append(f"{clock(elapsed / (done - self._done) * (1.0 - done))} left")
        return parts


def _fraction_done(state: State) -> float:
    return 0.0 if state.max_duration is None else span(state.max_duration, state).fraction


def _place(state: State) -> str:
    """Epoch and batch of training, each of how many where that is known."""
    end, now = state.max_duration, state.timestamp
    epoch = int(now.epoch) + (1 if int(now.batch_in_epoch) > 0 else 0)  # that of the last batch, from 1
    whole = None if end is None else span(end, state)
    batches = f"/{int(whole.value)}" if whole is not None and whole.tick is TimeUnit.BATCH else ""
    return f"epoch {epoch}{out_of(end, TimeUnit.EPOCH)}, batch {int(now.batch)}{batches}"


def learning_rate(state: State) -> list[str]:
    """The learning rate of each group, where they differ, as one text; nothing without an optimizer."""
    rates = [f"{float(group['lr']):.4g}" for optimizer in state.optimizers for group in optimizer.param_groups]
    different = list(dict.fromkeys(rates))
    return [f"lr {'/'.join(different[:3])}{'/…' if len(different) > 3 else ''}"] if different else []
