"""TraceFiles: the files of traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, final

from composerlite import dist
from composerlite.checkpoint.record.naming import (
    check_variables,
    format_name_with_dist,
    format_name_with_dist_and_time,
)
from composerlite.errors import ConfigError

if TYPE_CHECKING:
    from composerlite.core import Logger, State


@final
class TraceFiles:
    """The files of one kind of trace.

    Args:
        owner: name of the class with these files, for messages.
        folder: folder, with ``{run_name}``, ``{rank}`` and the other variables of ranks.
        filename: name of each file; may also contain ``{batch}`` and other counts.
        remote_file_name: name of each upload; ``None``: no upload.
        overwrite: accept files in the folder.
        num_traces_to_keep: number of newest files to keep; -1: all.

    Raises:
        ConfigError: a variable does not exist.
    """

    def __init__(
        self,
        owner: str,
        folder: str,
        filename: str,
        remote_file_name: str | None,
        *,
        overwrite: bool,
        num_traces_to_keep: int = -1,
    ) -> None:
        self._owner = owner
        self._folder = check_variables(folder, argument=f"{owner}(folder)", allow_time=False)
        self._filename = check_variables(filename, argument=f"{owner}(filename)")
        if remote_file_name is not None:
            check_variables(remote_file_name, argument=f"{owner}(remote_file_name)")
        self._remote_file_name = remote_file_name
        self._overwrite = overwrite
        self._keep = num_traces_to_keep
        self.paths: list[Path] = []

    def folder(self, state: State) -> Path:
        """Return the folder of this run."""
        return Path(format_name_with_dist(self._folder, state.run_name))

    def check(self, state: State) -> None:
        """Check that a new run has an empty folder. Collective.

        Args:
            state: state of the run.

        Raises:
            ConfigError: the folder has files, and ``overwrite`` is false.
        """
        folder = self.folder(state)
        with dist.get_group().all_or_none(f"the folder of {self._owner}"):
            is_new = int(state.timestamp.batch) == 0
            if is_new and not self._overwrite and folder.is_dir() and next(folder.iterdir(), None) is not None:
                raise ConfigError(
                    f"{self._owner}: the folder {str(folder)!r} is not empty. Remove the files, give another "
                    "folder, or pass overwrite=True."
                )

    def path(self, state: State) -> Path:
        """Create the folder, and return the path of the next file."""
        name = format_name_with_dist_and_time(self._filename, state.run_name, state.timestamp)
        path = self.folder(state) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def written(self, path: Path, state: State, logger: Logger) -> None:
        """Upload the file ``path`` with the loggers, and delete the oldest files beyond ``num_traces_to_keep``."""
        if self._remote_file_name is not None and logger.has_file_upload_destination():
            name = format_name_with_dist_and_time(self._remote_file_name, state.run_name, state.timestamp)
            logger.upload_file(name.lstrip("/"), path, overwrite=self._overwrite)
        self.paths.append(path)
        while 0 <= self._keep < len(self.paths):
            self.paths.pop(0).unlink(missing_ok=True)
