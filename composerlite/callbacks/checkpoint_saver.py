"""CheckpointSaver: decides when a checkpoint is saved; a ``Saver`` does the rest."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Any, final

import torch

from composerlite import dist
from composerlite.callbacks.load_checkpoint import LoadCheckpoint
from composerlite.callbacks.save_arguments import (
    ends_with_this_batch,
    interval_of,
    is_never,
    is_of_one_rank,
    time_of,
    whole_number,
)
from composerlite.checkpoint import Catalog, IgnoreKeys, PendingSave, SaveReport
from composerlite.checkpoint.load.resume import Bucket
from composerlite.checkpoint.record.naming import PartialFilePath
from composerlite.checkpoint.save.saver import Saver
from composerlite.core import (
    AutoInterval,
    Callback,
    Event,
    Logger,
    MeasuredMetrics,
    SchedulePredicate,
    State,
    TimeInput,
    check_metric_exists,
)
from composerlite.errors import CheckpointError, ConfigError, checked_arguments

__all__ = ["CheckpointSaver"]

log = logging.getLogger(__name__)


@final
class CheckpointSaver(Callback):
    """Saves checkpoints during training.

    A save happens when ``save_interval`` says so, at most once per batch count; a built-in interval also saves at the
    end of training. Training goes on as soon as what is saved was copied; one save is in flight at a time, and the end
    of ``fit`` waits for it. A checkpoint appears when it is durable, and is verified on load; a kill at any moment
    leaves every older one as it was. A save that fails ends training at the next batch, unless failures are tolerated.
    Several savers may run side by side, in one folder if their ``filename`` and ``latest_filename`` differ.

    Args:
        folder: a local folder, or a URI such as ``'s3://bucket/{run_name}'``; ``{run_name}`` and the variables of
            ranks are filled in. With a URI each checkpoint is saved to a local folder and published behind training.
        filename: the name of each checkpoint, with any of the format variables ``{run_name} {rank} {local_rank}
            {world_size} {local_world_size} {node_rank} {epoch} {batch} {batch_in_epoch} {sample} {sample_in_epoch}
            {token} {token_in_epoch} {total_wct} {epoch_wct} {batch_wct}``; may name subfolders.
        remote_file_name: the name of each checkpoint in a bucket, with format variables: in those of the loggers that
            upload, and in that of ``folder``, where it is ``filename`` below the URI's path if nothing is given.
        latest_filename: a symbolic link to the newest checkpoint; ``None`` for none.
        latest_remote_file_name: the same in a bucket, as an object with ``.symlink`` after its name.
        save_interval: a number of epochs, a time string, or a function ``(state, event) -> bool``. 0: never.
        overwrite: replace files that are there already; otherwise training does not start where it would have to.
        num_checkpoints_to_keep: -1 for all, or how many of the newest stay. Those saved before a resume count. 0 for
            none once they are in a bucket.
        weights_only: save the model alone.
        ignore_keys: globs over ``state/model/…`` paths, or a function of the dict, of what is not saved.
        asynchronous: write behind training; else each save keeps training until it is durable.
        staging_bytes: memory for the copy of what is saved; ``None`` takes what a checkpoint needs if that is at most
            half of what is free. With less, training waits while the rest is written.
        lazy: training goes on before weights and optimizer state are copied, and the optimizer's next step waits for
            what is left. ``None`` does so where nothing else can change them: no algorithms, and no callbacks but those
            of composerlite.
        on_exception: if training fails, save what there is then as ``crash-<filename>``. Autoresume passes over it;
            ``load_path`` loads it. In one process only.
        in_memory: the folder is in memory that outlives the process: it is emptied at the end, once another saver has
            saved as much, and does not count where a run is asked to end. Before the step that ends an interval of
            batches the save of the one before is waited for: a process that is killed has lost one interval at most.
        failure_limit: so many saves in a row may fail, and so many uploads, with a warning each.
        ephemeral_interval: save at these times too, and delete such a checkpoint as soon as there is a newer one.
        keep_every: the first checkpoint at or after each multiple of this interval stays for ever.
        best_k: the best so many by ``best_metric`` stay, ``best_mode`` being ``'max'`` or ``'min'``.
        staging_folder: the local folder where ``folder`` is a URI; the path in the URI by default.
        num_concurrent_uploads: accepted for scripts of Composer. Checkpoints are published one after the other, which
            keeps ``latest`` right, and each is sent in several parts at the same time.
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
        remote_file_name: str | Path | None = None,
        latest_filename: str | Path | None = "latest-rank{rank}.pt",
        latest_remote_file_name: str | Path | None = None,
        save_interval: TimeInput | SchedulePredicate = "1ep",
        *,
        overwrite: bool = False,
        num_checkpoints_to_keep: int = -1,
        weights_only: bool = False,
        ignore_keys: IgnoreKeys = None,
        asynchronous: bool = True,
        staging_bytes: int | None = None,
        lazy: bool | None = None,
        on_exception: bool = False,
        in_memory: bool = False,
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
        whole_number(num_concurrent_uploads, argument="num_concurrent_uploads", least=1)
        self.save_interval = interval_of(save_interval, argument="save_interval", allow_auto=True)
        self.ephemeral_interval: SchedulePredicate | None = None
        if ephemeral_interval is not None:
            self.ephemeral_interval = interval_of(ephemeral_interval, argument="save_ephemeral_interval")
        self._saver = Saver(
            folder=str(folder),
            filename=str(filename),
            remote_file_name=remote_file_name,
            latest_filename=latest_filename,
            latest_remote_file_name=latest_remote_file_name,
            overwrite=overwrite,
            num_checkpoints_to_keep=num_checkpoints_to_keep,
            weights_only=weights_only,
            ignore_keys=ignore_keys,
            asynchronous=asynchronous,
            staging_bytes=None
            if staging_bytes is None
            else whole_number(staging_bytes, argument="save_staging_bytes", least=0),
            in_memory=in_memory,
            failure_limit=whole_number(failure_limit, argument="save_failure_limit", least=0),
            any_ephemeral=ephemeral_interval is not None,
            keep_every=None if keep_every is None else time_of(keep_every, argument="save_keep_every"),
            best_k=best_k,
            best_metric=best_metric,
            best_mode=best_mode,
            staging_folder=staging_folder,
            upload_timeout_in_seconds=float(upload_timeout_in_seconds),
            num_remote_checkpoints_to_keep=num_remote_checkpoints_to_keep,
        )
        self.overwrite = overwrite
        self.num_checkpoints_to_keep = num_checkpoints_to_keep
        self.weights_only = weights_only
        self.ignore_keys = self._saver.ignore_keys
        self.asynchronous = asynchronous
        self.lazy = lazy
        self.on_exception = on_exception
        self.in_memory = in_memory
        self.failure_limit = failure_limit
        self.best_metric = best_metric
        self.last_checkpoint_batch: int | None = None
        self._last_was_ephemeral = False
        self._last_says: tuple[object, ...] | None = None
        self._measured = MeasuredMetrics()
        self.take_leases = self._saver.take_leases
        self.save_after_exception = self._saver.save_after_exception
        self.published = self._saver.published

    # ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def init(self, state: State, logger: Logger) -> None:
        """Fill in the folder's name, make the folder, and finish or remove what a killed run left in it.

        Raises:
            ConfigError: the folder cannot be made or written to, or there is nowhere to keep checkpoints; or there are
                ranks that save a directory together and do not see one folder with any rank of their node.
            PermissionError: the bucket cannot be written to. FileNotFoundError: there is no such bucket.
        """
        if self.on_exception and (state.world_size > 1 or state.sharding is not None):
            raise ConfigError(
                "save_on_exception=True with several ranks, or with a model that is spread over ranks: where one fails "
                "the others are in the middle of a step, and no state is that of all. Leave it out and save more often."
            )
        fsdp = None if state.parallelism is None else state.parallelism.fsdp
        directory: str | None = None
        if fsdp is not None and fsdp.sharded_ckpt_prefix_dir != type(fsdp).sharded_ckpt_prefix_dir:
            directory = fsdp.sharded_ckpt_prefix_dir
        others = [one._saver for one in state.callbacks if isinstance(one, CheckpointSaver) and one is not self]
        self._saver.open(state, logger, others=others, directory=directory)
        for counter in self._saver.counters:
            state.piggyback.add(counter)

    def after_load(self, state: State, logger: Logger) -> None:
        """Know the checkpoints of this run that are behind it."""
        self._saver.take_up(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Refuse to start where another process writes, a checkpoint would be overwritten, or none can hold the model.

        Raises:
            RunInUseError: see :meth:`take_leases`.
        """
        self._saver.begin(state)
        if is_never(self.save_interval) and is_never(self.ephemeral_interval) and dist.get_global_rank() == 0:
            log.warning(
                "save_interval=%s never comes: no checkpoint is saved in %r, not even at the end of training, unless "
                "trainer.save_checkpoint_to_save_folder() is called. Give an interval of 1 or more, as in '500ba'.",
                getattr(self.save_interval, "interval", None),
                self.folder,
            )
        if self.best_metric is not None:
            check_metric_exists(self.best_metric, state, argument="save_best_metric")
        now = int(state.timestamp.batch)
        if self._last_says is None:  # what was loaded
            self._last_says = _says(state)
        if self.last_checkpoint_batch is not None and self.last_checkpoint_batch > now:
            self.last_checkpoint_batch = None  # time was reset: what was saved then says nothing about now

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """In memory, wait for the save in flight before the step that makes the next one due.

        So a process that is killed has lost one interval at most, and not two where memory is slower than training.
        """
        if self.in_memory and ends_with_this_batch(self.save_interval, state):
            self._saver.wait_for_previous()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """See how the save in flight went; save if an interval says so."""
        self._saver.look(state)
        self._learn()
        self._save_if_due(state, Event.BATCH_CHECKPOINT)
        self._saver.prepare(state)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Keep what was measured for the manifest."""
        self._measured.after_evaluation(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Keep what was measured for the manifest."""
        self._measured.after_epoch(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if an interval says so."""
        self._save_if_due(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if an interval says so."""
        self._save_if_due(state, Event.ITERATION_CHECKPOINT)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Save that the run was stopped if no checkpoint says so; wait for the save in flight and all publishing.

        Raises:
            Exception: what made one fail.
        """
        if state.stopped is not None:  # maybe behind the last moment at which one is saved
            self._save_if_due(state, Event.EPOCH_CHECKPOINT)
        self._saver.finish()
        self._learn()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for the save in flight and for all uploads, whatever ended training.

        Raises:
            Exception: what made one fail.
        """
        self._saver.close()

    def _save_if_due(self, state: State, event: Event) -> None:
        due, ephemeral = self._due(state, event)
        if not due and not ephemeral:
            return
        saved_already = self.last_checkpoint_batch == int(state.timestamp.batch)
        if state.stopped is not None and self._last_says != _says(state) and not self.weights_only:
            saved_already = False
        if not saved_already or (due and self._last_was_ephemeral):
            self._start(state, ephemeral=ephemeral)

    def _due(self, state: State, event: Event) -> tuple[bool, bool]:
        """Whether to save, and whether an ephemeral one. What clocks and functions say is asked of rank 0."""
        due = self.save_interval(state, event)
        ephemeral = self.ephemeral_interval is not None and self.ephemeral_interval(state, event) and not due
        if state.world_size > 1 and any(
            is_of_one_rank(interval, state) for interval in (self.save_interval, self.ephemeral_interval)
        ):
            answer = torch.tensor([int(due), int(ephemeral)])
            dist.broadcast(answer)
            due, ephemeral = map(bool, answer.tolist())
        return due, ephemeral

    # ── what ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def save(self, state: State) -> str:
        """Save a checkpoint now, move ``latest``, delete what is not to be kept; its path, when it is committed."""
        pending = self._start(state, ephemeral=False)
        self._saver.collect_all()
        self._learn()
        if pending is None:  # it failed and is tolerated; who asks for a path wants to know
            raise CheckpointError("the checkpoint could not be saved: see the warning in the log.")
        return self._saver.path_of(pending.wait())

    def has_saved(self, state: State) -> bool:
        """Whether there is a checkpoint of where the run stands, and of what was evaluated; waits for a save in flight.

        Raises:
            Exception: what made that fail, unless that is tolerated.
        """
        self._saver.collect()
        self._learn()
        is_of_now = self.last_checkpoint_batch == int(state.timestamp.batch) and self._last_says == _says(state)
        return is_of_now and not self._saver.last_failed

    def save_last(self, state: State) -> None:
        """Save where the run stands, which has to end here. The next regular checkpoint takes its place."""
        self._start(state, ephemeral=True)
        self._saver.collect_all()
        self._learn()

    def _start(self, state: State, *, ephemeral: bool) -> PendingSave | None:
        """Begin a save. Failures so far are raised first, or counted where that is tolerated."""
        self._saver.wait_for_previous()
        self._saver.collect()
        self._learn()
        # Set first: the checkpoint that is being written counts as saved in its own state.
        self.last_checkpoint_batch, self._last_was_ephemeral = int(state.timestamp.batch), ephemeral
        self._last_says = _says(state)
        if isinstance(self.save_interval, AutoInterval):
            self.save_interval.save_began(state)
        pending = self._saver.save(
            state, ephemeral=ephemeral, metrics=self._measured.now(state), lazy=self._may_copy_late(state)
        )
        self._learn()
        return pending

    def _learn(self) -> None:
        """Take note of how saves went that have ended."""
        while self._saver.ended:
            report = self._saver.ended.popleft()
            if isinstance(self.save_interval, AutoInterval):
                if report is None:
                    self.save_interval.record_failure()
                else:
                    self.save_interval.record_save(report.seconds["stall"], report.seconds["total"])

    def _may_copy_late(self, state: State) -> bool:
        """Whether only optimizers change weights from here to their next step."""
        if self.lazy is not None:
            return self.lazy
        ours = all(
            type(callback).__module__.startswith("composerlite.") and not isinstance(callback, LoadCheckpoint)
            for callback in state.callbacks
        )
        return ours and not state.algorithms

    # ── where, and what is there ─────────────────────────────────────────────────────────────────────────────────
    @property
    def folder(self) -> str:
        """The local folder."""
        return self._saver.folder

    @property
    def filename(self) -> PartialFilePath:
        """The name of each checkpoint."""
        return self._saver.filename

    @property
    def latest_filename(self) -> PartialFilePath | None:
        """The name of the link to the newest."""
        return self._saver.latest_filename

    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the checkpoints of this run, oldest first."""
        return self._saver.saved_checkpoints

    @property
    def newest(self) -> str | None:
        """Path of the newest checkpoint in the folder; ``None`` if there is none."""
        return self._saver.newest

    @property
    def reports(self) -> deque[SaveReport]:
        """How the last saves went."""
        return self._saver.reports

    @property
    def blocked_seconds(self) -> float:
        """How long training has waited for saves."""
        return self._saver.blocked_seconds

    @property
    def expected_seconds(self) -> float | None:
        """How long a save takes, as the last one did; ``None``: there was none. Known on rank 0."""
        return self._saver.expected_seconds

    @property
    def catalog(self) -> Catalog:
        """The folder's checkpoints, on each node for itself."""
        return self._saver.catalog

    @property
    def buckets(self) -> list[Bucket]:
        """Where else they are."""
        return [Bucket(publisher.remote, publisher.link, self.catalog) for publisher in self._saver.publishers]

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> dict[str, Any]:
        """What was measured, and the batch count of the last save: a resume does not save the same batch again."""
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
    """What a checkpoint says beside where the run stands, and what may change without a batch."""
    return state.stopped is not None, dict(state.evaluated_at), state.interruption.evaluation
