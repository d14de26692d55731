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
from composerlite.checkpoint.contents import TrainingState, check_kinds
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.loop_state import LoopState, Part
from composerlite.checkpoint.memory import Replication, open_replication
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.record.naming import varies
from composerlite.checkpoint.record.retention import Retention
from composerlite.checkpoint.save.form import AfterCommit, Form, SaveRequest, first_name
from composerlite.checkpoint.save.options import SaveOptions
from composerlite.checkpoint.save.outcomes import FAILURES, Outcomes
from composerlite.checkpoint.save.publish import Publisher, Publishing
from composerlite.checkpoint.save.run_folder import RunFolder, may_replace, position_of
from composerlite.checkpoint.save.save import SaveTask, begin_save
from composerlite.checkpoint.save.snapshot import StagingMemory
from composerlite.devices import rng
from composerlite.errors import CheckpointError, CheckpointExistsError, ConfigError, RankError, RunInUseError
from composerlite.storage import Uploader, leave_by
from composerlite.types import CheckpointNews, StateDict

log = logging.getLogger(__name__)
_LEASE_WAIT_SECONDS = 10.0
"""Seconds to wait for the lease of another process, except in an autoresume of the Trainer."""
_LONG_WAIT_SECONDS = 1.0
"""Shortest wait for the previous save that is logged at INFO, in seconds."""


