"""Saver: the checkpoints of one run in one folder and its buckets: names, overwrite, latest, retention, failures."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from composerlite import dist
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.node_disks import ONE_DISK, check_one_disk, disks_of, prepared_folder
from composerlite.checkpoint.record.contents import IgnoreKeys, check_ignore_keys, check_kinds
from composerlite.checkpoint.record.lineage import in_line
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.record.naming import (
    FIRST_RANK,
    PartialFilePath,
    archive_template,
    check_name_of_run,
    check_template,
    directory_template,
    format_name_with_dist,
    format_name_with_dist_and_time,
    names_of_ranks,
)
from composerlite.checkpoint.record.retention import Interval, deletions, retention_policy
from composerlite.checkpoint.save.memory_folder import folder_key, make_private, warn_of_others
from composerlite.checkpoint.save.pipeline import PendingSave, Pipeline
from composerlite.checkpoint.save.publishing import Publisher, RemoteSaving
from composerlite.checkpoint.save.publishing_together import Shares
from composerlite.checkpoint.save.save_job import SaveReport
from composerlite.checkpoint.save.saver_buckets import SavePublishing
from composerlite.checkpoint.save.saver_claims import Claims, SavedState, refuse_conflicts
from composerlite.checkpoint.save.saver_outcomes import FAILURES, FailuresInARow, RunLogger, SaveNews
from composerlite.errors import ConfigError, RankError
from composerlite.storage import make_folder
from composerlite.types import Lineage

__all__ = ["Saver"]

log = logging.getLogger(__name__)
_REPORTS = 100
_LEASE_SECONDS = 10.0
"""How long a run that does not resume waits for another process to end."""


@final
class Saver:
    """Saves a run's checkpoints where and as it was told, whenever it is told to.

    One save is in flight at a time. Whoever says when calls :meth:`look` between batches, and reads in ``ended`` how
    saves went. Every method is called by all ranks, where it does not say otherwise.

    Args:
        folder and others: as in ``composerlite.callbacks.CheckpointSaver``, which has the same arguments.
        any_ephemeral: some checkpoints will be.

    Raises:
        ConfigError: a name or number that cannot be used.
    """

    def __init__(
        self,
        *,
        folder: str,
        filename: str,
        remote_file_name: str | Path | None,
        latest_filename: str | Path | None,
        latest_remote_file_name: str | Path | None,
        overwrite: bool,
        num_checkpoints_to_keep: int,
        weights_only: bool,
        ignore_keys: IgnoreKeys,
        asynchronous: bool,
        staging_bytes: int | None,
        in_memory: bool,
        failure_limit: int,
        any_ephemeral: bool,
        keep_every: Interval | None,
        best_k: int | None,
        best_metric: str | None,
        best_mode: str,
        staging_folder: str | Path | None,
        upload_timeout_in_seconds: float,
        num_remote_checkpoints_to_keep: int,
    ) -> None:
        check_template(folder, argument="save_folder", allow_time=False)
        self._remote = RemoteSaving(
            folder=folder,
            filename=filename,
            remote_file_name=remote_file_name,
            latest_filename=latest_filename,
            latest_remote_file_name=latest_remote_file_name,
            staging_folder=staging_folder,
            timeout=upload_timeout_in_seconds,
            num_to_keep=num_remote_checkpoints_to_keep,
        )
        self._keeps_none = num_checkpoints_to_keep == 0
        self.folder = self._folder_template = self._remote.local_folder
        self.filename = PartialFilePath(check_template(filename, argument="save_filename"), self.folder)
        self.latest_filename: PartialFilePath | None = None
        if latest_filename is not None and not self._keeps_none:
            name = check_template(str(latest_filename), argument="save_latest_filename")
            self.latest_filename = PartialFilePath(name, self.folder)
        self._started_in = Path() if Path(self.folder).is_absolute() else Path.cwd()
        self.overwrite = overwrite
        self.weights_only = weights_only
        self.ignore_keys = check_ignore_keys(ignore_keys, argument="save_ignore_keys")
        self.asynchronous = asynchronous
        self.in_memory = in_memory
        self.best_metric = best_metric
        self.saved_checkpoints: list[str] = []
        self.blocked_seconds = 0.0
        self.reports: deque[SaveReport] = deque(maxlen=_REPORTS)
        self.ended: deque[SaveReport | None] = deque()
        """How saves went since they were last read here, oldest first; ``None``: one failed."""
        self._others: Sequence[Saver] = ()
        self._failures = FailuresInARow(failure_limit, "saved")
        self._deletion_failures = FailuresInARow(failure_limit, "deleted")
        self._warned = False
        self._pending: PendingSave | None = None
        self._tidying: PendingSave | None = None  # the last that ended; older checkpoints may still be deleted for it
        self._logger: RunLogger | None = None
        self._news = SaveNews()
        self._publishing = SavePublishing(
            self._remote,
            self._news,
            failure_limit=failure_limit,
            keeps_none=self._keeps_none,
            gone=lambda name: self._forget(self._path(name)),
        )
        self._prepared = False
        self._disks = ONE_DISK
        self._claims = Claims()
        self._pipeline = Pipeline(staging_bytes)
        # The ranks take note of it at the same batch: what they tell each other rides on what they reduce in it.
        self._saves_done = dist.PiggybackCounter(lambda: int(self._pending is not None and self._pending.done))
        self.counters = (self._saves_done, self._publishing.ranks_with_news)
        self._retention = retention_policy(
            -1 if self._keeps_none else num_checkpoints_to_keep,
            keep_every=keep_every,
            best_k=best_k,
            best_metric=best_metric,
            best_mode=best_mode,
        )
        rules = keep_every is not None or best_k is not None or num_checkpoints_to_keep not in (-1, 0)
        self._deletes = rules or any_ephemeral

    # ── before training ──────────────────────────────────────────────────────────────────────────────────────────
    def open(
        self, state: SavedState, logger: RunLogger, *, others: Sequence[Saver], directory: str | None = None
    ) -> None:
        """Fill in the folder's name, make the folder, and finish or remove what a killed run left in it.

        Args:
            state: of the run. logger: who is told what becomes of checkpoints.
            others: the other savers of the run.
            directory: the name of each checkpoint that is a directory, in place of that of a file.

        Raises:
            ConfigError: the folder cannot be made or written to, or there is nowhere to keep checkpoints; or there are
                ranks that save a directory together and do not see one folder with any rank of their node.
            PermissionError: the bucket cannot be written to. FileNotFoundError: there is no such bucket.
        """
        self._logger, self._others = logger, others
        self._news.tell_to(logger)
        self.folder = format_name_with_dist(self._folder_template, state.run_name, **FIRST_RANK)
        check_name_of_run(self.filename.filename, state.run_name, state.timestamp)
        if self.in_memory:
            self._prepare_memory(state)
        self._check_names_are_its_own(state)
        if state.sharding == "sharded":
            self._save_directories(directory)
        elif state.sharding == "deepspeed":
            self._save_archives()
        with dist.get_group().all_or_none("preparing the folder of checkpoints"):
            if self._is_first:
                self._prepare_folder()
                self._publishing.open(state, logger)
        self._publishing.begin(str(self._root), logger)
        if state.sharding == "deepspeed" and dist.get_world_size() > 1:
            check_one_disk(disks_of(self._root), self._root)
        if state.sharding == "sharded" and dist.get_world_size() > 1:
            self._disks = prepared_folder(self.catalog)
            self._publishing.use_disks(self._disks, state, logger)

    def _prepare_memory(self, state: SavedState) -> None:
        """Name the folder after the one that the run saves to, too, and make it on each node for this user alone."""
        group = dist.get_group()
        savers = [one for one in self._others if not one.in_memory]
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
        places = [publisher.bucket.uri() for publisher in self._publishing.publishers]
        return folder_key(Path(self.folder), " ".join(places))

    def _check_names_are_its_own(self, state: SavedState) -> None:
        """Refuse names whose files, or whose link, another saver of this run would replace by its own."""
        own = self._first_places(state)
        for other in self._others:
            for argument, place in other._first_places(state).items():
                if own.get(argument) == place:
                    raise ConfigError(
                        f"two CheckpointSavers have {argument}={getattr(self, argument).filename!r} in "
                        f"{self.folder!r}, and each would replace what is the other's. Give one of them another "
                        f"{argument}, or another folder."
                    )

    def _first_places(self, state: SavedState) -> dict[str, str]:
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

    def _save_directories(self, directory: str | None) -> None:
        """Name directories instead of files."""
        template = directory_template(self.filename.filename)
        if directory is not None:
            name = check_template(directory, argument="sharded_ckpt_prefix_dir")
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

    def take_up(self, state: SavedState) -> None:
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

    def _take_up(self, state: SavedState) -> tuple[list[str], bool, list[tuple[int, str]]]:
        """The paths of the checkpoints of this run that are behind it, whether any are to be deleted, and which are to
        be published: the number of the bucket, and the name.
        """
        manifests = self._manifests(state.run_name, _moment(state), state.lineage)
        self.saved_checkpoints = [self._path(manifest.name) for manifest in manifests]
        if manifests and self.latest_filename is not None:
            self._catch_up(manifests[-1], state)
        behind = self._publishing.behind(manifests, state.run_name)
        return self.saved_checkpoints, self._deletes or any(manifest.ephemeral for manifest in manifests), behind

    def _follow(self, state: SavedState) -> None:
        """On the disk of another node than the first: what a kill kept from coming or from going."""
        manifests = self._manifests(state.run_name, _moment(state), state.lineage)
        if self.saved_checkpoints and self.latest_filename is not None:
            for manifest in manifests:
                if self._path(manifest.name) == self.saved_checkpoints[-1]:
                    self._catch_up(manifest, state)
        for manifest in manifests if self._deletes and self.saved_checkpoints else ():
            if manifest.node is not None and self._path(manifest.name) not in self.saved_checkpoints:
                self.catalog.delete(manifest)

    def _catch_up(self, newest: Manifest, state: SavedState) -> None:
        """Point ``latest`` to ``newest`` if a kill came between its commit and that, of the first one too."""
        assert self.latest_filename is not None
        name = format_name_with_dist_and_time(
            self.latest_filename.filename, state.run_name, state.timestamp, **FIRST_RANK
        )
        link = self._root / name
        behind = not os.path.lexists(link)
        if link.is_symlink():
            target = os.path.relpath(link.parent / link.readlink(), self._root)
            its = newest.run_name, newest.template
            own = {m.name: m.order for m in self.catalog.manifests() if (m.run_name, m.template) == its}
            order = own.get(target)  # another's link is left alone
            behind = order is not None and order < newest.order
        if behind:
            self.catalog.point_latest(name, newest.name)
            self._point_links_of_ranks(newest, state)

    def _point_links_of_ranks(self, newest: Manifest, state: SavedState) -> None:
        """The same for the links of the other ranks, where each has a file."""
        assert self.latest_filename is not None
        if newest.kind == "deepspeed":
            ranks = len(newest.files)
            links = names_of_ranks(self.latest_filename.filename, state.run_name, state.timestamp, ranks)
            for link, file in zip(links, newest.files, strict=True):
                self.catalog.point_latest(link, file.path)

    def begin(self, state: SavedState) -> None:
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
                refuse_conflicts(state, self.catalog, self.filename.filename, self.folder, self._publishing.publishers)

    def _check_kinds(self, state: SavedState, *, weights_only: bool) -> None:
        with dist.get_group().all_or_none("looking at what checkpoints are to hold"):
            check_kinds(state, weights_only=weights_only, ignore_keys=self.ignore_keys)

    def take_leases(self, run_name: str, timeout: float) -> None:
        """Keep other processes from writing what this run writes; on rank 0, until :meth:`close`.

        Args:
            run_name: of the run. timeout: seconds to wait for the end of another process.

        Raises:
            RunInUseError: another process has the run, or writes files of the same names to the same folder.
        """
        templates = [self.filename] if self.latest_filename is None else [self.filename, self.latest_filename]
        names = [template.filename.replace("{run_name}", run_name) for template in templates]
        of_buckets = [publisher.bucket.lock(run_name) for publisher in self._publishing.publishers]
        self._claims.take(self._root, run_name, {name: self._path(name) for name in names}, of_buckets, timeout)

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────
    def look(self, state: SavedState) -> None:
        """See how the save in flight and uploads went, between two batches.

        Raises:
            CheckpointError: another process has the run by now.
            Exception: what made a save or an upload fail, unless that is tolerated.
        """
        self._claims.check()
        if self._pending is not None and self._saves_done.total == dist.get_world_size():
            self.collect()
        if self._publishing.has_news:
            self._publishing.take_note_together()
        if not self._prepared:  # after the first step: optimizers have their state now
            self._check_kinds(state, weights_only=self.weights_only)

    def prepare(self, state: SavedState) -> None:
        """Get ready for the next save, behind training, the first time that it is called."""
        if not self._prepared:
            self._prepared = True
            if self.asynchronous:
                self._pipeline.prepare(state, weights_only=self.weights_only, ignore_keys=self.ignore_keys)

    def wait_for_previous(self) -> None:
        """Wait until the save in flight is written, if there is one."""
        if self._pending is not None:
            self._pipeline.wait_for_previous()

    def save(
        self, state: SavedState, *, ephemeral: bool, metrics: Mapping[str, float], lazy: bool
    ) -> PendingSave | None:
        """Begin a save, when the one before was collected; ``None``: it failed, which is tolerated.

        Args:
            state: to save. ephemeral: it goes as soon as there is a newer one. metrics: what it is judged by.
            lazy: nothing but optimizers changes weights from here to their next step.
        """
        name = format_name_with_dist_and_time(self.filename.filename, state.run_name, state.timestamp, **FIRST_RANK)
        overwrite = self._may_overwrite(name)
        self._news.begun(name, self.folder, int(state.timestamp.batch), ephemeral=ephemeral)
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
                lazy=lazy,
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
            self.collect()
        return pending

    def save_after_exception(self, state: SavedState, error: Exception) -> None:
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

    @property
    def last_failed(self) -> bool:
        """Whether the save that ended last could not be done."""
        return self._failures.last_failed

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

    # ── how it went ──────────────────────────────────────────────────────────────────────────────────────────────
    def collect(self, *, alone: bool = False) -> None:
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

    def collect_all(self, *, alone: bool = False) -> None:
        """Wait for the save in flight and for the deletions behind it.

        Raises:
            Exception: what made one fail, unless that is tolerated.
        """
        self.collect(alone=alone)
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
        self.ended.append(report)
        self.blocked_seconds += report.seconds["stall"]
        for name in report.deleted:
            self._forget(self._path(name))
        path = self.path_of(report)
        self._forget(path)
        self.saved_checkpoints.append(path)

    def _publish(self, state: SavedState, shares: Sequence[Shares | None], manifest: Manifest) -> None:
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
        self.ended.append(None)
        self._failures.failed(error, self._logger)

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

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────
    def finish(self) -> None:
        """Wait for the save in flight and all publishing.

        Raises:
            Exception: what made one fail.
        """
        self.collect_all()
        if self._publishing.has_places:
            self._publishing.wait_together()
            self._publishing.take_note_together()

    def close(self) -> None:
        """Wait for the save in flight and for all uploads, whatever ended training.

        Raises:
            Exception: what made one fail.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._publishing.close)
            stack.callback(self._claims.release)
            if self.in_memory:
                stack.callback(self._empty)
            stack.callback(self._pipeline.close)
            self.collect_all(alone=True)  # each rank for itself: others may have failed and not come here
            self._publishing.wait()
            self._publishing.take_note()

    def _keep_leases(self) -> None:
        """Say that the folder was removed, if it was, and take the leases in it again."""
        if self._claims.keep():
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

    def _empty(self) -> None:
        """Give memory back in which nothing is that another saver has not saved, too."""
        savers = [saver for saver in self._others if not saver.in_memory]
        saved = [saver.reports[-1].batch for saver in savers if saver.reports and not saver.weights_only]
        for manifest in self.catalog.manifests() if saved and self._disks.is_keeper else ():
            if manifest.batch <= max(saved):
                self.catalog.delete(manifest)

    # ── where ────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def _is_first(self) -> bool:
        return dist.get_global_rank() == 0

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
    def publishers(self) -> list[Publisher]:
        """One for each bucket, on the ranks that publish."""
        return self._publishing.publishers

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

    def path_of(self, report: SaveReport) -> str:
        """The path of a checkpoint, as :attr:`saved_checkpoints` has it."""
        return self._path(str(report.path.relative_to(self._root)))

    def _path(self, name: str) -> str:
        """The folder as the user wrote it, with its './' if it has one, and the name."""
        return f"{self.folder.rstrip('/')}/{name}"


def _moment(state: SavedState) -> tuple[int, int]:
    """Return where the run stands, as ``Manifest.moment`` counts."""
    return len(state.fit_starts), int(state.timestamp.batch)
