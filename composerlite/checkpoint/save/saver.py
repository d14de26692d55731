"""Saver: writes, publishes, deletes and reports the checkpoints of a run in one folder and its buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, Protocol, final

from composerlite import dist
from composerlite.checkpoint.contents import check_kinds
from composerlite.checkpoint.memory.replication import Replication
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.record.retention import Retention
from composerlite.checkpoint.save.form import AfterCommit, SaveRequest
from composerlite.checkpoint.save.options import save_options
from composerlite.checkpoint.save.publish import Publication, Publisher, Publishing
from composerlite.checkpoint.save.run_folder import RunFolder, SavedState, position_of
from composerlite.checkpoint.save.save import Pipeline, SaveReport, SaveTask
from composerlite.errors import (
    CheckpointError,
    CheckpointExistsError,
    ConfigError,
    ObjectStoreError,
    RankError,
    RunInUseError,
)
from composerlite.storage import Uploader, leave_by, open_store
from composerlite.types import CheckpointNews, StateDict

__all__ = ["Saver"]

log = logging.getLogger(__name__)
_FAILURES = (OSError, CheckpointError, ObjectStoreError)
"""Errors of disks, networks and stores: ``save_failure_limit`` tolerates them."""
_REPORTS = 100
_LEASE_WAIT_SECONDS = 10.0
"""How long a run that does not resume waits for another process to end."""


# ── how saves went ───────────────────────────────────────────────────────────────────────────────────────────────
class RunLogger(Protocol):
    """Interface of the run's loggers that outcomes are reported to."""

    @property
    def uploaders(self) -> Sequence[tuple[Uploader, str]]: ...

    def log_metrics(self, metrics: Mapping[str, Any]) -> None: ...

    def log_checkpoint(self, news: CheckpointNews) -> None: ...


