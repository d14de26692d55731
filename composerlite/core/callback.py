"""Callback: takes part in training at its events. LoggerDestination: keeps what is logged. Logger: sends it there."""

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
    """Something that happens at events of training. Override the methods of the events you need.

    Each method gets the :class:`State` and the :class:`Logger` and may read and change the state. An exception leaves
    ``fit``. The engine calls only methods that a subclass overrides. Progress worth keeping goes into
    :meth:`state_dict`; it is saved in every full checkpoint and given back on resume.
    """

    @property
    def state_key(self) -> str:
        """The name under which :meth:`state_dict` is saved. Further callbacks of the same name get ``:1``, ``:2``, …"""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Progress to save: tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Call the method of ``event``. Override this one to be called at every event."""
        getattr(self, event.value)(state, logger)

    def init(self, state: State, logger: Logger) -> None:
        """Called while the trainer is built: model and optimizer exist, data do not, nothing is loaded."""

    def before_load(self, state: State, logger: Logger) -> None:
        """Called before a checkpoint is looked for and loaded."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Called after a checkpoint was loaded, or none was asked for."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Called when ``fit`` begins."""

    def iteration_start(self, state: State, logger: Logger) -> None:
        """Called before the first batch of an iteration."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Called before the first batch of an epoch; not again where an epoch is resumed in its middle."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Called before the next batch is requested from the loader."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Called when ``state.batch`` is loaded, on the CPU."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """Called when ``state.batch`` is on the device."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Called before the first microbatch; gradients are zero."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """Called before the forward pass of a microbatch."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """Called after the forward pass of a microbatch, which sets ``state.outputs``."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """Called before the loss is computed."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """Called after the loss is computed, which sets ``state.loss``."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """Called before the backward pass of a microbatch."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """Called after the backward pass of a microbatch."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Called when all gradients are there, unscaled, before the optimizer steps."""

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
        """Called after the forward pass of an evaluation batch, which sets ``state.outputs``."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Called when the metrics count the evaluation batch."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """Called after an evaluator, which sets ``state.eval_metric_values``."""

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
        """Called after the forward pass of a prediction batch, which sets ``state.outputs``."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """Called after a prediction batch."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """Called when ``Trainer.predict`` is over."""

    def close(self, state: State, logger: Logger) -> None:
        """Called when the trainer is closed, once, also after an exception in training. Release resources here."""

    def post_close(self) -> None:
        """Called after the :meth:`close` of every callback. Not called if the own :meth:`close` raised."""


class LoggerDestination(Callback):
    """A destination of metrics. Override what the destination can take; the rest is ignored.

    A destination is also a :class:`Callback`: it runs first at ``INIT`` and last at every other event.
    """

    @property
    def place(self) -> str | None:
        """Path or address of what it keeps, for people; known from ``INIT`` on. ``None``: it keeps nothing."""
        return None

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Settings of the run, once or a few times."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Numbers by name, at ``step`` (batches trained).

        Args:
            metrics: values by name.
            step: batches trained.
        """

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """A small table.

        Args:
            columns: names of the columns.
            rows: one list for each row, with a value for each column.
            name: of the table.
            step: batches trained.
        """

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Traces: the algorithms that ran, and at which event."""

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        """Images as arrays or tensors of shape (N, C, H, W), or (N, H, W, C) if ``channels_last``.

        Args:
            images: array or tensor of shape (N, C, H, W), or (N, H, W, C) if ``channels_last``.
            name: of the images.
            channels_last: whether the channels are the last dimension.
            step: batches trained.
        """

    def log_checkpoint(self, news: CheckpointNews) -> None:
        """Take news of a checkpoint: begun, committed, uploaded, deleted, or failed."""

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Keep a copy of the file ``file_path`` under ``remote_file_name``. Do not wait for it.

        Args:
            state: of the run.
            remote_file_name: name of the copy.
            file_path: local file.
            overwrite: replace a copy of that name.
        """

    def can_upload_files(self) -> bool:
        """Return true if :meth:`upload_file` does anything."""
        return False

    @property
    def uploader(self) -> Uploader | None:
        """Uploads to an object store, if this is one: savers publish their checkpoints with it, in their own order."""
        return None

    @property
    def checkpoint_prefix(self) -> str:
        """Prefix of the names of checkpoints in that store."""
        return ""


class Logger:
    """Sends metrics and files to every destination.

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

    @property
    def uploaders(self) -> list[tuple[Uploader, str]]:
        """Uploaders of the destinations that are object stores, each with the prefix of the names of checkpoints."""
        return [(one.uploader, one.checkpoint_prefix) for one in self.destinations if one.uploader is not None]

    def log_hyperparameters(self, parameters: Mapping[str, Any]) -> None:
        """Log settings of the run."""
        for destination in self.destinations:
            destination.log_hyperparameters(dict(parameters))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name. ``step`` defaults to the batches trained so far.

        Args:
            metrics: values by name.
            step: batches trained; defaults to those so far.
        """
        if not metrics or not self.destinations:
            return
        step = self._now() if step is None else step
        for destination in self.destinations:
            destination.log_metrics(dict(metrics), step)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a small table. ``step`` defaults to the batches trained so far.

        Args:
            columns: names of the columns.
            rows: one list for each row, with a value for each column.
            name: of the table.
            step: batches trained; defaults to those so far.
        """
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
        """Log images: arrays or tensors of shape (N, C, H, W), or (N, H, W, C) if ``channels_last``.

        Args:
            images: array or tensor of shape (N, C, H, W), or (N, H, W, C) if ``channels_last``.
            name: of the images.
            channels_last: whether the channels are the last dimension.
            step: batches trained; defaults to those so far.
        """
        step = self._now() if step is None else step
        for destination in self.destinations:
            destination.log_images(images, name, channels_last, step)

    def log_checkpoint(self, news: CheckpointNews) -> None:
        """Pass the news of a checkpoint to every destination."""
        for destination in self.destinations:
            destination.log_checkpoint(news)

    def upload_file(self, remote_file_name: str, file_path: Path | str, *, overwrite: bool = False) -> None:
        """Hand ``file_path`` to every destination that keeps files. One that fails does not keep it from the others.

        Args:
            remote_file_name: name of the copy.
            file_path: local file.
            overwrite: replace a copy of that name.

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
        raise_all(errors, f"several loggers failed while {remote_file_name!r} was handed to them")

    def has_file_upload_destination(self) -> bool:
        """Return true if any destination keeps files."""
        return any(destination.can_upload_files() for destination in self.destinations)

    def _now(self) -> int:
        return int(self._state.timestamp.batch)
