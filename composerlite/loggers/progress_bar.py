"""ProgressBarLogger: how far training is, as bars that grow on a terminal, or as lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from composerlite.core import LoggerDestination, SchedulePredicate, TimeInput, TimeUnit
from composerlite.errors import checked_arguments
from composerlite.loggers.console import ConsoleLogger, StreamInput, is_terminal, open_stream
from composerlite.loggers.values import out_of, to_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from composerlite.core import Logger, State
    from composerlite.loggers.console import TextStream

__all__ = ["Bars", "LiveBars", "ProgressBarLogger"]

_SECONDS_BETWEEN_DRAWS = 0.1


class Bars:
    """A stack of progress bars, for where there is no terminal: it shows nothing.

    Evaluation opens a bar on top of that of training. Text goes above them.
    """

    def open(self, title: str, total: int | None, completed: int = 0) -> None:
        """Put a bar on top. ``total`` is ``None`` where it is not known."""

    def advance(self, values: Mapping[str, Any]) -> None:
        """Count one more on the top bar."""

    def finish(self, values: Mapping[str, Any]) -> None:
        """Take the top bar off; it stays visible as it is."""

    def stop(self) -> None:
        """Take all bars off and leave the terminal as it was. Safe to call at any time."""


@dataclass(slots=True)
class _Bar:
    task: TaskID
    completed: int


@final
class LiveBars(Bars):
    """Bars drawn with rich, at most ten times a second and on the calling thread: nothing runs between two draws.

    It is a text stream too: what is written appears above the bars.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._progress: Progress | None = None
        self._bars: list[_Bar] = []
        self._next_draw = 0.0

    def open(self, title: str, total: int | None, completed: int = 0) -> None:
        if self._progress is None:
            self._progress = _start(self._stream)
        task = self._progress.add_task(title, total=total, completed=completed, values="")
        self._bars.append(_Bar(task, completed))
        self._draw({})

    def advance(self, values: Mapping[str, Any]) -> None:
        if not self._bars:
            return
        self._bars[-1].completed += 1
        if time.monotonic() >= self._next_draw:
            self._draw(values)

    def finish(self, values: Mapping[str, Any]) -> None:
        if self._progress is None:
            return
        self._draw(values)
        task = self._bars.pop().task
        if not self._bars:
            self.stop()
            return
        # Bars below go on: print this one above them for good, so that the moving part stays small.
        self._progress.print(self._progress.make_tasks_table([t for t in self._progress.tasks if t.id == task]))
        self._progress.remove_task(task)
        self._progress.refresh()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._bars.clear()

    def write(self, text: str, /) -> object:
        if self._progress is None:
            return self._stream.write(text)
        return self._progress.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def flush(self) -> object:
        return self._stream.flush()

    def _draw(self, values: Mapping[str, Any]) -> None:
        if self._progress is not None:
            bar = self._bars[-1]
            self._progress.update(bar.task, completed=bar.completed, values=to_text(values))
            self._progress.refresh()
            self._next_draw = time.monotonic() + _SECONDS_BETWEEN_DRAWS


def _start(stream: TextStream) -> Progress:
    """A display that draws only when told to, and that a crash leaves harmless: the cursor stays visible."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    one_line = Column(no_wrap=True, overflow="ellipsis")
    console = Console(file=stream)  # type: ignore[arg-type]  # it needs no more than write and flush
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[values]}", markup=False, table_column=one_line),
        console=console,
        auto_refresh=False,
        # What the program prints goes above the bars. Where it is sent to a file, it must arrive there.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )
    progress.start()
    console.show_cursor(True)
    return progress


@final
class ProgressBarLogger(LoggerDestination):
    """Shows how far training is: bars on a terminal, elsewhere a line for each epoch and evaluation.

    Each epoch, evaluation and prediction has its bar. Bars are drawn at most ten times a second, by the training
    thread. Only global rank 0 shows anything.

    Args:
        progress_bar: show bars where ``stream`` is a terminal.
        log_to_console: ``True`` writes a line every ``console_log_interval``, also above bars; ``False`` writes none;
            ``None`` writes one for each epoch and evaluation where there are no bars.
        console_log_interval: as in :class:`ConsoleLogger`. Used with ``log_to_console=True``.
        stream: ``'stderr'``, ``'stdout'`` or an open text file, which is not closed.
        log_traces: lines also say which algorithms ran.

    Raises:
        ConfigError: an interval that cannot be read, or an unknown stream.
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
        output = open_stream(stream)
        shows_bars = progress_bar and is_terminal(output)
        self._bars = Bars()
        if shows_bars:
            self._bars = output = LiveBars(output)
        self._lines: LoggerDestination = LoggerDestination()  # one that ignores everything
        if log_to_console:
            self._lines = ConsoleLogger(console_log_interval, stream=output, log_traces=log_traces)
        elif log_to_console is None and not shows_bars:
            self._lines = ConsoleLogger("1ep", stream=output, log_traces=log_traces)
        self._losses: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        self._in_epoch = False

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            if name.startswith("loss/"):
                self._losses[name] = value
            elif name.startswith("metrics/"):
                self._metrics[name] = value
        self._lines.log_metrics(metrics, step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._lines.log_hyperparameters(hyperparameters)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self._lines.log_table(columns, rows, name, step)

    def log_traces(self, traces: dict[str, Any]) -> None:
        self._lines.log_traces(traces)

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────────
    def fit_start(self, state: State, logger: Logger) -> None:
        self._stop()  # whatever an earlier fit left when it was interrupted

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._open_epoch(state, completed=0)

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._in_epoch:  # resumed in the middle of an epoch
            self._open_epoch(state, completed=int(state.timestamp.batch_in_epoch) - 1)
        self._bars.advance(self._losses)
        self._lines.batch_end(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._finish_epoch(state)
        self._lines.epoch_end(state, logger)

    def iteration_end(self, state: State, logger: Logger) -> None:
        self._lines.iteration_end(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._finish_epoch(state)
        self._lines.fit_end(state, logger)

    # ── evaluation and prediction ────────────────────────────────────────────────────────────────────────────────
    def eval_start(self, state: State, logger: Logger) -> None:
        self._bars.open(str(state.dataloader_label), _length(state))

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self._bars.advance({})

    def eval_end(self, state: State, logger: Logger) -> None:
        self._bars.finish(self._metrics_of(state))
        self._lines.eval_end(state, logger)

    def predict_start(self, state: State, logger: Logger) -> None:
        self._bars.open("predict", _length(state))

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        self._bars.advance({})

    def predict_end(self, state: State, logger: Logger) -> None:
        self._bars.finish({})

    def close(self, state: State, logger: Logger) -> None:
        self._stop()

    def _open_epoch(self, state: State, *, completed: int) -> None:
        self._in_epoch = True
        title = f"epoch {int(state.timestamp.epoch) + 1}{out_of(state.max_duration, TimeUnit.EPOCH)}"
        self._bars.open(title, _length(state), completed)

    def _finish_epoch(self, state: State) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self._bars.finish({**self._losses, **self._metrics_of(state)})

    def _metrics_of(self, state: State) -> dict[str, Any]:
        prefix = f"metrics/{state.dataloader_label}/"
        return {name: value for name, value in self._metrics.items() if name.startswith(prefix)}

    def _stop(self) -> None:
        self._in_epoch = False
        self._bars.stop()


def _length(state: State) -> int | None:
    return None if state.dataloader_len is None else int(state.dataloader_len)
