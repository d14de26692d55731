"""ProgressBarLogger: how far training is, as bars that grow on a terminal or in a notebook, or as lines."""

from __future__ import annotations

from typing import Any, final

from composerlite.core import Logger, LoggerDestination, SchedulePredicate, State, TimeInput, TimeUnit
from composerlite.errors import checked_arguments
from composerlite.loggers.bars import Bars, bars_on
from composerlite.loggers.console import ConsoleLogger, EpochsAndSeconds, StreamInput, learning_rate, open_stream
from composerlite.loggers.values import out_of, shown


@final
class ProgressBarLogger(LoggerDestination):
    """Shows the progress of training: bars on a terminal and in a notebook, elsewhere lines.

    Each epoch, evaluation and prediction has its bar, with its speed, elapsed time and time left. Bars are drawn at
    most ten times a second, by the training thread. Lines come at the end of each epoch, for each evaluation and when
    there was none for 30 seconds. Only global rank 0 shows anything.

    Args:
        progress_bar: show bars where ``stream`` is a terminal or the output of a notebook.
        log_to_console: ``True`` writes a line every ``console_log_interval``, also above bars; ``False`` writes none;
            ``None`` writes lines where there are no bars.
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
        drawn = bars_on(output) if progress_bar else None
        self._bars = Bars() if drawn is None else drawn
        self._lines: LoggerDestination = LoggerDestination()  # one that ignores everything
        if log_to_console or (log_to_console is None and drawn is None):
            interval = console_log_interval if log_to_console else EpochsAndSeconds()
            self._lines = ConsoleLogger(interval, stream=output if drawn is None else drawn, log_traces=log_traces)
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
        self.stop()  # whatever an earlier fit left when it was interrupted
        self._lines.fit_start(state, logger)

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._open_epoch(state, completed=0)

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._in_epoch:  # resumed in the middle of an epoch
            self._open_epoch(state, completed=int(state.timestamp.batch_in_epoch) - 1)
        self._bars.advance(lambda: [*shown(self._losses), *learning_rate(state)])
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
        self._lines.eval_start(state, logger)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self._bars.advance(list)
        self._lines.eval_batch_end(state, logger)

    def eval_end(self, state: State, logger: Logger) -> None:
        self._bars.finish(shown(self._metrics_of(state)), whole=True)  # they are what it was run for
        self._lines.eval_end(state, logger)

    def predict_start(self, state: State, logger: Logger) -> None:
        self._bars.open("predict", _length(state))

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        self._bars.advance(list)

    def predict_end(self, state: State, logger: Logger) -> None:
        self._bars.finish([])

    def close(self, state: State, logger: Logger) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bars off and leave the terminal as it was, whatever has ended training. They come back with it."""
        self._in_epoch = False
        self._bars.stop()

    def _open_epoch(self, state: State, *, completed: int) -> None:
        self._in_epoch = True
        title = f"epoch {int(state.timestamp.epoch) + 1}{out_of(state.max_duration, TimeUnit.EPOCH)}"
        self._bars.open(title, _length(state), completed)

    def _finish_epoch(self, state: State) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self._bars.finish(shown({**self._losses, **self._metrics_of(state)}))

    def _metrics_of(self, state: State) -> dict[str, Any]:
        prefix = f"metrics/{state.dataloader_label}/"
        return {name: value for name, value in self._metrics.items() if name.startswith(prefix)}


def _length(state: State) -> int | None:
    return None if state.dataloader_len is None else int(state.dataloader_len)
