"""One save, whoever asks for it: stage, write, vote, commit, point ``latest``, publish, give older checkpoints up.

A trainer, the functions and ``Checkpointer`` differ in what is written and where, which a :class:`RankWriter` knows,
and in what is to follow. The thread that saves pays for :meth:`SaveJob.stage`; the rest is :meth:`SaveJob.run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, final

from torch.optim import Optimizer

from composerlite import dist
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.directory import FinalizedManifest
from composerlite.checkpoint.record.manifest import Manifest, bytes_text
from composerlite.checkpoint.save.staging import Snapshot, Stageable, Staging
from composerlite.errors import CorruptCheckpointError, SaveError
from composerlite.storage import RING_BYTES, HostMemory, start_threads

__all__ = ["LONGEST_WORK", "PREVIOUS_SECONDS", "FollowUp", "PendingSave", "RankWriter", "SaveJob", "SaveReport"]

log = logging.getLogger(__name__)
T = TypeVar("T")
LONGEST_WORK = timedelta(hours=1)
"""A rank that writes for longer than that does not count as alive any more: its disk hangs."""
PREVIOUS_SECONDS = 3600.0
"""How long a save waits for the one before it. A disk that takes longer hangs."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did and what it cost.

    Attributes:
        path: the checkpoint.
        batch: optimizer steps done when it was saved.
        size_bytes: of its data.
        seconds: by name. ``stall``: the training thread was kept from training. ``snapshot``: copying, in part in the
            background. ``waiting``: for the save before this one. ``hash``, ``write``, ``flush``: of the writing
            threads. ``commit``: from durable data to a checkpoint that exists. ``total``: from the call until then.
            With several ranks they are those of rank 0, but for the stall, which is this rank's own.
        weights_crc: CRC-32 of each storage of the model, where rank 0 has all of it.
        deleted: names of the checkpoints that were given up for it.
    """

    path: Path
    batch: int
    size_bytes: int
    seconds: Mapping[str, float]
    weights_crc: Sequence[int] = ()
    deleted: Sequence[str] = ()


class RankWriter(Stageable, Protocol):
    """What this rank writes of a checkpoint: its bytes, and how they become a part of what is committed.

    Attributes:
        gathers: the ranks need each other for :meth:`staged_in` and :meth:`write`, which are called on all, or none.
        may_stream: the bytes may be written as they are while the caller waits: that takes no longer than to copy them.
        seconds: spent by name, complete after :meth:`finish`.
        weights_crc: CRC-32 of each storage of the model, after :meth:`write`.
    """

    gathers: bool
    may_stream: bool
    seconds: dict[str, float]
    weights_crc: Sequence[int]

    def write(self, memory: HostMemory | None, ring_bytes: int, *, may_grow: bool = False) -> None:
        """Hand all bytes to those who write them, and who may still be writing when this returns.

        Args:
            memory: what :meth:`staged_in` was given; ``None`` to read from the tensors themselves.
            ring_bytes: memory to write with in that case.
            may_grow: take more in that case, rather than wait for the disk.

        Raises:
            OSError: no space, no permission, and the like.
        """
        ...

    def finish(self) -> Any:
        """Wait until everything is durable; what rank 0 needs to know of it, which can be pickled.

        Raises:
            OSError: no space, no permission, and the like.
        """
        ...

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """On rank 0: make the checkpoint exist, of ``parts``, what :meth:`finish` gave on each rank; its manifest."""
        ...

    def close(self, *, may_be_committed: bool) -> None:
        """Let go of everything, and remove what was written unless it is committed or may be. Twice is fine."""
        ...


class DiskWriter(RankWriter, Protocol):
    """The same where nodes have disks of their own: how the part of each becomes a part of the whole."""

    def seal(self, manifest: Manifest, parts: Sequence[Any]) -> FinalizedManifest:
        """On rank 0: the index and the record of all files."""
        ...

    def prepare(self, sealed: FinalizedManifest) -> None:
        """Make this disk's part durable, so that nothing is left but to rename it."""
        ...

    def complete(self) -> None:
        """Give this disk's part its name and its commit record."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """What follows the commit of a checkpoint of a run.

    Attributes:
        catalog: the folder's checkpoints.
        latest: links to point to it: their names, and the file that each leads to.
        publish: is given the manifest after the commit, before anything is given up. On rank 0; where there are
            several disks on all, and on others without files.
        give_up: which checkpoints to delete after that. On rank 0.
        is_leader: this rank is the one that points ``latest`` and deletes checkpoints in the folder that it sees.
        is_routine: its line in the log is below INFO.
    """

    catalog: Catalog
    latest: Mapping[str, str] = field(default_factory=dict[str, str])
    publish: Callable[[Manifest], object] | None = None
    give_up: Callable[[], Sequence[Manifest]] | None = None
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
class SaveJob:
    """A save that all ranks of ``group`` have planned.

    Attributes:
        manifest: what will be committed, but for its files.
        path: of the checkpoint, or its URI.
        writer: what this rank writes.
        votes: of all ranks over the commit: one, or, where nodes have disks of their own, three: when each has
            written, when each disk is prepared, when each is complete.
        follow_up: of a run's checkpoint.
        ring_bytes: memory to write with where there is no snapshot.
        started: when the save was called for. waiting_seconds: how long it waited for the one before it.
        blocking: training waits until the end.
        stall_seconds: how long it has kept training besides the snapshot.
        staging: where the copy is, if there is one.
        snapshot: the copy, in memory that does not change; ``None`` to read from the tensors themselves.
        streamed: there was memory for a copy, but new: what is written was read when it was handed over.
        failure: why this rank cannot do its part: it votes against the checkpoint.
        to_delete: what was given up and is not deleted yet.
        future: what comes of :meth:`start`; cancelled where the caller was interrupted before the work had begun.
    """

    manifest: Manifest
    path: str | Path
    writer: RankWriter
    votes: Sequence[dist.Vote]
    group: dist.Group
    follow_up: FollowUp | None = None
    ring_bytes: int = RING_BYTES
    started: float = field(default_factory=time.perf_counter)
    waiting_seconds: float = 0.0
    blocking: bool = False
    stall_seconds: float = 0.0
    staging: Staging | None = field(default=None, init=False)
    snapshot: Snapshot | None = field(default=None, init=False)
    streamed: bool = field(default=False, init=False)
    failure: BaseException | None = field(default=None, init=False)
    to_delete: list[Manifest] = field(default_factory=list[Manifest], init=False)
    future: Future[Any] = field(default_factory=lambda: Future[Any](), init=False)
    _memory: HostMemory | None = field(default=None, init=False)
    _written: bool = field(default=False, init=False)

    # ── what whoever saves waits for ─────────────────────────────────────────────────────────────────────────────
    def stage(
        self,
        staging: Staging,
        lazy: Sequence[Optimizer] = (),
        *,
        has_room: bool = True,
        make_room: Callable[[], object] = lambda: None,
    ) -> None:
        """Copy what is to be written, or, where memory for that would be new, have it written now.

        With several ranks, what fails is for the vote.

        Args:
            staging: has the memory.
            lazy: see :meth:`Staging.take`.
            has_room: there is room for the file already.
            make_room: wait until there is.
        """
        self.staging = staging
        writer = self.writer
        try:
            streams = writer.may_stream and has_room and staging.would_be_new(writer)
            copies = not streams and staging.reserve(writer.size_bytes)
            if writer.gathers:
                streams, copies = self.group.broadcast((streams, copies))
            if copies:
                self.snapshot = staging.take(writer, lazy)
                self._memory = self.snapshot.memory
                return
            if not streams:
                log.info("no memory for a copy of %s: training waits while it is written", self.path)
                make_room()
            with staging.paused():
                self._write(may_grow=streams)
            self.streamed = streams
        except BaseException as e:
            self._close(may_be_committed=False)
            if self.group.size == 1:
                raise
            self.failure = e

    def _write(self, *, may_grow: bool = False) -> None:
        try:
            self.writer.write(self._memory, self.ring_bytes, may_grow=may_grow)
        except BaseException:
            self.writer.close(may_be_committed=False)
            raise
        self._written = True

    def start(self, work: Callable[[], T], then: Callable[[], object] = lambda: None) -> Future[T]:
        """Do ``work``, which calls :meth:`run`, in a thread for which a program that ends waits; at once if blocking.

        Ctrl-C before the thread has begun cancels the save; later it runs on, and whoever waits sees its end.

        Args:
            work: gives the result of the future, or raises its error.
            then: is called when the future is done.
        """

        def run() -> None:
            if not self.future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as e:  # noqa: BLE001 - it is the future's
                self.future.set_exception(e)
            else:
                self.future.set_result(result)
            then()

        try:
            if self.blocking or not start_threads(run, 1, name="checkpoint-save", daemon=False):
                self.blocking = True
                run()
        except BaseException:
            self.cancel()
            raise
        return self.future

    def cancel(self) -> None:
        """End the save if its work has not begun, and leave nothing behind. Twice is fine."""
        if self.future.cancel():
            self._close(may_be_committed=False)

    # ── in any thread ────────────────────────────────────────────────────────────────────────────────────────────
    def run(self) -> SaveReport:
        """Write what is not written, make it durable and commit it, together with the other ranks.

        Raises:
            SaveError: the snapshot changed while it was taken.
            OSError: no space, no permission, and the like. Nothing is left behind.
            RankError: the same where there are several ranks; its cause is what one of them raised.
        """
        try:
            if len(self.votes) == 1:
                report: SaveReport = self.votes[0].run(self._finish, self._commit)
            else:
                report = self._commit_on_disks(cast("DiskWriter", self.writer))
        finally:
            self._close(may_be_committed=self.votes[-2 if len(self.votes) > 1 else 0].may_be_committed)
            if self.streamed and self.staging is not None:
                self.staging.prepare(self.writer.size_bytes)
        return self._as_seen_here(report)

    def _close(self, *, may_be_committed: bool) -> None:
        self.writer.close(may_be_committed=may_be_committed)
        memory, self._memory = self._memory, None
        if memory is not None and self.staging is not None and self.snapshot is not None and self.snapshot.is_over:
            self.staging.give_back(memory)

    def _finish(self) -> Any:
        """Do this rank's part, until it is durable."""
        if self.failure is not None:
            raise self.failure
        if self.snapshot is not None:
            self.snapshot.wait()
        if not self._written:
            self._write()
        return self.writer.finish()

    def _commit(self, parts: Sequence[Any]) -> SaveReport:
        seconds = self._seconds()
        before_commit = time.perf_counter()
        after = self.follow_up
        with contextlib.nullcontext() if after is None else after.catalog.pointing(after.links):
            manifest = self.writer.commit(dataclasses.replace(self.manifest, timings=seconds), parts)
        return self._conclude(manifest, before_commit)

    def _commit_on_disks(self, writer: DiskWriter) -> SaveReport:
        """Commit where nodes have disks of their own, all of it or none.

        When every rank has written, each disk's part is prepared: durable, and not yet a checkpoint. Then rank 0
        commits its own part, which decides, and the others follow. A kill in between leaves prepared parts, which the
        next start completes if the first disk has the checkpoint, and removes if it has not.
        """
        written, prepared, completed = self.votes
        after = self.follow_up

        def seal(parts: Sequence[Any]) -> FinalizedManifest:
            return writer.seal(dataclasses.replace(self.manifest, timings=self._seconds()), parts)

        def follow() -> None:
            if not self.group.is_first:
                writer.complete()
            if after is not None:
                for link, name in after.links.items():
                    after.catalog.point_latest(link, name)

        sealed: FinalizedManifest = written.run(self._finish, seal)
        prepared.run(lambda: writer.prepare(sealed), lambda _: writer.complete())
        manifest = dataclasses.replace(sealed.manifest, node=0)
        report: SaveReport = completed.run(follow, lambda _: self._conclude(manifest, time.perf_counter()))
        if after is not None and not self.group.is_first:
            if after.publish is not None:
                after.publish(self.manifest)
            if after.is_leader:
                _delete_named(after.catalog, report.deleted)
        return report

    def _conclude(self, manifest: Manifest, before_commit: float) -> SaveReport:
        """Do what is left on rank 0 when the checkpoint exists."""
        now = time.perf_counter()
        seconds = {**manifest.timings, "commit": now - before_commit, "total": now - self.started}
        if (after := self.follow_up) is not None:
            size = bytes_text(manifest.size_bytes)
            log.log(after.log_level, "saved checkpoint %s (%s in %.2f s)", self.path, size, seconds["total"])
            if after.publish is not None:
                after.publish(manifest)
            self.to_delete = list(after.give_up()) if after.give_up is not None else []
        deleted = [old.name for old in self.to_delete]
        if self.blocking:
            self.delete_old()
        return SaveReport(
            path=Path(self.path),
            batch=manifest.batch,
            size_bytes=manifest.size_bytes,
            seconds=seconds,
            weights_crc=self.writer.weights_crc,
            deleted=deleted,
        )

    def delete_old(self) -> None:
        """Delete what the policy of retention gave up when the checkpoint existed. Twice is fine."""
        while self.follow_up is not None and self.to_delete:
            self.follow_up.catalog.delete(self.to_delete.pop(0))

    def _as_seen_here(self, report: SaveReport) -> SaveReport:
        """Return what rank 0 reports, with this rank's name for the folder and how long it was kept from training."""
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

    def _seconds(self) -> dict[str, float]:
        """Return what was spent until the data were durable."""
        return {
            "stall": self._stall_seconds(),
            "snapshot": 0.0 if self.snapshot is None else self.snapshot.seconds,
            "waiting": self.waiting_seconds,
            **self.writer.seconds,
        }


