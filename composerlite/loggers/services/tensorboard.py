"""TensorboardLogger: metrics as TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.services.service import ServiceLogger, need_package
from composerlite.loggers.values import plain, to_json

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from composerlite.core import Logger, State


@final
class TensorboardLogger(ServiceLogger["SummaryWriter"]):
    """Writes metrics for TensorBoard, one folder per run.

    A resumed run continues in the folder. TensorBoard then drops the steps after the checkpoint, which are trained
    again, so each step is shown once. A run that starts from its beginning replaces the points of earlier attempts.

    Args:
        log_dir: the folder, ``tensorboard_logs`` by default, with the run's name as a subfolder, or with
            ``{run_name}`` in the path. ``{rank}`` and the other variables of ranks are filled in.
        flush_interval: batches between two writes. Evaluations, epochs and the end of training also write.
        rank_zero_only: only global rank 0 writes. Otherwise each rank has a folder ``rank<N>``.

    Raises:
        ConfigError: tensorboard is not installed, or an argument is invalid; at ``INIT`` the folder cannot be created.

    Example:
        .. code-block:: python

            Trainer(model=model, loggers=TensorboardLogger("board"))
    """

    @checked_arguments
    def __init__(
        self, log_dir: str | Path | None = None, flush_interval: int = 100, rank_zero_only: bool = True
    ) -> None:
        if flush_interval < 1:
            raise ConfigError(
                f"TensorboardLogger(flush_interval={flush_interval}): expected a number of batches, 1 or more."
            )
        need_package("tensorboard", who="TensorboardLogger", extra="tensorboard")
        super().__init__("TensorBoard", rank_zero_only=rank_zero_only)
        folder = "tensorboard_logs" if log_dir is None else str(log_dir)
        if "{run_name}" not in folder:
            folder = f"{folder}/{{run_name}}"
        self._folder = folder if rank_zero_only else f"{folder}/rank{{rank}}"
        format_name_with_dist(self._folder, run_name="")  # raises if a variable does not exist
        self._flush_interval = flush_interval
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
                f"TensorboardLogger: the folder {folder!r} cannot be created: {e.strerror}. Give another log_dir."
            ) from e

    def after_load(self, state: State, logger: Logger) -> None:
        if self._is_silent or self._run is not None:
            return
        from torch.utils.tensorboard import SummaryWriter  # a slow import

        # Points at the batch of the checkpoint were logged before the save, so they stay.
        batch = self._batch = int(state.timestamp.batch)
        folder = format_name_with_dist(self._folder, state.run_name)
        self._run = SummaryWriter(folder, purge_step=batch + 1 if batch else 0)
        self._write_early()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        values = {name: plain(value) for name, value in metrics.items()}

        def write(writer: SummaryWriter, batch: int) -> None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    writer.add_scalar(name, value, batch)
                else:
                    writer.add_text(name, str(value), batch)

        self._write(write, step)

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
            self._send()

    def close(self, state: State, logger: Logger) -> None:
        self._send()

    def post_close(self) -> None:
        if self._run is not None:  # not in close(): other callbacks may log in their close()
            self._run.close()

    def _send(self) -> None:
        if self._run is not None:
            self._run.flush()
