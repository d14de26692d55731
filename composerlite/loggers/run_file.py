"""A file that a logger keeps of a run: made when the run begins, continued by the next launch, and uploaded."""

from __future__ import annotations

import time
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from composerlite import dist
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.core import LoggerDestination
from composerlite.errors import ConfigError
from composerlite.loggers.remote_uploader_downloader import RemoteUploaderDownloader

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["RunFileLogger"]


@runtime_checkable
class _Saver(Protocol):
    """A callback that saves checkpoints, as far as it is asked where."""

    folder: str
    in_memory: bool


class RunFileLogger(LoggerDestination):
    """A logger that keeps what it gets in the file ``template`` of this run.

    It is written at the end of a batch where something has waited for ``flush_seconds``; after each epoch and at the
    end it is written and uploaded.

    Args:
        template: the file's name, with ``{run_name}`` and the variables of ranks; ``None``: ``name`` in the folder of
            the checkpoints, or in one named after the run if there are none.
        remote_template: the name under which other loggers keep it; ``None``: they do not.
        name: what the file is called where no other name is given.
        on_every_rank: every rank has a file of its own; else global rank 0 alone.
        flush_seconds: how long what is logged may wait.

    Attributes:
        path: of the file, from ``INIT`` on.
        is_kept: this rank has one.

    Raises:
        ConfigError: an unknown variable, or a negative time; at ``INIT`` a file that cannot be written, or nobody who
            can take it.
    """

    def __init__(
        self,
        template: str | Path | None,
        remote_template: str | None,
        *,
        name: str = "",
        on_every_rank: bool = False,
        flush_seconds: float = 1.0,
    ) -> None:
        if not flush_seconds >= 0:
            raise ConfigError(f"{type(self).__name__}(flush_seconds={flush_seconds!r}): want seconds, 0 or more.")
        template = None if template is None else str(template)
        for one in (template, remote_template):
            if one is not None:
                format_name_with_dist(one, run_name="")  # a typo in a variable is an error now
        self._template = template
        self._name = name
        self._remote_template = remote_template
        self._flush_seconds = flush_seconds
        self._flushed_at = time.monotonic()
        self._uploaded = True
        self._state: State | None = None
        self._is_ready = False  # a subclass says when what is logged may be written
        self.is_kept = on_every_rank or dist.get_global_rank() == 0
        self.path = Path(name)

    @property
    def place(self) -> str | None:
        return str(self.path) if self.is_kept else None

    @abstractmethod
    def _write_waiting(self) -> bool:
        """Write what waits; whether there was something."""

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        if self._is_ready and self._write_waiting():
            self._uploaded = False

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────
    def init(self, state: State, logger: Logger) -> None:
        self._state = state
        owner = type(self).__name__
        template = self._beside_checkpoints(state) if self._template is None else self._template
        self.path = Path(format_name_with_dist(template, state.run_name)).absolute()
        if self._remote_template is not None and not logger.has_file_upload_destination():
            raise ConfigError(
                f"{owner}(remote_file_name={self._remote_template!r}): no logger of this run keeps files. Add one that "
                "does, or leave remote_file_name out."
            )
        if not self.is_kept:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as e:
            raise ConfigError(
                f"{owner}(filename={template!r}): {str(self.path)!r} cannot be written: {e.strerror}. Give a path that "
                "can."
            ) from e

    def batch_end(self, state: State, logger: Logger) -> None:
        if time.monotonic() - self._flushed_at >= self._flush_seconds:
            self._flush()

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._upload(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._upload(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        self._upload(state, logger)

    def post_close(self) -> None:
        self._flush()  # what others logged while they closed

    # ── on other machines ────────────────────────────────────────────────────────────────────────────────────────
    def _beside_checkpoints(self, state: State) -> str:
        folders = [one.folder for one in state.callbacks if isinstance(one, _Saver) and not one.in_memory]
        return f"{folders[0] if folders else '{run_name}'}/{self._name}"

    def _fetch(self, state: State, logger: Logger) -> None:
        """Download the file where a run is resumed on another machine and the file here is empty."""
        if self._remote_template is None or not self.is_kept or self.path.stat().st_size > 0:
            return
        name = format_name_with_dist(self._remote_template, state.run_name)
        for destination in logger.destinations:
            if isinstance(destination, RemoteUploaderDownloader):
                try:
                    destination.download_file(name, self.path, overwrite=True, progress_bar=False)
                except FileNotFoundError:  # nothing was uploaded before
                    continue
                return

    def _upload(self, state: State, logger: Logger) -> None:
        """Write what waits, and hand the file to the loggers that keep files, if it has changed."""
        self._flush()
        if self._remote_template is None or not self.is_kept or self._uploaded:
            return
        logger.upload_file(format_name_with_dist(self._remote_template, state.run_name), self.path, overwrite=True)
        self._uploaded = True
