"""Steps of a save: stage, write, vote, commit, point ``latest``, publish, delete by retention.

A trainer, the functions and ``Checkpointer`` differ in what is written and where, which a ``RankWriter`` knows, and in
what is to follow. The thread that saves pays for :meth:`PendingSave.stage`; the rest is :meth:`PendingSave.run`. A
:class:`Pipeline` saves the checkpoints of a run one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, final

from torch.optim import Optimizer

from composerlite import dist
from composerlite.checkpoint.contents import IgnoreKeys, TrainingState, versions
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.node_disks import Disks
from composerlite.checkpoint.record.manifest import Manifest, new_id
from composerlite.checkpoint.record.naming import check_template
from composerlite.checkpoint.record.retention import Retention
from composerlite.checkpoint.save.form import RankWriter, SaveRequest, first_name, form_of, gathering
from composerlite.checkpoint.save.snapshot import Snapshot, StagingMemory, finish_device_work
from composerlite.errors import SaveError, bytes_text
from composerlite.storage import HostMemory, wait_at_exit, wait_no_more
from composerlite.threads import start_threads
from composerlite.types import Lineage, StateDict

if TYPE_CHECKING:
    from composerlite.checkpoint.save.sharded_writer import SealedIndex, ShardWriter

__all__ = ["FollowUp", "PendingSave", "Pipeline", "SaveReport", "save", "save_checkpoint"]

log = logging.getLogger(__name__)
_in_background: dict[int, PendingSave] = {}
T = TypeVar("T")
LONGEST_WORK = timedelta(hours=1)
"""A rank that writes for longer than that does not count as alive any more: its disk hangs."""
PREVIOUS_SECONDS = 3600.0
"""How long a save waits for the one before it. A disk that takes longer hangs."""
_LONG_WAIT_SECONDS = 1.0
"""Seconds after which a wait for the previous save is logged."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Outcome of a save, and its cost.

    Attributes:
        path: the checkpoint.
        batch: optimizer steps done when it was saved. moment: with the calls of ``fit``, as ``Manifest.moment`` counts.
        size_bytes: of its data.
        seconds: by name. ``stall``: the training thread was kept from training. ``snapshot``: copying, in part in the
            background. ``waiting``: for the save before this one. ``hash``, ``write``, ``flush``: of the writing
            threads. ``commit``: from durable data to a checkpoint that exists. ``total``: from the call until then.
            With several ranks they are those of rank 0, but for the stall, which is this rank's own.
            ``longest_stall``: the stall of the rank that was kept longest, until its data were durable.
            ``straggler``: so much longer than the median of the others the slowest of the ranks that write took.
        slowest_rank: that rank; ``None``: fewer than two ranks have written.
        weights_crc: CRC-32 of each storage of the model, where rank 0 has all of it.
        deleted: names of the checkpoints that were given up for it.
        not_finite: the marks of the checkpoint, see :class:`Manifest`.
    """

    path: Path
    batch: int
    moment: tuple[int, int]
    size_bytes: int
    seconds: Mapping[str, float]
    slowest_rank: int | None = None
    weights_crc: Sequence[int] = ()
    deleted: Sequence[str] = ()
    not_finite: Sequence[str] = ()


class _RankPart(NamedTuple):
    """Part of a rank: ``what`` its writer says of it, the seconds until it was durable, and those of its stall."""

    what: Any
    seconds: float
    stall_seconds: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """Work that follows the commit of a run's checkpoint.

    Attributes:
        catalog: the folder's checkpoints.
        latest: links to point to it: their names, and the file that each leads to.
        publish: is called after the commit, before anything is given up. On rank 0; where there are several disks on
            all.
        retention: which older checkpoints are to go after that. On rank 0.
        is_leader: this rank is the one that points ``latest`` and deletes checkpoints in the folder that it sees.
        is_routine: its line in the log is below INFO.
    """

    catalog: Catalog
    latest: Mapping[str, str] = field(default_factory=dict[str, str])
    publish: Callable[[], object] | None = None
    retention: Retention | None = None
    is_leader: bool = True
    is_routine: bool = False

    @property
    def links(self) -> Mapping[str, str]:
        """The links that this rank points to the checkpoint, and the file that each leads to."""
        return {link: name for link, name in self.latest.items() if self.is_leader and link != name}

    @property
    def log_level(self) -> int:
        """Level of the line that the save has in the log; one that is published has it then."""
        return logging.DEBUG if self.is_routine or self.publish is not None else logging.INFO


@final
@dataclass(kw_only=True)
class PendingSave:
    """A save that all ranks of ``group`` have planned. Create it on the training thread.

    Attributes:
        manifest: what will be committed, but for its files.
        path: of the checkpoint, or its URI.
        writer: what this rank writes.
        votes: of all ranks over the commit: one, when each has written; where nodes have disks of their own a second
            one, when each disk has its deciding file.
        follow_up: of a run's checkpoint.
        started: when the save was called for. waiting_seconds: how long it waited for the one before it.
        slowest_rank: on rank 0, the rank that was the last to write.
        blocking: training waits until the end.
        stall_seconds: how long it has kept training besides the snapshot.
        staging: where the copy is, if there is one.
        snapshot: the copy, in memory that does not change; ``None`` to read from the tensors themselves.
        failure: why this rank cannot do its part: it votes against the checkpoint.
        to_delete: names of the checkpoints that this rank deletes from the disk that it sees, after the save.
        future: what comes of :meth:`start`; cancelled where the caller was interrupted before the work had begun.
        deletion_error: why older checkpoints could not be deleted.
    """

    manifest: Manifest
    path: str | Path
    writer: RankWriter
    votes: Sequence[dist.Vote]
    group: dist.Group
    follow_up: FollowUp | None = None
    started: float = field(default_factory=time.perf_counter)
    waiting_seconds: float = 0.0
    slowest_rank: int | None = field(default=None, init=False)
    blocking: bool = False
    stall_seconds: float = 0.0
    staging: StagingMemory | None = field(default=None, init=False)
    snapshot: Snapshot | None = field(default=None, init=False)
    failure: BaseException | None = field(default=None, init=False)
    to_delete: Sequence[str] = field(default=(), init=False)
    future: Future[Any] = field(default_factory=lambda: Future[Any](), init=False)
    deletion_error: Exception | None = field(default=None, init=False)
    _tidied: threading.Event = field(default_factory=threading.Event, init=False)
    _memory: HostMemory | None = field(default=None, init=False)
    _written: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)

    # ── what users hold ──────────────────────────────────────────────────────────────────────────────────────────
    @property
    def name(self) -> str:
        """Name of the checkpoint to come, below its folder."""
        return self.manifest.name

    @property
    def done(self) -> bool:
        """True once the save has ended, successfully or not."""
        return self.future.done()

    def wait(self, timeout: float | None = PREVIOUS_SECONDS) -> SaveReport:
        """Wait until the checkpoint is committed, at most ``timeout`` seconds.

        Raises:
            TimeoutError: it is not.
            SaveError: its contents could not be written.
            OSError: no space, no permission, and the like.
        """
        if not self.join(timeout):
            raise TimeoutError(f"checkpoint {self.name!r} is not written after {timeout} s: does the disk hang?")
        try:
            return self.future.result()
        except BaseException:
            wait_no_more(self)
            raise

    def join(self, timeout: float | None = PREVIOUS_SECONDS) -> bool:
        """Wait until it has ended, well or not; whether it has."""
        try:
            self.future.exception(timeout)
        except TimeoutError:
            return self.future.done()
        except CancelledError:  # whoever saved was interrupted
            pass
        return True

    @property
    def is_tidy(self) -> bool:
        """True once older checkpoints are deleted."""
        return self._tidied.is_set()

    def wait_until_tidy(self) -> None:
        """Wait until older checkpoints are deleted.

        Raises:
            SaveError: that does not end.
        """
        if not self._tidied.wait(PREVIOUS_SECONDS):
            raise SaveError(f"older checkpoints than {self.name!r} are not deleted after {PREVIOUS_SECONDS} s.")

    # ── what whoever saves waits for ─────────────────────────────────────────────────────────────────────────────
    def stage(
        self, staging: StagingMemory, lazy: Sequence[Optimizer] = (), previous: PendingSave | None = None
    ) -> None:
        """Copy the state, or write the state itself now if no memory is ready for a copy.

        With several ranks an error is kept for the vote.

        Args:
            staging: memory for the copy. Without a copy, memory for the next save is prepared.
            lazy: see :meth:`StagingMemory.take`.
            previous: the save before. Its checkpoints by retention are deleted before the state is written.

        Raises:
            SaveError: in a run of one rank: the contents cannot be written.
            OSError: in a run of one rank: no space, no permission, and the like.
        """
        self.staging = staging
        writer = self.writer
        try:
            memory = staging.reserve(writer.size_bytes)
            copies = memory is not None
            if writer.gathers:
                copies = self.group.broadcast(copies)
            if copies:
                if memory is None:
                    raise SaveError(f"no memory for this rank's part of a copy of {self.path}.")
                self.snapshot = staging.take(memory, writer.storages(), writer.size_bytes, lazy)
                self._memory = memory
                writer.staged_in(memory)
                return
            if memory is not None:  # rank 0 has none
                staging.give_back(memory)
            log.info("no memory is ready for a copy of %s: training waits while the state is written", self.path)
            if previous is not None:
                previous.wait_until_tidy()  # the disk may have no room before
            self._write()
            staging.prepare(writer.size_bytes)
        except BaseException as e:
            self._close(may_be_committed=False)
            if self.group.size == 1:
                raise
            self.failure = e

    def _write(self) -> None:
        try:
            if self._memory is None:
                finish_device_work(self.writer.storages())
            self.writer.write(self._memory)
        except BaseException:
            self.writer.close(may_be_committed=False)
            raise
        self._written = True

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Do ``work``, which calls :meth:`run`, in a thread for which a program that ends waits; at once if blocking.

        Its result, or its error, is the future's. Older checkpoints are deleted after that: the next snapshot waits for
        neither. Ctrl-C before the thread has begun cancels the save; later it runs on, and whoever waits sees its end.
        """

        def run() -> None:
            if not self.future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as e:  # noqa: BLE001 - it is the future's
                self._failed(e)
                self.future.set_exception(e)
            else:
                self.future.set_result(result)
            self._ended = True
            try:
                self._delete_old()
            except Exception as e:  # noqa: BLE001 - who saves asks for it
                self.deletion_error = e
            finally:
                self._tidied.set()
                _in_background.pop(id(self), None)
                if self.future.exception() is None:
                    wait_no_more(self)

        wait_at_exit(self, lambda: [f"checkpoint {str(self.path)!r}"], PREVIOUS_SECONDS)
        _in_background[id(self)] = self
        try:
            if self.blocking or not start_threads(run, 1, name="checkpoint-save"):
                self.blocking = True
                run()
        except BaseException:
            self.cancel()
            raise
        return self.future

    def _failed(self, error: BaseException) -> None:
        """See that ``error`` is in the log where nobody asks for it, at the latest when the program ends."""
        what = f"checkpoint {str(self.path)!r}: {type(error).__name__}: {error}"
        if self.follow_up is not None and self.group.is_first and not self.blocking:
            wait_at_exit(self, lambda: [what], 0.0)
            return
        wait_no_more(self)
        if self.follow_up is None and self.group.is_first:  # who asks its future is not known
            log.error("could not save %s", what)

    def cancel(self) -> None:
        """Cancel the save if its work has not begun, and leave nothing behind. May be called twice."""
        if self.future.cancel():
            wait_no_more(self)
            _in_background.pop(id(self), None)
            self._close(may_be_committed=False)
            self._tidied.set()

    def leave_to_parent(self) -> None:
        """End in a forked process, which has no thread that saves: whoever waits here gets an error."""
        if not self._ended:
            self.future.__init__()  # the thread may have its lock
            self.future.set_exception(
                SaveError(
                    f"checkpoint {str(self.path)!r}: the process that this one was forked from saves it, and learns "
                    "alone how that ends. Wait for it there, or before the fork."
                )
            )
        self.to_delete = ()
        self._tidied = threading.Event()
        self._tidied.set()

    # ── in any thread ────────────────────────────────────────────────────────────────────────────────────────────
    def run(self) -> SaveReport:
        """Write the rest, make it durable and commit it, together with the other ranks.

        Raises:
            SaveError: the snapshot changed while it was taken.
            OSError: no space, no permission, and the like. Nothing is left behind.
            RankError: the same where there are several ranks; its cause is what one of them raised.
        """
        try:
            if len(self.votes) == 1:
                report: SaveReport = self.votes[0].run(self._finish, self._commit)
            else:
                report = self._commit_on_disks(cast("ShardWriter", self.writer))
        finally:
            self._close(may_be_committed=self.votes[0].may_be_committed)
        if self.follow_up is not None and self.follow_up.is_leader:
            self.to_delete = report.deleted
        return self._as_seen_here(report)

    def _close(self, *, may_be_committed: bool) -> None:
        self.writer.close(may_be_committed=may_be_committed)
        memory, self._memory = self._memory, None
        if memory is not None and self.staging is not None and self.snapshot is not None and self.snapshot.is_complete:
            self.staging.give_back(memory)

    def _finish(self) -> _RankPart:
        """Do this rank's part, until it is durable."""
        if self.failure is not None:
            raise self.failure
        if self.snapshot is not None:
            self.snapshot.wait()
        if not self._written:
            self._write()
        what = self.writer.finish(dataclasses.replace(self.manifest, timings=self._own_seconds()))
        return _RankPart(what, time.perf_counter() - self.started - self.waiting_seconds, self._stall_seconds())

    def _own_seconds(self) -> dict[str, float]:
        """Seconds that this rank's training thread waited, and those of the snapshot."""
        snapshot = 0.0 if self.snapshot is None else self.snapshot.seconds
        return {"stall": self._stall_seconds(), "snapshot": snapshot, "waiting": self.waiting_seconds}

    def _commit(self, parts: Sequence[_RankPart]) -> SaveReport:
        seconds = self._note_ranks(parts)
        before_commit = time.perf_counter()
        with self._pointing():
            manifest = self.writer.commit(
                dataclasses.replace(self.manifest, timings=seconds), [part.what for part in parts]
            )
        return self._after_commit(manifest, before_commit)

    def _pointing(self) -> contextlib.AbstractContextManager[None]:
        """Point this rank's links to the checkpoint at the end of the block, in which it is committed."""
        if (after := self.follow_up) is None:
            return contextlib.nullcontext()
        return after.catalog.place.pointing(after.links)

    def _commit_on_disks(self, writer: ShardWriter) -> SaveReport:
        """Commit where nodes have disks of their own: the checkpoint exists if every disk has its deciding file.

        Nothing is deleted, and no link is moved, before all disks have it.
        """
        written, committed = self.votes

        def finish() -> _RankPart:
            part = self._finish()
            stack.enter_context(self._pointing())
            return part

        def seal(parts: Sequence[_RankPart]) -> SealedIndex:
            timings = self._note_ranks(parts)
            return writer.seal(dataclasses.replace(self.manifest, timings=timings), [part.what for part in parts])

        def conclude(_: object) -> SaveReport:
            assert writer.committed is not None
            stack.close()  # now the links are moved
            return self._after_commit(writer.committed, before_commit)

        with contextlib.ExitStack() as stack:
            sealed: SealedIndex = written.run(finish, seal)
            before_commit = time.perf_counter()
            report: SaveReport = committed.run(lambda: writer.commit_part(sealed), conclude)
        if not self.group.is_first and self.follow_up is not None and self.follow_up.publish is not None:
            self.follow_up.publish()
        return report

    def _after_commit(self, manifest: Manifest, before_commit: float) -> SaveReport:
        """Log, publish and apply retention on rank 0, once the checkpoint exists."""
        now = time.perf_counter()
        seconds = {**manifest.timings, "commit": now - before_commit, "total": now - self.started}
        deleted: Sequence[str] = ()
        if (after := self.follow_up) is not None:
            size = bytes_text(manifest.size_bytes)
            log.log(after.log_level, "saved checkpoint %s (%s in %.2f s)", self.path, size, seconds["total"])
            if manifest.not_finite != self.manifest.not_finite:
                log.warning(
                    "checkpoint %s: %s is not finite, while the loss was: the checkpoint is marked. autoresume and "
                    "save_best_k skip it.",
                    self.path,
                    manifest.not_finite[0],
                )
            if after.publish is not None:
                after.publish()
            if after.retention is not None:
                deleted = [old.name for old in after.retention.given_up(after.catalog.readable(), manifest.template)]
        return SaveReport(
            path=Path(self.path),
            batch=manifest.batch,
            moment=manifest.moment,
            size_bytes=manifest.size_bytes,
            seconds=seconds,
            slowest_rank=self.slowest_rank,
            weights_crc=self.writer.weights_crc,
            deleted=deleted,
            not_finite=manifest.not_finite,
        )

    def _delete_old(self) -> None:
        """Delete the checkpoints that retention no longer keeps from the disk that this rank sees."""
        if self.follow_up is not None and self.to_delete:
            catalog = self.follow_up.catalog
            for manifest in catalog.readable(self.to_delete):
                delete_checkpoint(catalog.place, manifest)

    def _as_seen_here(self, report: SaveReport) -> SaveReport:
        """Report of rank 0 with this rank's path of the folder and its stall."""
        several = self.group.size > 1
        if self.blocking:
            stall = time.perf_counter() - self.started if several else report.seconds["total"]
        elif several:
            stall = self._stall_seconds()
        else:
            return report
        return dataclasses.replace(report, path=Path(self.path), seconds={**report.seconds, "stall": stall})

    def _stall_seconds(self) -> float:
        return self.stall_seconds + (0.0 if self.snapshot is None else self.snapshot.stall_seconds)

    def _note_ranks(self, parts: Sequence[_RankPart]) -> dict[str, float]:
        """Seconds of each phase until the data were durable, on rank 0, which learns who was the slowest rank."""
        compared: dict[str, float] = {}
        writers = {rank: part.seconds for rank, part in enumerate(parts) if part.what}
        if len(writers) > 1:
            self.slowest_rank = max(writers, key=writers.__getitem__)
            slowest = writers.pop(self.slowest_rank)
            compared["straggler"] = max(0.0, slowest - statistics.median(writers.values()))
        if len(parts) > 1:
            compared["longest_stall"] = max(part.stall_seconds for part in parts)
        return {**self._own_seconds(), **compared, **self.writer.seconds}


