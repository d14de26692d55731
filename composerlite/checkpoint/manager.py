"""CheckpointManager: saves, restores, keeps and publishes the checkpoints of one training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, final

from composerlite import dist
from composerlite.checkpoint.contents import TrainingState, check_kinds
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.loop_state import LoopState, Part, Steps
from composerlite.checkpoint.memory import Replication, open_replication
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.lease import HeartbeatLease, Lease, take_leases
from composerlite.checkpoint.record.history import own_checkpoints
from composerlite.checkpoint.record.naming import names_of_ranks, varies
from composerlite.checkpoint.record.record import Manifest, SavedRun
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.options import SaveOptions
from composerlite.checkpoint.save.publish import Publishing
from composerlite.checkpoint.save.run_folder import RunFolder, may_replace
from composerlite.checkpoint.save.save import SaveReport, SaveTask, begin_save
from composerlite.checkpoint.save.snapshot import StagingMemory
from composerlite.devices import rng
from composerlite.errors import CheckpointError, ConfigError, ObjectStoreError, RankError, RunInUseError, SaveError
from composerlite.storage import Uploader, leave_by
from composerlite.types import CheckpointNews, CheckpointStep

log = logging.getLogger(__name__)
_FAILURES = (OSError, CheckpointError, ObjectStoreError)
"""Errors of disks, networks and stores, tolerated by ``save_failure_limit``."""
_FAILED: Mapping[str, CheckpointStep] = {"saved": "failed", "published": "upload failed"}
"""Event of a failure, by the kind of work. The failure of any other work is the event ``"deletion failed"``."""
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
            a local folder, and publishes the checkpoint in the background. Only one loop at a time may save to
            ``folder``.
        run_name: name of the run. The manager restores and deletes only checkpoints of this run.
        filename: name of each checkpoint; ``{batch}`` is the step.
        keep: number of newest checkpoints to keep; -1: all; 0: none in the local folder after the upload to a bucket.
        options: further arguments of :class:`composerlite.callbacks.CheckpointSaver`, by name:
            ``overwrite``, ``asynchronous``, ``failure_limit``, ``ignore_keys``, ``latest_filename``,
            ``staging_folder``, ``num_remote_checkpoints_to_keep``, ``upload_timeout_in_seconds`` and the like.
        **parts: everything to save, by name: objects with ``state_dict()`` and ``load_state_dict()``, or dicts. A
            restore fills dicts in place. Rank 0 saves the state of modules and optimizers; of sharded modules and
            optimizers each rank saves its shards. Each rank saves all other parts.

    Attributes:
        options: settings.
        where: folder of the checkpoints.
        saved: names of the checkpoints of this run, oldest first.
        outcomes: outcomes of saves and uploads.
        pending: the save in flight, if any.
        publishers: publishers, one for each bucket, on the ranks that publish, after :meth:`open`.
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
        options = options or {}
        self.options = SaveOptions({**given, **options})
        needs_trainer = self.options.in_memory or self.options.replication is not None or self.options.on_exception
        if parts and (needs_trainer or options.keys() & given.keys()):
            raise ConfigError(
                f"options={options}: give folder, filename and keep as arguments of the manager. Leave out in_memory, "
                "replication and on_exception, which need a Trainer."
            )
        self.where = RunFolder(self.options)
        self.saved: list[str] = []
        self.outcomes = Outcomes(self.options.failure_limit)
        self.replication: Replication | None = None  # set by open()
        self._state: TrainingState | None = LoopState(run_name, parts) if parts else None
        self._others: Sequence[CheckpointManager] = ()
        self._staging = StagingMemory(self.options.staging_bytes)
        self.pending: SaveTask | None = None
        self._leases: dict[Lease, tuple[int, int] | None] = {}  # on rank 0; values: identities of lock files
        self._publishing = Publishing(self.options, self.where, lambda: self._check_leases(confirm=True))
        self.publishers = self._publishing.publishers
        self._saves_done = dist.PiggybackCounter(lambda: int(self.pending is not None and self.pending.done))
        self._deletes = self.options.keep.deletes

    # ── a loop without a Trainer ─────────────────────────────────────────────────────────────────────────────────
    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for saves and uploads. Raise their errors, or add a note to the error that ended the loop."""
        if error is None:
            with contextlib.closing(self):
                self.finish()
            return
        try:
            self.close()
        except Exception as e:  # noqa: BLE001 - added as a note to the error of the loop
            log.error("a checkpoint could not be saved: %s", e)
            error.add_note(f"A checkpoint could also not be saved: {type(e).__name__}: {e}")

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
        return state.timestamp.batch

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
                the folder with no other rank of the same node; or ``on_exception`` is set in a run of several ranks or
                with a sharded model.
            PermissionError: the bucket cannot be written to.
            FileNotFoundError: the bucket does not exist.
            ObjectStoreError: the store does not answer, or fails.
        """
        self._state, self._others = state, others
        group, options, where = dist.get_group(), self.options, self.where
        # 1. Names of the folder, files and links. Writes nothing.
        where.name(state, directory=directory)
        if options.on_exception and (dist.get_world_size() > 1 or where.form.is_spread):
            raise ConfigError(
                "save_on_exception=True with several ranks, or a model that is sharded over ranks: if one rank "
                "fails, the others are in the middle of a step. Leave the option out and save more often."
            )
        # 2. The name of a folder in memory contains the key of the folder of another manager of the run.
        if options.in_memory:
            saver = min((one for one in others if not one.options.in_memory), key=lambda one: one.options.weights_only)
            # A folder or bucket that was removed and created again has another key: ignore older copies in memory.
            buckets = [publisher.bucket for publisher in saver.publishers]
            where.keep_in_memory(state, saver.where.key(buckets, share=options.replication is not None))
        # 3. The folder: create it, and remove leftovers of killed processes.
        group.from_first("preparing the folder of checkpoints", lambda: where.prepare(state))
        where.find_disks()
        # 4. Buckets: check access. Refuse names of another saver.
        self._publishing.open(state, where.form, () if options.in_memory else uploaders)
        group.from_first("comparing file names", self._check_names_are_its_own)
        # 5. Replication to another node.
        if options.replication is not None:
            self.replication = open_replication(where.catalog.folder, options.replication)

    def _check_names_are_its_own(self) -> None:
        """Raise if another open manager of this run has the same names in a folder or a bucket. Call on rank 0."""
        own = self._new_leases()
        for other in self._others:
            theirs = other._new_leases() if other.where.run_name else {}
            for name in own.keys() & theirs.keys():
                raise ConfigError(
                    f"two CheckpointSavers, of {self.where.folder!r} and of {other.where.folder!r}, both write "
                    f"{name!r}, and would replace each other's files. Give one of them another filename, "
                    "latest_filename, remote_file_name or latest_remote_file_name, or another folder."
                )

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
        # Use the user's path, not the full path: rank 0 sends the paths of checkpoints to all ranks, and the working
        # directory may differ between nodes.
        return RunPlace(Catalog(where.folder), where.filename, None, buckets, self.options.in_memory, self.replication)

    def _known(self, *, any_template: bool = False) -> list[Manifest]:
        """Return the records of this manager's checkpoints, also from before a resume, oldest first.

        With ``any_template`` the result includes the run's checkpoints with other templates.
        """
        state = self.state
        batch, fit_calls = int(state.timestamp.batch), len(state.fit_starts)
        now = SavedRun(name=state.run_name, timestamp={"batch": batch}, fit_calls=fit_calls, lineage=state.lineage)
        return own_checkpoints(self.where.catalog.manifests(), now, None if any_template else self.where.filename)

    def load_existing(self) -> None:
        """List the checkpoints of this run, and complete interrupted links, deletions and uploads.

        Call after the restore and before the first save. May wait for uploads if the folder keeps no checkpoints.
        """
        group, state = dist.get_group(), self.state

        def existing() -> tuple[list[str], Manifest | None, bool, list[str]]:
            """Return names, oldest first; the newest record; whether saves delete; and names to publish again."""
            known = self._known()
            newest = (known or self._known(any_template=True))[-1:]
            deletes = self._deletes or any(manifest.ephemeral for manifest in known)
            return [one.name for one in known], next(iter(newest), None), deletes, self._publishing.behind(known)

        self.saved, newest, self._deletes, behind = group.from_first("finding the checkpoints of this run", existing)
        if self.replication is not None:
            self.replication.held = {*self.saved}
        again = [self._publishing.of(name, overwrite=True) for name in behind]
        with group.all_or_none("listing the checkpoints of this run"):
            if self.where.is_leader:
                self.where.catch_up(newest, state)
            for publish in again:
                publish()

    def begin(self, *, several: bool) -> bool:
        """Take the leases of the run, and check that saves are possible and overwrite no other files.

        Call before training, after :meth:`load_existing`. First collects the save that earlier training left in flight.

        Args:
            several: the run saves more than one checkpoint.

        Returns:
            False if the last save failed or was interrupted, so that its checkpoint may or may not exist.

        Raises:
            Exception: error of the last save, unless the error was raised before or is tolerated.
            ConfigError: names vary in the folder, and the name in the bucket is constant; or a value cannot be saved.
            RunInUseError: another process writes files of the same names.
            CheckpointExistsError: this run would overwrite other files.
        """
        group, state = dist.get_group(), self.state
        self.collect(alone=True)  # the ranks may have raised at different moments
        (last_is_unconfirmed,) = group.max([int(self.outcomes.last_is_unconfirmed)])
        if last_is_unconfirmed:
            # The checkpoint of an interrupted save may exist.
            self.saved = [one.name for one in group.from_first("finding the checkpoints of this run", self._known)]
        if self._publishing.buckets:
            leave_by()  # no deadline: an earlier shutdown may have been cancelled
            name, remote = self.where.filename, self.options.names.remote_filename
            if several and varies(name) and not varies(remote) and not self.options.overwrite:
                raise ConfigError(
                    f"save_remote_file_name={remote!r} is the same each time, and save_filename={name!r} is not: "
                    f"the second checkpoint would replace the first in the bucket. Put {{epoch}} or {{batch}} "
                    "into it, or pass save_overwrite=True to keep only the newest there."
                )
        with group.all_or_none("comparing the contents of checkpoints"):
            check_kinds(state.weights_state_dict(), self.options.ignore_keys)
        self.take_leases()
        with group.all_or_none("finding checkpoints that this run would overwrite"):
            if self.where.is_leader and not self.options.overwrite:
                self.where.refuse_conflicts(state, [(one.remote, one.template) for one in self.publishers])
        keeps_one = self.options.keep.policy.last == 1 or self.options.in_memory
        if several and group.is_first and not keeps_one and not varies(self.where.filename):
            log.warning(
                "save_filename=%r is constant: each save replaces the last, so only one checkpoint is kept. To "
                "keep several, put {epoch} or {batch} into it, as in 'ep{epoch}-ba{batch}-rank{rank}.pt'.",
                self.where.filename,
            )
        return not last_is_unconfirmed

    def take_leases(self, timeout: float = _LEASE_WAIT_SECONDS) -> None:
        """Take the leases of this manager's names in the folder and in buckets, on rank 0. Collective.

        Leases of an earlier call are only checked. After the takeover of a lease in a bucket, unfinished uploads
        of the previous holder are removed.

        Args:
            timeout: seconds to wait for a lease that another process holds.

        Raises:
            RunInUseError: another process writes files of the same names.
        """
        dist.get_group().from_first("acquiring the lease of the run", lambda: self._take_leases(timeout))

    def _take_leases(self, timeout: float) -> None:
        if self._leases:
            self._check_leases()
            return
        run_name, leases = self.state.run_name, self._new_leases()
        take_leases(leases, f"run {run_name!r}", timeout)
        self._leases = dict.fromkeys(leases.values())  # close() releases the leases after any error below
        self._leases = {lease: _identity(lease.uri) for lease in self._leases}
        if any(isinstance(lease, HeartbeatLease) and lease.taken_over for lease in self._leases):
            for publisher in self.publishers:
                publisher.remove_uploads(run_name)

    def _new_leases(self) -> dict[str, Lease]:
        """Return the leases of this manager's names in the folder and in buckets, by path or URI, not taken yet."""
        where = self.where
        names = [one.replace("{run_name}", where.run_name) for one in (where.filename, where.latest) if one is not None]
        root, place = where.catalog.folder.resolve(), where.catalog.place
        leases = {str(root / name.replace("{rank}", "0")): place.lock(name) for name in names}
        for publisher in self.publishers:
            leases.update(publisher.leases(where.run_name))
        return leases

    def _check_leases(self, *, confirm: bool = False) -> None:
        """Raise RunInUseError if a lease is lost.

        Args:
            confirm: ask the store if the last answer is old, since this process may have been suspended. Publishing
                passes true right before a write that makes a checkpoint visible. False: make no request.
        """
        for lease in self._leases:
            if confirm and isinstance(lease, HeartbeatLease):
                lease.confirm()
            if lease.lost_to is not None:
                raise RunInUseError(
                    f"{lease.lost_to} has taken over this run, or the names of its files, because this process did "
                    "not renew its lease in time. This process must not write there: start the run again."
                )

    def _check_folder(self) -> None:
        """Check the leases, and the folder. Call before a save.

        Raises:
            RunInUseError: another process took a lease over.
            SaveError: the folder was removed or replaced. Another process may have the folder by now.
        """
        self._check_leases()
        for lease, identity in self._leases.items():
            if identity is not None and _identity(lease.uri) != identity:
                raise SaveError(
                    f"save_folder={self.where.folder!r} was removed or replaced while this run saves to it: "
                    f"{lease.uri!r} is gone. Its checkpoints are gone as well, and another process may use the "
                    "folder by now. Restore the folder, or start the run again."
                )

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
        self._check_leases()
        if self.pending is not None and self._saves_done.total == dist.get_world_size():
            self.collect()
        newest = self.saved[-1] if self.saved else None
        if self.replication is not None and (arrived := self.replication.poll(newest)) is not None:
            self.outcomes.replicated(arrived)
        if self._publishing.ranks_with_news.total:
            self._note_publishing()
        events, self.outcomes.events = self.outcomes.events, []
        return events

    def prepare(self) -> None:
        """Check that a checkpoint can hold the state of the run. Prepare memory for asynchronous saves.

        Call after the first optimizer step, when the optimizers have a state. A save before the memory is ready is
        synchronous.

        Raises:
            ConfigError: a value cannot be saved.
        """
        with dist.get_group().all_or_none("comparing the contents of checkpoints"):
            request = self._request(self.where.filename)
            held = self.state.weights_state_dict() if self.options.weights_only else self.state.state_dict()
            contents = request.gathered(held)
            check_kinds(contents.get("state", {}), None)
        if self.options.asynchronous and (size_bytes := self.where.form.expected_bytes(contents)) is not None:
            self._staging.prepare(size_bytes)

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
            state.timestamp = Steps(step)
            self._note_publishing()
        name, started = names_of_ranks(where.filename, state)[0], time.perf_counter()
        self.outcomes.begun(name, where.folder, int(state.timestamp.batch), ephemeral=ephemeral)
        policy = options.keep.policy
        if policy.best is not None and policy.metric not in (metrics or {}) and not ephemeral:
            self.outcomes.warn_of_missing_metric(name, policy.metric)
        # A run may save again to a name that the run has used before, such as ``ep{epoch}.pt`` within an epoch. The
        # earlier save may have failed after the commit, for example because too many uploads were waiting.
        overwrite = options.overwrite or name in self.saved or name in self.outcomes.maybe_written
        self._deletes = self._deletes or ephemeral
        kept = frozenset[str]() if self.replication is None else frozenset(self.replication.held)
        publish = self._publishing.of(name, overwrite=overwrite) if self._publishing.buckets else None
        also = self._publishing.names_in_buckets(name, state) if self._publishing.buckets else {}
        waited, self.outcomes.waited_seconds = self.outcomes.waited_seconds, 0.0
        try:
            with dist.get_group().all_or_none(f"checkpoint {name!r}"):
                self._check_folder()
            request = self._request(
                where.filename,
                latest=where.latest,
                overwrite=overwrite or (bool(state.lineage.ancestors) and may_replace(state, where.catalog, name)),
                occasion="ephemeral" if ephemeral else "regular",
                metrics=metrics or {},
                publish=publish,
                also=also,
                retention=dataclasses.replace(policy, held=kept) if self._deletes else None,
                is_routine=options.in_memory,
            )
            how = ("lazy" if lazy else "async") if options.asynchronous else "sync"
            self.pending = pending = begin_save(request, self._staging, how=how, started=started, waited=waited)
        except (*_FAILURES, RankError, RunInUseError) as e:
            self.outcomes.ended("saved", e)
            return None
        if not options.asynchronous:
            self.collect()
            return None if self.outcomes.last_is_unconfirmed else pending
        return pending

    def save_after_exception(self, error: Exception) -> None:
        """Save the current state after training failed with ``error``, and add a note with the path to ``error``.

        If this save fails, add a note about the failure and do not raise: the user must see ``error``. For a run of a
        single rank.
        """
        name = PurePath(self.where.filename)
        template = str(name.with_name(f"crash-{name.name}"))
        try:
            self._check_folder()
            if self.pending is not None:
                self.pending.join()
            request = self._request(template, overwrite=True, occasion="crash")
            report = begin_save(request, self._staging, how="sync").wait()
        except Exception as e:  # noqa: BLE001 - added as a note to the error of training
            log.error("could not save the state of training after %r: %s", error, e)
            error.add_note(f"The state of training could not be saved: {type(e).__name__}: {e}")
        else:
            error.add_note(f"The state of training was saved as {str(report.path)!r}.")

    def _request(self, template: str, **fields: Any) -> SaveRequest:
        """Return a request to save the state to the folder of this manager, with further ``fields``."""
        return SaveRequest(
            state=self.state,
            weights_only=self.options.weights_only,
            ignore_keys=self.options.ignore_keys,
            catalog=self.where.catalog,
            template=template,
            form=self.where.form,
            **fields,
        )

    def published(self, seconds: float) -> bool | None:
        """Wait at most ``seconds`` for all uploads. Return whether all ranks are done; ``None`` without a bucket."""
        if not self._publishing.buckets:
            return None
        return dist.get_group().wait_for_all(self._publishing.is_done, timedelta(seconds=max(seconds, 0.001)))

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
        started = time.perf_counter()
        pending.join()
        seconds = time.perf_counter() - started
        self.outcomes.waited_seconds += seconds
        level = logging.INFO if seconds >= _LONG_WAIT_SECONDS else logging.DEBUG
        log.log(level, "waited %.2f s for the save of %s", seconds, pending.manifest.name)
        self.pending = None  # after the wait: if the wait is interrupted, the next call waits again
        name, work = pending.manifest.name, "saved"
        group = dist.Group() if alone or not self._deletes else dist.get_group()
        try:
            report: SaveReport = pending.future.result()
            self.outcomes.committed(report)
            self.saved = [*(one for one in self.saved if one not in {name, *report.deleted}), name]
            work = "deleted"
            with group.all_or_none("deleting older checkpoints"):
                if report.deletion_error is not None:
                    raise report.deletion_error
            self.outcomes.ended(work, None)
        except (*_FAILURES, RankError) as e:
            exists = any(isinstance(cause, FileExistsError) for cause in (e, *getattr(e, "causes", ())))
            if work == "saved" and not exists:
                self.outcomes.maybe_written.add(name)
            self.outcomes.ended(work, e)

    def _note_publishing(self, *, alone: bool = False) -> None:
        """Record the outcomes of finished uploads. Collective unless ``alone``.

        Raises:
            Exception: error of an upload, unless the error is tolerated.
        """
        if not self._publishing.buckets:
            return
        outcomes = (dist.Group() if alone else dist.get_group()).broadcast(self._publishing.take_news())
        # An upload may delete its checkpoint from the folder. Compare names: paths may differ between ranks.
        uploads = [one for one in outcomes if one.work == "published"]
        moved = {event.name for one in uploads for event in one.events if event.what == "deleted"}
        self.saved = [name for name in self.saved if name not in moved]
        for outcome in outcomes:
            self.outcomes.events += outcome.events
            self.outcomes.ended(outcome.work, outcome.error, outcome.upload)

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
        with contextlib.ExitStack() as stack:  # calls the last function first; calls the others even after an error
            stack.callback(self._publishing.close_store)
            for lease in self._leases:  # released after the uploads: the next launch resumes from the uploads
                stack.callback(lease.release)
            if self._leases:
                stack.callback(self.where.close)
            stack.callback(setattr, self, "_leases", {})
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
                if manifest.run.moment <= max(saved):
                    delete_checkpoint(catalog.place, manifest)