@final
class _FailuresInARow:
    """Counts failures since the last success, the same on every rank: rank 0 warns for all.

    Args:
        limit: number of consecutive failures that are tolerated, with a warning each.
        what: past participle for the warning, such as ``'saved'``.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self.count = 0

    def note(self, error: Exception | None, logger: RunLogger | None) -> None:
        """Reset the count on success (``None``); warn of ``error``.

        Raises:
            Exception: ``error``, if there are more in a row than the limit, or if it cannot be tolerated.
        """
        if error is None:
            self.count = 0
            return
        self.count += 1
        if self.count > self._limit or not _may_be_tolerated(error):
            raise error
        warn = log.warning if dist.get_global_rank() == 0 else log.debug
        warn(
            "a checkpoint could not be %s (%d in a row, save_failure_limit=%d): %s: %s",
            self._what,
            self.count,
            self._limit,
            type(error).__name__,
            error,
        )
        if logger is not None:
            logger.log_metrics({"checkpoint/failures_in_a_row": self.count})


@final
class Outcomes:
    """Counts failures, sends news of checkpoints to loggers, and logs costs as metrics ``checkpoint/…``.

    For the training thread of all ranks; rank 0 logs. Nothing is logged before :meth:`set_logger`.

    Args:
        failure_limit: number of consecutive failures of saves, deletions and uploads that are tolerated.

    Attributes:
        reports: of the last saves.
        blocked_seconds: how long training waited for saves.
    """

    def __init__(self, failure_limit: int) -> None:
        self.blocked_seconds = 0.0
        self.reports: deque[SaveReport] = deque(maxlen=_REPORTS)
        self._ended: deque[SaveReport | None] = deque()
        self._saves = _FailuresInARow(failure_limit, "saved")
        self._deletions = _FailuresInARow(failure_limit, "deleted")
        self._uploads = _FailuresInARow(failure_limit, "published")
        self._remote_deletions = _FailuresInARow(failure_limit, "deleted from a bucket")
        self._logger: RunLogger | None = None
        # One save is in flight at a time.
        self._begun = CheckpointNews(what="begun", name="", where="", batch=0, at=0.0)
        self._is_committed = True

    def set_logger(self, logger: RunLogger) -> None:
        """Set the loggers that receive the outcomes."""
        self._logger = logger

    def begun(self, name: str, where: str, batch: int, *, ephemeral: bool) -> None:
        """A save starts."""
        self._begun = CheckpointNews(
            what="begun", name=name, where=where, batch=batch, at=time.time(), ephemeral=ephemeral
        )
        self._is_committed = False
        self._tell(self._begun)

    @property
    def last_is_unconfirmed(self) -> bool:
        """True if the last save failed or was interrupted: a checkpoint may or may not exist."""
        return not self._is_committed

    def take_ended(self) -> list[SaveReport | None]:
        """Return the reports of saves that ended since the last call, oldest first; ``None`` for one that failed."""
        return [self._ended.popleft() for _ in range(len(self._ended))] if self._ended else []

    def committed(self, report: SaveReport) -> None:
        """The last save succeeded, and older checkpoints were deleted by retention."""
        self._is_committed = True
        self._saves.note(None, self._logger)
        self.reports.append(report)
        self._ended.append(report)
        at = self._begun.at + report.seconds["total"] - report.seconds.get("waiting", 0.0)
        told = dataclasses.replace(self._begun, what="committed", at=at, size_bytes=report.size_bytes)
        self._tell(dataclasses.replace(told, seconds=dict(report.seconds), slowest_rank=report.slowest_rank))
        self.deleted(report.deleted, self._begun.where, at)
        costs = {f"{name}_seconds": value for name, value in report.seconds.items()}
        self._log(**costs, bytes=report.size_bytes, batch=report.batch, slowest_rank=report.slowest_rank)

    def failed(self, error: Exception) -> None:
        """The last save failed.

        Raises:
            Exception: ``error``, unless it is tolerated.
        """
        self._tell(
            dataclasses.replace(self._begun, what="failed", at=time.time(), error=f"{type(error).__name__}: {error}")
        )
        self._ended.append(None)
        self._saves.note(error, self._logger)

    def old_deleted(self, error: Exception | None) -> None:
        """Log the deletion of older checkpoints, or its failure, which does not affect the newest.

        Raises:
            Exception: ``error``, unless it is tolerated.
        """
        self._deletions.note(error, self._logger)

    def published(self, one: Publication) -> None:
        """An upload has ended, well or not, and so have the deletions after it, which do not affect it.

        Raises:
            Exception: what made one fail, unless it is tolerated.
        """
        news = one.news
        self._tell(news)
        self.deleted(one.deleted, news.where, news.at)
        if one.error is None:
            self._log(
                uploaded_batch=news.batch,
                uploaded_bytes=news.size_bytes,
                upload_seconds=news.seconds["upload"],
                upload_lag_seconds=one.lag_seconds,
            )
        self._uploads.note(one.error, self._logger)
        if one.error is None:
            self._remote_deletions.note(one.deletion_error, self._logger)

    def replicated(self, name: str) -> None:
        """Replicas of the checkpoint ``name`` in memory have arrived on all nodes."""
        for batch in [report.batch for report in self.reports if report.path.name == PurePath(name).name][-1:]:
            self._log(replicated_batch=batch)

    def deleted(self, names: Sequence[str], where: str, at: float | None = None) -> None:
        """Checkpoints are gone from ``where``, since ``at`` or now."""
        for name in names:
            at = time.time() if at is None else at
            self._tell(CheckpointNews(what="deleted", name=name, where=where, batch=None, at=at))

    def _tell(self, news: CheckpointNews) -> None:
        if self._logger is not None and dist.get_global_rank() == 0:
            self._logger.log_checkpoint(news)

    def _log(self, **metrics: float | None) -> None:
        """Log ``metrics`` with every logger of the run; docs/logging.md lists their names."""
        if self._logger is not None:
            known = {f"checkpoint/{name}": value for name, value in metrics.items() if value is not None}
            self._logger.log_metrics(known)


def _may_be_tolerated(error: Exception) -> bool:
    """Return true if the error is neither a bug of ours nor a rank that is gone."""
    if isinstance(error, RankError):
        return bool(error.causes) and all(isinstance(cause, _FAILURES) for cause in error.causes)
    return isinstance(error, _FAILURES)


# ── saves ────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class Saver:
    """Saves a run's checkpoints.

    One save is in flight at a time. The caller calls :meth:`look` between batches, and asks ``outcomes`` how
    saves went. Every method is called by all ranks, where it does not say otherwise.

    Args:
        arguments: of the callback, with parsed durations.
        any_ephemeral: some checkpoints are to go as soon as there is a newer one.

    Attributes:
        options: settings. where: the folder.
        saved_checkpoints: paths of the checkpoints of this run, oldest first.
        outcomes: of saves and uploads.
        replication: to another node, of checkpoints in memory.

    Raises:
        ConfigError: a name that cannot be used, or there is no such store.
    """

    def __init__(self, arguments: Mapping[str, Any], *, any_ephemeral: bool) -> None:
        self.options = options = save_options(arguments, any_ephemeral=any_ephemeral)
        self.where = RunFolder(options)
        self.saved_checkpoints: list[str] = []
        self._maybe_written: set[str] = set()  # names of failed saves: the file may exist
        self.outcomes = Outcomes(options.failure_limit)
        self.replication: Replication | None = None  # once the folder is open
        self._others: Sequence[Saver] = ()
        self._warned = False
        self._pending: SaveTask | None = None
        self._store = None if options.names.bucket is None else open_store(options.names.bucket)
        self._publishing: Publishing | None = None  # where there is anywhere to publish to
        self._pipeline = Pipeline(options.staging_bytes)
        self._saves_done = dist.PiggybackCounter(lambda: int(self._pending is not None and self._pending.done))
        self._deletes = options.keep.deletes

    @property
    def counters(self) -> list[dist.PiggybackCounter]:
        """Numbers that the ranks sum in the reduction of each batch, so that all act at the same batch."""
        publishing = [] if self._publishing is None else [self._publishing.ranks_with_news]
        return [self._saves_done, *publishing, *(() if self.replication is None else self.replication.counters)]

    # ── before training ──────────────────────────────────────────────────────────────────────────────────────────
    def open(
        self, state: SavedState, logger: RunLogger, *, others: Sequence[Saver], directory: str | None = None
    ) -> None:
        """Fill in the folder's name, make the folder, and finish or remove what a killed run left in it.

        Args:
            state: of the run. logger: gets the news of checkpoints.
            others: the other savers of the run.
            directory: template of names if each checkpoint is a directory.

        Raises:
            ConfigError: the folder cannot be made or written to, or there is nowhere to keep checkpoints; or another
                saver has the same names in a bucket; or there are
                ranks that save a directory together and do not see one folder with any rank of their node.
            PermissionError: the bucket cannot be written to. FileNotFoundError: there is no such bucket.
        """
        self._others = others
        self.outcomes.set_logger(logger)
        group, options, where = dist.get_group(), self.options, self.where
        # 1. Names of the folder, its files and links. Nothing is written yet.
        form = where.name(state, [other.where for other in others], directory=directory)
        if options.on_exception and (dist.get_world_size() > 1 or form.is_spread):
            raise ConfigError(
                "save_on_exception=True with several ranks, or a model that is sharded over ranks: where one fails "
                "the others are in the middle of a step, and no state is that of all. Leave it out and save more often."
            )
        # 2. Is there a bucket?
        uploads = not options.in_memory and group.from_first("finding buckets", lambda: bool(logger.uploaders))
        if self._store is not None or uploads:
            self._publishing = Publishing(options, self._store, where, form)
        elif options.keep.none_here:
            raise ConfigError(
                "num_checkpoints_to_keep=0 keeps none in the folder, and there is no bucket to keep them in: give "
                "save_folder a URI, or the Trainer a RemoteUploaderDownloader, or keep 1 or more."
            )
        else:
            options.names.check_buckets(())
        # 3. A folder in memory is named after the other folder of the run.
        if options.in_memory:
            savers = [one for one in others if not one.options.in_memory]
            saver = next((one for one in savers if not one.options.weights_only), savers[0])
            if options.replication is not None:
                saver.where.share_key()
            key = group.from_first("telling the folder in memory from others", saver.key_of_folder)
            where.keep_in_memory(state, key)
        # 4. The folder exists, and what killed processes left in it is gone.
        with group.all_or_none("preparing the folder of checkpoints"):
            if group.is_first:
                where.prepare(state)
        where.find_disks(form)
        # 5. The bucket answers, and no other saver has these names there.
        if self._publishing is not None:
            self._publishing.open(state, logger.uploaders)
            with group.all_or_none("comparing the names in buckets"):
                if group.is_first:
                    self._check_objects_are_its_own(state)
        # 6. Replication to another node.
        if options.replication is not None:
            levels = len(Path(state.run_name).parts) + 1
            self.replication = Replication(where.root, levels=levels, gigabytes_per_second=options.replication)

    def _check_objects_are_its_own(self, state: SavedState) -> None:
        """Refuse names in a bucket that another saver of this run has, of those that are open."""
        own = {item for publisher in self.publishers for item in publisher.objects(state).items()}
        for other in self._others:
            theirs = (item for publisher in other.publishers for item in publisher.objects(state).items())
            for argument, uri in theirs:
                if (argument, uri) in own:
                    raise ConfigError(
                        f"two CheckpointSavers, of {self.where.folder!r} and of {other.where.folder!r}, have the same "
                        f"{argument} in a bucket, {uri!r}, and each would replace what is the other's. Give one of "
                        f"them another {argument}."
                    )

    def key_of_folder(self) -> str:
        """Return an ID of the folder or bucket, another one if it was made again at the same place. On rank 0."""
        return self.where.key([publisher.bucket for publisher in self.publishers])

    def load_existing(self, state: SavedState) -> None:
        """Find the checkpoints that this run has saved up to now."""
        group = dist.get_group()
        self.saved_checkpoints, self._deletes, behind = group.from_first(
            "finding the checkpoints of this run", lambda: self._load_existing(state)
        )
        if self.replication is not None:
            self.replication.take_up(map(self._name_of, self.saved_checkpoints))
        publishing = self._publishing
        again = [
            publishing.of(name, [number], overwrite=self._may_overwrite(name))
            for name, number in behind
            if publishing is not None
        ]
        with group.all_or_none("taking up the checkpoints of this run"):
            if self.where.is_leader and not group.is_first:
                self.where.follow(self.saved_checkpoints, state, deletes=self._deletes)
            for publish in again:
                publish()

    def _load_existing(self, state: SavedState) -> tuple[list[str], bool, list[tuple[str, int]]]:
        """Return the paths of the run's checkpoints, whether any are to be deleted, and which are to be published."""
        manifests = self.where.manifests(state)
        paths = [self.where.path(manifest.name) for manifest in manifests]
        if manifests:
            self.where.catch_up(manifests[-1], state)
        behind = [] if self._publishing is None else self._publishing.behind(manifests)
        return paths, self._deletes or any(manifest.ephemeral for manifest in manifests), behind

    def begin(self, state: SavedState, *, several: bool) -> None:
        """Refuse to start where another process writes, a checkpoint would be overwritten, or none can hold the model.

        Args:
            state: of the run.
            several: the run saves more than one checkpoint.

        Raises:
            ConfigError: names vary in the folder, and the name in the bucket is always the same.
            RunInUseError: see :meth:`take_leases`.
        """
        group = dist.get_group()
        if self._publishing is not None:
            leave_by()  # clear the deadline of a shutdown that did not happen
            if several:
                self.where.check_remote_name()
        with group.all_or_none("looking at what checkpoints are to hold"):
            check_kinds(state.weights_state_dict(), self.options.ignore_keys)
        with group.all_or_none("taking the lease of the run"):
            if group.is_first:
                self.take_leases(state.run_name, _LEASE_WAIT_SECONDS)
        with group.all_or_none("looking for checkpoints that this run would overwrite"):
            if self.where.is_leader and not self.options.overwrite:
                buckets = [(publisher.remote, publisher.template) for publisher in self.publishers]
                self.where.refuse_conflicts(state, buckets)
        keeps_one = self.options.keep.only_newest or self.options.in_memory
        if several and group.is_first and not keeps_one and not self.where.filename.varies:
            log.warning(
                "save_filename=%r is the same each time: each save replaces the last, and one checkpoint is kept. To "
                "keep several, put {epoch} or {batch} into it, as in 'ep{epoch}-ba{batch}-rank{rank}.pt'.",
                self.where.filename.filename,
            )

    def take_leases(self, run_name: str, timeout: float) -> None:
        """Take the leases of this saver's names in its folder and buckets. Call on rank 0.

        Args:
            run_name: of the run.
            timeout: seconds to wait for the end of another process.

        Raises:
            RunInUseError: another process writes files of these names.
        """
        leases = [publisher.leases(run_name) for publisher in self.publishers]
        self.where.take_leases(run_name, {uri: lease for own in leases for uri, lease in own.items()}, timeout)
        for publisher, own in zip(self.publishers, leases, strict=True):
            if any(lease.taken_over for lease in own.values()):
                publisher.remove_uploads(timedelta(), run_name)

    def recover(self, state: SavedState) -> bool:
        """Collect the last save after a ``fit`` that raised; return false if a checkpoint may or may not exist.

        Raises:
            Exception: what made it fail, unless that was raised before or is tolerated.
        """
        self.collect(alone=True)  # the ranks may have raised at different moments
        group = dist.get_group()
        (last_is_unconfirmed,) = group.max([int(self.outcomes.last_is_unconfirmed)])
        if not last_is_unconfirmed:
            return True
        known = group.from_first("finding the checkpoints of this run", lambda: self.where.manifests(state))
        self.saved_checkpoints = [self.where.path(manifest.name) for manifest in known]  # an interrupted one may exist
        return False

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────
    def poll(self) -> None:
        """Collect the save in flight and uploads that have ended, between two batches.

        Raises:
            RunInUseError: another process has the run by now.
            Exception: what made a save or an upload fail, unless that is tolerated.
        """
        self.where.check_leases()
        if self._pending is not None and self._saves_done.total == dist.get_world_size():
            self.collect()
        if self.replication is not None:
            arrived = self.replication.look(None if self.newest is None else self._name_of(self.newest))
            if arrived is not None:
                self.outcomes.replicated(arrived)
        if self._publishing is not None and self._publishing.ranks_with_news.total:
            self._note_publishing(dist.get_group().broadcast(self._publishing.take_news()))

    def check_contents(self, state: SavedState) -> StateDict:
        """Check that checkpoints can hold what the run keeps; return that. For after the first step of optimizers.

        Raises:
            ConfigError: they cannot.
        """
        with dist.get_group().all_or_none("looking at what checkpoints are to hold"):
            held = self._contents(state)
            check_kinds(held, self.options.ignore_keys)
        return held

    def prepare(self, state: SavedState, held: StateDict) -> None:
        """Get memory ready in the background for the next save of ``held``, which :meth:`check_contents` returned."""
        if self.options.asynchronous:
            self._pipeline.prepare(dataclasses.replace(self._request(state), state_dict=held))

    def _contents(self, state: SavedState) -> StateDict:
        """Gather the contents of a checkpoint, with the state of each callback."""
        return state.weights_state_dict() if self.options.weights_only else state.state_dict()

    def wait_for_previous(self) -> None:
        """Wait until the save in flight is written, if there is one."""
        if self._pending is not None:
            self._pipeline.wait_for_previous()

    def save(self, state: SavedState, *, ephemeral: bool, metrics: Mapping[str, float], lazy: bool) -> SaveTask | None:
        """Save. Call :meth:`collect` first. ``None``: the save failed, and that is tolerated.

        Args:
            state: to save.
            ephemeral: delete the checkpoint as soon as there is a newer one. metrics: for the record.
            lazy: only optimizers change weights before their next step, so the copy may wait until then.

        Raises:
            RunInUseError: another process has the run by now, and this one must not write.
            Exception: what made the save fail, unless that is tolerated.
        """
        options, where = self.options, self.where
        name = where.name_now(state)
        started = time.perf_counter()
        self.outcomes.begun(name, where.folder, int(state.timestamp.batch), ephemeral=ephemeral)
        is_own = self._may_overwrite(name)
        kept = frozenset[str]() if self.replication is None else frozenset(self.replication.held)
        publishing = self._publishing
        publish = None if publishing is None else publishing.of(name, overwrite=is_own)
        also = {} if publishing is None else publishing.names_in_buckets(name, state)
        retention = Retention(options.keep.policy, position_of(state), kept) if self._deletes else None
        after_commit = AfterCommit(publish, also, retention, is_routine=options.in_memory)
        if options.best_metric is not None and options.best_metric not in metrics and not ephemeral:
            self._warn_of_missing_metric(name)
        try:
            with dist.get_group().all_or_none(f"checkpoint {name!r}"):
                held = self._contents(state)
                where.check_leases()
                where.check_folder()
            pending = self._pipeline.save(
                dataclasses.replace(
                    self._request(state),
                    state_dict=held,
                    latest=None if where.latest_filename is None else where.latest_filename.filename,
                    overwrite=is_own or where.may_replace(state, name),
                    occasion="ephemeral" if ephemeral else "regular",
                    metrics=metrics,
                    after_commit=after_commit,
                    how=("lazy" if lazy else "async") if options.asynchronous else "sync",
                    started=started,
                )
            )
        except (*_FAILURES, RankError, RunInUseError) as e:
            self.outcomes.failed(e)
            return None
        self._pending = pending
        if not options.asynchronous:
            self.collect()
        return pending

    def save_after_exception(self, state: SavedState, error: Exception) -> None:
        """Save the current state, since training failed with ``error``, to which a note with the path is added.

        An error of this save becomes a note as well: the user has to see ``error``.
        """
        folder, _, name = self.where.filename.filename.rpartition("/")
        template = f"{folder}/crash-{name}" if folder else f"crash-{name}"
        try:
            self.where.check_leases()
            self.where.check_folder()
            request = dataclasses.replace(
                self._request(state), template=template, overwrite=True, occasion="crash", how="sync"
            )
            report = self._pipeline.save(request).wait()
        except Exception as e:  # noqa: BLE001 - told with the error that matters
            log.error("could not save the state of training after %r: %s", error, e)
            error.add_note(f"The state of training could not be saved: {type(e).__name__}: {e}")
        else:
            error.add_note(f"The state of training was saved as {str(report.path)!r}.")

    def _request(self, state: SavedState) -> SaveRequest:
        """Return the request to save ``state`` where this saver saves."""
        return SaveRequest(
            state=state,
            weights_only=self.options.weights_only,
            ignore_keys=self.options.ignore_keys,
            catalog=self.where.own_catalog,
            template=self.where.filename.filename,
            disks=self.where.disks,
        )

    @property
    def expected_seconds(self) -> float | None:
        """Estimate the seconds of a save by the last one, if there was one. Known on rank 0."""
        return self.outcomes.reports[-1].seconds["total"] if self.outcomes.reports else None

    def published(self, seconds: float) -> bool | None:
        """Wait until all is published, ``seconds`` at most; whether it is, on every rank; ``None``: nowhere to."""
        if self._publishing is None:
            return None
        return dist.get_group().wait_for_all(self._publishing.is_done, timedelta(seconds=max(seconds, 0.001)))

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
        pending = self._pending
        if pending is None:
            return
        started = time.perf_counter()
        if not pending.done:
            pending.join()
            self.outcomes.blocked_seconds += time.perf_counter() - started
        self._pending = None  # not before: who is interrupted while it waits asks again
        self._note_save(pending, alone=alone)

    def path_of(self, pending: SaveTask | None) -> str:
        """Wait for the save that was begun, and return the path of the checkpoint.

        Raises:
            CheckpointError: it failed. Where that is tolerated, who asks for a path wants to know all the same.
        """
        self.collect()
        if pending is None:
            raise CheckpointError("the checkpoint could not be saved: see the warning in the log.")
        return self._path_of(pending.wait())

    def _note_save(self, pending: SaveTask, *, alone: bool) -> None:
        """Take note of how a save went that has ended, and the deletions after it; on all ranks unless ``alone``."""
        try:
            report = pending.wait()
        except (*_FAILURES, RankError) as e:
            if not any(isinstance(cause, CheckpointExistsError) for cause in (e, *getattr(e, "causes", ()))):
                self._maybe_written.add(pending.name)
            self.outcomes.failed(e)
            return
        self.outcomes.committed(report)
        self.outcomes.blocked_seconds += report.seconds["stall"]
        for name in report.deleted:
            self._forget(self.where.path(name))
        path = self._path_of(report)
        self._forget(path)
        self.saved_checkpoints.append(path)
        group = dist.SingleProcess() if alone or not self._deletes else dist.get_group()
        error: Exception | None = None
        try:
            with group.all_or_none("deleting older checkpoints"):
                if report.deletion_error is not None:
                    raise report.deletion_error
        except (*_FAILURES, RankError) as e:
            error = e
        self.outcomes.old_deleted(error)

    def _note_publishing(self, outcomes: Sequence[Publication]) -> None:
        """Take note of uploads that have ended.

        Raises:
            Exception: what made one fail, unless that is tolerated.
        """
        for name in [one.gone for one in outcomes if one.gone is not None]:
            self.outcomes.deleted([name], str(self.where.root))
            self._forget(self.where.path(name))
        for outcome in outcomes:
            self.outcomes.published(outcome)

    def _may_overwrite(self, name: str) -> bool:
        """Return true if a checkpoint may replace another of its name.

        One that this run has given before, such as ``ep{epoch}.pt`` within one epoch, is its own to give again, also
        where that save failed: it may have been behind the commit, as when too many uploads wait.
        """
        return self.options.overwrite or self.where.path(name) in self.saved_checkpoints or name in self._maybe_written

    def _name_of(self, path: str) -> str:
        """Return the name of one of the :attr:`saved_checkpoints`."""
        return path.removeprefix(self.where.path(""))

    def _forget(self, path: str) -> None:
        if path in self.saved_checkpoints:
            self.saved_checkpoints.remove(path)

    def _warn_of_missing_metric(self, name: str) -> None:
        """Warn once, on rank 0: it is the same at every save and on every rank."""
        if not self._warned and dist.get_global_rank() == 0:
            log.warning(
                "checkpoint %s has no %r: nothing was evaluated at that batch before the save. save_best_k ignores it. "
                "Give save_interval and eval_interval the same value.",
                name,
                self.options.best_metric,
            )
        self._warned = True

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────
    def finish(self) -> None:
        """Wait for the save in flight and all publishing.

        Raises:
            Exception: what made one fail.
        """
        self.collect()
        if self._publishing is not None:
            self._publishing.wait(dist.get_group())
            self._note_publishing(dist.get_group().broadcast(self._publishing.take_news()))

    def close(self) -> None:
        """Wait for the save in flight and for all uploads, whatever ended training.

        Raises:
            Exception: what made one fail.
        """
        with contextlib.ExitStack() as stack:
            if self._store is not None:
                stack.callback(self._store.close)
            stack.callback(self.where.release)  # not before: another launch resumes from what is being uploaded
            if self._publishing is not None:
                stack.callback(self._publishing.close)
                stack.callback(self._end_publishing, self._publishing)
            if self.options.in_memory:
                stack.callback(self._empty)
            if self.replication is not None:
                stack.callback(self.replication.close)
            stack.callback(self._pipeline.close)
            self.collect(alone=True)  # each rank for itself: others may have failed and not come here

    def _end_publishing(self, publishing: Publishing) -> None:
        publishing.wait(dist.SingleProcess())
        self._note_publishing(publishing.take_news())

    def _empty(self) -> None:
        """Delete checkpoints in memory that are no newer than the newest full checkpoint of another saver."""
        savers = [saver for saver in self._others if not saver.options.in_memory]
        reports = [saver.outcomes.reports for saver in savers if not saver.options.weights_only]
        saved = [its[-1].moment for its in reports if its]
        if saved and self.replication is not None:
            self.replication.empty(max(saved))
        if not saved or not self.where.is_leader:
            return
        catalog = self.where.catalog
        for manifest in catalog.readable():
            if manifest.moment <= max(saved):
                delete_checkpoint(catalog.place, manifest)

    @property
    def publishers(self) -> list[Publisher]:
        """Publishers, one for each bucket, on the ranks that publish."""
        return [] if self._publishing is None else self._publishing.publishers

    def _path_of(self, report: SaveReport) -> str:
        """Return the path of a checkpoint, as :attr:`saved_checkpoints` has it."""
        return self.where.path(str(report.path.relative_to(self.where.root)))
