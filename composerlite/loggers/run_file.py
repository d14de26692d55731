"""A file that a logger keeps of a run: made when the run begins, gone on with by the next launch, and uploaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

from composerlite import dist
from composerlite.checkpoint import format_name_with_dist
from composerlite.errors import ConfigError
from composerlite.loggers.remote_uploader_downloader import RemoteUploaderDownloader

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["RunFile"]


@runtime_checkable
class _Saver(Protocol):
    """A callback that saves checkpoints, as far as it is asked where."""

    folder: str
    in_memory: bool


@final
class RunFile:
    """The file ``template`` of this run, on global rank 0.

    Args:
        owner: the logger, for messages.
        template: its name, with ``{run_name}`` and the variables of ranks; ``None``: ``name`` in the folder of the
            checkpoints, or in one named after the run if there are none.
        name: what the file is called where no other name is given.
        remote_template: the name under which other loggers keep it; ``None``: they do not.

    Raises:
        ConfigError: an unknown variable.
    """

    def __init__(self, owner: str, template: str | Path | None, remote_template: str | None, *, name: str) -> None:
        template = None if template is None else str(template)
        for one in (template, remote_template):
            if one is not None:
                format_name_with_dist(one, run_name="")  # a typo in a variable is an error now
        self._owner = owner
        self._template = template
        self._name = name
        self._remote_template = remote_template
        self._uploaded = True
        self.is_kept = dist.get_global_rank() == 0
        self.path = Path(name)

    def prepare(self, state: State, logger: Logger) -> None:
        """See that it can be written, and uploaded if it is to be.

        Raises:
            ConfigError: it cannot.
        """
        template = self._beside_checkpoints(state) if self._template is None else self._template
        self.path = Path(format_name_with_dist(template, state.run_name)).absolute()
        if self._remote_template is not None and not logger.has_file_upload_destination():
            raise ConfigError(
                f"{self._owner}(remote_file_name={self._remote_template!r}): no logger of this run keeps files. Add "
                "one that does, or leave remote_file_name out."
            )
        if not self.is_kept:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as e:
            raise ConfigError(
                f"{self._owner}(filename={template!r}): {str(self.path)!r} cannot be written: {e.strerror}. Give "
                "a path that can."
            ) from e

    def _beside_checkpoints(self, state: State) -> str:
        folders = [one.folder for one in state.callbacks if isinstance(one, _Saver) and not one.in_memory]
        return f"{folders[0] if folders else '{run_name}'}/{self._name}"

    def fetch(self, state: State, logger: Logger) -> None:
        """Where a run goes on on another machine and the file here is empty: get what was uploaded before."""
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

    def changed(self) -> None:
        """It has something that is not uploaded."""
        self._uploaded = False

    def upload(self, state: State, logger: Logger) -> None:
        """Hand it to the loggers that keep files, if it has changed."""
        if self._remote_template is None or not self.is_kept or self._uploaded:
            return
        logger.upload_file(format_name_with_dist(self._remote_template, state.run_name), self.path, overwrite=True)
        self._uploaded = True
