"""The base of loggers to services: a run that is known late, files that are kept in the background, packages that may
be missing, values as services take them, how a run ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
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
from composerlite.loggers.values import plain, to_json
from composerlite.storage import Background
from composerlite.storage.workers import StagedFiles

R = TypeVar("R")


class ServiceLogger(LoggerDestination, Generic[R]):
    """Logs to a run ``R`` of a service, which is known from ``AFTER_LOAD`` on: a resumed run continues its own."""

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

    def _reaching(self, run: R) -> contextlib.AbstractContextManager[object]:
        """Context of every call of the service."""
        return contextlib.nullcontext()

    def _write(self, write: Callable[[R, int], object], step: int | None) -> None:
        """Call ``write`` with the run and the batch."""
        if self._is_silent:
            return
        if self._run is None:  # before AFTER_LOAD it is not known which run it belongs to, and where that resumes
            self._early.append(write)
        else:
            with self._reaching(self._run):
                write(self._run, self._batch if step is None else step)

    def _write_early(self) -> None:
        """Log the values that came before the run was known."""
        early, self._early = self._early, []
        for write in early:
            self._write(write, None)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────
    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Keep a copy of the file as an artifact of the run, in the background.

        Raises:
            FileNotFoundError: there is no such file.
            Exception: what went wrong with something earlier.
        """
        if self._is_silent or not self.can_upload_files():
            return
        name = format_name_with_dist(remote_file_name, state.run_name)
        self._background.raise_failures()
        staged = self._files.copy(file_path, Path(name).name)

        def keep(run: R, batch: int) -> None:
            try:
                self._send_file(run, name, staged, batch, overwrite=overwrite)
            finally:
                self._files.give_back(staged)

        def write(run: R, batch: int) -> None:
            self._background.submit(
                f"keeping {name!r} as an artifact of {self._service}",
                lambda: keep(run, batch),
                lane=name,
                replaces=True,
                dropped=lambda: self._files.give_back(staged),
            )

        self._write(write, int(state.timestamp.batch))

    def _send_file(self, run: R, name: str, staged: Path, batch: int, *, overwrite: bool) -> None:
        """Keep the file ``staged`` as the artifact ``name``: for loggers that can upload files."""
        raise NotImplementedError

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────
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


def need_package(package: str, *, who: str, extra: str) -> None:
    """Raise ConfigError if ``package`` is not installed. It is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name in the current one is found as well
        raise ConfigError(
            f"{who} needs the package {package}, which is not installed: pip install 'composerlite[{extra}]'"
        )


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Filter ``metrics`` for numbers."""
    values = {name: plain(value) for name, value in metrics.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def json_of(value: Any) -> Any:
    """``value`` as JSON has it: dicts, lists, numbers and strings; of other things their text."""
    return json.loads(to_json(value))


def pictures(images: Any, *, channels_last: bool) -> list[npt.NDArray[Any]]:
    """A batch of images, or one, as arrays of shape (H, W, C) or (H, W)."""
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


def exit_code(*, training: bool) -> int:
    """Exit code that the process is about to have: 0, 1 after an error, or that of its ``SystemExit``.

    Args:
        training: ``fit`` was interrupted. That is an error also when the exception was handled already.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # a preempted run ends with 128 and the number of the signal
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return int(training or error is not None)
