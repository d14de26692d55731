"""CheckpointSaver: decides when to save a checkpoint. A ``CheckpointManager`` saves."""

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
_METRICS_ONLY = "replicated", "deletion failed"
"""Events whose metrics are logged, but not the events themselves."""
_CHECKPOINTS = Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT


@final
class CheckpointSaver(Callback):
    """Saves checkpoints during training.

    A save begins when ``save_interval`` is due, at most once per batch count; a built-in interval is also due at the
    end of training. Training continues as soon as the state is copied. One save runs at a time, and the end of ``fit``
    waits for the save. A checkpoint contains its record, with digests to verify the checkpoint on load, and exists from
    one rename on, after the data are durable. A kill at any moment leaves older checkpoints unchanged, except archives
    of ranks that are replaced under the same name. A failed save ends training at the next batch, unless
    ``failure_limit`` tolerates failures. Several savers may run side by side, in one folder if ``filename`` and
    ``latest_filename`` differ.

    Args:
        folder: a local folder, or a URI such as ``'s3://bucket/{run_name}'``; ``{run_name}`` and the variables of
            ranks are filled in. With a URI each checkpoint is saved to a local folder and uploaded in the background.
        filename: name of each checkpoint, with any of the format variables ``{run_name} {rank} {local_rank}
            {world_size} {local_world_size} {node_rank} {epoch} {batch} {batch_in_epoch} {sample} {sample_in_epoch}
            {token} {token_in_epoch} {total_wct} {epoch_wct} {batch_wct}``; may contain subfolders.
        remote_file_name: name of each checkpoint in a bucket, with format variables: in the buckets of the loggers that
            upload, and in the bucket of ``folder``, where the default is ``filename`` below the path of the URI.
            ``None``: ``filename`` below ``folder``.
        latest_filename: a symbolic link to the newest checkpoint; ``None``: no link.
        latest_remote_file_name: name of the link in a bucket, an object with ``.symlink`` after the name.
        save_interval: a number of epochs, a time string, or a function ``(state, event) -> bool``. 0: never.
        overwrite: replace existing files. Otherwise training does not start if files would have to be replaced.
        num_checkpoints_to_keep: -1 for all, or the number of newest checkpoints to keep, including checkpoints from
            before a resume. 0: keep none after the upload to a bucket.
        weights_only: save the model only.
        ignore_keys: globs over ``state/model/…`` paths to leave out, or a function that changes the dict.
        compat: ``'composer'``: also save the keys that Composer loads.
        asynchronous: write in the background. Otherwise training waits until each checkpoint is durable.
        staging_bytes: largest amount of memory for the copy of the state; ``None``: half of the free memory. Without
            enough memory training waits until the state is written.
        lazy: copy weights and optimizer state on a GPU while training continues; the next optimizer step waits for the
            copy. ``None``: only if nothing else changes the state: no algorithms, and only callbacks of composerlite.
            Tensors on the CPU are always copied before training continues.
        on_exception: if training fails, save the state as ``crash-<filename>``. Autoresume skips this checkpoint, and
            ``load_path`` loads it. For one process only.
        in_memory: the folder is in memory that outlives the process. The folder is emptied at the end, after another
            saver has saved the same state, and a preempted run does not save to it. Before the last step of an interval
            of batches training waits for the previous save, so a killed process loses one interval at most.
        replication: with ``in_memory``, replicate checkpoints to the memory of another node, at most at this rate in
            GB/s.
        failure_limit: number of consecutive saves, and of uploads, that may fail with a warning.
        ephemeral_interval: also save at this interval, and delete such a checkpoint when a newer checkpoint exists.
        keep_every: keep the first checkpoint at or after each multiple of this interval forever.
        best_k: number of best checkpoints by ``best_metric`` to keep.
        best_metric: name of the metric, such as ``'eval/MulticlassAccuracy'``.
        best_mode: ``'max'`` or ``'min'``.
        staging_folder: local folder if ``folder`` is a URI; by default the path in the URI.
        num_concurrent_uploads: ignored; for scripts of Composer. A checkpoint is uploaded in parallel parts.
        upload_timeout_in_seconds: longest wait for uploads, at the end of training and if too many uploads wait.
        num_remote_checkpoints_to_keep: -1 for all, or the number of newest checkpoints to keep in the bucket.

    Raises:
        ConfigError: a name, interval or number is invalid.
        CheckpointExistsError: at the start of training, if the folder has files that this run would write.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=CheckpointSaver("runs/fox", save_interval="500ba"))
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
        self._saved_extra: tuple[object, ...] | None = None
        self._is_over = False  # when fit began
        self._has_prepared = False
        self._measured = MeasuredMetrics()

    def init(self, state: State, logger: Logger) -> None:
        """Open the folder. See :meth:`CheckpointManager.open`."""
        self._logger = logger
        fsdp = None if state.parallelism is None else state.parallelism.fsdp
        others = [one.manager for one in state.callbacks if isinstance(one, CheckpointSaver) and one is not self]
        directory = None if fsdp is None else fsdp.given_prefix_dir
        self.manager.open(state, logger.uploaders, others=others, directory=directory)
        state.piggyback.extend(self.manager.counters)

    def after_load(self, state: State, logger: Logger) -> None:
        """List the checkpoints saved before this launch."""
        self.manager.load_existing()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that this process may write to the folder, and that no existing file would be replaced."""
        several = not is_never(self.save_interval) and not is_once(self.save_interval, state)
        with self._logged():
            is_saved = self.manager.begin(several=several)
        if is_never(self.save_interval) and is_never(self.ephemeral_interval) and dist.get_global_rank() == 0:
            log.warning(
                "save_interval=%s is never due: no checkpoint is saved in %r, not even at the end of training, unless "
                "trainer.save_checkpoint_to_save_folder() is called. Give an interval of 1 or more, as in '500ba'.",
                getattr(self.save_interval, "interval", None),
                self.folder,
            )
        policy = self.options.keep.policy
        if policy.best is not None:
            check_metric_exists(policy.metric, state, argument="save_best_metric")
            state.needs_train_metrics = state.needs_train_metrics or policy.metric.startswith("train/")
        self._saved_extra = self._saved_extra or _extra_state(state)  # of the loaded checkpoint
        if not is_saved or (self.last_checkpoint_batch or 0) > int(state.timestamp.batch):
            self.last_checkpoint_batch = None  # the checkpoint is missing, or time was reset
        self._is_over = state.training_is_over

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Wait for the running save before the step at which the next save is due, if ``in_memory``."""
        if self.in_memory and ends_with_this_batch(self.save_interval, state):
            self._collect()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Process finished saves, and save if an interval is due."""
        with self._logged() as events:
            events += self.manager.poll()
        if not self._has_prepared:
            self.manager.prepare()  # after the first step, when optimizers have their state
            self._has_prepared = True
        self._save_if_due(state, Event.BATCH_CHECKPOINT)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Note the metrics for the record of the next checkpoint."""
        self._measured.after_evaluation(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Note the metrics for the record of the next checkpoint."""
        self._measured.after_epoch(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if an interval is due."""
        self._save_if_due(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if an interval is due."""
        self._save_if_due(state, Event.ITERATION_CHECKPOINT)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Save the end of training if no checkpoint has it, and wait for saves and uploads."""
        if state.stopped is not None:  # perhaps after the last checkpoint event
            self._save_if_due(state, Event.EPOCH_CHECKPOINT)
        for event in _CHECKPOINTS if self._is_over else ():  # an earlier fit has trained, and raised before the save
            self._save_if_due(state, event)
        with self._logged():
            self.manager.finish()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for saves and uploads, also after an error in training, and raise their errors."""
        with self._logged():
            self.manager.close()

    def _save_if_due(self, state: State, event: Event) -> None:
        due = self.save_interval(state, event)
        ephemeral = self.ephemeral_interval is not None and self.ephemeral_interval(state, event) and not due
        intervals = self.save_interval, self.ephemeral_interval
        if state.world_size > 1 and any(may_differ_by_rank(interval, state) for interval in intervals):
            due, ephemeral = dist.get_group().broadcast((due, ephemeral))  # clocks and user functions of rank 0
        if not (due or ephemeral):
            return
        is_stop = state.stopped is not None and self._saved_extra != _extra_state(state) and not self.weights_only
        is_saved = self.last_checkpoint_batch == int(state.timestamp.batch) and not is_stop
        if not is_saved or (due and self._last_was_ephemeral):
            self._start(state, ephemeral=ephemeral)

    def save(self, state: State) -> str:
        """Save a checkpoint now, and return its path after the commit.

        Raises:
            CheckpointError: the save failed, and ``failure_limit`` tolerates the failure.
        """
        self._start(state, ephemeral=False)
        self._collect()
        if self.manager.outcomes.last_is_unconfirmed:  # a tolerated failure
            error = self.manager.outcomes.tolerated
            raise CheckpointError(f"the checkpoint could not be saved: {type(error).__name__}: {error}") from error
        return self.saved_checkpoints[-1]

    def has_saved(self, state: State) -> bool:
        """Wait for the running save. Return true if a checkpoint has the present batch and evaluation."""
        self._collect()
        is_current = self.last_checkpoint_batch == int(state.timestamp.batch) and self._saved_extra == _extra_state(
            state
        )
        return is_current and not self.manager.outcomes.last_is_unconfirmed

    def save_last(self, state: State) -> None:
        """Save a checkpoint of a preempted run. The next regular checkpoint replaces this one."""
        self._start(state, ephemeral=True)
        self._collect()

    def _start(self, state: State, *, ephemeral: bool) -> None:
        """Begin a save. Raises the failure of the last save, unless ``failure_limit`` tolerates the failure."""
        self._collect()
        # Before the save: the checkpoint contains the state of this callback.
        self.last_checkpoint_batch, self._last_was_ephemeral = int(state.timestamp.batch), ephemeral
        self._saved_extra = _extra_state(state)
        if isinstance(self.save_interval, AutoInterval):
            self.save_interval.save_began(state)
        update_not_finite(state)
        metrics, lazy = self._measured.now(state), self._may_copy_late(state)
        with self._logged():
            self.manager.save(ephemeral=ephemeral, metrics=metrics, lazy=lazy)

    def _collect(self) -> None:
        """Wait for the running save."""
        with self._logged():
            self.manager.collect()

    @contextlib.contextmanager
    def _logged(self) -> Generator[list[CheckpointNews]]:
        """Pass the events of the block to the loggers and the interval, also if the block raises.

        Yields:
            A list for events that the block itself has collected.
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
                if self._logger is not None and dist.get_global_rank() == 0 and news.what not in _METRICS_ONLY:
                    self._logger.log_checkpoint(news)
                if self._logger is not None and news.metrics:
                    self._logger.log_metrics({f"checkpoint/{name}": value for name, value in news.metrics.items()})

    def _may_copy_late(self, state: State) -> bool:
        """Return true if only optimizers change the weights before the next step."""
        if self.lazy is not None:
            return self.lazy
        ours = all(
            type(callback).__module__.startswith("composerlite.") and not isinstance(callback, LoadCheckpoint)
            for callback in state.callbacks
        )
        return ours and not state.algorithms

    @property
    def folder(self) -> str:
        """Local folder of the checkpoints."""
        return self.manager.where.folder

    @property
    def filename(self) -> PartialFilePath:
        """Template of the name of each checkpoint."""
        return PartialFilePath(self.manager.where.filename, self.options.names.local_folder)

    @property
    def blocked_seconds(self) -> float:
        """Seconds during which training has waited for saves."""
        return self.manager.outcomes.blocked_seconds + self.manager.outcomes.waited_seconds

    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the checkpoints of this run, oldest first."""
        return [f"{self.folder.rstrip('/')}/{name}" for name in self.manager.saved]

    def state_dict(self) -> dict[str, Any]:
        """Return the batch of the last save, so that a resumed run does not save the batch again, and measurements."""
        saved: dict[str, Any] = {"last_checkpoint_batch": self.last_checkpoint_batch}
        if self._last_was_ephemeral:
            saved["ephemeral"] = True
        if isinstance(self.save_interval, AutoInterval):
            saved["interval"] = self.save_interval.state_dict()
        if measured := self._measured.state_dict():
            saved["measured"] = measured
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the batch of the last save and measurements. Composer's state has neither."""
        self.last_checkpoint_batch = state_dict.get("last_checkpoint_batch")
        self._last_was_ephemeral = bool(state_dict.get("ephemeral", False))
        self._measured.load_state_dict(state_dict.get("measured", {}))
        if isinstance(self.save_interval, AutoInterval) and "interval" in state_dict:
            self.save_interval.load_state_dict(state_dict["interval"])


def _extra_state(state: State) -> tuple[object, ...]:
    """Return the stop flag and the finished evaluations. If these change, the same batch is saved again."""
    return state.stopped is not None, dict(state.evaluated_at), state.interruption.evaluation
