"""One save, from the call to the deletion of older checkpoints.

The training thread plans the save (:func:`begin_save`) and copies the state (:meth:`SaveTask.begin`). A background
thread (:meth:`SaveTask.run`) writes the copy, votes with the other ranks, commits, makes ``latest`` point to the new
checkpoint, publishes, and deletes older checkpoints. If a rank fails before the commit, all ranks remove their files
and raise. A rank that cannot find out whether rank 0 committed keeps its files: the checkpoint may exist. A
``RankWriter`` writes the files of this rank.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

from torch.optim import Optimizer

from composerlite import dist
from composerlite.checkpoint.contents import IgnoreKeys, TrainingState
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.record.naming import check_template, names_of_ranks
from composerlite.checkpoint.record.record import Manifest, SavedRun, new_id
from composerlite.checkpoint.save.form import Form, RankWriter, SaveRequest
from composerlite.checkpoint.save.snapshot import Snapshot, StagingMemory, finish_device_work
from composerlite.errors import CheckpointExistsError, SaveError, bytes_text
from composerlite.storage.workers import wait_at_exit, wait_no_more
from composerlite.threads import start_threads

if TYPE_CHECKING:
    from composerlite.checkpoint.save.sharded_writer import SealedIndex, ShardWriter

log = logging.getLogger(__name__)
_unfinished: set[SaveTask] = set()
LONGEST_WORK = timedelta(hours=1)
"""Time limit for the writes of a rank. The other ranks treat a rank that writes longer as lost: its disk hangs."""
_LONGEST_SAVE_SECONDS = 3600.0
"""Time limit for waiting for the end of a save. After this time the wait raises SaveError."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Outcome and duration of a save.

    Attributes:
        path: path of the checkpoint.
        batch: number of optimizer steps at the save.
        moment: (calls of ``fit``, batch), the sort key of checkpoints.
        size_bytes: size of the data.
        seconds: durations by name, measured on rank 0 except ``stall``.
            ``stall``: how long training on this rank waited for the save. ``longest_stall``: the longest on any rank.
            ``snapshot``: copying the state, in part in the background.
            ``waiting``: training waited for the previous save.
            ``hash``, ``write``, ``flush``: activities of the writing threads.
            ``straggler``: time of the slowest writing rank minus the median time of the other writing ranks.
            ``commit``: from the moment when all data are durable until the checkpoint exists.
            ``total``: ``waiting`` plus the time from the call until the checkpoint exists.
        slowest_rank: the slowest writing rank; ``None``: fewer than two ranks wrote.
        deleted: names of the older checkpoints that retention chose. After a ``deletion_error`` some still exist.
        deletion_error: error of this rank while deleting older checkpoints.
    """

    path: Path
    batch: int
    moment: tuple[int, int]
    size_bytes: int
    seconds: Mapping[str, float]
    slowest_rank: int | None = None
    deleted: Sequence[str] = ()
    deletion_error: Exception | None = None


def begin_save(
    request: SaveRequest,
    staging: StagingMemory,
    *,
    how: str = "async",
    started: float | None = None,
    waited: float = 0.0,
) -> SaveTask:
    """Save a checkpoint; training may continue when this returns. Every rank calls this, one save after the other.

    After an exception or a kill at any point, the checkpoint is complete, or does not exist and the next start removes
    its files. ``latest`` points to a complete checkpoint. A start points ``latest`` to the newest.

    Args:
        request: state to save, names and options.
        staging: memory for the copy. Without enough memory, training waits while the state itself is written.
        how: ``'async'``: training continues when the state is copied; ``'lazy'``: training continues at once, and the
            next optimizer step waits for the copy of weights and optimizer state; ``'sync'``: training continues after
            the commit.
        started: time of the user's call, in the seconds of ``time.perf_counter``; ``None``: now.
        waited: seconds that training has waited for the previous save, included in the durations of this save.

    Returns:
        The save, still in progress or finished. :meth:`SaveTask.wait` returns the report, or raises the error of the
        background thread; with several ranks, also the error of the copy.

    Raises:
        CheckpointExistsError: a checkpoint of the name exists, and ``request.overwrite`` is false.
        SaveError: the contents cannot be pickled.
        OSError: no space, no permission, and the like.
    """
    started = (time.perf_counter() if started is None else started) - waited
    # 1. Names and votes. The votes of different ranks are matched by their order of creation. So create all votes
    # before any step that can fail on one rank alone.
    state, group = request.state, dist.get_group()
    form = request.form or Form(state)
    disks = form.disks
    count = dist.get_world_size() if form.kind == "deepspeed" else 1  # of files
    names = names_of_ranks(request.template, state, count)
    what = f"checkpoint {names[0]!r}"
    votes = [group.vote(what, longest_work=LONGEST_WORK) for _ in range(1 if disks is None else 2)]
    # 2. Links and existing checkpoints. Raise for an existing name before the writers gather tensors, which is slow.
    is_leader = group.is_first if disks is None else disks.is_folder_leader
    links = [] if request.latest is None else names_of_ranks(request.latest, state, count)
    own_links = {link: name for link, name in zip(links, names, strict=False) if link != name}
    with group.all_or_none(what):
        held = state.weights_state_dict() if request.weights_only else state.state_dict()
        # The writer of a directory itself looks for an existing directory.
        for name in names if is_leader and not request.overwrite and form.kind != "sharded" else ():
            if (path := request.catalog.folder / name).exists():
                raise CheckpointExistsError(
                    f"checkpoint {str(path)!r} exists. Give names that differ, as with '{{batch}}' in them, delete "
                    "it, or pass overwrite=True (save_overwrite=True in the Trainer). If another run is writing "
                    "to this folder, give each run its own folder."
                )
    # 3. The record, and the writer of this rank.
    id_ = group.broadcast(new_id()) if len(names) > 1 else new_id()
    record = _record_of(request, form.kind, names, id_, waited)
    with group.all_or_none(what):
        writer = form.writer(request, held, record, names)
    task = SaveTask(
        manifest=record,
        path=request.catalog.folder / names[0],
        writer=writer,
        votes=votes,
        request=request,
        links=own_links if is_leader else None,
        started=started,
        blocking=how == "sync",
    )
    # 4. Copy the state, then do all further work in the background.
    # DeepSpeed also changes weights between two steps of an optimizer, so nothing may be copied later.
    task.begin(staging, state.optimizers if how == "lazy" and form.kind != "deepspeed" else ())
    return task


def _record_of(request: SaveRequest, kind: str, names: Sequence[str], id_: str, waited: float) -> Manifest:
    """Return the record of the checkpoint, without its files."""
    state, ignore_keys = request.state, request.ignore_keys
    form = "archives" if len(names) > 1 else "sharded" if kind == "sharded" else "file"
    if request.weights_only:
        kind = "weights"
    return Manifest(
        name=names[0],
        kind="crash" if request.occasion == "crash" else kind,
        template=request.template,
        run=SavedRun(
            name=state.run_name,
            timestamp={
                key: value.total_seconds() if isinstance(value, timedelta) else value
                for key, value in state.timestamp.state_dict().items()
            },
            fit_calls=len(state.fit_starts),
            world_size=dist.get_world_size(),
            lineage=state.lineage,
            metrics={name: value for name, value in request.metrics.items() if math.isfinite(value)},
            not_finite=tuple(state.not_finite),
        ),
        files=(),
        left_out=("<function>",) if callable(ignore_keys) else tuple(ignore_keys or ()),
        ephemeral=request.occasion == "ephemeral",
        also=dict(request.also),
        form=form,
        id=id_,
        timings={"waiting": waited},
    )


class _RankPart(NamedTuple):
    """Result of a rank.

    Attributes:
        written: result of the writer.
        not_finite: name of a weight with a NaN or infinite value; ``None``: all values are finite.
        seconds: time until the files were durable.
        stall_seconds: how long training waited.
    """

    written: Any
    not_finite: str | None
    seconds: float
    stall_seconds: float


@final
@dataclass(kw_only=True, eq=False)
class SaveTask:
    """A save that all ranks have planned. Create it on the training thread.

    Attributes:
        manifest: record of the checkpoint, without its files.
        path: path or URI of the checkpoint.
        writer: writer of the files of this rank; ``None``: this rank has no file.
        votes: one or two votes of all ranks. The ranks vote after every rank has written. If nodes have separate
            disks, the ranks vote again after every disk has the deciding file, which makes the checkpoint valid there.
        request: request of a run; ``None``: the checkpoint belongs to no run, and nothing is done after the commit.
        links: name of the checkpoint by name of each link that this rank moves. ``None``: this rank does not lead its
            disk, so that the rank moves no link and deletes no checkpoint.
        started: time of the call.
        blocking: training waits until the end.
        stall_seconds: how long training waited for the call. A lazy copy may delay the next step, too:
            ``snapshot.stall_seconds``.
        snapshot: copy of the state; ``None``: the writer reads the tensors themselves.
        failure: error of this rank while copying. With an error, this rank votes against the checkpoint.
        future: result of :meth:`begin`; cancelled if :meth:`begin` raised before the thread began.
    """

    manifest: Manifest
    path: str | Path
    writer: RankWriter | None
    votes: Sequence[dist.Vote]
    request: SaveRequest | None = None
    links: Mapping[str, str] | None = None
    started: float = field(default_factory=time.perf_counter)
    blocking: bool = False
    stall_seconds: float = 0.0
    snapshot: Snapshot | None = field(default=None, init=False)
    failure: BaseException | None = field(default=None, init=False)
    future: Future[Any] = field(default_factory=lambda: Future[Any](), init=False)
    _written: Any = field(default=None, init=False)
    _old: Sequence[Manifest] | None = field(default=None, init=False)
    """The older checkpoints to delete, on rank 0 after the commit."""

    # ── on the training thread ─────────────────────────────────────────────────────────────────────────────
    def begin(self, staging: StagingMemory, lazy: Sequence[Optimizer] = ()) -> Future[Any]:
        """Copy the state, and call :meth:`run` in a background thread. Return a future for the end, or the error.

        The result of the future is the report; ``None`` if the checkpoint belongs to no run. A blocking save copies
        nothing, and calls :meth:`run` in the calling thread. If no memory is ready for a copy, training waits while the
        state itself is written. In a run of one rank, an error of the copy is raised at once. With several ranks, the
        vote raises the error on all ranks. Ctrl-C is raised at once; after the start of the thread, at its end.

        Args:
            staging: memory for the copy.
            lazy: optimizers. Their tensors may be copied from accelerators later, until the next step.

        Returns:
            The future.
        """
        try:
            if not self.blocking:
                self._stage(staging, lazy)
            self.stall_seconds = time.perf_counter() - self.started
            self._start()
        except BaseException:
            if self.future.cancel():  # the thread has not begun
                wait_no_more(self)
                self._close(may_be_committed=False)
            elif not self.blocking:
                self.join()
            raise
        return self.future

    def _stage(self, staging: StagingMemory, lazy: Sequence[Optimizer]) -> None:
        writer = self.writer
        if writer is None or not writer.size_bytes:
            return
        try:
            self.snapshot = staging.take(writer.storages, writer.size_bytes, lazy)
            if self.snapshot is None:
                log.debug("no memory is ready for a copy of %s: training waits until the state is written", self.path)
                self._written = self._write(writer)
                staging.prepare(writer.size_bytes)
        except Exception as e:
            if self.votes[0].world_size == 1:
                raise
            self.failure = e

    def _write(self, writer: RankWriter) -> Any:
        memory = None if self.snapshot is None else self.snapshot.memory
        if memory is None:
            finish_device_work(writer.storages)
        timings = self._own_seconds()
        if not self.stall_seconds:  # the end of the wait is not known yet
            del timings["stall"]
        return writer.write(dataclasses.replace(self.manifest, timings=timings), memory)

    def _start(self) -> None:
        """Call :meth:`run` in a thread; in this thread if the save is blocking or no thread can be started.

        At exit the interpreter waits for the thread.
        """
        is_logged = self.votes[0].rank == 0 and not self.blocking  # the caller may never call wait()

        def run() -> None:
            try:
                if not self.future.set_running_or_notify_cancel():
                    return
                report = self.run()
            except BaseException as e:  # noqa: BLE001 - the future raises the error
                if is_logged:
                    log.error("could not save checkpoint %r: %s: %s", str(self.path), type(e).__name__, e)
                self.future.set_exception(e)
            else:
                self.future.set_result(None if self.request is None else report)
            finally:
                wait_no_more(self)
                _unfinished.discard(self)

        wait_at_exit(self, lambda: [f"checkpoint {str(self.path)!r}"], _LONGEST_SAVE_SECONDS)
        _unfinished.add(self)
        if self.blocking or not start_threads(run, 1, name="checkpoint-save"):
            self.blocking = True
            run()

    # ── in any thread ────────────────────────────────────────────────────────────────────────────────────────────
    def run(self) -> SaveReport:
        """Write, vote, commit, point ``latest``, publish, and delete older checkpoints, together with the other ranks.

        After an error this rank removes its files, unless the checkpoint exists or may exist.

        Raises:
            SaveError: a tensor changed while the snapshot was taken.
            OSError: no space, no permission, and the like.
            RankError: with several ranks, any of these errors. The cause is the error of the failed rank.
        """
        try:
            # Every rank calls _finish, then rank 0 calls _commit with the results of all ranks. All ranks return the
            # result of _commit, or raise.
            if len(self.votes) == 1:
                report: SaveReport = self.votes[0].run(self._finish, self._commit)
            else:
                report = self._commit_on_disks(cast("ShardWriter", self.writer))
        finally:
            self._close(may_be_committed=self.votes[0].may_be_committed)
        error = self._delete_old(report.deleted)
        stall = report.seconds["total"] if self.blocking else self._stall_seconds()
        seconds = {**report.seconds, "stall": stall}  # all other durations are from rank 0
        return dataclasses.replace(report, path=Path(self.path), seconds=seconds, deletion_error=error)

    def _close(self, *, may_be_committed: bool) -> None:
        if self.writer is not None:
            self.writer.close(may_be_committed=may_be_committed)
        if self.snapshot is not None:
            self.snapshot.give_back()

    def _finish(self) -> _RankPart:
        """Write the files of this rank, and wait until the files are durable. Raise the error of the copy."""
        if self.failure is not None:
            raise self.failure
        if self.snapshot is not None:
            self.snapshot.wait()
        if self.writer is not None and self._written is None:
            self._written = self._write(self.writer)
        seconds = time.perf_counter() - self.started - self.manifest.timings.get("waiting", 0.0)
        not_finite = None if self.writer is None else self.writer.not_finite
        return _RankPart(self._written, not_finite, seconds, self._stall_seconds())

    def _own_seconds(self) -> dict[str, float]:
        """Return the seconds that training waited on this rank, and the seconds of the snapshot."""
        snapshot = 0.0 if self.snapshot is None else self.snapshot.seconds
        return {"waiting": 0.0, **self.manifest.timings, "stall": self._stall_seconds(), "snapshot": snapshot}

    def _commit(self, parts: Sequence[_RankPart]) -> SaveReport:
        """Commit on rank 0, after all ranks have written."""
        assert self.writer is not None, "rank 0 has a file"
        manifest, slowest = self._compare_ranks(parts)
        before_commit = time.perf_counter()
        with self._pointing():
            manifest = self.writer.commit(manifest, [part.written for part in parts])
        return self._conclude(manifest, before_commit, slowest)

    def _pointing(self) -> contextlib.AbstractContextManager[None]:
        """Prepare the links of this rank: a full disk fails before the block, the commit. Move the links at its end."""
        if self.request is None or self.links is None:
            return contextlib.nullcontext()
        return self.request.catalog.place.pointing(self.links)

    def _commit_on_disks(self, writer: ShardWriter) -> SaveReport:
        """Commit on nodes with separate disks. The checkpoint exists if every disk has the deciding file.

        The first vote confirms that all data files are durable, the second vote that all deciding files are. The ranks
        delete no checkpoint and move no link before the second vote.
        """
        all_wrote, all_committed = self.votes

        def finish() -> _RankPart:
            part = self._finish()
            stack.enter_context(self._pointing())
            return part

        def seal(parts: Sequence[_RankPart]) -> tuple[SealedIndex, int | None]:
            manifest, slowest = self._compare_ranks(parts)
            return writer.seal(manifest, [part.written for part in parts]), slowest

        def conclude(committed: Sequence[Manifest | None]) -> SaveReport:
            assert committed[0] is not None
            stack.close()  # moves the links of rank 0 before publishing
            return self._conclude(committed[0], before_commit, slowest)

        with contextlib.ExitStack() as stack:
            sealed, slowest = all_wrote.run(finish, seal)
            before_commit = time.perf_counter()
            report: SaveReport = all_committed.run(lambda: writer.commit_part(sealed), conclude)
        if all_wrote.rank != 0 and self.request is not None and self.request.publish is not None:
            self.request.publish()  # publishes the files on the disk of this node
        return report

    def _conclude(self, manifest: Manifest, before_commit: float, slowest_rank: int | None) -> SaveReport:
        """Log, publish and apply retention on rank 0, once the checkpoint exists."""
        request = self.request
        now = time.perf_counter()
        seconds = {**manifest.timings, "commit": now - before_commit, "total": now - self.started}
        is_routine = request is not None and (request.is_routine or request.publish is not None)
        level, size = logging.DEBUG if is_routine else logging.INFO, bytes_text(manifest.size_bytes)
        log.log(level, "saved checkpoint %s (%s in %.2f s)", self.path, size, seconds["total"])
        if manifest.run.not_finite != self.manifest.run.not_finite:
            log.warning(
                "checkpoint %s: %s has NaN or infinite values although the loss is finite. autoresume and save_best_k "
                "skip this checkpoint.",
                self.path,
                manifest.run.not_finite[0],
            )
        if request is not None and request.publish is not None:
            request.publish()
        if request is not None and request.retention is not None:
            known = request.catalog.manifests()
            self._old = request.retention.given_up(known, manifest)
        return SaveReport(
            path=Path(self.path),
            batch=manifest.run.moment[1],
            moment=manifest.run.moment,
            size_bytes=manifest.size_bytes,
            seconds=seconds,
            slowest_rank=slowest_rank,
            deleted=[old.name for old in self._old or ()],
        )

    def _delete_old(self, names: Sequence[str]) -> Exception | None:
        """Delete the checkpoints ``names`` if this rank leads a disk. Return an error instead of raising.

        An error does not affect the new checkpoint, which exists.
        """
        if self.request is None or self.links is None or not names:
            return None
        catalog = self.request.catalog
        try:
            for manifest in catalog.manifests(names) if self._old is None else self._old:
                delete_checkpoint(catalog.place, manifest)
        except Exception as e:  # noqa: BLE001 - stored in deletion_error; the saver raises or counts the error
            return e
        return None

    def _stall_seconds(self) -> float:
        return self.stall_seconds + (0.0 if self.snapshot is None else self.snapshot.stall_seconds)

    def _compare_ranks(self, parts: Sequence[_RankPart]) -> tuple[Manifest, int | None]:
        """Return the record with all that is known after the writes, and the slowest rank. Called on rank 0."""
        compared: dict[str, float] = {}
        slowest_rank: int | None = None
        writers = {rank: part.seconds for rank, part in enumerate(parts) if part.written}
        if len(writers) > 1:
            slowest_rank = max(writers, key=writers.__getitem__)
            slowest = writers.pop(slowest_rank)
            compared["straggler"] = max(0.0, slowest - statistics.median(writers.values()))
        if len(parts) > 1:
            compared["longest_stall"] = max(part.stall_seconds for part in parts)
        own = {} if self.writer is None else self.writer.seconds
        timings = {**self._own_seconds(), **compared, **own}
        run = self.manifest.run
        if not run.not_finite:
            run = dataclasses.replace(run, not_finite=tuple(part.not_finite for part in parts if part.not_finite)[:1])
        return dataclasses.replace(self.manifest, run=run, timings=timings), slowest_rank

    # ── the end of the save ──────────────────────────────────────────────────────────────────────────────────────
    @property
    def done(self) -> bool:
        """True after the save has succeeded, failed or been cancelled."""
        return self.future.done()

    def wait(self, timeout: float = _LONGEST_SAVE_SECONDS) -> SaveReport:
        """Wait at most ``timeout`` seconds for the end of the save, with its deletions, and return the report.

        Raises:
            SaveError: the save did not end in time, or the contents could not be written.
            OSError: no space, no permission, and the like.
        """
        self.join(timeout)
        return self.future.result()

    def join(self, timeout: float = _LONGEST_SAVE_SECONDS) -> None:
        """Wait at most ``timeout`` seconds for the end of the save.

        Raises:
            SaveError: the save did not end in time.
        """
        if not concurrent.futures.wait([self.future], timeout).done:
            raise SaveError(f"checkpoint {self.manifest.name!r} was not written within {timeout} s. The disk may hang.")


def _fail_in_forked_process() -> None:
    """Fail the saves that a forked process inherits: the threads for the saves run in the parent process."""
    for task in _unfinished:
        task.future.__init__()  # a thread of the parent may have held the lock
        task.future.set_exception(
            SaveError(
                f"checkpoint {str(task.path)!r}: the parent process saves it. Wait for the save in the parent, or "
                "before the fork."
            )
        )
    _unfinished.clear()


os.register_at_fork(after_in_child=_fail_in_forked_process)


def save(request: SaveRequest) -> Path:
    """Save a checkpoint, wait for the end of the save, and return the path. Raises as :func:`begin_save`."""
    return begin_save(request, StagingMemory(), how="sync").wait().path


def save_checkpoint(
    state: TrainingState,
    filename: str | Path = "ep{epoch}-ba{batch}-rank{rank}",
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
) -> str:
    """Save a checkpoint of ``state`` to ``filename``, replace an existing checkpoint there, and return the path.

    When this returns, the checkpoint is durable and committed. ``filename`` may contain the format variables
    ``{run_name} {rank} {epoch} {batch}`` … and folders. See :func:`begin_save` for guarantees and errors.

    Args:
        state: state of the run.
        filename: path, with format variables.
        weights_only: save only the weights of the model.
        ignore_keys: globs of keys to leave out, or a function that removes keys.

    Returns:
        Path of the checkpoint.
    """
    form = Form(state)
    form.check(weights_only=weights_only, ignore_keys=ignore_keys)
    folder = Path(names_of_ranks(str(Path(filename).parent), state)[0])
    form.find_disks(folder)
    request = SaveRequest(
        state=state,
        catalog=Catalog(folder),
        template=form.template(check_template(Path(filename).name, argument="filename"), "filename"),
        weights_only=weights_only,
        ignore_keys=ignore_keys,
        overwrite=True,
        form=form,
    )
    return str(save(request))
