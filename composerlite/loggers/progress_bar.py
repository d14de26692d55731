"""ProgressBarLogger: how far training is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from composerlite.core import LoggerDestination, SchedulePredicate, TimeInput, TimeUnit
from composerlite.errors import checked_arguments
from composerlite.loggers.console import ConsoleLogger
from composerlite.loggers.live_bars import Bars, LiveBars, NoBars
from composerlite.loggers.stream import StreamInput, is_terminal, open_stream

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["ProgressBarLogger"]


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
        self._bars: Bars = NoBars()
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
        end, epoch = state.max_duration, int(state.timestamp.epoch) + 1
        of = f"/{end.value}" if end is not None and end.unit is TimeUnit.EPOCH else ""
        self._bars.open(f"epoch {epoch}{of}", _length(state), completed)

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
