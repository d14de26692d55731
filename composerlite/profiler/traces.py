"""Files of traces: where they are, who gets them, and how many stay."""

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
    """The files that one kind of trace is written to.

    Args:
        owner: class that they are of, for messages.
        folder, filename: templates with ``{run_name}``, ``{rank}``, and in ``filename`` ``{batch}`` and the like.
        remote_file_name: template of the name under which loggers keep each; ``None``: they do not.
        overwrite: files may be there already.
        num_traces_to_keep: newest ones; -1 for all.

    Raises:
        ConfigError: a template has a variable that does not exist.
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
        """The folder, of this run."""
        return Path(format_name_with_dist(self._folder, state.run_name))

    def check(self, state: State) -> None:
        """Check that a run that begins does not mix its files with others. Every rank calls it.

        Raises:
            ConfigError: there are files in the folder, and ``overwrite`` is not given.
        """
        folder = self.folder(state)
        with dist.get_group().all_or_none(f"the folder of {self._owner}"):
            is_new = int(state.timestamp.batch) == 0
            if is_new and not self._overwrite and folder.is_dir() and next(folder.iterdir(), None) is not None:
                raise ConfigError(
                    f"{self._owner}: the folder {str(folder)!r} is not empty. Remove it, name another folder, or pass "
                    "overwrite=True."
                )

    def path(self, state: State) -> Path:
        """The file of now; its folder is there."""
        name = format_name_with_dist_and_time(self._filename, state.run_name, state.timestamp)
        path = self.folder(state) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def written(self, path: Path, state: State, logger: Logger) -> None:
        """Hand the file ``path`` to the loggers, and delete the oldest ones that are too many."""
        if self._remote_file_name is not None and logger.has_file_upload_destination():
            name = format_name_with_dist_and_time(self._remote_file_name, state.run_name, state.timestamp)
            logger.upload_file(name.lstrip("/"), path, overwrite=self._overwrite)
        self.paths.append(path)
        while 0 <= self._keep < len(self.paths):
            self.paths.pop(0).unlink(missing_ok=True)
