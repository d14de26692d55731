"""A file that a logger keeps of a run: made when the run begins, continued by the next launch, and uploaded."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from composerlite import dist
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.core import Logger, LoggerDestination, State
from composerlite.errors import ConfigError, ObjectStoreError
from composerlite.loggers.remote_uploader_downloader import RemoteUploaderDownloader
from composerlite.storage import atomic_write

if TYPE_CHECKING:
    from composerlite.checkpoint.place.bucket import Bucket
    from composerlite.checkpoint.save.publish import Publisher

log = logging.getLogger(__name__)


class _Publishing(Protocol):
    """Publishes checkpoints to buckets."""

    publishers: Sequence[Publisher]


@runtime_checkable
class _FolderSaver(Protocol):
    """A callback that saves checkpoints to a folder."""

    folder: str
    in_memory: bool
    manager: _Publishing


class RunFileLogger(LoggerDestination):
    """A logger that keeps what it gets in the file ``template`` of this run.

    It is written at the end of a batch where something has waited for ``flush_seconds``; after each epoch and at the
    end it is written and uploaded.

    Args:
        template: the file's name, with ``{run_name}`` and the variables of ranks; ``None``: ``name`` in the folder of
            the checkpoints, or in one named after the run if there are none.
        remote_template: the name under which other loggers keep it; ``None``: they do not.
        name: what the file is called where no other name is given.
        with_checkpoints: where neither template is given and checkpoints go to a bucket, so does the file, beside them.
            It must only be appended to.
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
        with_checkpoints: bool = False,
        on_every_rank: bool = False,
        flush_seconds: float = 1.0,
    ) -> None:
        if not flush_seconds >= 0:
            raise ConfigError(f"{type(self).__name__}(flush_seconds={flush_seconds!r}): expected seconds, 0 or more.")
        template = None if template is None else str(template)
        for one in (template, remote_template):
            if one is not None:
                format_name_with_dist(one, run_name="")  # a typo in a variable is an error now
        self._template = template
        self._name = name
        self._appends = with_checkpoints
        self._goes_along = with_checkpoints and template is None and remote_template is None
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
        """Write the waiting lines; return true if there were any."""

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
        self._upload(logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._upload(logger)

    def close(self, state: State, logger: Logger) -> None:
        self._upload(logger)

    def post_close(self) -> None:
        self._flush()  # what others logged while they closed

    # ── on other machines ────────────────────────────────────────────────────────────────────────────────────────
    def _beside_checkpoints(self, state: State) -> str:
        folders = [one.folder for one in state.callbacks if isinstance(one, _FolderSaver) and not one.in_memory]
        return f"{folders[0] if folders else '{run_name}'}/{self._name}"

    @property
    def _publisher(self) -> Publisher | None:
        """The publisher of the checkpoints that the file goes to a bucket with, from ``INIT`` of all callbacks on."""
        if not self._goes_along or not self.is_kept or self._state is None:
            return None
        savers = [one for one in self._state.callbacks if isinstance(one, _FolderSaver) and not one.in_memory]
        return next((publisher for one in savers for publisher in one.manager.publishers), None)

    def _fetch(self, state: State, logger: Logger) -> None:
        """Download the file where a run is resumed on another machine, and continue it.

        A file that is here already stays, unless it is only appended to: then it gets what others have added.
        """
        if not self.is_kept or (self.path.stat().st_size > 0 and not self._appends):
            return
        there = self._uploaded_before(state, logger)
        here = self.path.read_bytes()
        if there is not None and (both := _joined(here, there)) != here:
            with atomic_write(self.path) as file:  # a kill leaves what only this machine has
                file.write(both)

    def _uploaded_before(self, state: State, logger: Logger) -> bytes | None:
        """Bytes that earlier launches have uploaded; ``None``: there are none."""
        try:
            if (publisher := self._publisher) is not None:
                return publisher.bucket.read(self._name)
        except FileNotFoundError:
            return None
        name = None if self._remote_template is None else format_name_with_dist(self._remote_template, state.run_name)
        stores = [one for one in logger.destinations if isinstance(one, RemoteUploaderDownloader)]
        for store in stores if name is not None else ():
            with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
                file = Path(folder) / "file"
                try:
                    store.download_file(str(name), file, progress_bar=False)
                except FileNotFoundError:  # nothing was uploaded before
                    continue
                return file.read_bytes()
        return None

    def _send_with_checkpoints(self) -> None:
        """Send the file before each checkpoint from now on: the lines up to a checkpoint are in the bucket when it is.

        Only behind :meth:`_fetch`: what the bucket has is in the file then.
        """
        if (publisher := self._publisher) is not None:
            publisher.before_each.append(lambda: self._send(publisher.bucket))

    def _upload(self, logger: Logger) -> None:
        """Write the waiting lines, and hand the file to the loggers that keep files, or send it, if it has changed."""
        self._flush()
        if not self.is_kept or self._uploaded or self._state is None:
            return
        if (publisher := self._publisher) is not None:
            uri = publisher.bucket.uri(self._name)
            self._uploaded = True
            publisher.uploader.submit(uri, lambda: self._send(publisher.bucket), lane=uri, replaces=True)
        elif self._remote_template is not None:
            name = format_name_with_dist(self._remote_template, self._state.run_name)
            logger.upload_file(name, self.path, overwrite=True)
            self._uploaded = True

    def _send(self, bucket: Bucket) -> None:
        """Upload the file as it is now, in the background. Where that fails, the next time it is all there."""
        try:
            with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
                copied = Path(folder) / self._name
                shutil.copyfile(self.path, copied)
                bucket.put(self._name, copied)
        except (OSError, ObjectStoreError) as e:
            self._uploaded = False
            log.warning("%s is not uploaded, and will be with the next checkpoint: %s", bucket.uri(self._name), e)


def _joined(here: bytes, there: bytes) -> bytes:
    """Return the file of which two machines have ``here`` and ``there``: what only one has stays, ``here`` first."""
    low, high = 0, min(len(here), len(there))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if here[:middle] == there[:middle] else (low, middle - 1)
    if low in (len(here), len(there)):
        return max(here, there, key=len)
    start = here.rfind(b"\n", 0, low) + 1
    own = here[start:] if here.endswith(b"\n") else here[start:] + b"\n"
    return there[:start] + own + there[start:]
