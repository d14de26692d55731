"""What is left of a save after the snapshot: write, vote, commit, point ``latest``, give older checkpoints up."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, final

from composerlite import dist
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.node_disks import ONE_DISK, DiskCommit, Disks, delete_named
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.save.snapshot import Snapshot, Stageable
from composerlite.storage import RING_BYTES, HostMemory

__all__ = ["LONGEST_WORK", "Body", "SaveJob", "SaveReport"]

log = logging.getLogger(__name__)
LONGEST_WORK = timedelta(hours=1)
"""A rank that writes for longer than that does not count as alive any more: its disk hangs."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did and what it cost.

    Attributes:
        path: the checkpoint.
        batch: optimizer steps done when it was saved.
        size_bytes: of its data.
        seconds: by name. ``stall``: the training thread was kept from training. ``snapshot``: copying, behind training
            in part. ``waiting``: for the save before this one. ``hash``, ``write``, ``flush``: of the writing threads.
            ``commit``: from durable data to a checkpoint that exists. ``total``: from the call until then. With several
            ranks they are those of rank 0, but for the stall, which is this rank's own.
        weights_crc: CRC-32 of each storage of the model, where rank 0 has all of it.
        deleted: names of the checkpoints that were given up for it.
    """

    path: Path
    batch: int
    size_bytes: int
    seconds: Mapping[str, float]
    weights_crc: Sequence[int] = ()
    deleted: Sequence[str] = ()


class Body(Stageable, Protocol):
    """What this rank writes of a checkpoint: its bytes, and how they become a part of what is committed.

    Attributes:
        gathers: the ranks need each other for :meth:`staged_in` and :meth:`write`, which are called on all, or none.
        is_plain: the bytes are written as they are, not compressed, which takes longer than to copy them.
        seconds: spent by name, complete after :meth:`finish`.
        weights_crc: CRC-32 of each storage of the model, after :meth:`write`.
    """

    gathers: bool
    is_plain: bool
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


@final
@dataclass(kw_only=True)
class SaveJob:
    """A save whose contents are known: in memory that does not change, or to be read while training waits.

    Attributes:
        manifest: what will be committed, but for its files.
        body: what this rank writes.
        memory: where the snapshot is; ``None`` to read from the tensors themselves.
        snapshot: the copy.
        streamed: there was memory for a copy, but new: what is written was read when it was handed over.
        failure: why this rank cannot do its part: it votes against the checkpoint.
        ring_bytes: memory to write with where there is no snapshot.
        latest: links to point to it: their names, and the file that each leads to.
        publish: is given the manifest after the commit, before anything is given up. On rank 0; where there are
            several disks on all, and on others without files.
        give_up: which checkpoints to delete after that. On rank 0.
        vote: of all ranks over the commit.
        on_disks: the commit where nodes have disks of their own, which begins with ``vote``; else ``None``.
        disks: which ranks see the same folder: one of each points ``latest`` and deletes checkpoints there.
        started: when the save was called for. waiting_seconds: how long it waited for the one before it.
        stall_seconds: how long it has kept training besides the snapshot. blocking: training waits until the end.
    """

    manifest: Manifest
    catalog: Catalog
    body: Body
    vote: dist.Vote
    started: float
    waiting_seconds: float
    memory: HostMemory | None = None
    snapshot: Snapshot | None = None
    streamed: bool = False
    failure: BaseException | None = None
    ring_bytes: int = RING_BYTES
    latest: Mapping[str, str] = field(default_factory=dict[str, str])
    publish: Callable[[Manifest], object] | None = None
    give_up: Callable[[], Sequence[Manifest]] | None = None
    on_disks: DiskCommit | None = None
    disks: Disks = ONE_DISK
    stall_seconds: float = 0.0
    blocking: bool = False

    def __post_init__(self) -> None:
        self._written = False
        self.to_delete: list[Manifest] = []

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return self.catalog.folder / self.manifest.name

    def write(self, *, may_grow: bool = False) -> None:
        """Hand all bytes to those who write them, and who may still be writing when this returns.

        Args:
            may_grow: where there is no copy of them, take new memory for them rather than wait for the disk.

        Raises:
            OSError: no space, no permission, and the like. Nothing is left behind.
        """
        try:
            self.body.write(self.memory, self.ring_bytes, may_grow=may_grow)
        except BaseException:
            self.body.close(may_be_committed=False)
            raise
        self._written = True

    def run(self) -> SaveReport:
        """Write what is not written, make it durable and commit it, together with the other ranks.

        Raises:
            SaveError: the snapshot changed while it was taken.
            OSError: no space, no permission, and the like. Nothing is left behind.
            RankError: the same where there are several ranks; its cause is what one of them raised.
        """
        try:
            if self.on_disks is not None:
                report = self._commit_on_disks(self.on_disks)
            else:
                report = self.vote.run(self._finish, self._commit)
        finally:
            self.body.close(may_be_committed=(self.on_disks or self.vote).may_be_committed)
        return self._as_seen_here(report)

    def _commit_on_disks(self, commit: DiskCommit) -> SaveReport:
        report = commit.run(
            self._finish,
            lambda: dataclasses.replace(self.manifest, timings=self._seconds()),
            self._point_latest,
            lambda manifest: self._conclude(dataclasses.replace(manifest, node=0), time.perf_counter()),
        )
        if dist.get_global_rank() != 0:
            if self.publish is not None:
                self.publish(self.manifest)
            if self.disks.is_keeper:
                delete_named(self.catalog, report.deleted)
        return report

    def _finish(self) -> Any:
        """This rank's part, until it is durable."""
        if self.failure is not None:
            raise self.failure
        if self.snapshot is not None:
            self.snapshot.wait()
        if not self._written:
            self.write()
        return self.body.finish()

    def _commit(self, parts: Sequence[Any]) -> SaveReport:
        seconds = self._seconds()
        before_commit = time.perf_counter()
        with contextlib.ExitStack() as links:  # made first: a disk that has no room for them has no checkpoint either
            staged = [links.enter_context(self.catalog.latest_link(link, name)) for link, name in self._links()]
            manifest = self.body.commit(dataclasses.replace(self.manifest, timings=seconds), parts)
            for one in staged:
                one.publish()
        return self._conclude(manifest, before_commit)

    def _links(self) -> list[tuple[str, str]]:
        """The links that this rank points to the checkpoint, and the file that each leads to."""
        return [(link, name) for link, name in self.latest.items() if link != name] if self.disks.is_keeper else []

    def _point_latest(self) -> None:
        for link, name in self._links():
            self.catalog.point_latest(link, name)

    def _conclude(self, manifest: Manifest, before_commit: float) -> SaveReport:
        """What is left on rank 0 when the checkpoint exists."""
        now = time.perf_counter()
        seconds = {**manifest.timings, "commit": now - before_commit, "total": now - self.started}
        log.info("saved checkpoint %s (%.1f MB in %.2f s)", self.path, manifest.size_bytes / 1e6, seconds["total"])
        if self.publish is not None:
            self.publish(manifest)
        self.to_delete = list(self.give_up()) if self.give_up is not None else []
        deleted = [old.name for old in self.to_delete]
        if self.blocking:
            self.delete_old()
        return SaveReport(
            path=self.path,
            batch=manifest.batch,
            size_bytes=manifest.size_bytes,
            seconds=seconds,
            weights_crc=self.body.weights_crc,
            deleted=deleted,
        )

    def delete_old(self) -> None:
        """Delete what the policy of retention gave up when the checkpoint existed. Twice is fine."""
        while self.to_delete:
            self.catalog.delete(self.to_delete.pop(0))

    def _as_seen_here(self, report: SaveReport) -> SaveReport:
        """What rank 0 reports, with this rank's name for the folder and how long it was kept from training."""
        several = self.manifest.world_size > 1
        if self.blocking:
            stall = time.perf_counter() - self.started if several else report.seconds["total"]
        elif several:
            stall = self._stall_seconds()
        else:
            return report
        return dataclasses.replace(report, path=self.path, seconds={**report.seconds, "stall": stall})

    def _stall_seconds(self) -> float:
        return self.stall_seconds + (0.0 if self.snapshot is None else self.snapshot.stall_seconds)

    def _seconds(self) -> dict[str, float]:
        """What was spent until the data were durable."""
        return {
            "stall": self._stall_seconds(),
            "snapshot": 0.0 if self.snapshot is None else self.snapshot.seconds,
            "waiting": self.waiting_seconds,
            **self.body.seconds,
        }
