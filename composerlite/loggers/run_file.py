"""RunFileLogger: the base of loggers that write a file of the run."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from composerlite import dist
from composerlite.checkpoint import CheckpointManager
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.core import Logger, LoggerDestination, State
from composerlite.errors import ConfigError, ObjectStoreError
from composerlite.loggers.remote_uploader_downloader import RemoteUploaderDownloader
from composerlite.storage import atomic_write

if TYPE_CHECKING:
    from composerlite.checkpoint.save.publish import Publisher

log = logging.getLogger(__name__)


class RunFileLogger(LoggerDestination):
    """A logger that writes lines to a file, and uploads the file after each epoch and at the end.

    Lines are written at the end of a batch if the last write is ``flush_seconds`` ago, and after each epoch.

    Args:
        template: path with ``{run_name}`` and the variables of ranks; ``None``: the file ``name`` in the folder of the
            checkpoints, or in a folder named after the run if there are no checkpoints.
        remote_template: name of the upload, for the loggers that upload files; ``None``: no upload.
        name: name of the file if ``template`` is ``None``.
        appends: the logger only appends lines. Then the file can be merged with the file of another machine, and
            without templates the file is uploaded with the checkpoints, if these go to a bucket.
        on_every_rank: write one file per rank; otherwise only on global rank 0.
        flush_seconds: seconds between two writes.

    Attributes:
        path: path of the file, from ``INIT`` on.
        is_kept: true if this rank writes a file.

    Raises:
        ConfigError: a variable is unknown, or the time is negative; at ``INIT`` the file cannot be written, or no
            logger uploads files.
    """

    def __init__(
        self,
        template: str | Path | None,
        remote_template: str | None,
        *,
        name: str = "",
        appends: bool = False,
        on_every_rank: bool = False,
        flush_seconds: float = 1.0,
    ) -> None:
        if not flush_seconds >= 0:
            raise ConfigError(f"{type(self).__name__}(flush_seconds={flush_seconds!r}): expected seconds, 0 or more.")
        for given in (template, remote_template):
            if given is not None:
                format_name_with_dist(str(given), run_name="")  # raises if a variable does not exist
        self._template = None if template is None else str(template)
        self._remote_template = remote_template
        self._name = name
        self._appends = appends
        self._is_beside = appends and template is None and remote_template is None  # the checkpoints
        self._flush_seconds = flush_seconds
        self._flushed_at = time.monotonic()
        self._uploaded = True
        self._state: State | None = None
        self._publisher: Publisher | None = None
        self._is_ready = False  # subclasses set this flag when lines may be written
        self.is_kept = on_every_rank or dist.get_global_rank() == 0
        self.path = Path(name)

    @property
    def place(self) -> str | None:
        return str(self.path) if self.is_kept else None

    @abstractmethod
    def _write_waiting(self) -> bool:
        """Write the waiting lines. Return true if there were any."""

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        if self._is_ready and self._write_waiting():
            self._uploaded = False

    def init(self, state: State, logger: Logger) -> None:
        self._state = state
        template = self._template
        if template is None:
            managers = _managers(state)
            template = f"{managers[0].where.folder if managers else '{run_name}'}/{self._name}"
        self.path = Path(format_name_with_dist(template, state.run_name)).absolute()
        if self._remote_template is not None and not logger.has_file_upload_destination():
            raise ConfigError(
                f"{type(self).__name__}(remote_file_name={self._remote_template!r}): no logger of this run uploads "
                "files. Add a RemoteUploaderDownloader, or leave remote_file_name out."
            )
        if not self.is_kept:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as e:
            raise ConfigError(
                f"{type(self).__name__}(filename={template!r}): {str(self.path)!r} cannot be written: {e.strerror}. "
                "Give another filename."
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
        self._flush()  # other callbacks may have logged in their close()

    def _continue_file(self, state: State, logger: Logger, *, download: bool) -> None:
        """Prepare the file at ``AFTER_LOAD``.

        Args:
            state: state of the run.
            logger: logger of the run.
            download: continue the uploaded file, since the run may have been on another machine. If the logger only
                appends, lines of both files are kept; otherwise a local file wins.
        """
        publishers = [found for one in _managers(state) for found in one.publishers] if self._is_beside else []
        here, there = self.path.read_bytes(), b""
        with contextlib.suppress(FileNotFoundError):  # nothing was uploaded yet
            if not download or (here and not self._appends):
                pass
            elif publishers:
                there = publishers[0].bucket.read(self._name)
            elif self._remote_template is not None:
                name = format_name_with_dist(self._remote_template, state.run_name)
                stores = [one for one in logger.destinations if isinstance(one, RemoteUploaderDownloader)]
                with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
                    for store in stores[:1]:
                        store.download_file(name, copied := Path(folder) / "file", progress_bar=False)
                        there = copied.read_bytes()
        if there and not here.startswith(there):
            lines = dict.fromkeys([*here.splitlines(), *there.splitlines()])
            with atomic_write(self.path) as file:
                file.write(there if there.startswith(here) else b"".join(line + b"\n" for line in lines))
        if publishers:  # from now on the lines before a checkpoint are in the bucket before the checkpoint
            self._publisher = publisher = publishers[0]
            publisher.before_each.append(lambda: self._send(publisher))

    def _upload(self, state: State, logger: Logger) -> None:
        """Write the waiting lines, and upload the file in the background if the content is new."""
        self._flush()
        if not self.is_kept or self._uploaded:
            return
        if (publisher := self._publisher) is not None:
            self._uploaded = True
            uri = publisher.bucket.uri(self._name)
            publisher.uploader.submit(uri, lambda: self._send(publisher), lane=uri, replaces=True)
        elif self._remote_template is not None:
            name = format_name_with_dist(self._remote_template, state.run_name)
            logger.upload_file(name, self.path, overwrite=True)
            self._uploaded = True

    def _send(self, publisher: Publisher) -> None:
        """Upload the present content, in a background thread. A failure is a warning: the next upload has all lines."""
        try:
            with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
                copied = Path(folder) / self._name
                shutil.copyfile(self.path, copied)
                publisher.bucket.put(self._name, copied)
        except (OSError, ObjectStoreError) as e:
            self._uploaded = False
            uri = publisher.bucket.uri(self._name)
            log.warning("could not upload %s; the next upload tries again: %s", uri, e)


def _managers(state: State) -> list[CheckpointManager]:
    """Return the managers of the callbacks that save checkpoints, except in memory."""
    found = [getattr(callback, "manager", None) for callback in state.callbacks]  # this layer has no CheckpointSaver
    return [one for one in found if isinstance(one, CheckpointManager) and not one.options.in_memory]
