"""CheckpointSaver: decides when a checkpoint is saved; a ``CheckpointManager`` does the rest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any, final

from composerlite import dist
from composerlite.callbacks.load_checkpoint import LoadCheckpoint
from composerlite.checkpoint import CheckpointManager, IgnoreKeys
from composerlite.checkpoint.record.naming import PartialFilePath
from composerlite.checkpoint.save.options import DEFAULTS, OWN_REMOTE_LATEST, OWN_REMOTE_NAME
from composerlite.core import (
    Callback,
    Event,
    Logger,
    SchedulePredicate,
    State,
    Time,
    TimeInput,
    TimeUnit,
    create_interval_scheduler,
)
from composerlite.core.interval import (
    AutoInterval,
    ends_with_this_batch,
    is_never,
    is_once,
    may_differ_by_rank,
)
from composerlite.core.measured import MeasuredMetrics, check_metric_exists, update_not_finite
from composerlite.errors import CheckpointError, checked_arguments, naming
from composerlite.types import CheckpointNews

log = logging.getLogger(__name__)
_NUMBERS_ALONE = "replicated", "deletion failed"
"""Events of which loggers get the numbers."""
_CHECKPOINTS = Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT


@final
class CheckpointSaver(Callback):
    """Saves checkpoints during training.

    A save happens when ``save_interval`` says so, at most once per batch count; a built-in interval also saves at the
    end of training. Training continues as soon as the state is copied; one save is in flight at a time, and the end
    of ``fit`` waits for it. A checkpoint contains its record, with digests by which it is verified on load, and exists
    from one rename on, after it is durable. A kill at any moment leaves older checkpoints as they were; only archives
    of ranks that are replaced under their names are lost. A save that fails ends training at the next batch, unless
    failures are tolerated.
    Several savers may run side by side, in one folder if their ``filename`` and ``latest_filename`` differ.

    Args:
        folder: a local folder, or a URI such as ``'s3://bucket/{run_name}'``; ``{run_name}`` and the variables of
            ranks are filled in. With a URI each checkpoint is saved to a local folder and published in the background.
        filename: the name of each checkpoint, with any of the format variables ``{run_name} {rank} {local_rank}
            {world_size} {local_world_size} {node_rank} {epoch} {batch} {batch_in_epoch} {sample} {sample_in_epoch}
            {token} {token_in_epoch} {total_wct} {epoch_wct} {batch_wct}``; may name subfolders.
        remote_file_name: the name of each checkpoint in a bucket, with format variables: in those of the loggers that
            upload, and in that of ``folder``, where it is ``filename`` below the URI's path if nothing is given.
            ``None``: ``filename`` below ``folder``.
        latest_filename: a symbolic link to the newest checkpoint; ``None`` for none.
        latest_remote_file_name: the same in a bucket, as an object with ``.symlink`` after its name.
        save_interval: a number of epochs, a time string, or a function ``(state, event) -> bool``. 0: never.
        overwrite: replace files that are there already; otherwise training does not start where it would have to.
        num_checkpoints_to_keep: -1 for all, or how many of the newest stay. Those saved before a resume count. 0 for
            none once they are in a bucket.
        weights_only: save the model alone.
        ignore_keys: globs over ``state/model/…`` paths, or a function of the dict, of what is not saved.
        compat: ``'composer'``: save what Composer loads, too.
        asynchronous: write in the background; else each save keeps training until it is durable.
        staging_bytes: most memory for the copy of the state; ``None``: half of the free memory. Without enough memory
            training waits while the state is written.
        lazy: weights and optimizer state on a GPU are copied while training continues, and the next optimizer step
            waits for the copy. ``None``: if nothing else changes them: no algorithms, only callbacks of composerlite.
            Tensors of the CPU are always copied before training continues.
        on_exception: if training fails, save what there is then as ``crash-<filename>``. Autoresume skips it;
            ``load_path`` loads it. In one process only.
        in_memory: the folder is in memory that outlives the process: it is emptied at the end, once another saver has
            saved as much, and does not count where a run is preempted. Before the step that ends an interval of
            batches the save of the one before is waited for: a process that is killed has lost one interval at most.
        replication: with ``in_memory``, replicate checkpoints to the memory of another node, at so many GB/s at most.
        failure_limit: number of consecutive saves, and of uploads, that may fail, with a warning each.
        ephemeral_interval: save at these times too, and delete such a checkpoint as soon as there is a newer one.
        keep_every: the first checkpoint at or after each multiple of this interval stays for ever.
        best_k: number of the best checkpoints by ``best_metric`` to keep; ``best_mode`` is ``'max'`` or ``'min'``.
        staging_folder: the local folder where ``folder`` is a URI; the path in the URI by default.
        num_concurrent_uploads: accepted for scripts of Composer; a checkpoint is sent at a time, in several parts.
        upload_timeout_in_seconds: how long to wait for uploads, at the end of training and where too many wait.
        num_remote_checkpoints_to_keep: -1 for all, or how many of the newest stay in the bucket.

    Raises:
        ConfigError: a name, interval or number that cannot be used, at construction.
        CheckpointExistsError: at the start of training, if the folder holds what this run would write.
    """

    @checked_arguments
    def __init__(
        self,
        folder: str | Path = "{run_name}/checkpoints",
        filename: str | Path = "ep{epoch}-ba{batch}-rank{rank}.pt",
        remote_file_name: str | Path | None = OWN_REMOTE_NAME,
        latest_filename: str | Path | None = "latest-rank{rank}.pt",
        latest_remote_file_name: str | Path | None = OWN_REMOTE_LATEST,
        save_interval: TimeInput | SchedulePredicate = "1ep",
        *,
        overwrite: bool = False,
        num_checkpoints_to_keep: int = -1,
        weights_only: bool = False,
        ignore_keys: IgnoreKeys = None,
        compat: str | None = None,
        asynchronous: bool = True,
        staging_bytes: int | None = None,
        lazy: bool | None = None,
        on_exception: bool = False,
        in_memory: bool = False,
        replication: float | None = None,
        failure_limit: int = 0,
        ephemeral_interval: TimeInput | SchedulePredicate | None = None,
        keep_every: TimeInput | None = None,
        best_k: int | None = None,
        best_metric: str | None = None,
        best_mode: str = "max",
        staging_folder: str | Path | None = None,
        num_concurrent_uploads: int = 1,
        upload_timeout_in_seconds: float = 3600,
        num_remote_checkpoints_to_keep: int = -1,
    ) -> None:
        arguments = dict(locals())
        with naming("save_interval", save_interval):
            self.save_interval = create_interval_scheduler(save_interval, allow_auto=True)
        self.ephemeral_interval: SchedulePredicate | None = None
        if ephemeral_interval is not None:
            with naming("save_ephemeral_interval", ephemeral_interval):
                self.ephemeral_interval = create_interval_scheduler(ephemeral_interval)
        if keep_every is not None:
            with naming("save_keep_every", keep_every):
                arguments["keep_every"] = Time.from_input(keep_every, TimeUnit.EPOCH)
        self.manager = CheckpointManager(folder, options={name: arguments[name] for name in DEFAULTS})
        self.options = self.manager.options
        self._logger: Logger | None = None
        self.weights_only = weights_only
        self.lazy = lazy
        self.in_memory = in_memory
        self.last_checkpoint_batch: int | None = None
        self._last_was_ephemeral = False
        self._last_says: tuple[object, ...] | None = None
        self._only_ends = False
        self._has_prepared = False
        self._measured = MeasuredMetrics()

    # ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def init(self, state: State, logger: Logger) -> None:
        """Open the folder. See :meth:`CheckpointManager.open`."""
        self._logger = logger
        fsdp = None if state.parallelism is None else state.parallelism.fsdp
        others = [one.manager for one in state.callbacks if isinstance(one, CheckpointSaver) and one is not self]
        directory = None if fsdp is None else fsdp.given_prefix_dir
        self.manager.open(state, logger.uploaders, others=others, directory=directory)
        state.piggyback.extend(self.manager.counters)

    def after_load(self, state: State, logger: Logger) -> None:
        """Find the checkpoints that this run has saved up to now."""
        self.manager.load_existing()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Refuse to start where another process writes, files would be overwritten, or none could hold the model."""
        several = not is_never(self.save_interval) and not is_once(self.save_interval, state)
        with self._logged():
            is_saved = self.manager.begin(several=several)
        if is_never(self.save_interval) and is_never(self.ephemeral_interval) and dist.get_global_rank() == 0:
            log.warning(
                "save_interval=%s never comes: no checkpoint is saved in %r, not even at the end of training, unless "
                "trainer.save_checkpoint_to_save_folder() is called. Give an interval of 1 or more, as in '500ba'.",
                getattr(self.save_interval, "interval", None),
                self.folder,
            )
        policy = self.options.keep.policy
        if policy.best is not None:
            check_metric_exists(policy.metric, state, argument="save_best_metric")
            state.needs_train_metrics = state.needs_train_metrics or policy.metric.startswith("train/")
        self._last_says = self._last_says or _says(state)  # what was loaded
        if not is_saved or (self.last_checkpoint_batch or 0) > int(state.timestamp.batch):
            self.last_checkpoint_batch = None  # or time was reset: what was saved then says nothing about now
        self._only_ends = state.training_is_over

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Wait for the save in flight before the step that makes the next one due, if ``in_memory``."""
        if self.in_memory and ends_with_this_batch(self.save_interval, state):
            self._collect()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Collect the save in flight if it has ended; save if an interval is due."""
        with self._logged() as events:
            events += self.manager.poll()
        if not self._has_prepared:
            self.manager.prepare()  # after the first step: optimizers have their state now
            self._has_prepared = True
        self._save_if_due(state, Event.BATCH_CHECKPOINT)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Keep the metrics for the record."""
        self._measured.after_evaluation(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Keep the metrics for the record."""
        self._measured.after_epoch(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if an interval says so."""
        self._save_if_due(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if an interval says so."""
        self._save_if_due(state, Event.ITERATION_CHECKPOINT)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Save the end if no checkpoint has it yet; wait for saves and uploads; raise what they do.

        The run may have been stopped behind the last moment at which one is saved. Or ``fit`` raised when it had
        trained on everything, and was called again.
        """
        if state.stopped is not None:
            self._save_if_due(state, Event.EPOCH_CHECKPOINT)
        for event in _CHECKPOINTS if self._only_ends else ():
            self._save_if_due(state, event)
        with self._logged():
            self.manager.finish()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for saves and uploads, whatever ended training, and raise what they do."""
        with self._logged():
            self.manager.close()

    def _save_if_due(self, state: State, event: Event) -> None:
        due, ephemeral = self._due(state, event)
        if not (due or ephemeral):
            return
        is_stop = state.stopped is not None and self._last_says != _says(state) and not self.weights_only
        saved_already = self.last_checkpoint_batch == int(state.timestamp.batch) and not is_stop
        if not saved_already or (due and self._last_was_ephemeral):
            self._start(state, ephemeral=ephemeral)

    def _due(self, state: State, event: Event) -> tuple[bool, bool]:
        """Decide whether to save, and whether an ephemeral checkpoint. Rank 0 evaluates clocks and user functions."""
        due = self.save_interval(state, event)
        ephemeral = self.ephemeral_interval is not None and self.ephemeral_interval(state, event) and not due
        intervals = self.save_interval, self.ephemeral_interval
        if state.world_size > 1 and any(may_differ_by_rank(interval, state) for interval in intervals):
            due, ephemeral = dist.get_group().broadcast((due, ephemeral))
        return due, ephemeral

    # ── what ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def save(self, state: State) -> str:
        """Save a checkpoint now, move ``latest``, delete what is not to be kept; its path, when it is committed."""
        self._start(state, ephemeral=False)
        self._collect()
        if self.manager.outcomes.last_is_unconfirmed:  # a tolerated failure: there is no path to return
            error = self.manager.outcomes.tolerated
            raise CheckpointError(f"the checkpoint could not be saved: {type(error).__name__}: {error}") from error
        return self.saved_checkpoints[-1]

    def has_saved(self, state: State) -> bool:
        """Return true if a checkpoint has the current batch and its evaluation. Waits for the last save."""
        self._collect()
        is_of_now = self.last_checkpoint_batch == int(state.timestamp.batch) and self._last_says == _says(state)
        return is_of_now and not self.manager.outcomes.last_is_unconfirmed

    def save_last(self, state: State) -> None:
        """Save where the run stands, which has to end here. The next regular checkpoint takes its place."""
        self._start(state, ephemeral=True)
        self._collect()

    def _start(self, state: State, *, ephemeral: bool) -> None:
        """Begin a save. Failures so far are raised first, or counted where that is tolerated."""
        self._collect()
        # Set first: the checkpoint that is being written counts as saved in its own state.
        self.last_checkpoint_batch, self._last_was_ephemeral = int(state.timestamp.batch), ephemeral
        self._last_says = _says(state)
        if isinstance(self.save_interval, AutoInterval):
            self.save_interval.save_began(state)
        update_not_finite(state)
        metrics, lazy = self._measured.now(state), self._may_copy_late(state)
        with self._logged():
            self.manager.save(ephemeral=ephemeral, metrics=metrics, lazy=lazy)

    def _collect(self) -> None:
        """Wait for the save in flight."""
        with self._logged():
            self.manager.collect()

    @contextlib.contextmanager
    def _logged(self) -> Generator[list[CheckpointNews]]:
        """Pass the events of the block to the loggers and the interval, whether or not an error ends the block.

        Yields:
            A list, for events that the block has taken already.
        """
        events: list[CheckpointNews] = []
        try:
            yield events
        finally:
            outcomes = self.manager.outcomes
            taken, outcomes.events = events + outcomes.events, []
            for news in taken:
                if isinstance(self.save_interval, AutoInterval) and news.what == "failed":
                    self.save_interval.record_failure()
                elif isinstance(self.save_interval, AutoInterval) and news.what == "committed":
                    self.save_interval.record_save(news.seconds["stall"], news.seconds["total"])
                if self._logger is not None and dist.get_global_rank() == 0 and news.what not in _NUMBERS_ALONE:
                    self._logger.log_checkpoint(news)
                if self._logger is not None and news.metrics:
                    self._logger.log_metrics({f"checkpoint/{name}": value for name, value in news.metrics.items()})

    def _may_copy_late(self, state: State) -> bool:
        """Return true if only optimizers change weights from here to their next step."""
        if self.lazy is not None:
            return self.lazy
        ours = all(
            type(callback).__module__.startswith("composerlite.") and not isinstance(callback, LoadCheckpoint)
            for callback in state.callbacks
        )
        return ours and not state.algorithms

    @property
    def folder(self) -> str:
        """The local folder."""
        return self.manager.where.folder

    @property
    def filename(self) -> PartialFilePath:
        """The name of each checkpoint."""
        return PartialFilePath(self.manager.where.filename, self.options.names.local_folder)

    @property
    def blocked_seconds(self) -> float:
        """Seconds for which saves have blocked training."""
        return self.manager.outcomes.blocked_seconds + self.manager.outcomes.waited_seconds

    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the checkpoints of this run, oldest first."""
        return [f"{self.folder.rstrip('/')}/{name}" for name in self.manager.saved]

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> dict[str, Any]:
        """Return the measurements and the batch of the last save, so that a resumed run does not save it again."""
        saved: dict[str, Any] = {"last_checkpoint_batch": self.last_checkpoint_batch}
        if self._last_was_ephemeral:
            saved["ephemeral"] = True
        if isinstance(self.save_interval, AutoInterval):
            saved["interval"] = self.save_interval.state_dict()
        if measured := self._measured.state_dict():
            saved["measured"] = measured
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the batch count of the last save. Composer's state, a list of paths, holds none."""
        self.last_checkpoint_batch = state_dict.get("last_checkpoint_batch")
        self._last_was_ephemeral = bool(state_dict.get("ephemeral", False))
        self._measured.load_state_dict(state_dict.get("measured", {}))
        if isinstance(self.save_interval, AutoInterval) and "interval" in state_dict:
            self.save_interval.load_state_dict(state_dict["interval"])


def _says(state: State) -> tuple[object, ...]:
    """Return the state of a checkpoint, other than its position, that may change without another batch."""
    return state.stopped is not None, dict(state.evaluated_at), state.interruption.evaluation