def _leave_to_parent() -> None:
    for pending in _in_background.values():
        pending.leave_to_parent()
    _in_background.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


# ── one after the other ──────────────────────────────────────────────────────────────────────────────────────────────
@final
class Pipeline:
    """Saves checkpoints one after the other, each in the background.

    Args:
        staging_bytes: memory for the copy of what is saved, kept from save to save. ``None`` takes what a checkpoint
            needs if that is at most half of what is free. Where it does not suffice, the training thread waits while
            the bytes go through a ring of that size.
    """

    def __init__(self, staging_bytes: int | None = None) -> None:
        self._staging = StagingMemory(staging_bytes)
        self._pending: PendingSave | None = None
        self._given_up: set[str] = set()  # by the save before, and perhaps not deleted yet
        self._previous: dict[str, SaveReport] = {}
        self._waited = 0.0

    def prepare(
        self,
        state: TrainingState,
        *,
        weights_only: bool = False,
        ignore_keys: IgnoreKeys = None,
        state_dict: StateDict | None = None,
    ) -> None:
        """Prepare memory for copies of ``state`` in the background. Call after the first optimizer step.

        A save before the memory is ready is synchronous.

        Args:
            state: of the run.
            weights_only: as in :meth:`save`.
            ignore_keys: as in :meth:`save`.
            state_dict: state dict of ``state``, if the caller has it already.

        Raises:
            SaveError: the contents of its checkpoints cannot be pickled.
        """
        if self._pending is not None:
            return  # the save had memory, or prepared some
        gathered = gathering(state, state_dict, weights_only=weights_only, ignore_keys=ignore_keys)
        if (size_bytes := form_of(state).expected_bytes(gathered)) is not None:
            self._staging.prepare(size_bytes)

    def prepared(self, timeout: float = 60.0) -> bool:
        """Wait at most ``timeout`` seconds until memory is prepared; return whether it is."""
        return self._staging.wait_until_prepared(timeout)

    def save(
        self,
        state: TrainingState,
        *,
        catalog: Catalog,
        template: str,
        weights_only: bool = False,
        ignore_keys: IgnoreKeys = None,
        overwrite: bool = False,
        latest: str | None = None,
        asynchronous: bool = True,
        lazy: bool = False,
        ephemeral: bool = False,
        after_crash: bool = False,
        metrics: Mapping[str, float] | None = None,
        also: Mapping[str, str] | None = None,
        publish: Callable[[], object] | None = None,
        retention: Retention | None = None,
        disks: Disks | None = None,
        files: int | None = None,
        is_routine: bool = False,
        state_dict: StateDict | None = None,
        started: float | None = None,
    ) -> PendingSave:
        """Save a checkpoint of ``state``; training may continue when this returns.

        After an exception or a kill at any point there is either the whole checkpoint or none of it, and ``latest``
        points to the newest whole one.

        Args:
            state: what to save.
            catalog: the folder it goes to.
            template: its name, with format variables.
            weights_only: leave out everything but the model.
            ignore_keys: leave out these keys.
            overwrite: replace a checkpoint of the same name.
            latest: name of the symbolic link to point to it, with format variables.
            asynchronous: return when the snapshot is taken; otherwise when the checkpoint is committed.
            lazy: return before weights and optimizer state on accelerators are copied. The next optimizer step waits
                for the copy, and nothing but optimizers may change these tensors before.
            ephemeral: it is given up as soon as a newer one is committed.
            after_crash: the state is that in which an exception left it; nobody resumes from it unasked.
            metrics: metric values to keep with it, by name; those that are no finite numbers are left out.
            also: other names under which the same file is uploaded, each with its template.
            publish: called after the commit, perhaps on another thread.
            retention: which older checkpoints of the same template are deleted after that.
            disks: which ranks see the same folder, where all write to it and not all see one.
            files: that a rank writes of a directory at most; ``None``: as many as it likes.
            is_routine: its line in the log is below INFO.
            state_dict: what ``state`` holds, or its weights; ``None``: it is asked for that.
            started: when gathering it began, as ``time.perf_counter`` counts; ``None``: now.

        Returns:
            The save, which may still be in progress; :meth:`PendingSave.wait` returns its report.

        Raises:
            CheckpointExistsError: there is one of that name and ``overwrite`` is false.
            SaveError: its contents cannot be pickled.
            OSError: no space, no permission, and the like. What goes wrong in the background, and all that goes wrong
                after the snapshot, comes out of :meth:`PendingSave.wait`.
        """
        group = dist.get_group()
        self.wait_for_previous()
        waiting, self._waited = self._waited, 0.0
        started = (time.perf_counter() if started is None else started) - waiting
        form = form_of(state)
        template = form.template(template)
        form.check(weights_only=weights_only, ignore_keys=ignore_keys)
        names = form.names(template, state)
        name = names[0]
        is_leader = group.is_first if disks is None else disks.is_folder_leader
        previous = self._pending
        if previous is not None and not self._given_up.isdisjoint(names):
            previous.wait_until_tidy()  # one of this name is about to go
        # First of all: votes are counted on each rank.
        rounds = 1 if disks is None else 2
        votes = [group.vote(f"checkpoint {name!r}", longest_work=LONGEST_WORK) for _ in range(rounds)]
        # Before the ranks meet to gather: a name that is taken is told as that.
        with group.all_or_none(f"checkpoint {name!r}"):
            for one in names if is_leader else ():
                catalog.check_free(one, overwrite=overwrite, directory=form.kind == "sharded")
        record = Manifest(
            name=name,
            kind="crash" if after_crash else "weights" if weights_only else form.kind,
            template=template,
            run_name=state.run_name,
            timestamp={
                key: value.total_seconds() if isinstance(value, timedelta) else value
                for key, value in state.timestamp.state_dict().items()
            },
            fit_calls=len(state.fit_starts),
            world_size=group.size,
            files=(),
            left_out=("<function>",) if callable(ignore_keys) else tuple(ignore_keys or ()),
            metrics={name: value for name, value in (metrics or {}).items() if math.isfinite(value)},
            ephemeral=ephemeral,
            versions=versions(),
            not_finite=tuple(getattr(state, "not_finite", ())),
            lineage=getattr(state, "lineage", Lineage()),  # a loop of the user's own may have none
            also=dict(also or {}),
            form="archives" if len(names) > 1 else "sharded" if form.kind == "sharded" else "file",
            id=group.broadcast(new_id()) if len(names) > 1 else new_id(),
        )
        with group.all_or_none(f"checkpoint {name!r}"):
            gathered = gathering(state, state_dict, weights_only=weights_only, ignore_keys=ignore_keys)
            request = SaveRequest(
                state=state,
                gathered=gathered,
                record=record,
                path=catalog.folder / name,
                catalog=catalog,
                names=names,
                template=template,
                weights_only=weights_only,
                overwrite=overwrite,
                disks=disks,
                files=files,
            )
            writer = form.writer(request)
        pending = PendingSave(
            manifest=record,
            path=request.path,
            writer=writer,
            votes=votes,
            group=group,
            follow_up=FollowUp(
                catalog=catalog,
                latest={} if latest is None else dict(zip(form.names(latest, state), names, strict=True)),
                publish=publish,
                retention=retention,
                is_leader=is_leader,
                is_routine=is_routine,
            ),
            started=started,
            waiting_seconds=waiting,
            blocking=not asynchronous,
        )
        try:
            if asynchronous:
                pending.stage(self._staging, state.optimizers if lazy and form.may_be_lazy else (), previous)
            pending.stall_seconds = time.perf_counter() - started
            if pending.snapshot is not None:  # it counts its own, later ones too
                pending.stall_seconds -= pending.snapshot.stall_seconds
            self._pending = pending
            pending.start(lambda: self._finish(pending, previous))
        except BaseException:
            pending.cancel()
            raise
        return pending

    def close(self) -> None:
        """Wait for the save in progress and give the memory back. Errors of the save are left to who waits for it."""
        self.wait_for_previous()
        self.wait_until_tidy()
        self._pending = None  # what is saved after this is a first save again, whose memory can be prepared
        self._staging.close()

    def _finish(self, pending: PendingSave, previous: PendingSave | None) -> SaveReport:
        if previous is not None:
            previous.wait_until_tidy()  # the disk has room for no more than one checkpoint too many
        report = pending.run()
        self._given_up = set(report.deleted)
        before = self._previous.get(pending.manifest.template)
        if (
            before is not None
            and report.batch > before.batch
            and len(report.weights_crc) > 0
            and not report.not_finite  # what is NaN stays so, and that was said
            and (list(before.weights_crc) == list(report.weights_crc))
            and dist.get_global_rank() == 0
        ):
            log.warning(
                "checkpoint %s holds exactly the weights of %s, %d steps before it: is the model trained? Look at the "
                "learning rate, at requires_grad, and whether the optimizer has the model's parameters.",
                report.path,
                before.path.name,
                report.batch - before.batch,
            )
        self._previous[pending.manifest.template] = report
        return report

    def wait_until_tidy(self) -> None:
        """Wait until the checkpoints that the save before gave up are deleted.

        Raises:
            SaveError: that does not end.
        """
        if self._pending is not None:
            self._pending.wait_until_tidy()

    def wait_for_previous(self) -> None:
        """Wait until the save before has ended, well or not. The next one counts the time as its own.

        Raises:
            SaveError: it does not end.
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


def save(state: TrainingState, **arguments: Any) -> Path:
    """Save a checkpoint of ``state`` and return its path when it is committed. Arguments as :meth:`Pipeline.save`."""
    return Pipeline().save(state, **arguments, asynchronous=False).wait().path


def save_checkpoint(
    state: TrainingState,
    filename: str | Path = "ep{epoch}-ba{batch}-rank{rank}",
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
) -> str:
    """Save a checkpoint of ``state`` to ``filename``, replacing what is there, and return its path.

    When this returns, the checkpoint is durable and committed. ``filename`` may contain the format variables
    ``{run_name} {rank} {epoch} {batch}`` … and folders. See :meth:`Pipeline.save` for what is guaranteed and raised.

    Args:
        state: state of the run.
        filename: path, with format variables.
        weights_only: save the model's weights only.
        ignore_keys: globs of keys to leave out, or a function that removes them.

    Returns:
        Path of the checkpoint.
    """
    form = form_of(state)
    template = form.template(check_template(Path(filename).name, argument="filename"), "filename")
    folder = Path(first_name(str(Path(filename).parent), state))
    path = save(
        state,
        catalog=Catalog(folder),
        template=template,
        weights_only=weights_only,
        ignore_keys=ignore_keys,
        overwrite=True,
        disks=form.disks(folder),
    )
    return str(path)
