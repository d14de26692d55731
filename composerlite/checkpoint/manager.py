"""CheckpointManager: saves, restores, keeps and publishes the checkpoints of one training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, final

from composerlite import dist
from composerlite.checkpoint.contents import check_kinds
from composerlite.checkpoint.load.resume import RunBucket, RunPlace, choose
from composerlite.checkpoint.loop_state import LoopState, Part
from composerlite.checkpoint.memory.replication import Replication
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.record.retention import Retention
from composerlite.checkpoint.save.form import AfterCommit, SaveRequest, form_of
from composerlite.checkpoint.save.options import save_options
from composerlite.checkpoint.save.outcomes import FAILURES, Outcomes
from composerlite.checkpoint.save.publish import Publisher, Publishing
from composerlite.checkpoint.save.run_folder import RunFolder, SavedState, position_of
from composerlite.checkpoint.save.save import PREVIOUS_SECONDS, SaveReport, SaveTask, begin_save
from composerlite.checkpoint.save.snapshot import StagingMemory
from composerlite.devices import rng
from composerlite.errors import CheckpointError, CheckpointExistsError, ConfigError, RankError, RunInUseError, SaveError
from composerlite.storage import Uploader, leave_by, open_store
from composerlite.types import CheckpointNews, StateDict

__all__ = ["CheckpointManager"]

log = logging.getLogger(__name__)
_LEASE_WAIT_SECONDS = 10.0
"""How long a run that does not resume waits for another process to end."""
_LONG_WAIT_SECONDS = 1.0
"""Seconds after which a wait for the previous save is logged."""


@final
class CheckpointManager:
    """Saves, restores, keeps and publishes the checkpoints of one training loop.

    A loop of your own: :meth:`restore` before training, :meth:`save` when a checkpoint is due, :meth:`poll` after each
    step, and a ``with`` block that waits for saves and uploads at the end::

        progress = {"epoch": 0}
        with CheckpointManager("runs/mine", model=model, optimizer=optimizer, progress=progress, keep=3) as checkpoints:
            step = checkpoints.restore()  # the newest good checkpoint; 0: there is none
            while step < 1000:
                train_one_step(model, optimizer)
                step += 1
                if step % 100 == 0:
                    checkpoints.save(step)  # copies the state; a thread writes it
                for event in checkpoints.poll():
                    print(event.what, event.name)

    The states of random generators are saved and restored, too. The :class:`composerlite.callbacks.CheckpointSaver` of
    a Trainer saves with the same class, and gives it the Trainer's state in :meth:`open`.

    One save is in flight at a time. Every rank calls every method, in the main thread, where a method does not say
    otherwise. If the save fails on one rank, all ranks raise, and no checkpoint exists.

    Args:
        folder: a local folder, or a URI such as ``'s3://bucket/run'``. With a URI each checkpoint is saved to a local
            folder and published in the background. One loop at a time saves there.
        run_name: name of the run. Only checkpoints of this name are restored or deleted.
        filename: name of each checkpoint; ``{batch}`` is the step.
        keep: how many of the newest checkpoints stay; -1: all.
        options: further arguments of :class:`composerlite.callbacks.CheckpointSaver`, by their names there:
            ``overwrite``, ``asynchronous``, ``failure_limit``, ``ignore_keys``, ``latest_filename``,
            ``staging_folder``, ``num_remote_checkpoints_to_keep``, ``upload_timeout_in_seconds`` and the like.
        **parts: everything to save, by name: objects with ``state_dict()`` and ``load_state_dict()``, or dicts, which
            are filled again in place. Of modules and optimizers rank 0 saves the state, or each rank its shards. All
            other parts are saved for each rank.

    Attributes:
        options: settings. where: the folder.
        saved_checkpoints: paths of the checkpoints of this run, oldest first.
        outcomes: of saves and uploads.
        replication: to another node, of checkpoints in memory.

    Raises:
        ConfigError: a name or an option that cannot be used, a part without a state, or there is no such store.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        run_name: str = "run",
        filename: str = "step{batch}.pt",
        keep: int = -1,
        options: Mapping[str, Any] | None = None,
        **parts: Part,
    ) -> None:
        given = {"folder": folder, "filename": filename, "num_checkpoints_to_keep": keep, **(options or {})}
        self.options = save_options(given)
        self.where = RunFolder(self.options)
        self.saved_checkpoints: list[str] = []
        self.outcomes = Outcomes(self.options.failure_limit)
        self.replication: Replication | None = None  # once the folder is open
        self._state: SavedState | None = LoopState(run_name, parts) if parts else None
        self._others: Sequence[CheckpointManager] = ()
        self._staging = StagingMemory(self.options.staging_bytes)
        self._pending: SaveTask | None = None
        self._waited = 0.0
        bucket = self.options.names.bucket
        self._store = None if bucket is None else open_store(bucket)
        self._publishing: Publishing | None = None  # where there is anywhere to publish to
        self._saves_done = dist.PiggybackCounter(lambda: int(self._pending is not None and self._pending.done))
        self._deletes = self.options.keep.deletes

    # ── a loop without a Trainer ─────────────────────────────────────────────────────────────────────────────────
    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for saves and uploads. Their errors are raised, or noted in the error that ended the loop."""
        try:
            if error is None:
                self.finish()
        finally:
            try:
                self.close()
            except Exception as e:
                if error is None:
                    raise
                log.error("a checkpoint could not be saved: %s", e)
                error.add_note(f"A checkpoint could not be saved, too: {type(e).__name__}: {e}")

    def restore(self) -> int:
        """Restore all parts, and the random generators, from the newest good checkpoint. Call before the first save.

        All bytes are verified. A damaged checkpoint is skipped with a warning, and an older one is restored.

        Returns:
            The step of the checkpoint; 0 if the run has none.

        Raises:
            RunInUseError: another process saves this run.
            CheckpointError: there are checkpoints, and none of them is good.
            IncompatibleCheckpointError: the parts differ from those in the checkpoint; lists all differences.
            CheckpointExistsError: other files have names that this run would overwrite.
            ConfigError: the manager has no parts; or see :meth:`open`.
        """
        state = self._state
        if not isinstance(state, LoopState):
            raise ConfigError("restore() needs parts: CheckpointManager(folder, model=model, optimizer=optimizer).")
        group = dist.group_of()
        self.open(state)
        with group.all_or_none("taking the lease of the run"):
            if group.is_first:
                self.take_leases(_LEASE_WAIT_SECONDS)
        choice = choose([self.place], state.run_name, state)
        if choice.loaded is not None:
            generators = choice.loaded.restore()
            if generators is not None:
                rng.restore(generators, dist.get_global_rank())
        state.lineage = choice.lineage
        self.load_existing()
        self.begin(several=True)
        return state.step

    @property
    def counters(self) -> list[dist.PiggybackCounter]:
        """Numbers that the ranks sum in the reduction of each batch, so that all act at the same batch."""
        publishing = [] if self._publishing is None else [self._publishing.ranks_with_news]
        return [self._saves_done, *publishing, *(() if self.replication is None else self.replication.counters)]

    # ── before training ──────────────────────────────────────────────────────────────────────────────────────────
    def open(
        self,
        state: SavedState,
        uploaders: Sequence[tuple[Uploader, str]] = (),
        *,
        others: Sequence[CheckpointManager] = (),
        directory: str | None = None,
    ) -> None:
        """Fill in the folder's name, make the folder, and remove the remains of killed processes in it.

        Args:
            state: of the run.
            uploaders: of loggers, each with the prefix of the names in its bucket.
            others: the other managers of the run.
            directory: template of names if each checkpoint is a directory.

        Raises:
            ConfigError: the folder cannot be made or written to, or there is nowhere to keep checkpoints; or another
                saver has the same names in a bucket; or there are
                ranks that save a directory together and do not see one folder with any rank of their node.
            PermissionError: the bucket cannot be written to. FileNotFoundError: there is no such bucket.
        """
        self._state, self._others = state, others
        group, options, where = dist.get_group(), self.options, self.where
        # 1. Names of the folder, its files and links. Nothing is written yet.
        form = where.name(state, [other.where for other in others], directory=directory)
        if options.on_exception and (dist.get_world_size() > 1 or form.is_spread):
            raise ConfigError(
                "save_on_exception=True with several ranks, or a model that is sharded over ranks: where one fails "
                "the others are in the middle of a step, and no state is that of all. Leave it out and save more often."
            )
        # 2. Is there a bucket?
        uploads = not options.in_memory and group.from_first("finding buckets", lambda: bool(uploaders))
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
            self._publishing.open(state, uploaders)
            with group.all_or_none("comparing the names in buckets"):
                if group.is_first:
                    self._check_objects_are_its_own(state)
        # 6. Replication to another node.
        if options.replication is not None:
            levels = len(Path(state.run_name).parts) + 1
            self.replication = Replication(where.root, levels=levels, gigabytes_per_second=options.replication)

    def _check_objects_are_its_own(self, state: SavedState) -> None:
        """Refuse names in a bucket that another manager of this run has, of those that are open."""
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

    @property
    def state(self) -> SavedState:
        """The state to save. Raises ConfigError before :meth:`open` or :meth:`restore`."""
        if self._state is None or not self.where.is_open:
            raise ConfigError("call restore() before the first save: it opens the folder and lists its checkpoints.")
        return self._state

    @property
    def place(self) -> RunPlace:
        """The folder and the buckets, to resume from."""
        where = self.where
        link = None if where.latest_filename is None else where.latest_filename.filename
        buckets = [RunBucket(one.remote, one.link, one.template) for one in self.publishers]
        memory = None if self.replication is None else self.replication.memory
        return RunPlace(where.catalog, where.filename.filename, link, buckets, self.options.in_memory, memory)

    def load_existing(self) -> None:
        """Find the checkpoints that this run has saved up to now."""
        group, state = dist.get_group(), self.state
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

    def begin(self, *, several: bool) -> None:
        """Refuse to start where another process writes, a checkpoint would be overwritten, or none can hold the model.

        Args:
            several: the run saves more than one checkpoint.

        Raises:
            ConfigError: names vary in the folder, and the name in the bucket is always the same.
            RunInUseError: see :meth:`take_leases`.
        """
        group, state = dist.get_group(), self.state
        if self._publishing is not None:
            leave_by()  # clear the deadline of a shutdown that did not happen
            if several:
                self.where.check_remote_name()
        with group.all_or_none("looking at what checkpoints are to hold"):
            check_kinds(state.weights_state_dict(), self.options.ignore_keys)
        with group.all_or_none("taking the lease of the run"):
            if group.is_first:
                self.take_leases(_LEASE_WAIT_SECONDS)
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

    def take_leases(self, timeout: float) -> None:
        """Take the leases of this manager's names in its folder and buckets. Call on rank 0.

        Args:
            timeout: seconds to wait for the end of another process.

        Raises:
            RunInUseError: another process writes files of these names.
        """
        run_name = self.state.run_name
        leases = [publisher.leases(run_name) for publisher in self.publishers]
        self.where.take_leases(run_name, {uri: lease for own in leases for uri, lease in own.items()}, timeout)
        for publisher, own in zip(self.publishers, leases, strict=True):
            if any(lease.taken_over for lease in own.values()):
                publisher.remove_uploads(timedelta(), run_name)

    def recover(self) -> bool:
        """Collect the last save after a ``fit`` that raised; return false if a checkpoint may or may not exist.

        Raises:
            Exception: what made it fail, unless that was raised before or is tolerated.
        """
        self.collect(alone=True)  # the ranks may have raised at different moments
        group = dist.get_group()
        (last_is_unconfirmed,) = group.max([int(self.outcomes.last_is_unconfirmed)])
        if not last_is_unconfirmed:
            return True
        known = group.from_first("finding the checkpoints of this run", lambda: self.where.manifests(self.state))
        self.saved_checkpoints = [self.where.path(manifest.name) for manifest in known]  # an interrupted one may exist
        return False

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────
    def poll(self) -> list[CheckpointNews]:
        """Collect the save in flight and uploads that have ended; call between two steps.

        With several ranks a loop of your own learns at the next :meth:`save` how the one before went.

        Returns:
            Events since the last call, oldest first: a save has begun, a checkpoint exists, is uploaded, or deleted.

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
            self._note_publishing()
        return self.outcomes.take_events()

    def check_contents(self) -> StateDict:
        """Check that checkpoints can hold what the run keeps; return that. For after the first step of optimizers.

        Raises:
            ConfigError: they cannot.
        """
        with dist.get_group().all_or_none("looking at what checkpoints are to hold"):
            held = self._contents()
            check_kinds(held, self.options.ignore_keys)
        return held

    def prepare(self, held: StateDict) -> None:
        """Get memory ready in the background for the next save of ``held``, which :meth:`check_contents` returned.

        A save before the memory is ready is synchronous.
        """
        if self.options.asynchronous:
            request = dataclasses.replace(self._request(), state_dict=held)
            if (size_bytes := form_of(request.state).expected_bytes(request)) is not None:
                self._staging.prepare(size_bytes)

    def _contents(self) -> StateDict:
        """Gather the contents of a checkpoint, with the state of each callback."""
        return self.state.weights_state_dict() if self.options.weights_only else self.state.state_dict()

    def wait_for_previous(self) -> None:
        """Wait until the save in flight has ended, well or not. The next save counts the time as its own.

        Raises:
            SaveError: the save does not end.
        """
        pending = self._pending
        if pending is None or pending.done:
            return
        started = time.perf_counter()
        if not pending.join():
            raise SaveError(f"checkpoint {pending.name!r} is not written after {PREVIOUS_SECONDS} s: the disk hangs.")
        seconds = time.perf_counter() - started
        self._waited += seconds
        level = logging.INFO if seconds >= _LONG_WAIT_SECONDS else logging.DEBUG
        log.log(level, "waited %.2f s for the save of %s to end", seconds, pending.name)

    def save(
        self,
        step: int | None = None,
        *,
        ephemeral: bool = False,
        metrics: Mapping[str, float] | None = None,
        lazy: bool = False,
    ) -> SaveTask | None:
        """Save a checkpoint; training may continue when this returns. Waits for the save before.

        After an exception or a kill at any point there is either the whole checkpoint or none of it.

        Args:
            step: number of steps done, of a loop without a Trainer.
            ephemeral: delete the checkpoint as soon as there is a newer one.
            metrics: numbers for the record, by name.
            lazy: only optimizers change weights before their next step, so the copy may wait until then.

        Returns:
            The save, which may still be in progress. ``None``: the save failed, and that is tolerated.

        Raises:
            RunInUseError: another process has the run by now, and this one must not write.
            Exception: the error of this save or of the one before, unless that is tolerated.
        """
        self.wait_for_previous()
        self.collect()
        options, where, state = self.options, self.where, self.state
        if step is not None and isinstance(state, LoopState):
            state.step = step
            self._note_publishing()
        name = where.name_now(state)
        started = time.perf_counter()
        self.outcomes.begun(name, where.folder, int(state.timestamp.batch), ephemeral=ephemeral)
        is_own = self._may_overwrite(name)
        kept = frozenset[str]() if self.replication is None else frozenset(self.replication.held)
        publishing = self._publishing
        publish = None if publishing is None else publishing.of(name, overwrite=is_own)
        also = {} if publishing is None else publishing.names_in_buckets(name, state)
        retention = Retention(options.keep.policy, position_of(state), kept) if self._deletes else None
        if options.best_metric is not None and options.best_metric not in (metrics or {}) and not ephemeral:
            self.outcomes.warn_of_missing_metric(name, options.best_metric)
        waited, self._waited = self._waited, 0.0
        try:
            with dist.get_group().all_or_none(f"checkpoint {name!r}"):
                held = self._contents()
                where.check_leases()
                where.check_folder()
            request = dataclasses.replace(
                self._request(),
                state_dict=held,
                latest=None if where.latest_filename is None else where.latest_filename.filename,
                overwrite=is_own or where.may_replace(state, name),
                occasion="ephemeral" if ephemeral else "regular",
                metrics=metrics or {},
                after_commit=AfterCommit(publish, also, retention, is_routine=options.in_memory),
                how=("lazy" if lazy else "async") if options.asynchronous else "sync",
                started=started,
            )
            pending = begin_save(request, self._staging, waited=waited)
        except (*FAILURES, RankError, RunInUseError) as e:
            self.outcomes.failed(e)
            return None
        self._pending = pending
        if not options.asynchronous:
            self.collect()
        return pending

    def save_after_exception(self, error: Exception) -> None:
        """Save the current state, since training failed with ``error``, to which a note with the path is added.

        An error of this save becomes a note as well: the user has to see ``error``.
        """
        folder, _, name = self.where.filename.filename.rpartition("/")
        template = f"{folder}/crash-{name}" if folder else f"crash-{name}"
        try:
            self.where.check_leases()
            self.where.check_folder()
            self.wait_for_previous()
            request = dataclasses.replace(
                self._request(), template=template, overwrite=True, occasion="crash", how="sync"
            )
            report = begin_save(request, self._staging).wait()
        except Exception as e:  # noqa: BLE001 - told with the error that matters
            log.error("could not save the state of training after %r: %s", error, e)
            error.add_note(f"The state of training could not be saved: {type(e).__name__}: {e}")
        else:
            error.add_note(f"The state of training was saved as {str(report.path)!r}.")

    def _request(self) -> SaveRequest:
        """Return the request to save the state where this manager saves."""
        return SaveRequest(
            state=self.state,
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
        except (*FAILURES, RankError) as e:
            if not any(isinstance(cause, CheckpointExistsError) for cause in (e, *getattr(e, "causes", ()))):
                self.outcomes.maybe_written.add(pending.name)
            self.outcomes.failed(e)
            return
        self.outcomes.committed(report)
        path = self._path_of(report)
        self._forget(path, *(self.where.path(name) for name in report.deleted))
        self.saved_checkpoints.append(path)
        group = dist.SingleProcess() if alone or not self._deletes else dist.get_group()
        error: Exception | None = None
        try:
            with group.all_or_none("deleting older checkpoints"):
                if report.deletion_error is not None:
                    raise report.deletion_error
        except (*FAILURES, RankError) as e:
            error = e
        self.outcomes.old_deleted(error)

    def _note_publishing(self, *, alone: bool = False) -> None:
        """Take note of uploads that have ended; on all ranks unless ``alone``.

        Raises:
            Exception: what made one fail, unless that is tolerated.
        """
        if self._publishing is None:
            return
        outcomes = self._publishing.take_news()
        outcomes = outcomes if alone else dist.get_group().broadcast(outcomes)
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
        is_own = self.where.path(name) in self.saved_checkpoints or name in self.outcomes.maybe_written
        return is_own or self.options.overwrite

    def _name_of(self, path: str) -> str:
        """Return the name of one of the :attr:`saved_checkpoints`."""
        return path.removeprefix(self.where.path(""))

    def _forget(self, *paths: str) -> None:
        self.saved_checkpoints = [path for path in self.saved_checkpoints if path not in paths]

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────
    def finish(self) -> None:
        """Wait for the save in flight and all publishing.

        Raises:
            Exception: what made one fail.
        """
        self.collect()
        if self._publishing is not None:
            self._publishing.wait(dist.get_group())
            self._note_publishing()

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
            stack.callback(self._staging.close)
            stack.callback(self.wait_for_previous)
            self.collect(alone=True)  # each rank for itself: others may have failed and not come here

    def _end_publishing(self, publishing: Publishing) -> None:
        publishing.wait(dist.SingleProcess())
        self._note_publishing(alone=True)

    def _empty(self) -> None:
        """Delete checkpoints in memory that are no newer than the newest full checkpoint of another manager."""
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