@final
class PendingSave:
    """A save in the background.

    To be made on the training thread.

    Args:
        job: the save.

    Attributes:
        name: of the checkpoint to come, below its folder.
        deletion_error: why older checkpoints could not be deleted.
    """

    def __init__(self, name: str, job: SaveJob) -> None:
        self.name = name
        self.deletion_error: Exception | None = None
        self._job = job
        self._copy = job.snapshot
        self._training_thread = threading.get_ident()
        self._future: Future[SaveReport] = job.future
        self._tidied = threading.Event()

    def start(self, work: Callable[[], SaveReport]) -> None:
        """Do ``work``, which runs the job, and then delete older checkpoints: the next snapshot waits for neither."""

        def tidy() -> None:
            try:
                self._job.delete_old()
            except Exception as e:  # noqa: BLE001 - who saves asks for it
                self.deletion_error = e
            finally:
                self._tidied.set()

        self._job.start(work, tidy)

    def cancel(self) -> None:
        """End the save if it has not begun: nobody waits for it."""
        self._job.cancel()
        if self._future.cancelled():
            self._tidied.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout: float | None = PREVIOUS_SECONDS) -> SaveReport:
        """Wait until the checkpoint is committed, at most ``timeout`` seconds.

        Raises:
            TimeoutError: it is not.
            SaveError: its contents could not be written.
            OSError: no space, no permission, and the like.
        """
        if not self.join(timeout):
            raise TimeoutError(f"checkpoint {self.name!r} is not written after {timeout} s: does the disk hang?")
        return self._future.result()

    def join(self, timeout: float | None = PREVIOUS_SECONDS) -> bool:
        """Wait until it has ended, well or not; whether it has."""
        if self._copy is not None and threading.get_ident() == self._training_thread:
            self._copy.complete()
        try:
            self._future.exception(timeout)
        except TimeoutError:
            return self._future.done()
        except CancelledError:  # whoever saved was interrupted
            pass
        return True

    @property
    def is_tidy(self) -> bool:
        """Whether older checkpoints are deleted."""
        return self._tidied.is_set()

    def wait_until_tidy(self) -> None:
        """Wait until older checkpoints are deleted.

        Raises:
            SaveError: that does not end.
        """
        if not self._tidied.wait(PREVIOUS_SECONDS):
            raise SaveError(f"older checkpoints than {self.name!r} are not deleted after {PREVIOUS_SECONDS} s.")


def _delete_named(catalog: Catalog, names: Iterable[str]) -> None:
    """Delete what this disk has of checkpoints that rank 0 has given up. What stays takes space, and that is logged."""
    for name in names:
        try:
            if (manifest := catalog.manifest_of(name)) is not None:
                catalog.delete(manifest)
        except (OSError, CorruptCheckpointError) as e:
            log.warning("%s is given up and cannot be deleted here: %s", catalog.folder / name, e)
