"""ProgressBarLogger: progress of training as bars on a terminal or in a notebook, elsewhere as lines."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Callable
from typing import IO, Any, cast, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from composerlite.core import Event, Logger, SchedulePredicate, State, TimeInput
from composerlite.errors import checked_arguments
from composerlite.loggers.console import (
    LONGEST_SILENCE_SECONDS,
    ConsoleLogger,
    StreamInput,
    epochs_in_all,
    learning_rate,
)
from composerlite.loggers.values import clock, shown

_SECONDS_BETWEEN_DRAWS = 0.1


@final
class ProgressBarLogger(ConsoleLogger):
    """Shows the progress of training: bars on a terminal and in a notebook, lines elsewhere.

    Each epoch, evaluation and prediction has a bar with speed, elapsed time, time left and values. The training thread
    draws the bars, at most ten times a second. Lines are written at the end of each epoch and evaluation, and after 30
    seconds without a line. Only global rank 0 shows anything.

    Args:
        progress_bar: draw bars if ``stream`` is a terminal, or in a notebook with ipywidgets.
        log_to_console: ``True`` writes a line every ``console_log_interval``, also above bars; ``False`` writes none;
            ``None`` writes lines if there are no bars.
        console_log_interval: time between two lines with ``log_to_console=True``; see :class:`ConsoleLogger`.
        stream: ``'stderr'``, ``'stdout'`` or an open text file. The logger does not close the file.
        log_traces: also write lines about the algorithms that ran.

    Raises:
        ConfigError: the interval is invalid, or the stream is unknown.

    Example:
        .. code-block:: python

            Trainer(model=model, loggers=ProgressBarLogger(stream="stdout"), progress_bar=False)
    """

    @checked_arguments
    def __init__(
        self,
        progress_bar: bool = True,
        log_to_console: bool | None = None,
        console_log_interval: TimeInput | SchedulePredicate = "1ba",
        stream: StreamInput = "stderr",
        log_traces: bool = False,
    ) -> None:
        interval = console_log_interval if log_to_console else self._is_due_by_default
        super().__init__(interval, stream, log_traces)
        self._console = Console(file=cast("IO[str]", self._stream))
        can_draw = self._console.is_interactive or (
            self._console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        )
        self._draws_bars = progress_bar and can_draw and not self._is_silent
        self._writes_lines = not self._draws_bars if log_to_console is None else log_to_console
        self._progress: Progress | None = None  # while there are bars
        self._bars: list[TaskID] = []  # an evaluation within an epoch is behind the epoch; the last bar advances
        self._in_epoch = False
        self._next_draw = 0.0
        self._latest: dict[str, Any] = {}
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._latest |= {name: metrics[name] for name in metrics if name.startswith(("loss/", "metrics/"))}
        super().log_metrics(metrics, step)

    def fit_start(self, state: State, logger: Logger) -> None:
        self.stop()  # bars of an earlier fit that was interrupted
        super().fit_start(state, logger)

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._open_epoch(state, completed=0)

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._in_epoch:  # resumed in the middle of an epoch
            self._open_epoch(state, completed=int(state.timestamp.batch_in_epoch) - 1)
        self._advance(lambda: [*self._values("loss/"), *learning_rate(state)])
        super().batch_end(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._finish_epoch(state)
        super().epoch_end(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._finish_epoch(state)
        super().fit_end(state, logger)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._open(str(state.dataloader_label), state)
        super().eval_start(state, logger)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self._advance(list)
        super().eval_batch_end(state, logger)

    def eval_end(self, state: State, logger: Logger) -> None:
        self._finish(self._values(f"metrics/{state.dataloader_label}/"))
        super().eval_end(state, logger)

    def predict_start(self, state: State, logger: Logger) -> None:
        self._open("predict", state)

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        self._advance(list)

    def predict_end(self, state: State, logger: Logger) -> None:
        self._finish([])

    def close(self, state: State, logger: Logger) -> None:
        self.stop()

    def stop(self) -> None:
        """Print unfinished bars for the last time and restore the terminal. Does nothing if there are no bars."""
        self._in_epoch = False
        if self._progress is None:
            return
        progress, self._progress = self._progress, None
        last = progress.make_tasks_table(progress.tasks)
        progress.stop()
        self._console.print(last)
        self._bars = []
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected = []

    def _open_epoch(self, state: State, *, completed: int) -> None:
        self._in_epoch = True
        self._open(f"epoch {int(state.timestamp.epoch) + 1}{epochs_in_all(state)}", state, completed)

    def _finish_epoch(self, state: State) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self._finish(self._values("loss/", f"metrics/{state.dataloader_label}/"))

    def _open(self, title: str, state: State, completed: int = 0) -> None:
        """Add a bar for the data in use."""
        if not self._draws_bars:
            return
        if self._progress is None:
            values = TextColumn("{task.fields[values]}", markup=False, table_column=Column(overflow="fold"))
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=self._console.width // 10),
                MofNCompleteColumn(),
                _PaceColumn(),
                values,
                console=self._console,
                auto_refresh=False,  # no thread: processes may be forked at any time
                transient=True,  # stop() and _finish() print the last state of each bar
                redirect_stdout=sys.stdout.isatty(),  # the output of `train.py > out.txt` belongs into the file
                redirect_stderr=sys.stderr.isatty(),
            )
            stderr = sys.stderr
            self._progress.start()
            self._console.show_cursor(True)  # in case the process is killed
            for handler in (*logging.root.handlers, *logging.getLogger("composerlite").handlers):
                if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:  # pyright: ignore
                    handler.setStream(sys.stderr)  # rich prints above the bars
                    self._redirected.append((handler, stderr))
        length = None if state.dataloader_len is None else int(state.dataloader_len)
        self._bars.append(self._progress.add_task(title, total=length, completed=completed, values=""))
        self._progress.refresh()

    def _advance(self, values: Callable[[], list[str]]) -> None:
        """Count a batch, and draw the bar with ``values()`` unless the last drawing was a moment ago."""
        if self._progress is None:
            return
        self._progress.advance(self._bars[-1])
        if time.monotonic() >= self._next_draw:
            self._progress.update(self._bars[-1], values=", ".join(values()))
            self._progress.refresh()
            self._next_draw = time.monotonic() + _SECONDS_BETWEEN_DRAWS

    def _finish(self, values: list[str]) -> None:
        """Print the last bar with ``values``, above the bars that continue, and remove it."""
        if self._progress is None:
            return
        number = self._bars.pop()
        task = next(task for task in self._progress.tasks if task.id == number)
        if task.total is None:
            task.total = task.completed
        self._progress.stop_task(number)
        self._progress.update(number, values=", ".join(values))
        if not self._bars:
            self.stop()
            return
        last = self._progress.make_tasks_table([task])
        self._progress.remove_task(number)
        self._progress.refresh()
        self._console.print(last)

    def _values(self, *prefixes: str) -> list[str]:
        return shown({name: value for name, value in self._latest.items() if name.startswith(prefixes)})

    def _is_due_by_default(self, state: State, event: Event) -> bool:
        """Interval of lines: the end of each epoch, and 30 seconds after the last line."""
        is_silent = time.monotonic() >= self._written_at + LONGEST_SILENCE_SECONDS
        return event is Event.EPOCH_END or (event is Event.BATCH_END and is_silent)

    def _write(self, line: str) -> None:
        if not self._writes_lines:
            return
        if self._progress is None:
            super()._write(line)
        else:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _PaceColumn(ProgressColumn):
    """Batches per second, elapsed time and time left: ``30.9/s, 0:12, 1:03:45 left``."""

    def render(self, task: Task) -> Text:
        parts = [clock(task.elapsed or 0.0)]
        if speed := task.finished_speed or task.speed:
            parts.insert(0, f"{speed:.3g}/s" if speed < 1000 else f"{speed:.0f}/s")
        if task.stop_time is None and task.time_remaining is not None:
            parts.append(f"{clock(task.time_remaining)} left")
        return Text(", ".join(parts))
