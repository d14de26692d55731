"""CheckpointSaver: decides when a checkpoint is saved, under which name, and which older ones go."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any, final

from composerlite.checkpoint import (
    Catalog,
    IgnoreKeys,
    Manifest,
    PartialFilePath,
    check_ignore_keys,
    check_template,
    deletions,
    ensure_no_conflict,
    format_name_with_dist,
    format_name_with_dist_and_time,
    retention_policy,
    save,
)
from composerlite.core import Callback, Event, Logger, SchedulePredicate, State, TimeInput, create_interval_scheduler
from composerlite.errors import ConfigError, checked_arguments

__all__ = ["CheckpointSaver"]

log = logging.getLogger(__name__)


@final
class CheckpointSaver(Callback):
    """Saves checkpoints during training.

    A save happens when ``save_interval`` says so, at most once per batch count; a built-in interval also saves at the
    end of training. When a save returns, the checkpoint is durable and verified on load; a kill at any moment leaves
    every older one as it was. Several savers may run side by side, in one folder if their names differ.

    Args:
        folder: a local folder; ``{run_name}`` and the variables of ranks are filled in.
        filename: the name of each checkpoint, with any of the format variables ``{run_name} {rank} {local_rank}
            {world_size} {local_world_size} {node_rank} {epoch} {batch} {batch_in_epoch} {sample} {sample_in_epoch}
            {token} {token_in_epoch} {total_wct} {epoch_wct} {batch_wct}``; may name subfolders.
        latest_filename: a symbolic link to the newest checkpoint; ``None`` for none.
        save_interval: a number of epochs, a time string, or a function ``(state, event) -> bool``.
        overwrite: replace files that are there already; otherwise training does not start where it would have to.
        num_checkpoints_to_keep: -1 for all, or how many of the newest stay. Those saved before a resume count.
        weights_only: save the model alone.
        ignore_keys: globs over ``state/model/…`` paths, or a function of the dict, of what is not saved.

    Raises:
        ConfigError: a name, interval or number that cannot be used, at construction.
        CheckpointExistsError: at the start of training, if the folder holds what this run would write.
    """

    @checked_arguments
    def __init__(
        self,
        folder: str | Path = "{run_name}/checkpoints",
        filename: str | Path = "ep{epoch}-ba{batch}-rank{rank}.pt",
        latest_filename: str | Path | None = "latest-rank{rank}.pt",
        save_interval: TimeInput | SchedulePredicate = "1ep",
        *,
        overwrite: bool = False,
        num_checkpoints_to_keep: int = -1,
        weights_only: bool = False,
        ignore_keys: IgnoreKeys = None,
    ) -> None:
        folder, filename = str(folder), str(filename)
        if "://" in folder:
            raise ConfigError(f"folder={folder!r}: checkpoints are saved to local folders; object stores come later.")
        check_template(folder, argument="save_folder", allow_time=False)
        self.filename = PartialFilePath(check_template(filename, argument="save_filename"), folder)
        self.latest_filename: PartialFilePath | None = None
        if latest_filename is not None:
            name = check_template(str(latest_filename), argument="save_latest_filename")
            self.latest_filename = PartialFilePath(name, folder)
        try:
            self.save_interval = create_interval_scheduler(save_interval)
        except ConfigError as e:
            raise ConfigError(f"save_interval={save_interval!r}: {e}") from e
        self.folder = self._folder_template = folder
        self.overwrite = overwrite
        self.num_checkpoints_to_keep = num_checkpoints_to_keep
        self.weights_only = weights_only
        self.ignore_keys = check_ignore_keys(ignore_keys, argument="save_ignore_keys")
        self.saved_checkpoints: list[str] = []
        self.last_checkpoint_batch: int | None = None
        self._retention = retention_policy(num_checkpoints_to_keep)

    # ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def init(self, state: State, logger: Logger) -> None:
        """Fill in the folder's name, make the folder, and finish or remove what a killed run left in it.

        Raises:
            ConfigError: the folder cannot be made or written to.
        """
        self.folder = format_name_with_dist(self._folder_template, state.run_name)
        folder = Path(self.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass  # it can be written to
        except OSError as e:
            raise ConfigError(f"save_folder={self.folder!r} cannot be written to: {e}. Choose another folder.") from e
        self.catalog.recover()

    def after_load(self, state: State, logger: Logger) -> None:
        """Know the checkpoints of this run that are behind it."""
        self.saved_checkpoints = [self._path(manifest.name) for manifest in self._manifests(state)]

    def fit_start(self, state: State, logger: Logger) -> None:
        """Refuse to start where this run would overwrite a checkpoint that is ahead of it."""
        if not self.overwrite:
            ensure_no_conflict(
                self.catalog.files(),
                self.filename.filename,
                run_name=state.run_name,
                timestamp=state.timestamp,
                folder=self.folder,
            )
        now = int(state.timestamp.batch)
        if self.last_checkpoint_batch is not None and self.last_checkpoint_batch > now:
            self.last_checkpoint_batch = None  # time was reset: what was saved then says nothing about now

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if the interval says so."""
        if self.save_interval(state, Event.BATCH_CHECKPOINT):
            self._save_once(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if the interval says so."""
        if self.save_interval(state, Event.EPOCH_CHECKPOINT):
            self._save_once(state)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if the interval says so."""
        if self.save_interval(state, Event.ITERATION_CHECKPOINT):
            self._save_once(state)

    def _save_once(self, state: State) -> None:
        if self.last_checkpoint_batch != int(state.timestamp.batch):
            self.save(state)

    # ── what ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def save(self, state: State) -> str:
        """Save a checkpoint now, move ``latest``, delete what is not to be kept; the path of the checkpoint."""
        # Set first: the checkpoint that is being written counts as saved in its own state.
        self.last_checkpoint_batch = int(state.timestamp.batch)
        # A name that this run has given before, such as 'ep{epoch}.pt' within one epoch, is its own to give again.
        name = format_name_with_dist_and_time(self.filename.filename, state.run_name, state.timestamp)
        own = self._path(name) in self.saved_checkpoints
        saved = save(
            state,
            catalog=self.catalog,
            template=self.filename.filename,
            weights_only=self.weights_only,
            ignore_keys=self.ignore_keys,
            overwrite=self.overwrite or own,
            latest=None if self.latest_filename is None else self.latest_filename.filename,
        )
        path = self._path(str(saved.relative_to(self.folder)))
        if path in self.saved_checkpoints:
            self.saved_checkpoints.remove(path)
        self.saved_checkpoints.append(path)
        if self.num_checkpoints_to_keep != -1:
            for manifest in deletions(self._manifests(state), self._retention):
                self.catalog.delete(manifest)
                if (gone := self._path(manifest.name)) in self.saved_checkpoints:
                    self.saved_checkpoints.remove(gone)
        return path

    @property
    def catalog(self) -> Catalog:
        """The folder's checkpoints."""
        return Catalog(self.folder)

    def _manifests(self, state: State) -> list[Manifest]:
        """The checkpoints that this saver wrote, in this process or before a resume.

        Those ahead of the run are not among them: they are left from before it was started over, and would count as
        newer than what it saves now.
        """
        return [
            manifest
            for manifest in self.catalog.manifests()
            if manifest.run_name == state.run_name
            and manifest.template == self.filename.filename
            and manifest.batch <= int(state.timestamp.batch)
        ]

    def _path(self, name: str) -> str:
        """The folder as the user wrote it, with its './' if it has one, and the name."""
        return f"{self.folder.rstrip('/')}/{name}"

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> dict[str, Any]:
        """The batch count of the last save, so that a resume does not save the same batch again."""
        return {"last_checkpoint_batch": self.last_checkpoint_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the batch count of the last save. Composer's state, a list of paths, holds none."""
        self.last_checkpoint_batch = state_dict.get("last_checkpoint_batch")
