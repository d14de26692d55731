"""Logger: one place to log to; LoggerDestination: where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composerlite.core.callback import Callback
from composerlite.core.checkpoint_news import CheckpointNews

if TYPE_CHECKING:
    from composerlite.core.state import State
    from composerlite.storage import Uploader

__all__ = ["Logger", "LoggerDestination"]


class LoggerDestination(Callback):
    """Where metrics go. Override what the destination can take; the rest is ignored.

    A destination is also a :class:`Callback`: it runs first at ``INIT`` and last at every other event.
    """

    @property
    def place(self) -> str | None:
        """Where it puts what it gets, a path or an address, for people; known from ``INIT`` on. ``None``: nowhere."""
        return None

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Settings of the run, once or a few times."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Numbers by name, at ``step`` (batches trained)."""

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """A small table."""

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Which algorithms ran at which event."""

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        """Images as arrays or tensors of shape (N, C, H, W), or (N, H, W, C) if ``channels_last``."""

    def log_checkpoint(self, news: CheckpointNews) -> None:
        """Something became of a checkpoint: it was begun, committed, uploaded, deleted, or failed."""

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Keep a copy of the file ``file_path`` under ``remote_file_name``. Do not wait for it."""

    def can_upload_files(self) -> bool:
        """Whether :meth:`upload_file` does anything."""
        return False

    @property
    def uploader(self) -> Uploader | None:
        """Uploads to an object store, if this is one: savers publish their checkpoints with it, in their own order."""
        return None

    @property
    def checkpoint_prefix(self) -> str:
        """What stands before the names of checkpoints in that store."""
        return ""


class Logger:
    """Sends what is logged to every destination.

    Args:
        state: its timestamp gives the step of metrics that are logged without one.
        destinations: one destination or several.
    """

    def __init__(
        self, state: State, destinations: LoggerDestination | Sequence[LoggerDestination] | None = None
    ) -> None:
        if destinations is None:
            destinations = ()
        elif isinstance(destinations, LoggerDestination):
            destinations = (destinations,)
        self.destinations: tuple[LoggerDestination, ...] = tuple(destinations)
        self._state = state

    def log_hyperparameters(self, parameters: Mapping[str, Any]) -> None:
        """Log settings of the run."""
        for destination in self.destinations:
            destination.log_hyperparameters(dict(parameters))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name. ``step`` defaults to the batches trained so far."""
        if not metrics or not self.destinations:
            return
        step = self._now() if step is None else step
        for destination in self.destinations:
            destination.log_metrics(dict(metrics), step)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a small table. ``step`` defaults to the batches trained so far."""
        step = self._now() if step is None else step
        for destination in self.destinations:
            destination.log_table(columns, rows, name, step)

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Log which algorithms ran."""
        for destination in self.destinations:
            destination.log_traces(dict(traces))

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        """Log images: arrays or tensors of shape (N, C, H, W), or (N, H, W, C) if ``channels_last``."""
        step = self._now() if step is None else step
        for destination in self.destinations:
            destination.log_images(images, name, channels_last, step)

    def log_checkpoint(self, news: CheckpointNews) -> None:
        """Tell what became of a checkpoint."""
        for destination in self.destinations:
            destination.log_checkpoint(news)

    def upload_file(self, remote_file_name: str, file_path: Path | str, *, overwrite: bool = False) -> None:
        """Hand ``file_path`` to every destination that keeps files. One that fails does not keep it from the others.

        Raises:
            FileNotFoundError: there is no such file.
            Exception: what a destination raised, an error of an earlier upload for example; an ``ExceptionGroup`` if
                several did.
        """
        path = Path(file_path)
        if self.has_file_upload_destination() and not path.is_file():
            raise FileNotFoundError(f"upload_file({remote_file_name!r}): there is no file {str(path)!r}.")
        errors: list[Exception] = []
        for destination in self.destinations:
            try:
                destination.upload_file(self._state, remote_file_name, path, overwrite=overwrite)
            except Exception as e:  # noqa: BLE001 - raised below: the others must get the file first
                errors.append(e)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup(f"several loggers failed while {remote_file_name!r} was handed to them", errors)

    def has_file_upload_destination(self) -> bool:
        """Whether any destination keeps files."""
        return any(destination.can_upload_files() for destination in self.destinations)

    def _now(self) -> int:
        return int(self._state.timestamp.batch)
