"""Callback: code that runs at events. LoggerDestination: stores logged values. Logger: passes values to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composerlite.core.event import Event
from composerlite.core.state.state import State
from composerlite.errors import raise_all
from composerlite.types import CheckpointNews

if TYPE_CHECKING:
    from composerlite.storage import Uploader

__all__ = ["Callback", "Logger", "LoggerDestination"]


class Callback:
    """Code that runs at events of training. Override the methods of the events you need.

    Each method gets the :class:`State` and the :class:`Logger` and may change the state. An exception leaves ``fit``.
    The engine calls only overridden methods. Return progress from :meth:`state_dict`: every full checkpoint saves this
    dict, and a resume restores the dict.
    """

    @property
    def state_key(self) -> str:
        """Key of :meth:`state_dict` in checkpoints. Further callbacks with the same key get ``:1``, ``:2``, …"""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the progress to save: tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Call the method of ``event``. Override this method to run code at every event."""
        getattr(self, event.value)(state, logger)

    def init(self, state: State, logger: Logger) -> None:
        """Called during the construction of the trainer: model and optimizer exist, data do not, nothing is loaded."""

    def before_load(self, state: State, logger: Logger) -> None:
        """Called before the search for a checkpoint and its load."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Called after the load of a checkpoint, or without a load."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Called when ``fit`` begins."""

    def iteration_start(self, state: State, logger: Logger) -> None:
        """Called before the first batch of an iteration."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Called before the first batch of an epoch; not called if an epoch is resumed after its first batch."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Called before the next batch is requested from the loader."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Called when ``state.batch`` is loaded and still on the CPU."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """Called when ``state.batch`` is on the device."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Called before the first microbatch; gradients are zero."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """Called before the forward pass of a microbatch."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """Called after the forward pass of a microbatch, with ``state.outputs`` set."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """Called before the loss is computed."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """Called after the loss is computed, with ``state.loss`` set."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """Called before the backward pass of a microbatch."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """Called after the backward pass of a microbatch."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Called when all gradients are computed and unscaled, before the optimizer steps."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Called after the optimizer step, when ``state.timestamp`` counts the batch."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Called after ``batch_end`` and evaluation: the moment to save."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Called after an epoch, when ``state.timestamp`` counts it."""

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Called after ``epoch_end`` and evaluation: the moment to save."""

    def iteration_end(self, state: State, logger: Logger) -> None:
        """Called after an iteration, when ``state.timestamp`` counts it."""

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Called after ``iteration_end``: the moment to save."""

    def fit_end(self, state: State, logger: Logger) -> None:
        """Called when training is over."""

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Called before the first of several evaluators."""

    def eval_start(self, state: State, logger: Logger) -> None:
        """Called before the first batch of an evaluator."""

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Called when an evaluation batch is on the device."""

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Called before the forward pass of an evaluation batch."""

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Called after the forward pass of an evaluation batch, with ``state.outputs`` set."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Called when the metrics count the evaluation batch."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """Called after an evaluator, with ``state.eval_metric_values`` set."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Called after the last of several evaluators."""

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Called when ``Trainer.eval`` begins."""

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Called when ``Trainer.eval`` is over."""

    def predict_start(self, state: State, logger: Logger) -> None:
        """Called when ``Trainer.predict`` begins."""

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """Called when a prediction batch is on the device."""

    def predict_before_forward(self, state: State, logger: Logger) -> None:
        """Called before the forward pass of a prediction batch."""

    def predict_after_forward(self, state: State, logger: Logger) -> None:
        """Called after the forward pass of a prediction batch, with ``state.outputs`` set."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """Called after a prediction batch."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """Called when ``Trainer.predict`` is over."""

    def close(self, state: State, logger: Logger) -> None:
        """Called once when the trainer is closed, also after an exception in training. Release resources here."""

    def post_close(self) -> None:
        """Called after the :meth:`close` of every callback, unless :meth:`close` of this callback raised."""


class LoggerDestination(Callback):
    """A destination of metrics and files. Override the methods for the supported data; other data is ignored.

    A destination is also a :class:`Callback`, called first at ``INIT`` and last at every other event.
    """

    @property
    def place(self) -> str | None:
        """Path or address of the stored data, for readers; set from ``INIT`` on. ``None`` if nothing is stored."""
        return None

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Store settings of the run. Called once or a few times."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Store numbers by name.

        Args:
            metrics: values by name.
            step: number of trained batches.
        """

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Store a small table.

        Args:
            columns: names of the columns.
            rows: one list for each row, with a value for each column.
            name: name of the table.
            step: number of trained batches.
        """

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Store traces: the algorithms of an event."""

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        """Store images: arrays or tensors of shape (N, C, H, W), or (N, H, W, C) if ``channels_last``.

        Args:
            images: array or tensor of shape (N, C, H, W), or (N, H, W, C) if ``channels_last``.
            name: name of the images.
            channels_last: the channels are the last dimension.
            step: number of trained batches.
        """

    def log_checkpoint(self, news: CheckpointNews) -> None:
        """Store the news of a checkpoint: begun, committed, uploaded, deleted, or failed."""

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Copy the file ``file_path`` to ``remote_file_name``, in the background.

        Args:
            state: state of the run.
            remote_file_name: name of the copy.
            file_path: local file.
            overwrite: replace an existing copy.
        """

    def can_upload_files(self) -> bool:
        """Return true if :meth:`upload_file` copies files."""
        return False

    @property
    def uploader(self) -> Uploader | None:
        """Uploader of an object store, used by savers for checkpoints; ``None`` if the destination has no store."""
        return None

    @property
    def checkpoint_prefix(self) -> str:
        """Prefix of the names of checkpoints in the store."""
        return ""


class Logger:
    """Sends metrics and files to every destination.

    Args:
        state: its timestamp is the default step of metrics.
        destinations: a destination, or a sequence.
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

    @property
    def uploaders(self) -> list[tuple[Uploader, str]]:
        """Uploaders of all destinations, each with the prefix of the names of checkpoints."""
        return [(d.uploader, d.checkpoint_prefix) for d in self.destinations if d.uploader is not None]

    def log_hyperparameters(self, parameters: Mapping[str, Any]) -> None:
        """Log settings of the run."""
        for destination in self.destinations:
            destination.log_hyperparameters(dict(parameters))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name.

        Args:
            metrics: values by name.
            step: number of trained batches; by default the current number.
        """
        if not metrics or not self.destinations:
            return
        step = self._now() if step is None else step
        for destination in self.destinations:
            destination.log_metrics(dict(metrics), step)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a small table.

        Args:
            columns: names of the columns.
            rows: one list for each row, with a value for each column.
            name: name of the table.
            step: number of trained batches; by default the current number.
        """
        step = self._now() if step is None else step
        for destination in self.destinations:
            destination.log_table(columns, rows, name, step)

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Log the algorithms of an event."""
        for destination in self.destinations:
            destination.log_traces(dict(traces))

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        """Log images: arrays or tensors of shape (N, C, H, W), or (N, H, W, C) if ``channels_last``.

        Args:
            images: array or tensor of shape (N, C, H, W), or (N, H, W, C) if ``channels_last``.
            name: name of the images.
            channels_last: the channels are the last dimension.
            step: number of trained batches; by default the current number.
        """
        step = self._now() if step is None else step
        for destination in self.destinations:
            destination.log_images(images, name, channels_last, step)

    def log_checkpoint(self, news: CheckpointNews) -> None:
        """Pass the news of a checkpoint to every destination."""
        for destination in self.destinations:
            destination.log_checkpoint(news)

    def upload_file(self, remote_file_name: str, file_path: Path | str, *, overwrite: bool = False) -> None:
        """Pass ``file_path`` to every destination. All destinations get the file, even if some raise.

        Args:
            remote_file_name: name of the copy.
            file_path: local file.
            overwrite: replace an existing copy.

        Raises:
            FileNotFoundError: the file does not exist.
            Exception: error of a destination, perhaps of an earlier upload; an ``ExceptionGroup`` for several errors.
        """
        path = Path(file_path)
        if self.has_file_upload_destination() and not path.is_file():
            raise FileNotFoundError(f"upload_file({remote_file_name!r}): the file {str(path)!r} does not exist.")
        errors: list[Exception] = []
        for destination in self.destinations:
            try:
                destination.upload_file(self._state, remote_file_name, path, overwrite=overwrite)
            except Exception as e:  # noqa: BLE001 - raised below, after all destinations have the file
                errors.append(e)
        raise_all(errors, f"upload_file({remote_file_name!r}): several loggers failed")

    def has_file_upload_destination(self) -> bool:
        """Return true if a destination copies files."""
        return any(destination.can_upload_files() for destination in self.destinations)

    def _now(self) -> int:
        return int(self._state.timestamp.batch)
