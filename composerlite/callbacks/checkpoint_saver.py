"""CheckpointSaver: decides when a checkpoint is saved, under which name, and which older ones go."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
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
from composerlite.checkpoint import Catalog, IgnoreKeys, Manifest, PendingSave, Pipeline, SaveReport
from composerlite.checkpoint.load.resume import Bucket
from composerlite.checkpoint.place.lease import FolderLease, Lease, take_leases
from composerlite.checkpoint.place.memory_folder import folder_key, make_private, warn_of_others
from composerlite.checkpoint.place.remote import RemoteCatalog
from composerlite.checkpoint.place.several_disks import prepared_folder
from composerlite.checkpoint.place.shared_folder import ONE_DISK, check_one_disk, disks_of
from composerlite.checkpoint.record.contents import check_ignore_keys, check_kinds
from composerlite.checkpoint.record.lineage import in_line, may_be_replaced
from composerlite.checkpoint.record.naming import (
    FIRST_RANK,
    PartialFilePath,
    archive_template,
    check_name_of_run,
    check_template,
    directory_template,
    ensure_no_conflict,
    format_name_with_dist,
    format_name_with_dist_and_time,
    names_of_ranks,
)
from composerlite.checkpoint.record.retention import deletions, retention_policy
from composerlite.checkpoint.save.publishing import RemoteSaving
from composerlite.checkpoint.save.publishing_together import Shares
from composerlite.checkpoint.save.saver_buckets import SavePublishing
from composerlite.checkpoint.save.saver_outcomes import FAILURES, FailuresInARow, SaveNews
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
from composerlite.errors import CheckpointError, ConfigError, RankError, checked_arguments
from composerlite.storage import make_folder
from composerlite.types import Lineage

__all__ = ["CheckpointSaver"]

log = logging.getLogger(__name__)
_REPORTS = 100
_LEASE_SECONDS = 10.0
"""How long a run that does not resume waits for another process to end."""


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
        filename = str(filename)
        check_template(str(folder), argument="save_folder", allow_time=False)
        self._remote = RemoteSaving(
            folder=str(folder),
            filename=filename,
            remote_file_name=remote_file_name,
            latest_filename=latest_filename,
            latest_remote_file_name=latest_remote_file_name,
            staging_folder=staging_folder,
            timeout=float(upload_timeout_in_seconds),
            num_to_keep=num_remote_checkpoints_to_keep,
        )
        whole_number(num_concurrent_uploads, argument="num_concurrent_uploads", least=1)
        folder = self._remote.local_folder
        self._keeps_none = num_checkpoints_to_keep == 0
        self.filename = PartialFilePath(check_template(filename, argument="save_filename"), folder)
        self.latest_filename: PartialFilePath | None = None
        if latest_filename is not None and not self._keeps_none:
            name = check_template(str(latest_filename), argument="save_latest_filename")
            self.latest_filename = PartialFilePath(name, folder)
        self.save_interval = interval_of(save_interval, argument="save_interval", allow_auto=True)
        self.ephemeral_interval: SchedulePredicate | None = None
        if ephemeral_interval is not None:
            self.ephemeral_interval = interval_of(ephemeral_interval, argument="save_ephemeral_interval")
        self.folder = self._folder_template = folder
        self._started_in = Path() if Path(self.folder).is_absolute() else Path.cwd()
        self.overwrite = overwrite
        self.num_checkpoints_to_keep = num_checkpoints_to_keep
        self.weights_only = weights_only
        self.ignore_keys = check_ignore_keys(ignore_keys, argument="save_ignore_keys")
        self.asynchronous = asynchronous
        self.lazy = lazy
        self.on_exception = on_exception
        self.in_memory = in_memory
        self.failure_limit = whole_number(failure_limit, argument="save_failure_limit", least=0)
        self.best_metric = best_metric
        self.saved_checkpoints: list[str] = []
        self.last_checkpoint_batch: int | None = None
        self.blocked_seconds = 0.0
        self.reports: deque[SaveReport] = deque(maxlen=_REPORTS)
        self._last_was_ephemeral = False
        self._last_says: tuple[object, ...] | None = None
        self._failures = FailuresInARow(self.failure_limit, "saved")
        self._deletion_failures = FailuresInARow(self.failure_limit, "deleted")
        self._warned = False
        self._measured = MeasuredMetrics()
        self._pending: PendingSave | None = None
        self._tidying: PendingSave | None = None  # the last that ended; older checkpoints may still be deleted for it
        self._logger: Logger | None = None
        self._news = SaveNews()
        self._publishing = SavePublishing(
            self._remote,
            self._news,
            failure_limit=self.failure_limit,
            keeps_none=self._keeps_none,
            gone=lambda name: self._forget(self._path(name)),
        )
        self._prepared = False
        self._disks = ONE_DISK
        self._leases: list[Lease] = []
        self._pipeline = Pipeline(
            None if staging_bytes is None else whole_number(staging_bytes, argument="save_staging_bytes", least=0)
        )
        # The ranks take note of it at the same batch: what they tell each other rides on what they reduce in it.
        self._saves_done = dist.Rider(lambda: int(self._pending is not None and self._pending.done))
        self._retention = retention_policy(
            -1 if self._keeps_none else num_checkpoints_to_keep,
            keep_every=None if keep_every is None else time_of(keep_every, argument="save_keep_every"),
            best_k=best_k,
            best_metric=best_metric,
            best_mode=best_mode,
        )
        rules = keep_every is not None or best_k is not None or num_checkpoints_to_keep not in (-1, 0)
        self._deletes = rules or ephemeral_interval is not None

    # ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def init(self, state: State, logger: Logger) -> None:
        """Fill in the folder's name, make the folder, and finish or remove what a killed run left in it.

        Raises:
            ConfigError: the folder cannot be made or written to, or there is nowhere to keep checkpoints; or there are
                ranks that save a directory together and do not see one folder with any rank of their node.
            PermissionError: the bucket cannot be written to. FileNotFoundError: there is no such bucket.
        """
        self._logger = logger
        self._news.tell_to(logger)
        self.folder = format_name_with_dist(self._folder_template, state.run_name, **FIRST_RANK)
        check_name_of_run(self.filename.filename, state.run_name, state.timestamp)
        if self.in_memory:
            self._prepare_memory(state)
        self._check_names_are_its_own(state)
        if self.on_exception and (state.world_size > 1 or state.sharding is not None):
            raise ConfigError(
                "save_on_exception=True with several ranks, or with a model that is spread over ranks: where one fails "
                "the others are in the middle of a step, and no state is that of all. Leave it out and save more often."
            )
        if state.sharding == "sharded":
            self._save_directories(state)
        elif state.sharding == "deepspeed":
            self._save_archives()
        with dist.get_group().all_or_none("preparing the folder of checkpoints"):
            if self._is_first:
                self._prepare_folder()
                self._publishing.open(state, logger)
        state.riders.add(self._saves_done)
        self._publishing.begin(str(self._root), logger)
        state.riders.add(self._publishing.ranks_with_news)
        if state.sharding == "deepspeed" and dist.get_world_size() > 1:
            check_one_disk(disks_of(self._root), self._root)
        if state.sharding == "sharded" and dist.get_world_size() > 1:
            self._disks = prepared_folder(self.catalog)
            self._publishing.use_disks(self._disks, state, logger)

    def _prepare_memory(self, state: State) -> None:
        """Name the folder after the one that the run saves to, too, and make it on each node for this user alone."""
        group = dist.get_group()
        savers = [one for one in state.callbacks if isinstance(one, CheckpointSaver) and not one.in_memory]
        saver = next((one for one in savers if not one.weights_only), savers[0])
        key = group.from_first("telling the folder in memory from others", saver.key_of_folder)
        self.folder = f"{self.folder}-{key}"
        with group.all_or_none("preparing the folder in memory"):
            if dist.get_local_rank() == 0:
                folder = Path(self.folder)
                make_private(folder, levels=len(Path(state.run_name).parts) + 1)
                warn_of_others(folder, Path(state.run_name).name)

    def key_of_folder(self) -> str:
        """Return what tells its folder from others and from one that was there before; on rank 0."""
        places = [publisher.remote.uri() for publisher in self._publishing.publishers]
        return folder_key(Path(self.folder), " ".join(places))

    def _check_names_are_its_own(self, state: State) -> None:
        """Refuse names whose files, or whose link, another saver of this run would replace by its own."""
        own = self._first_places(state)
        for other in state.callbacks:
            if other is self or not isinstance(other, CheckpointSaver):
                continue
            for argument, place in other._first_places(state).items():
                if own.get(argument) == place:
                    raise ConfigError(
                        f"two CheckpointSavers have {argument}={getattr(self, argument).filename!r} in "
                        f"{self.folder!r}, and each would replace what is the other's. Give one of them another "
                        f"{argument}, or another folder."
                    )

    def _first_places(self, state: State) -> dict[str, str]:
        """Return where its files and its link would be now, by the argument that names them."""
        root = self._started_in / format_name_with_dist(self._folder_template, state.run_name, **FIRST_RANK)
        places: dict[str, str] = {}
        for argument, template in (("filename", self.filename), ("latest_filename", self.latest_filename)):
            if template is not None:
                place = root / format_name_with_dist_and_time(
                    template.filename, state.run_name, state.timestamp, **FIRST_RANK
                )
                places[argument] = os.path.join(os.path.realpath(place.parent), place.name)  # noqa: PTH118
        return places

    def _save_directories(self, state: State) -> None:
        """Name directories instead of files; as ``sharded_ckpt_prefix_dir`` says where the user has given one."""
        template = directory_template(self.filename.filename)
        fsdp = None if state.parallelism is None else state.parallelism.fsdp
        if fsdp is not None and fsdp.sharded_ckpt_prefix_dir != type(fsdp).sharded_ckpt_prefix_dir:
            name = check_template(fsdp.sharded_ckpt_prefix_dir, argument="sharded_ckpt_prefix_dir")
            template = str(Path(template).with_name(name))
        self.filename = PartialFilePath(template, self._folder_template)
        if self.latest_filename is not None:
            latest = directory_template(self.latest_filename.filename, argument="save_latest_filename")
            self.latest_filename = PartialFilePath(latest, self._folder_template)
        self._remote.name_directories(template)

    def _save_archives(self) -> None:
        """Name archives, one for each rank."""
        if self.weights_only:
            raise ConfigError(
                "save_weights_only=True: DeepSpeed has the weights in pieces, with the state of the optimizer, and "
                "saves both. Save whole checkpoints, and make a file of the weights of one with "
                "composerlite.checkpoint.unshard_zero."
            )
        template = archive_template(self.filename.filename)
        self.filename = PartialFilePath(template, self._folder_template)
        if self.latest_filename is not None:
            latest = archive_template(self.latest_filename.filename, argument="save_latest_filename")
            self.latest_filename = PartialFilePath(latest, self._folder_template)
        self._remote.name_archives(template)

    def _prepare_folder(self) -> None:
        folder = self._root
        try:
            make_folder(folder)
            with tempfile.TemporaryFile(dir=folder):
                pass  # it can be written to
        except OSError as e:
            raise ConfigError(f"save_folder={self.folder!r} cannot be written to: {e}. Choose another folder.") from e
        self.catalog.recover()

    def after_load(self, state: State, logger: Logger) -> None:
        """Know the checkpoints of this run that are behind it."""
        group = dist.get_group()
        self.saved_checkpoints, self._deletes, behind = group.from_first(
            "finding the checkpoints of this run", lambda: self._take_up(state)
        )
        shares = [self._publishing.shares(name) for _, name in behind]
        with group.all_or_none("taking up the checkpoints of this run"):
            if self._disks.is_keeper and not self._is_first:
                self._follow(state)
            for (number, name), its in zip(behind, shares, strict=True):
                overwrite = self._may_overwrite(name)
                self._publishing.publish_again(number, name, state.run_name, its, overwrite=overwrite)

    def _take_up(self, state: State) -> tuple[list[str], bool, list[tuple[int, str]]]:
        """The paths of the checkpoints of this run that are behind it, whether any are to be deleted, and which are to
        be published: the number of the bucket, and the name.
        """
        manifests = self._manifests(state.run_name, _moment(state), state.lineage)
        self.saved_checkpoints = [self._path(manifest.name) for manifest in manifests]
        if manifests and self.latest_filename is not None:
            self._catch_up(manifests[-1], state)
        behind = self._publishing.behind(manifests, state.run_name)
        return self.saved_checkpoints, self._deletes or any(manifest.ephemeral for manifest in manifests), behind

    def _follow(self, state: State) -> None:
        """On the disk of another node than the first: what a kill kept from coming or from going."""
        manifests = self._manifests(state.run_name, _moment(state), state.lineage)
        if self.saved_checkpoints and self.latest_filename is not None:
            for manifest in manifests:
                if self._path(manifest.name) == self.saved_checkpoints[-1]:
                    self._catch_up(manifest, state)
        for manifest in manifests if self._deletes and self.saved_checkpoints else ():
            if manifest.node is not None and self._path(manifest.name) not in self.saved_checkpoints:
                self.catalog.delete(manifest)

    def _catch_up(self, newest: Manifest, state: State) -> None:
        """Point ``latest`` to ``newest`` if a kill came between its commit and that."""
        assert self.latest_filename is not None
        name = format_name_with_dist_and_time(
            self.latest_filename.filename, state.run_name, state.timestamp, **FIRST_RANK
        )
        link = self._root / name
        if link.is_symlink():
            target = os.path.relpath(link.parent / link.readlink(), self._root)
            its = newest.run_name, newest.template
            own = {m.name: m.order for m in self.catalog.manifests() if (m.run_name, m.template) == its}
            order = own.get(target)  # another's link is left alone
            if order is not None and order < newest.order:
                self.catalog.point_latest(name, newest.name)
                self._point_links_of_ranks(newest, state)

    def _point_links_of_ranks(self, newest: Manifest, state: State) -> None:
        """The same for the links of the other ranks, where each has a file."""
        assert self.latest_filename is not None
        if newest.kind == "deepspeed":
            ranks = len(newest.files)
            links = names_of_ranks(self.latest_filename.filename, state.run_name, state.timestamp, ranks)
            for link, file in zip(links, newest.files, strict=True):
                self.catalog.point_latest(link, file.path)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Refuse to start where another process writes, a checkpoint would be overwritten, or none can hold the model.

        Raises:
            RunInUseError: see :meth:`take_leases`.
        """
        group = dist.get_group()
        self._check_kinds(state, weights_only=True)
        with group.all_or_none("taking the lease of the run"):
            if self._is_first:
                self.take_leases(state.run_name, _LEASE_SECONDS)
        with group.all_or_none("looking for checkpoints that this run would overwrite"):
            if self._disks.is_keeper and not self.overwrite:
                self._ensure_no_conflict(state)
        if is_never(self.save_interval) and is_never(self.ephemeral_interval) and self._is_first:
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

    def _check_kinds(self, state: State, *, weights_only: bool) -> None:
        with dist.get_group().all_or_none("looking at what checkpoints are to hold"):
            check_kinds(state, weights_only=weights_only, ignore_keys=self.ignore_keys)

    def _ensure_no_conflict(self, state: State) -> None:
        ensure_no_conflict(
            self.catalog.names(),
            self.filename.filename,
            run_name=state.run_name,
            timestamp=state.timestamp,
            folder=self.folder,
            may_replace=functools.partial(_may_replace, state, self.catalog),
        )
        for publisher in self._publishing.publishers:
            ensure_no_conflict(
                publisher.remote.names(),
                publisher.template,
                run_name=state.run_name,
                timestamp=state.timestamp,
                folder=publisher.remote.uri(),
                may_replace=functools.partial(_may_replace, state, publisher.remote),
            )

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """In memory, wait for the save in flight before the step that makes the next one due.

        So a process that is killed has lost one interval at most, and not two where memory is slower than training.
        """
        if self.in_memory and self._pending is not None and ends_with_this_batch(self.save_interval, state):
            self._pipeline.wait_for_previous()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """See how the save in flight went; save if an interval says so."""
        for lease in self._leases:
            if lease.lost_to is not None:
                raise CheckpointError(
                    f"{lease.lost_to} has taken this run over: it had not heard of this process for long. It goes on "
                    "from the newest checkpoint, and this process must not write there any more."
                )
        if self._pending is not None and self._saves_done.total == dist.get_world_size():
            self._collect()
        if self._publishing.has_news:
            self._publishing.take_note_together()
        if not self._prepared:  # after the first step: optimizers have their state now
            self._check_kinds(state, weights_only=self.weights_only)
        self._save_if_due(state, Event.BATCH_CHECKPOINT)
        if not self._prepared:
            self._prepared = True
            if self.asynchronous:
                self._pipeline.prepare(state, weights_only=self.weights_only, ignore_keys=self.ignore_keys)

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
        self._collect_all()
        if self._publishing.has_places:
            self._publishing.wait_together()
            self._publishing.take_note_together()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for the save in flight and for all uploads, whatever ended training.

        Raises:
            Exception: what made one fail.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._publishing.close)
            stack.callback(self._release)
            if self.in_memory:
                stack.callback(self._empty, state)
            stack.callback(self._pipeline.close)
            self._collect_all(alone=True)  # each rank for itself: others may have failed and not come here
            self._publishing.wait()
            self._publishing.take_note()

    def take_leases(self, run_name: str, timeout: float) -> None:
        """Keep other processes from writing what this run writes; on rank 0, until :meth:`close`.

        Args:
            run_name: of the run. timeout: seconds to wait for the end of another process.

        Raises:
            RunInUseError: another process has the run, or writes files of the same names to the same folder.
        """
        if self._leases:
            return
        own: list[Lease] = [FolderLease(self._root, run_name)]
        own += [publisher.remote.lease(run_name) for publisher in self._publishing.publishers]
        take_leases(own, f"run {run_name!r}", timeout)
        self._leases = own
        templates = [self.filename] if self.latest_filename is None else [self.filename, self.latest_filename]
        for template in templates:
            name = template.filename.replace("{run_name}", run_name)
            lease = FolderLease(self._root, f"{name}.name")
            advice = (
                "each would replace the other's files. Give this run a save_folder or names of its own, or stop it."
            )
            try:
                take_leases([lease], f"{self._path(name)!r}", timeout, advice)
            except OSError as e:  # a full disk, as it may be later on: saves say so, and may be tolerated
                log.warning("nothing keeps another run from writing %s: %s", self._path(name), e)
            else:
                self._leases.append(lease)

    def _keep_leases(self) -> None:
        """Say that the folder was removed, if it was, and take the leases in it again."""
        kept = [lease.keep() for lease in self._leases]
        if all(kept):
            return
        gone = [path for path in self.saved_checkpoints if not (self._started_in / path).exists()]
        log.error(
            "save_folder=%r was removed or replaced while this run saves to it: %d checkpoints that it had saved are "
            "gone (%s). It is made again, and what is saved from now on is in it.",
            self.folder,
            len(gone),
            ", ".join(gone[-3:]) or "none",
        )
        for path in gone:
            self._forget(path)

    def _empty(self, state: State) -> None:
        """Give memory back in which nothing is that another saver has not saved, too."""
        savers = [c for c in state.callbacks if isinstance(c, CheckpointSaver) and not c.in_memory]
        saved = [saver.reports[-1].batch for saver in savers if saver.reports and not saver.weights_only]
        for manifest in self.catalog.manifests() if saved and self._disks.is_keeper else ():
            if manifest.batch <= max(saved):
                self.catalog.delete(manifest)

    def _release(self) -> None:
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()

    @property
    def _is_first(self) -> bool:
        return dist.get_global_rank() == 0

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
        self._collect_all()
        if pending is None:  # it failed and is tolerated; who asks for a path wants to know
            raise CheckpointError("the checkpoint could not be saved: see the warning in the log.")
        return self._path_of(pending.wait())

    def save_after_exception(self, state: State, error: Exception) -> None:
        """Save what there is, since training failed with ``error``, to which a note says where that is.

        What makes this fail becomes a note as well: ``error`` is what the user has to see.
        """
        folder, _, name = self.filename.filename.rpartition("/")
        template = f"{folder}/crash-{name}" if folder else f"crash-{name}"
        try:
            report = self._pipeline.save(
                state,
                catalog=self.catalog,
                template=template,
                weights_only=self.weights_only,
                ignore_keys=self.ignore_keys,
                overwrite=True,
                asynchronous=False,
                after_crash=True,
            ).wait()
        except Exception as e:  # noqa: BLE001 - told with the error that matters
            log.error("what training had reached could not be saved after %r: %s", error, e)
            error.add_note(f"What training had reached could not be saved: {type(e).__name__}: {e}")
        else:
            error.add_note(f"What training had reached was saved as {str(report.path)!r}.")

    def has_saved(self, state: State) -> bool:
        """Whether there is a checkpoint of where the run stands, and of what was evaluated; waits for a save in flight.

        Raises:
            Exception: what made that fail, unless that is tolerated.
        """
        self._collect()
        is_of_now = self.last_checkpoint_batch == int(state.timestamp.batch) and self._last_says == _says(state)
        return is_of_now and not self._failures.last_failed

    def save_last(self, state: State) -> None:
        """Save where the run stands, which has to end here. The next regular checkpoint takes its place."""
        self._start(state, ephemeral=True)
        self._collect_all()

    @property
    def expected_seconds(self) -> float | None:
        """How long a save takes, as the last one did; ``None``: there was none. Known on rank 0."""
        return self.reports[-1].seconds["total"] if self.reports else None

    def published(self, seconds: float) -> bool | None:
        """Wait until all checkpoints are published, ``seconds`` at most; whether that is so; ``None``: nowhere to.

        The same on every rank.
        """
        return self._publishing.published(seconds)

    @property
    def newest(self) -> str | None:
        """Path of the newest checkpoint in the folder; ``None`` if there is none."""
        return self.saved_checkpoints[-1] if self.saved_checkpoints else None

    def _start(self, state: State, *, ephemeral: bool) -> PendingSave | None:
        """Begin a save. Failures so far are raised first, or counted where that is tolerated."""
        if self._pending is not None:
            self._pipeline.wait_for_previous()
            self._collect()
        # Set first: the checkpoint that is being written counts as saved in its own state.
        self.last_checkpoint_batch, self._last_was_ephemeral = int(state.timestamp.batch), ephemeral
        self._last_says = _says(state)
        name = format_name_with_dist_and_time(self.filename.filename, state.run_name, state.timestamp, **FIRST_RANK)
        overwrite = self._may_overwrite(name)
        if isinstance(self.save_interval, AutoInterval):
            self.save_interval.save_began(state)
        self._news.begun(name, self.folder, int(state.timestamp.batch), ephemeral=ephemeral)
        metrics = self._measured.now(state)
        shares = self._publishing.shares_of_all(name)
        if self.best_metric is not None and self.best_metric not in metrics and not ephemeral:
            self._warn_of_missing_metric(name)
        try:
            self._keep_leases()
            pending = self._pipeline.save(
                state,
                catalog=Catalog(self._root),
                template=self.filename.filename,
                weights_only=self.weights_only,
                ignore_keys=self.ignore_keys,
                overwrite=overwrite,
                latest=None if self.latest_filename is None else self.latest_filename.filename,
                asynchronous=self.asynchronous,
                lazy=self._may_copy_late(state),
                ephemeral=ephemeral,
                metrics=metrics,
                publish=functools.partial(self._publish, state, shares) if self._publishing.has_places else None,
                give_up=functools.partial(self._given_up, state.run_name, _moment(state), state.lineage)
                if self._deletes
                else None,
                disks=self._disks,
            )
        except (*FAILURES, RankError) as e:
            self._failed(e)
            return None
        self._pending = pending
        if not self.asynchronous:
            self._collect()
        return pending

    def _collect(self, *, alone: bool = False) -> None:
        """Wait for the save in flight and take note of how it went; on all ranks unless ``alone``.

        Raises:
            Exception: what made it fail, unless that is tolerated.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        started = time.perf_counter()
        if not pending.done:
            pending.join()
            self.blocked_seconds += time.perf_counter() - started
        self._note_save(pending)
        before, self._tidying = self._tidying, pending
        if before is not None:
            self._note_deletions(before, alone=alone)

    def _note_deletions(self, pending: PendingSave, *, alone: bool) -> None:
        """Take note of how deletions went after the save had ended; on all ranks unless ``alone``.

        They count apart from saves: the newest checkpoint is there, whatever becomes of older ones.
        """
        group = dist.SingleProcess() if alone or not self._deletes else dist.get_group()
        error, pending.deletion_error = pending.deletion_error, None
        try:
            with group.all_or_none("deleting older checkpoints"):
                if error is not None:
                    raise error
        except (*FAILURES, RankError) as e:
            self._deletion_failures.failed(e, self._logger)
        else:
            self._deletion_failures.succeeded()

    def _collect_all(self, *, alone: bool = False) -> None:
        """Wait for the save in flight and for the deletions behind it.

        Raises:
            Exception: what made one fail, unless that is tolerated.
        """
        self._collect(alone=alone)
        self._pipeline.wait_until_tidy()
        tidying, self._tidying = self._tidying, None
        if tidying is not None:
            self._note_deletions(tidying, alone=alone)

    def _note_save(self, pending: PendingSave) -> None:
        """Take note of how a save went that has ended."""
        try:
            report = pending.wait()
        except (*FAILURES, RankError) as e:
            self._failed(e)
            return
        self._news.committed(report)
        self._failures.succeeded()
        self.reports.append(report)
        self.blocked_seconds += report.seconds["stall"]
        if isinstance(self.save_interval, AutoInterval):
            self.save_interval.record_save(report.seconds["stall"], report.seconds["total"])
        for name in report.deleted:
            self._forget(self._path(name))
        path = self._path_of(report)
        self._forget(path)
        self.saved_checkpoints.append(path)

    def _publish(self, state: State, shares: Sequence[Shares | None], manifest: Manifest) -> None:
        """Called behind training with a checkpoint that was committed."""
        self._publishing.publish(manifest, state.run_name, shares, overwrite=self._may_overwrite(manifest.name))

    def _may_overwrite(self, name: str) -> bool:
        """Whether a checkpoint may take the place of another of its name.

        One that this run has given before, such as ``ep{epoch}.pt`` within one epoch, is its own to give again.
        """
        return self.overwrite or self._path(name) in self.saved_checkpoints

    def _forget(self, path: str) -> None:
        if path in self.saved_checkpoints:
            self.saved_checkpoints.remove(path)

    def _failed(self, error: Exception) -> None:
        self._news.failed(error)
        if isinstance(self.save_interval, AutoInterval):
            self.save_interval.record_failure()
        self._failures.failed(error, self._logger)

    def _may_copy_late(self, state: State) -> bool:
        """Whether only optimizers change weights from here to their next step."""
        if self.lazy is not None:
            return self.lazy
        ours = all(
            type(callback).__module__.startswith("composerlite.") and not isinstance(callback, LoadCheckpoint)
            for callback in state.callbacks
        )
        return ours and not state.algorithms

    def _warn_of_missing_metric(self, name: str) -> None:
        """Once, on rank 0: it is the same at every save and on every rank."""
        if not self._warned and self._is_first:
            log.warning(
                "checkpoint %s has no %r: nothing was evaluated at that batch before the save. It is none of the best. "
                "Give save_interval and eval_interval the same value.",
                name,
                self.best_metric,
            )
        self._warned = True

    def _given_up(self, run_name: str, moment: tuple[int, int], lineage: Lineage) -> Sequence[Manifest]:
        """Return what is to be deleted after the save at ``moment``; called in the background."""
        return deletions(self._manifests(run_name, moment, lineage), self._retention)

    @property
    def _root(self) -> Path:
        """The folder, wherever the process has gone since this was made."""
        return self._started_in / self.folder

    @property
    def catalog(self) -> Catalog:
        """The folder's checkpoints: by its name as long as that means the same, on each node for itself."""
        try:
            is_here = Path(self.folder).is_absolute() or Path.cwd() == self._started_in
        except FileNotFoundError:  # the working directory was removed
            is_here = False
        return Catalog(self.folder if is_here else self._root)

    @property
    def buckets(self) -> list[Bucket]:
        """Where else they are."""
        return [Bucket(publisher.remote, publisher.link, self.catalog) for publisher in self._publishing.publishers]

    def _manifests(self, run_name: str, moment: tuple[int, int], lineage: Lineage) -> list[Manifest]:
        """Return the checkpoints that this saver wrote, in this process or before a resume.

        Those of an attempt that was abandoned are not among them, nor are those ahead of the run: they are left from
        before it was started over, and would count as newer than what it saves now.
        """
        return [
            manifest
            for manifest in self.catalog.manifests()
            if manifest.run_name == run_name
            and manifest.template == self.filename.filename
            and in_line(lineage, manifest)
            and manifest.moment <= moment
        ]

    def _path_of(self, report: SaveReport) -> str:
        return self._path(str(report.path.relative_to(self._root)))

    def _path(self, name: str) -> str:
        """The folder as the user wrote it, with its './' if it has one, and the name."""
        return f"{self.folder.rstrip('/')}/{name}"

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


def _moment(state: State) -> tuple[int, int]:
    """Return where the run stands, as ``Manifest.moment`` counts."""
    return len(state.fit_starts), int(state.timestamp.batch)


def _may_replace(state: State, places: Catalog | RemoteCatalog, name: str) -> bool:
    """Check that the checkpoint ``name`` is one that autoresume passed over, and that the run comes to save again."""
    try:
        manifest = places.manifest_of(name)
    except CheckpointError:
        return False
    return manifest is not None and may_be_replaced(state.lineage, manifest)


def _says(state: State) -> tuple[object, ...]:
    """What a checkpoint says beside where the run stands, and what may change without a batch."""
    return state.stopped is not None, dict(state.evaluated_at), state.interruption.evaluation