def _identity(path: str) -> tuple[int, int] | None:
    """Return the device number and the inode number of the file ``path``; ``None``: there is no such file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = Path(path).stat()
        return found.st_dev, found.st_ino
    return None


# ── outcomes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class Outcomes:
    """Outcomes of the saves of a manager, the same on every rank: rank 0 warns for all.

    Args:
        failure_limit: number of tolerated failures in a row, each with a warning. Saves, deletions and uploads are
            counted separately.

    Attributes:
        reports: reports of the last 100 successful saves, oldest first.
        blocked_seconds: seconds that training waited for successful saves, and before them for the previous save.
        waited_seconds: seconds that training has waited for the last save, for the report of the next save.
        maybe_written: names of checkpoints with a failed save. The checkpoint may exist.
        last_is_unconfirmed: the last save is in flight, failed or was interrupted: a checkpoint may or may not exist.
        tolerated: the last error that was tolerated.
        events: events that :meth:`CheckpointManager.poll` has not returned yet, oldest first.
    """

    def __init__(self, failure_limit: int) -> None:
        self.reports: deque[SaveReport] = deque(maxlen=100)
        self.blocked_seconds = self.waited_seconds = 0.0
        self.maybe_written: set[str] = set()
        self.last_is_unconfirmed = False
        self.tolerated: Exception | None = None
        self._limit = failure_limit
        self._failures = Counter[str]()
        self._warned_of_metric = False
        self.events: list[CheckpointNews] = []
        # Event of the last begun save. One save is in flight at a time, so one event is enough.
        self._begun = CheckpointNews(what="begun", name="", where="", batch=0, at=0.0)

    def begun(self, name: str, where: str, batch: int, *, ephemeral: bool) -> None:
        """Record the start of a save of the checkpoint ``name`` in the folder ``where``."""
        news = CheckpointNews(what="begun", name=name, where=where, batch=batch, at=time.time(), ephemeral=ephemeral)
        self._begun, self.last_is_unconfirmed = news, True
        self.events.append(news)

    def committed(self, report: SaveReport) -> None:
        """Record the success of the last save, and the deletion of older checkpoints by retention."""
        self.last_is_unconfirmed = False
        self.ended("saved", None)
        self.reports.append(report)
        self.blocked_seconds += report.seconds["stall"]
        at = self._begun.at + report.seconds["total"] - report.seconds.get("waiting", 0.0)
        numbers = {f"{name}_seconds": value for name, value in report.seconds.items()}
        numbers |= {"bytes": report.size_bytes, "batch": report.batch}
        if report.slowest_rank is not None:
            numbers["slowest_rank"] = report.slowest_rank
        news = dataclasses.replace(self._begun, what="committed", at=at, size_bytes=report.size_bytes, metrics=numbers)
        news = dataclasses.replace(news, seconds=dict(report.seconds), slowest_rank=report.slowest_rank)
        self.events.append(news)
        self.events += [
            CheckpointNews(what="deleted", name=name, where=self._begun.where, at=at) for name in report.deleted
        ]

    def replicated(self, name: str) -> None:
        """Record the arrival of replicas of the checkpoint ``name`` in the memory of other nodes."""
        for batch in [report.batch for report in self.reports if report.path.name == PurePath(name).name][-1:]:
            news = CheckpointNews(what="replicated", name=name, where=self._begun.where, batch=batch, at=time.time())
            self.events.append(dataclasses.replace(news, metrics={"replicated_batch": batch}))

    def ended(self, what: str, error: Exception | None, news: CheckpointNews | None = None) -> None:
        """Count a failure, record an event, and warn. A success resets the count of failures in a row.

        Args:
            what: the work: ``"saved"``, ``"deleted"``, ``"published"`` or ``"deleted from a bucket"``.
            error: reason of a failure; ``None``: a success.
            news: event of the upload; ``None``: the event of the last save.

        Raises:
            Exception: ``error``, if there are more failures in a row than the limit, or if a cause is none of
                ``OSError``, ``CheckpointError`` and ``ObjectStoreError``, such as a bug or a lost rank.
        """
        if error is None:
            self._failures[what] = 0
            return
        self._failures[what] += 1
        count, text = self._failures[what], f"{type(error).__name__}: {error}"
        at = time.time() if news is None else news.at
        failed = _FAILED.get(what, "deletion failed")
        event = dataclasses.replace(news or self._begun, what=failed, at=at, error=text, metrics={})
        causes = error.causes if isinstance(error, RankError) else (error,)
        if count > self._limit or not causes or not all(isinstance(cause, _FAILURES) for cause in causes):
            self.events.append(event)
            raise error
        self.tolerated = error
        self.events.append(dataclasses.replace(event, metrics={"failures_in_a_row": count}))
        if dist.get_global_rank() == 0:
            log.warning(
                "a checkpoint could not be %s (%d in a row, save_failure_limit=%d): %s", what, count, self._limit, text
            )

    def warn_of_missing_metric(self, name: str, metric: str) -> None:
        """Warn about a checkpoint without the metric of ``save_best_k``, once, on rank 0."""
        if not self._warned_of_metric and dist.get_global_rank() == 0:
            log.warning(
                "checkpoint %s has no %r: no evaluation ran at that batch before the save. save_best_k ignores "
                "this checkpoint. Give save_interval and eval_interval the same value.",
                name,
                metric,
            )
        self._warned_of_metric = True
