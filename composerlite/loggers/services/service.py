"""ServiceLogger: the base of loggers to a service, and conversions of values for services."""

from __future__ import annotations

import importlib.util
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from composerlite import dist
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.core import Logger, LoggerDestination, State
from composerlite.errors import ConfigError
from composerlite.loggers.values import plain
from composerlite.storage import Background
from composerlite.storage.workers import StagedFiles

R = TypeVar("R")


class ServiceLogger(LoggerDestination, Generic[R]):
    """A logger to the run ``R`` of a service.

    A subclass sets ``_run`` at ``AFTER_LOAD``, when it is known whether the run resumes, and then calls
    :meth:`_write_early`. Values logged before are logged then.

    Args:
        service: name of the service, for messages.
        rank_zero_only: only global rank 0 logs; otherwise each rank has a run of its own.
        timeout: seconds to wait for background work when the trainer closes.

    Attributes:
        run_id: id of the run of the service; ``None`` on ranks that do not log.
    """

    def __init__(self, service: str, *, rank_zero_only: bool, timeout: float = 600.0) -> None:
        self._service = service
        self._rank_zero_only = rank_zero_only
        self._is_silent = rank_zero_only and dist.get_global_rank() != 0
        self._timeout = float(timeout)
        self._run_name = ""
        self._run: R | None = None
        self._early: list[Callable[[R, int], object]] = []
        self._batch = 0
        self._is_training = False
        self._background = Background(type(self).__name__, timeout=self._timeout)
        self._files = StagedFiles()
        self.run_id: str | None = None

    @abstractmethod
    def _send(self) -> None:
        """Send the waiting values to the service."""

    def _write(self, write: Callable[[R, int], object], step: int | None) -> None:
        """Call ``write`` with the run and the batch, as soon as the run is known."""
        if self._is_silent:
            return
        if self._run is None:
            self._early.append(write)
        else:
            write(self._run, self._batch if step is None else step)

    def _write_early(self) -> None:
        """Log the values from before ``AFTER_LOAD``, at the batch of the checkpoint."""
        early, self._early = self._early, []
        for write in early:
            self._write(write, None)

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Copy the file, and upload the copy as an artifact of the run in the background.

        Args:
            state: state of the run.
            remote_file_name: name of the artifact.
            file_path: local file.
            overwrite: replace an artifact of the same name.

        Raises:
            FileNotFoundError: the file does not exist.
            Exception: error of earlier background work.
        """
        if self._is_silent or not self.can_upload_files():
            return
        name = format_name_with_dist(remote_file_name, state.run_name)
        self._background.raise_failures()
        staged = self._files.copy(file_path, Path(name).name)

        def send(run: R, batch: int) -> None:
            try:
                self._send_file(run, name, staged, batch, overwrite=overwrite)
            finally:
                self._files.give_back(staged)

        def submit(run: R, batch: int) -> None:
            self._background.submit(
                f"uploading {name!r} to {self._service}",
                lambda: send(run, batch),
                lane=name,
                replaces=True,
                dropped=lambda: self._files.give_back(staged),
            )

        self._write(submit, int(state.timestamp.batch))

    def _send_file(self, run: R, name: str, staged: Path, batch: int, *, overwrite: bool) -> None:
        """Upload the file ``staged`` as the artifact ``name``. Called if :meth:`can_upload_files` is true."""
        raise NotImplementedError

    def fit_start(self, state: State, logger: Logger) -> None:
        self._is_training = True

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._send()

    def eval_end(self, state: State, logger: Logger) -> None:
        self._send()

    def fit_end(self, state: State, logger: Logger) -> None:
        self._is_training = False
        self._send()
        self._background.raise_failures()

    def _exit_code(self) -> int:
        """Return the exit code of the process: 0, 1 after an error, 130 after Ctrl-C, or the code of ``SystemExit``.

        A ``fit`` that did not end counts as an error, also if the program has handled the exception.
        """
        error = sys.exception()
        if isinstance(error, SystemExit):  # a preempted run ends with 128 and the number of the signal
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error, KeyboardInterrupt):
            return 130
        return int(self._is_training or error is not None)


def need_package(package: str, *, who: str, extra: str) -> None:
    """Raise ConfigError if ``package`` is not installed. Does not import the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of the same name in the working directory has no origin
        raise ConfigError(
            f"{who} needs the package {package}, which is not installed: pip install 'composerlite[{extra}]'"
        )


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers."""
    values = {name: plain(value) for name, value in metrics.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def pictures(images: Any, *, channels_last: bool) -> list[npt.NDArray[Any]]:
    """Return a batch of images, or one image, as arrays of shape (H, W, C) or (H, W)."""
    array = images.detach().cpu() if isinstance(images, torch.Tensor) else np.asarray(images)
    if isinstance(array, torch.Tensor):
        array = (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    if array.ndim not in (2, 3, 4):
        raise ConfigError(f"log_images: the shape is {array.shape}: expected (N, C, H, W), or (N, H, W, C).")
    if array.ndim == 2:
        return [array]
    batch = array[None] if array.ndim == 3 else array
    if not channels_last:
        batch = batch.transpose(0, 2, 3, 1)
    return [image[..., 0] if image.shape[-1] == 1 else image for image in batch]
