"""TensorboardLogger: metrics as TensorBoard event files."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

from composerlite import dist
from composerlite.checkpoint import format_name_with_dist
from composerlite.core import LoggerDestination
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.values import plain, to_json

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from composerlite.core import Logger, State

__all__ = ["TensorboardLogger"]

_Write: TypeAlias = "Callable[[SummaryWriter, int | None], None]"


@final
class TensorboardLogger(LoggerDestination):
    """Writes metrics for TensorBoard, one folder per run.

    A resumed run goes on in the folder of the interrupted one. TensorBoard then drops the steps that were logged after
    the checkpoint and are trained again, so no step shows twice; a run that starts again from its beginning replaces
    what earlier attempts of the same name showed.

    Args:
        log_dir: the folder; ``tensorboard_logs`` by default. The run's name is added below it, unless ``log_dir`` says
            with ``{run_name}`` where it goes; ``{rank}`` and the like are filled in too.
        flush_interval: batches between two flushes; evaluations, epochs and the end of training flush as well.
        rank_zero_only: write on global rank 0 only. Otherwise each rank has a folder ``rank<N>`` of its own.

    Raises:
        ConfigError: at construction tensorboard is not installed or a variable is unknown; at ``INIT`` the folder
            cannot be made.
    """

    @checked_arguments
    def __init__(
        self, log_dir: str | Path | None = None, flush_interval: int = 100, rank_zero_only: bool = True
    ) -> None:
        if flush_interval < 1:
            raise ConfigError(
                f"TensorboardLogger(flush_interval={flush_interval}): want a number of batches, 1 or more."
            )
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "TensorboardLogger needs the package tensorboard, which is not installed: "
                "pip install 'composerlite[tensorboard]'"
            )
        folder = "tensorboard_logs" if log_dir is None else str(log_dir)
        if "{run_name}" not in folder:
            folder = f"{folder}/{{run_name}}"
        self._folder = folder if rank_zero_only else f"{folder}/rank{{rank}}"
        format_name_with_dist(self._folder, run_name="")  # a typo in a variable is an error now
        self._flush_interval = flush_interval
        self._is_silent = rank_zero_only and dist.get_global_rank() != 0
        self._writer: SummaryWriter | None = None
        self._early: list[_Write] = []
        self._place: str | None = None

    @property
    def place(self) -> str | None:
        return self._place

    def init(self, state: State, logger: Logger) -> None:
        if self._is_silent:
            return
        folder = self._place = format_name_with_dist(self._folder, state.run_name)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(
                f"TensorboardLogger: the folder {folder!r} cannot be made: {e.strerror}. Give another log_dir."
            ) from e

    def after_load(self, state: State, logger: Logger) -> None:
        if self._is_silent or self._writer is not None:
            return
        from torch.utils.tensorboard import SummaryWriter  # imports slowly

        # What was logged at the batch of the checkpoint itself was logged before it was saved, and stays.
        batch = int(state.timestamp.batch)
        folder = format_name_with_dist(self._folder, state.run_name)
        self._writer = SummaryWriter(folder, purge_step=batch + 1 if batch else 0)
        for write in self._early:
            write(self._writer, batch)
        self._early.clear()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._write(functools.partial(_write_metrics, metrics), step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.log_metrics({f"hyperparameters/{name}": to_json(value) for name, value in hyperparameters.items()})

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self.log_metrics({name: "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)}, step)

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        layout = "NHWC" if channels_last else "NCHW"
        self._write(lambda writer, step: writer.add_images(name, images, step, dataformats=layout), step)

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) % self._flush_interval == 0:
            self._flush()

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._flush()

    def eval_end(self, state: State, logger: Logger) -> None:
        self._flush()

    def fit_end(self, state: State, logger: Logger) -> None:
        self._flush()

    def close(self, state: State, logger: Logger) -> None:
        self._flush()

    def post_close(self) -> None:
        if self._writer is not None:  # not in close(): other callbacks may log while they close
            self._writer.close()

    def _write(self, write: _Write, step: int | None) -> None:
        if self._is_silent:
            return
        if self._writer is None:  # before AFTER_LOAD it is not known at which step the run goes on
            self._early.append(write)
        else:
            write(self._writer, step)

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()


def _write_metrics(metrics: dict[str, Any], writer: SummaryWriter, step: int | None) -> None:
    for name, value in metrics.items():
        value = plain(value)
        if isinstance(value, int | float):
            writer.add_scalar(name, value, step)
        else:
            writer.add_text(name, str(value), step)