@final
class CheckpointManager:
    """Saves, restores, keeps and publishes the checkpoints of one training loop.

    In your own loop, call :meth:`restore` before training, :meth:`save` when a checkpoint is due, and :meth:`poll`
    after each step. A ``with`` block waits for saves and uploads at the end::

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

    The manager also saves and restores the states of random generators. The
    :class:`composerlite.callbacks.CheckpointSaver` of a Trainer uses this class, and passes the state to :meth:`open`.

    One save is in flight at a time. Every rank calls every public method, in the main thread, unless a method says
    otherwise. If the save fails on one rank, all ranks raise, and no checkpoint exists.

    Args:
        folder: a local folder, or a URI such as ``'s3://bucket/run'``. With a URI the manager saves each checkpoint to
            a local folder, and publishes the checkpoint in the background. Only one loop at a time may save there.
        run_name: name of the run. The manager restores and deletes only checkpoints of this run.
        filename: name of each checkpoint; ``{batch}`` is the step.
        keep: number of newest checkpoints to keep; -1: all; 0: none in the local folder after the upload to a bucket.
        options: further arguments of :class:`composerlite.callbacks.CheckpointSaver`, by name:
            ``overwrite``, ``asynchronous``, ``failure_limit``, ``ignore_keys``, ``latest_filename``,
            ``staging_folder``, ``num_remote_checkpoints_to_keep``, ``upload_timeout_in_seconds`` and the like.
        **parts: everything to save, by name: objects with ``state_dict()`` and ``load_state_dict()``, or dicts. A
            restore fills dicts in place. Rank 0 saves the state of modules and optimizers, or each rank saves its
            shards. Each rank saves all other parts.

    Attributes:
        options: settings.
        where: folder of the checkpoints.
        saved: names of the checkpoints of this run, oldest first.
        outcomes: outcomes of saves and uploads.
        pending: the save in flight, if any.
        replication: replication of checkpoints in memory to another node, if any.

    Raises:
        ConfigError: a name or an option is invalid, a part has no state, or the store is unknown.
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
        given = {"folder": folder, "filename": filename, "num_checkpoints_to_keep": keep}
        if parts and (twice := sorted(given.keys() & (options or {}).keys())):
            raise ConfigError(
                f"options={options}: give {', '.join(twice)} as folder, filename and keep of the manager."
            )
        self.options = SaveOptions({**given, **(options or {})})
        if parts and (self.options.in_memory or self.options.replication is not None or self.options.on_exception):
            raise ConfigError(
                f"options={options}: in_memory, replication and on_exception need a Trainer. Leave them out."
            )
        self.where = RunFolder(self.options)
        self.saved: list[str] = []
        self.outcomes = Outcomes(self.options.failure_limit)
        self.replication: Replication | None = None  # set by open()
        self._state: TrainingState | None = LoopState(run_name, parts) if parts else None
        self._others: Sequence[CheckpointManager] = ()
        self._staging = StagingMemory(self.options.staging_bytes)
        self.pending: SaveTask | None = None
        self._waited = 0.0
        self._publishing = Publishing(self.options, self.where)
        self._saves_done = dist.PiggybackCounter(lambda: int(self.pending is not None and self.pending.done))
        self._deletes = self.options.keep.deletes

    # ── a loop without a Trainer ─────────────────────────────────────────────────────────────────────────────────
    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for saves and uploads. Raise their errors, or add a note to the error that ended the loop."""
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
        """Restore all parts and the random generators from the newest good checkpoint. Call before the first save.

        The manager verifies all bytes, skips a damaged checkpoint with a warning, and restores an older checkpoint.

        Returns:
            The step of the checkpoint; 0 if the run has none.

        Raises:
            RunInUseError: another process saves this run.
            CheckpointError: checkpoints exist, and all are damaged.
            IncompatibleCheckpointError: the parts differ from the parts in the checkpoint; lists all differences.
            CheckpointExistsError: this run would overwrite other files.
            ConfigError: the manager has no parts, or :meth:`open` raises this error.
        """
        state = self._state
        if not isinstance(state, LoopState):
            raise ConfigError("restore() needs parts: CheckpointManager(folder, model=model, optimizer=optimizer).")
        self.open(state)
        self.take_leases()
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
        """Counters that the ranks sum in the reduction of each batch, so that all ranks act at the same batch."""
        replication = [] if self.replication is None else self.replication.counters
        return [self._saves_done, self._publishing.ranks_with_news, *replication]

    # ── before training ──────────────────────────────────────────────────────────────────────────────────────────
    def open(
        self,
        state: TrainingState,
        uploaders: Sequence[tuple[Uploader, str]] = (),
        *,
        others: Sequence[CheckpointManager] = (),
        directory: str | None = None,
    ) -> None:
        """Fill in the names, create the folder, remove leftovers of killed processes, and check the buckets.

        :meth:`restore` calls this method. The Trainer calls this method itself.

        Args:
            state: state of the run.
            uploaders: uploaders of loggers, each with the prefix of names in the bucket.
            others: the other managers of the run. A manager with ``in_memory`` needs at least one other manager.
            directory: template of names if each checkpoint is a directory.

        Raises:
            ConfigError: the folder cannot be created or written to; there is no place to keep checkpoints; another
                saver has the same names in the folder or a bucket; ranks save a directory together, and a rank shares
                the folder with no rank of the same node; or ``on_exception`` is set in a run of several ranks.
            PermissionError: the bucket cannot be written to.
            FileNotFoundError: the bucket does not exist.
            ObjectStoreError: the store does not answer, or fails.
        """
        self._state, self._others = state, others
        group, options, where = dist.get_group(), self.options, self.where
        # 1. Names of the folder, files and links. Writes nothing.
        form = where.name(state, directory=directory)
        if options.on_exception and (dist.get_world_size() > 1 or form.is_spread):
            raise ConfigError(
                "save_on_exception=True with several ranks, or a model that is sharded over ranks: where one fails "
                "the others are in the middle of a step, and no state is that of all. Leave it out and save more often."
            )
        # 2. A folder in memory gets a name with the key of the other folder of the run.
        if options.in_memory:
            savers = [one for one in others if not one.options.in_memory]
            saver = next((one for one in savers if not one.options.weights_only), savers[0])
            if options.replication is not None:
                saver.where.share_key()
            # A folder or bucket that was removed and made again has another key: older copies in memory do not count.
            buckets = [publisher.bucket for publisher in saver.publishers]
            key = group.from_first("telling the folder in memory from others", lambda: saver.where.key(buckets))
            where.keep_in_memory(state, key)
        # 3. The folder: create it, and remove leftovers of killed processes.
        group.from_first("preparing the folder of checkpoints", lambda: where.prepare(state))
        where.find_disks(form)
        # 4. Buckets: check access. Refuse names of another saver.
        self._publishing.open(state, form, () if options.in_memory else uploaders)
        group.from_first("comparing the names of files", lambda: self._check_names_are_its_own(state))
        # 5. Replication to another node.
        if options.replication is not None:
            self.replication = open_replication(where.root, options.replication)

    def _check_names_are_its_own(self, state: TrainingState) -> None:
        """Raise if another open manager of this run has the same names in a folder or a bucket. Call on rank 0."""
        own = self._names_now(state)
        for other in self._others:
            theirs = other._names_now(state) if other.where.run_name else []
            for argument, name in (item for item in own if item in theirs):
                raise ConfigError(
                    f"two CheckpointSavers, of {self.where.folder!r} and of {other.where.folder!r}, have the same "
                    f"{argument} {name!r}, and each would replace what is the other's. Give one of them another "
                    f"{argument}, or another folder."
                )

    def _names_now(self, state: TrainingState) -> list[tuple[str, str]]:
        """Return argument and path or URI of a checkpoint and of the links, with the current time in the names."""
        root, templates = self.where.root.resolve(), [("filename", self.where.filename)]
        templates += [] if self.where.latest is None else [("latest_filename", self.where.latest)]
        found = [(argument, str(root / first_name(template, state))) for argument, template in templates]
        for one in self.publishers:
            found.append(("remote_file_name", one.bucket.uri(first_name(one.template, state))))
            found += [("latest_remote_file_name", one.bucket.uri(f"/{link}")) for link in one.links[:1]]
        return found

    @property
    def state(self) -> TrainingState:
        """State to save. Raises ConfigError before :meth:`open` or :meth:`restore`."""
        if self._state is None or not self.where.run_name:
            raise ConfigError("call restore() before the first save: it opens the folder and lists its checkpoints.")
        return self._state

    @property
    def place(self) -> RunPlace:
        """Folder and buckets to resume from."""
        where = self.where
        buckets = [RunPlace(one.remote, one.template, one.link) for one in self.publishers]
        # By the user's path, not the full path: rank 0 sends the paths of checkpoints to all ranks, and the working
        # directory may differ between nodes.
        folder = Catalog(where.folder)
        return RunPlace(folder, where.filename, where.latest, buckets, self.options.in_memory, self.replication)

    def load_existing(self) -> None:
        """List the checkpoints of this run, and complete interrupted links, deletions and uploads.

        Call after the restore and before the first save. May wait for uploads if the folder keeps no checkpoints.
        """
        group, state = dist.get_group(), self.state

        def existing() -> tuple[list[str], bool, list[str]]:
            """Return names, oldest first; whether saves delete checkpoints; and the names to publish again."""
            manifests = self.where.manifests(state)
            deletes = self._deletes or any(manifest.ephemeral for manifest in manifests)
            return [manifest.name for manifest in manifests], deletes, self._publishing.behind(manifests)

        self.saved, self._deletes, behind = group.from_first("finding the checkpoints of this run", existing)
        if self.replication is not None:
            self.replication.held = {*self.saved}
        again = [self._publishing.of(name, overwrite=self._may_overwrite(name)) for name in behind]
        with group.all_or_none("taking up the checkpoints of this run"):
            if self.where.is_leader and self.saved:
                self.where.catch_up(self.saved[-1], state)
            for publish in again:
                publish()

    def begin(self, *, several: bool) -> None:
        """Take the leases of the run, and check that saves are possible and overwrite no other files.

        Call before training, after :meth:`open`.

        Args:
            several: the run saves more than one checkpoint.

        Raises:
            ConfigError: names vary in the folder, and the name in the bucket is constant; or a value cannot be saved.
            RunInUseError: another process writes files of the same names.
            CheckpointExistsError: this run would overwrite other files.
        """
        group, state = dist.get_group(), self.state
        if self._publishing.buckets:
            leave_by()  # no deadline: an earlier shutdown may have been cancelled
            if several:
                self.where.check_remote_name()
        with group.all_or_none("looking at what checkpoints are to hold"):
            check_kinds(state.weights_state_dict(), self.options.ignore_keys)
        self.take_leases()
        with group.all_or_none("looking for checkpoints that this run would overwrite"):
            if self.where.is_leader and not self.options.overwrite:
                buckets = [(publisher.remote, publisher.template) for publisher in self.publishers]
                self.where.refuse_conflicts(state, buckets)
        keeps_one = self.options.keep.policy.last == 1 or self.options.in_memory
        if several and group.is_first and not keeps_one and not varies(self.where.filename):
            log.warning(
                "save_filename=%r is the same each time: each save replaces the last, and one checkpoint is kept. To "
                "keep several, put {epoch} or {batch} into it, as in 'ep{epoch}-ba{batch}-rank{rank}.pt'.",
                self.where.filename,
            )

    def take_leases(self, timeout: float = _LEASE_WAIT_SECONDS) -> None:
        """Take the leases of this manager's names in the folder and in buckets, on rank 0. Collective.

        Leases of an earlier call are only checked. After the takeover of a lease in a bucket, unfinished uploads
        of the previous holder are removed.

        Args:
            timeout: seconds to wait for the end of another process.

        Raises:
            RunInUseError: another process writes files of the same names.
        """
        run_name = self.state.run_name

        def take() -> None:
            leases = [publisher.leases(run_name) for publisher in self.publishers]
            self.where.take_leases(run_name, {uri: lease for own in leases for uri, lease in own.items()}, timeout)
            for publisher, own in zip(self.publishers, leases, strict=True):
                if any(lease.taken_over for lease in own.values()):
                    publisher.remove_uploads(run_name)

        dist.get_group().from_first("taking the lease of the run", take)

    def recover(self) -> bool:
        """Collect the last save after ``fit`` raised.

        Returns:
            True if the outcome of the last save is known. False if a checkpoint may or may not exist; then
            :attr:`saved` is listed again.

        Raises:
            Exception: error of the save, unless the error was raised before or is tolerated.
        """
        self.collect(alone=True)  # the ranks may have raised at different moments
        group = dist.get_group()
        (last_is_unconfirmed,) = group.max([int(self.outcomes.last_is_unconfirmed)])
        if not last_is_unconfirmed:
            return True
        known = group.from_first("finding the checkpoints of this run", lambda: self.where.manifests(self.state))
        self.saved = [manifest.name for manifest in known]  # an interrupted save may exist
        return False

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────
    def poll(self) -> list[CheckpointNews]:
        """Process finished saves and uploads. Call between two steps.

        With several ranks, your own loop gets the outcome of a save at the next :meth:`save`.

        Returns:
            Events since the last call, oldest first: a save has begun or failed; a checkpoint exists, is uploaded,
            replicated or deleted; an upload or a deletion failed.

        Raises:
            RunInUseError: another process holds the lease of the run.
            Exception: error of a save or an upload, unless the error is tolerated.
        """
        self.where.check_leases()
        if self.pending is not None and self._saves_done.total == dist.get_world_size():
            self.collect()
        if self.replication is not None:
            arrived = self.replication.poll(self.saved[-1] if self.saved else None)
            if arrived is not None:
                self.outcomes.replicated(arrived)
        if self._publishing.ranks_with_news.total:
            self._note_publishing()
        return self.outcomes.take_events()

    def prepare(self) -> None:
        """Check that a checkpoint can hold the state of the run. Prepare memory for saves in the background.

        Call after the first optimizer step, when the optimizers have a state. A save before the memory is ready is
        synchronous.

        Raises:
            ConfigError: a value cannot be saved.
        """
        with dist.get_group().all_or_none("looking at what checkpoints are to hold"):
            held = self._contents()
            check_kinds(held, self.options.ignore_keys)
        if self.options.asynchronous:
            contents = dataclasses.replace(self._request(), state_dict=held).gathered()
            if (size_bytes := Form(self.state).expected_bytes(contents)) is not None:
                self._staging.prepare(size_bytes)

    def _contents(self) -> StateDict:
        """Return the contents of a checkpoint: the weights alone, or the whole state including callbacks."""
        return self.state.weights_state_dict() if self.options.weights_only else self.state.state_dict()

    def save(
        self,
        step: int | None = None,
        *,
        ephemeral: bool = False,
        metrics: Mapping[str, float] | None = None,
        lazy: bool = False,
    ) -> SaveTask | None:
        """Wait for the previous save, and begin to save a checkpoint. Training may continue when this returns.

        After an exception or a kill at any point, either the complete checkpoint exists or no part of it.

        Args:
            step: number of finished steps, in a loop without a Trainer.
            ephemeral: delete the checkpoint as soon as there is a newer checkpoint.
            metrics: numbers for the record, by name.
            lazy: copying may continue until the next optimizer step. Nothing else may change weights before that step.

        Returns:
            The save, still in progress or finished. ``None``: the save failed, and the failure is tolerated.

        Raises:
            ConfigError: ``step`` is missing or negative, or :meth:`restore` was not called.
            RunInUseError: another process holds the lease of the run. This process must not write.
            Exception: error of this save or of the previous save, unless the error is tolerated.
        """
        self.collect()
        options, where, state = self.options, self.where, self.state
        if isinstance(state, LoopState):
            if step is None or step < 0:
                raise ConfigError(f"save({step}): expected the number of steps done, 0 or more.")
            state.step = step
            self._note_publishing()
        name, started = first_name(where.filename, state), time.perf_counter()
        self.outcomes.begun(name, where.folder, int(state.timestamp.batch), ephemeral=ephemeral)
        if options.best_metric is not None and options.best_metric not in (metrics or {}) and not ephemeral:
            self.outcomes.warn_of_missing_metric(name, options.best_metric)
        overwrite = self._may_overwrite(name)
        self._deletes = self._deletes or ephemeral
        kept = frozenset[str]() if self.replication is None else frozenset(self.replication.held)
        retention = Retention(options.keep.policy, position_of(state), kept) if self._deletes else None
        after_commit = AfterCommit(retention=retention, is_routine=options.in_memory)
        if self._publishing.buckets:
            publish = self._publishing.of(name, overwrite=overwrite)
            also = self._publishing.names_in_buckets(name, state)
            after_commit = after_commit._replace(publish=publish, also=also)
        waited, self._waited = self._waited, 0.0
        try:
            with dist.get_group().all_or_none(f"checkpoint {name!r}"):
                held = self._contents()
                where.check_folder()
            request = dataclasses.replace(
                self._request(),
                state_dict=held,
                latest=where.latest,
                overwrite=overwrite or may_replace(state, where.catalog, name),
                occasion="ephemeral" if ephemeral else "regular",
                metrics=metrics or {},
                after_commit=after_commit,
                how=("lazy" if lazy else "async") if options.asynchronous else "sync",
                started=started,
            )
            pending = begin_save(request, self._staging, waited=waited)
        except (*FAILURES, RankError, RunInUseError) as e:
            self.outcomes.ended("saved", e)
            return None
        self.pending = pending
        if not options.asynchronous:
            self.collect()
            return None if self.outcomes.last_is_unconfirmed else pending
        return pending

    def save_after_exception(self, error: Exception) -> None:
        """Save the current state after training failed with ``error``, and add a note with the path to ``error``.

        If this save fails, add a note about the failure and do not raise: the user must see ``error``. For a run of a
        single rank.
        """
        folder, _, name = self.where.filename.rpartition("/")
        template = f"{folder}/crash-{name}" if folder else f"crash-{name}"
        try:
            self.where.check_folder()
            if self.pending is not None:
                self.pending.join()
            request = dataclasses.replace(
                self._request(), template=template, overwrite=True, occasion="crash", how="sync"
            )
            report = begin_save(request, self._staging).wait()
        except Exception as e:  # noqa: BLE001 - added as a note to the error of training
            log.error("could not save the state of training after %r: %s", error, e)
            error.add_note(f"The state of training could not be saved: {type(e).__name__}: {e}")
        else:
            error.add_note(f"The state of training was saved as {str(report.path)!r}.")

    def _request(self) -> SaveRequest:
        """Return a request to save the state to the folder of this manager."""
        return SaveRequest(
            state=self.state,
            weights_only=self.options.weights_only,
            ignore_keys=self.options.ignore_keys,
            catalog=self.where.catalog,
            template=self.where.filename,
            disks=self.where.disks,
        )

    @property
    def expected_seconds(self) -> float | None:
        """Estimated seconds of a save: the duration of the last save on rank 0; ``None`` before the first save."""
        return self.outcomes.reports[-1].seconds["total"] if self.outcomes.reports else None

    def published(self, seconds: float) -> bool | None:
        """Wait at most ``seconds`` for all uploads. Return whether all ranks are done; ``None`` without a bucket."""
        if not self._publishing.buckets:
            return None
        return dist.get_group().wait_for_all(self._publishing.is_done, timedelta(seconds=max(seconds, 0.001)))

    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the checkpoints of this run, oldest first."""
        return [self.where.path(name) for name in self.saved]

    @property
    def newest(self) -> str | None:
        """Path of the newest checkpoint in the folder; ``None`` if there is none."""
        return self.where.path(self.saved[-1]) if self.saved else None

    @property
    def blocked_seconds(self) -> float:
        """Seconds that training waited for saves."""
        return self.outcomes.blocked_seconds + self._waited

    # ── outcomes ─────────────────────────────────────────────────────────────────────────────────────────────────
    def collect(self, *, alone: bool = False) -> None:
        """Wait for the save in flight, if any, and record the outcome. Collective unless ``alone``.

        The report of the next save includes the seconds of the wait.

        Raises:
            SaveError: the save does not end.
            Exception: error of the save, unless the error is tolerated.
        """
        pending = self.pending
        if pending is None:
            return
        if not pending.done:
            started = time.perf_counter()
            pending.join()
            seconds = time.perf_counter() - started
            self._waited += seconds
            level = logging.INFO if seconds >= _LONG_WAIT_SECONDS else logging.DEBUG
            log.log(level, "waited %.2f s for the save of %s to end", seconds, pending.name)
        self.pending = None  # after the wait: if the wait is interrupted, the next call waits again
        try:
            report = pending.wait()
        except (*FAILURES, RankError) as e:
            if not any(isinstance(cause, CheckpointExistsError) for cause in (e, *getattr(e, "causes", ()))):
                self.outcomes.maybe_written.add(pending.name)
            self.outcomes.ended("saved", e)
            return
        self.outcomes.committed(report)
        self._forget(pending.name, *report.deleted)
        self.saved.append(pending.name)
        group = dist.Group() if alone or not self._deletes else dist.get_group()
        error: Exception | None = None
        try:
            with group.all_or_none("deleting older checkpoints"):
                if report.deletion_error is not None:
                    raise report.deletion_error
        except (*FAILURES, RankError) as e:
            error = e
        self.outcomes.ended("deleted", error)

    def path_of(self, pending: SaveTask | None) -> str:
        """Collect the save ``pending``, the last result of :meth:`save`, and return the path of the checkpoint.

        Raises:
            CheckpointError: the save failed. A tolerated failure raises, too, because there is no path to return.
        """
        self.collect()
        if pending is None:
            raise CheckpointError("the checkpoint could not be saved: see the warning in the log.")
        pending.wait()
        return self.where.path(pending.name)

    def _note_publishing(self, *, alone: bool = False) -> None:
        """Record the outcomes of finished uploads. Collective unless ``alone``.

        Raises:
            Exception: error of an upload, unless the error is tolerated.
        """
        if not self._publishing.buckets:
            return
        outcomes = self._publishing.take_news()
        outcomes = outcomes if alone else dist.get_group().broadcast(outcomes)
        # An upload may delete its checkpoint from the folder. Compare names: paths may differ between ranks.
        uploads = [one for one in outcomes if one.work == "published"]
        self._forget(*(event.name for one in uploads for event in one.events if event.what == "deleted"))
        for outcome in outcomes:
            self.outcomes.published(outcome)

    def _may_overwrite(self, name: str) -> bool:
        """Return true if the checkpoint ``name`` may replace an existing checkpoint.

        A run may save again to a name that the run has used before, such as ``ep{epoch}.pt`` within an epoch. The
        earlier save may have failed after the commit, for example because too many uploads were waiting.
        """
        return name in self.saved or name in self.outcomes.maybe_written or self.options.overwrite

    def _forget(self, *names: str) -> None:
        self.saved = [name for name in self.saved if name not in names]

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────
    def finish(self) -> None:
        """Wait for the save in flight and for all uploads.

        Raises:
            Exception: error of the save or of an upload.
        """
        self.collect()
        if self._publishing.buckets:
            self._publishing.wait(dist.get_group())
            self._note_publishing()

    def close(self) -> None:
        """Wait for the save in flight and for all uploads, after success or failure of training; free all resources.

        Not collective, since other ranks may have failed. Releases the leases of the run.

        Raises:
            Exception: error of the save or of an upload.
        """
        with contextlib.ExitStack() as stack:  # calls the last function first, and all functions after an error
            stack.callback(self._publishing.close_store)
            stack.callback(self.where.release)  # after the uploads: the next launch resumes from them
            stack.callback(self._publishing.close)
            stack.callback(self._note_publishing, alone=True)
            stack.callback(self._publishing.wait, dist.Group())
            if self.options.in_memory:
                stack.callback(self._empty)
            if self.replication is not None:
                stack.callback(self.replication.close)
            stack.callback(self._staging.close)
            self.collect(alone=True)  # other ranks may have failed and not call close()

    def _empty(self) -> None:
        """Delete checkpoints in memory up to the newest full checkpoint of another manager."""
        savers = [one for one in self._others if not (one.options.in_memory or one.options.weights_only)]
        saved = [saver.outcomes.reports[-1].moment for saver in savers if saver.outcomes.reports]
        catalogs = [self.where.catalog] if self.where.is_leader else []
        if self.replication is not None and self.replication.is_leader:
            catalogs.append(self.replication.replicas)
        for catalog in catalogs if saved else ():
            for manifest in catalog.manifests():
                if manifest.moment <= max(saved):
                    delete_checkpoint(catalog.place, manifest)

    @property
    def publishers(self) -> list[Publisher]:
        """Publishers, one for each bucket, on the ranks that publish."""
        return self._publishing.publishers
