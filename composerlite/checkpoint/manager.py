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
"""Seconds that a run without a resume waits for another process to end."""
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

    One save is in flight at a time. Every rank calls every method, in the main thread, unless a method says otherwise.
    If the save fails on one rank, all ranks raise, and no checkpoint exists.

    Args:
        folder: a local folder, or a URI such as ``'s3://bucket/run'``. With a URI the manager saves each checkpoint to
            a local folder, and publishes the checkpoint in the background. Only one loop at a time may save there.
        run_name: name of the run. The manager restores and deletes only checkpoints of this run.
        filename: name of each checkpoint; ``{batch}`` is the step.
        keep: number of newest checkpoints to keep; -1: all.
        options: further arguments of :class:`composerlite.callbacks.CheckpointSaver`, by name:
            ``overwrite``, ``asynchronous``, ``failure_limit``, ``ignore_keys``, ``latest_filename``,
            ``staging_folder``, ``num_remote_checkpoints_to_keep``, ``upload_timeout_in_seconds`` and the like.
        **parts: everything to save, by name: objects with ``state_dict()`` and ``load_state_dict()``, or dicts. A
            restore fills dicts in place. Rank 0 saves the state of modules and optimizers, or each rank saves its
            shards. Each rank saves all other parts.

    Attributes:
        options: settings.
        where: folder of the checkpoints.
        saved_checkpoints: paths of the checkpoints of this run, oldest first.
        outcomes: outcomes of saves and uploads.
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
        self.options = save_options({**given, **(options or {})})
        self.where = RunFolder(self.options)
        self.saved_checkpoints: list[str] = []
        self.outcomes = Outcomes(self.options.failure_limit)
        self.replication: Replication | None = None  # set by open()
        self._state: SavedState | None = LoopState(run_name, parts) if parts else None
        self._others: Sequence[CheckpointManager] = ()
        self._staging = StagingMemory(self.options.staging_bytes)
        self._pending: SaveTask | None = None
        self._waited = 0.0
        bucket = self.options.names.bucket
        self._store = None if bucket is None else open_store(bucket)
        self._publishing: Publishing | None = None  # set by open() if there is a bucket
        self._saves_done = dist.PiggybackCounter(lambda: int(self._pending is not None and self._pending.done))
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
        """Counters that the ranks sum in the reduction of each batch, so that all ranks act at the same batch."""
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
        """Fill in the name of the folder, create the folder, and remove leftovers of killed processes there.

        Args:
            state: state of the run.
            uploaders: uploaders of loggers, each with the prefix of names in the bucket.
            others: the other managers of the run.
            directory: template of names if each checkpoint is a directory.

        Raises:
            ConfigError: the folder cannot be created or written to; there is no place to keep checkpoints; another
                saver has the same names in a bucket; or ranks save a directory together, and a rank shares the folder
                with no rank of the same node.
            PermissionError: the bucket cannot be written to.
            FileNotFoundError: the bucket does not exist.
        """
        self._state, self._others = state, others
        group, options, where = dist.get_group(), self.options, self.where
        # 1. Names of the folder, files and links. Writes nothing.
        form = where.name(state, [other.where for other in others], directory=directory)
        if options.on_exception and (dist.get_world_size() > 1 or form.is_spread):
            raise ConfigError(
                "save_on_exception=True with several ranks, or a model that is sharded over ranks: where one fails "
                "the others are in the middle of a step, and no state is that of all. Leave it out and save more often."
            )
        # 2. Publishing, if there is a bucket.
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
        # 3. A folder in memory gets a name with the key of the other folder of the run.
        if options.in_memory:
            savers = [one for one in others if not one.options.in_memory]
            saver = next((one for one in savers if not one.options.weights_only), savers[0])
            if options.replication is not None:
                saver.where.share_key()
            key = group.from_first("telling the folder in memory from others", saver.key_of_folder)
            where.keep_in_memory(state, key)
        # 4. The folder: create it, and remove leftovers of killed processes.
        with group.all_or_none("preparing the folder of checkpoints"):
            if group.is_first:
                where.prepare(state)
        where.find_disks(form)
        # 5. The bucket: check access, and refuse names of another saver.
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
        """Raise if another open manager of this run has the same names in a bucket."""
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
        """Return an ID of the folder or bucket. After a removal and a new creation the ID differs. Call on rank 0."""
        return self.where.key([publisher.bucket for publisher in self.publishers])

    @property
    def state(self) -> SavedState:
        """State to save. Raises ConfigError before :meth:`open` or :meth:`restore`."""
        if self._state is None or not self.where.is_open:
            raise ConfigError("call restore() before the first save: it opens the folder and lists its checkpoints.")
        return self._state

    @property
    def place(self) -> RunPlace:
        """Folder and buckets to resume from."""
        where = self.where
        link = None if where.latest_filename is None else where.latest_filename.filename
        buckets = [RunBucket(one.remote, one.link, one.template) for one in self.publishers]
        memory = None if self.replication is None else self.replication.memory
        return RunPlace(where.catalog, where.filename.filename, link, buckets, self.options.in_memory, memory)

    def load_existing(self) -> None:
        """List the checkpoints of this run, and complete links, deletions and uploads that a kill interrupted."""
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
        """Return the paths of the run's checkpoints, a flag for deletions, and the checkpoints to publish again."""
        manifests = self.where.manifests(state)
        paths = [self.where.path(manifest.name) for manifest in manifests]
        if manifests:
            self.where.catch_up(manifests[-1], state)
        behind = [] if self._publishing is None else self._publishing.behind(manifests)
        return paths, self._deletes or any(manifest.ephemeral for manifest in manifests), behind

    def begin(self, *, several: bool) -> None:
        """Raise if another process writes, a checkpoint would be overwritten, or no checkpoint can hold the model.

        Args:
            several: the run saves more than one checkpoint.

        Raises:
            ConfigError: names vary in the folder, and the name in the bucket is constant; or a value cannot be saved.
            RunInUseError: another process writes files of the same names.
            CheckpointExistsError: this run would overwrite other files.
        """
        group, state = dist.get_group(), self.state
        if self._publishing is not None:
            leave_by()  # clear the deadline of a cancelled shutdown
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
        """Take the leases of this manager's names in the folder and in buckets. Call on rank 0.

        Args:
            timeout: seconds to wait for the end of another process.

        Raises:
            RunInUseError: another process writes files of the same names.
        """
        run_name = self.state.run_name
        leases = [publisher.leases(run_name) for publisher in self.publishers]
        self.where.take_leases(run_name, {uri: lease for own in leases for uri, lease in own.items()}, timeout)
        for publisher, own in zip(self.publishers, leases, strict=True):
            if any(lease.taken_over for lease in own.values()):
                publisher.remove_uploads(timedelta(), run_name)

    def recover(self) -> bool:
        """Collect the last save after ``fit`` raised. Return false if the checkpoint of that save may or may not exist.

        Raises:
            Exception: error of the save, unless the error was raised before or is tolerated.
        """
        self.collect(alone=True)  # the ranks may have raised at different moments
        group = dist.get_group()
        (last_is_unconfirmed,) = group.max([int(self.outcomes.last_is_unconfirmed)])
        if not last_is_unconfirmed:
            return True
        known = group.from_first("finding the checkpoints of this run", lambda: self.where.manifests(self.state))
        self.saved_checkpoints = [self.where.path(manifest.name) for manifest in known]  # an interrupted save may exist
        return False

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────
    def poll(self) -> list[CheckpointNews]:
        """Process finished saves and uploads. Call between two steps.

        With several ranks, your own loop gets the outcome of a save at the next :meth:`save`.

        Returns:
            Events since the last call, oldest first: a save has begun, a checkpoint exists, is uploaded, or deleted.

        Raises:
            RunInUseError: another process holds the lease of the run.
            Exception: error of a save or an upload, unless the error is tolerated.
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
        """Check that a checkpoint can hold the state of the run, and return the contents of the checkpoint.

        Call after the first optimizer step, when the optimizers have a state.

        Raises:
            ConfigError: a value cannot be saved.
        """
        with dist.get_group().all_or_none("looking at what checkpoints are to hold"):
            held = self._contents()
            check_kinds(held, self.options.ignore_keys)
        return held

    def prepare(self, held: StateDict) -> None:
        """Prepare memory for the next save in the background. ``held`` is the result of :meth:`check_contents`.

        A save before the memory is ready is synchronous.
        """
        if self.options.asynchronous:
            request = dataclasses.replace(self._request(), state_dict=held)
            if (size_bytes := form_of(request.state).expected_bytes(request)) is not None:
                self._staging.prepare(size_bytes)

    def _contents(self) -> StateDict:
        """Gather the contents of a checkpoint, including the state of each callback."""
        return self.state.weights_state_dict() if self.options.weights_only else self.state.state_dict()

    def wait_for_previous(self) -> None:
        """Wait until the save in flight has succeeded or failed. The next save counts the time of the wait.

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
        """Wait for the previous save, and begin to save a checkpoint. Training may continue when this returns.

        After an exception or a kill at any point, either the complete checkpoint exists or no part of it.

        Args:
            step: number of finished steps, in a loop without a Trainer.
            ephemeral: delete the checkpoint as soon as there is a newer checkpoint.
            metrics: numbers for the record, by name.
            lazy: the copy may last until the next optimizer step. Nothing else may change weights before that step.

        Returns:
            The save, still in progress or finished. ``None``: the save failed, and the failure is tolerated.

        Raises:
            RunInUseError: another process holds the lease of the run. This process must not write.
            Exception: error of this save or of the previous save, unless the error is tolerated.
        """
        self.wait_for_previous()
        self.collect()
        options, where, state = self.options, self.where, self.state
        if isinstance(state, LoopState):
            if step is None or step < 0:
                raise ConfigError(f"save({step}): expected the number of steps done, 0 or more.")
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
        """Save the current state after training failed with ``error``, and add a note with the path to ``error``.

        If this save fails, add a note about the failure and do not raise: the user must see ``error``.
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
            catalog=self.where.own_catalog,
            template=self.where.filename.filename,
            disks=self.where.disks,
        )

    @property
    def expected_seconds(self) -> float | None:
        """Estimated seconds of a save: the duration of the last save, if any. Known on rank 0."""
        return self.outcomes.reports[-1].seconds["total"] if self.outcomes.reports else None

    def published(self, seconds: float) -> bool | None:
        """Wait at most ``seconds`` for all uploads. Return true if all ranks are done; ``None`` without a bucket."""
        if self._publishing is None:
            return None
        return dist.get_group().wait_for_all(self._publishing.is_done, timedelta(seconds=max(seconds, 0.001)))

    @property
    def newest(self) -> str | None:
        """Path of the newest checkpoint in the folder; ``None`` if there is none."""
        return self.saved_checkpoints[-1] if self.saved_checkpoints else None

    # ── outcomes ─────────────────────────────────────────────────────────────────────────────────────────────────
    def collect(self, *, alone: bool = False) -> None:
        """Wait for the save in flight, and record the outcome. Collective unless ``alone``.

        Raises:
            Exception: error of the save, unless the error is tolerated.
        """
        pending = self._pending
        if pending is None:
            return
        started = time.perf_counter()
        if not pending.done:
            pending.join()
            self.outcomes.blocked_seconds += time.perf_counter() - started
        self._pending = None  # after the wait: if the wait is interrupted, the next call waits again
        self._note_save(pending, alone=alone)

    def path_of(self, pending: SaveTask | None) -> str:
        """Wait for the save ``pending``, the result of :meth:`save`, and return the path of the checkpoint.

        Raises:
            CheckpointError: the save failed. A tolerated failure raises, too, because there is no path to return.
        """
        self.collect()
        if pending is None:
            raise CheckpointError("the checkpoint could not be saved: see the warning in the log.")
        return self._path_of(pending.wait())

    def _note_save(self, pending: SaveTask, *, alone: bool) -> None:
        """Record the outcome of a finished save and of the following deletions. Collective unless ``alone``."""
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
        """Record the outcomes of finished uploads. Collective unless ``alone``.

        Raises:
            Exception: error of an upload, unless the error is tolerated.
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
        """Return true if the checkpoint ``name`` may replace an existing checkpoint.

        A run may save again to a name that the run has used before, such as ``ep{epoch}.pt`` within an epoch. The
        earlier save may have failed after the commit, for example because too many uploads were waiting.
        """
        is_own = self.where.path(name) in self.saved_checkpoints or name in self.outcomes.maybe_written
        return is_own or self.options.overwrite

    def _name_of(self, path: str) -> str:
        """Return the name of a checkpoint in :attr:`saved_checkpoints`."""
        return path.removeprefix(self.where.path(""))

    def _forget(self, *paths: str) -> None:
        self.saved_checkpoints = [path for path in self.saved_checkpoints if path not in paths]

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────
    def finish(self) -> None:
        """Wait for the save in flight and for all uploads.

        Raises:
            Exception: error of the save or of an upload.
        """
        self.collect()
        if self._publishing is not None:
            self._publishing.wait(dist.get_group())
            self._note_publishing()

    def close(self) -> None:
        """Wait for the save in flight and for all uploads, after success or failure of training; free all resources.

        Raises:
            Exception: error of the save or of an upload.
        """
        with contextlib.ExitStack() as stack:
            if self._store is not None:
                stack.callback(self._store.close)
            stack.callback(self.where.release)  # after uploads, from which another launch resumes
            if self._publishing is not None:
                stack.callback(self._publishing.close)
                stack.callback(self._end_publishing, self._publishing)
            if self.options.in_memory:
                stack.callback(self._empty)
            if self.replication is not None:
                stack.callback(self.replication.close)
            stack.callback(self._staging.close)
            stack.callback(self.wait_for_previous)
            self.collect(alone=True)  # other ranks may have failed and not call close()

    def _end_publishing(self, publishing: Publishing) -> None:
        publishing.wait(dist.SingleProcess())
        self._note_publishing(alone=True)

    def _empty(self) -> None:
        """Delete checkpoints in memory up to the newest full checkpoint of another manager."""
        savers = [saver for saver in self._others if not saver.options.in_memory]
        reports = [saver.outcomes.reports for saver in savers if not saver.options.weights_only]
        saved = [its[-1].moment for its in reports if its]
        if saved and self.replication is not None:
            self.replication.empty(max(saved))
        if not saved or not self.where.is_leader:
            return
        catalog = self.where.catalog
        for manifest in catalog.manifests():
            if manifest.moment <= max(saved):
                delete_checkpoint(catalog.place, manifest)

    @property
    def publishers(self) -> list[Publisher]:
        """Publishers, one for each bucket, on the ranks that publish."""
        return [] if self._publishing is None else self._publishing.publishers

    def _path_of(self, report: SaveReport) -> str:
        """Return the path of a checkpoint in the form of :attr:`saved_checkpoints`."""
        return self.where.path(str(report.path.relative_to(self.where.root)))
