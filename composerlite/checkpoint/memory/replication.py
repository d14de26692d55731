"""Replication of checkpoints in memory to another node, in the background."""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path
from typing import final

from composerlite import dist
from composerlite.checkpoint.memory.folder import make_private
from composerlite.checkpoint.memory.replicas import NodeMemory, replica_folder
from composerlite.checkpoint.place.node_disks import disks_of
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.errors import RankError
from composerlite.threads import start_threads

log = logging.getLogger(__name__)
_GIGABYTE = 1e9
_LOOK_SECONDS = 0.2
"""Seconds between two checks for a lost rank, in :meth:`Replication.close`."""


@final
class Replication:
    """Sends the newest checkpoint in memory to the next node, one checkpoint after the other.

    All nodes replicate the same checkpoint, and keep their parts until all nodes have the next checkpoint. So parts and
    replicas make a whole checkpoint whichever node is lost. All ranks make an instance and call every method.

    Args:
        folder: folder of checkpoints in memory.
        levels: number of folders for this user alone, as in :func:`make_private`.
        gigabytes_per_second: highest rate at which a node sends; 1 GB is 10⁹ bytes.

    Attributes:
        memory: the memory of the nodes; ``None``: all ranks see the same folder, and nothing is replicated.
        counters: the caller must exchange these counters between the ranks with each batch.
        held: names of the checkpoints that retention must not delete. At a resume the caller adds all checkpoints in
            the folder, since the replicas may belong to any of these.
    """

    def __init__(self, folder: Path, *, levels: int, gigabytes_per_second: float) -> None:
        group = dist.get_group()
        with group.all_or_none("preparing the folder of replicas"):
            if dist.get_local_rank() == 0:
                make_private(replica_folder(folder), levels=levels)
        disks = None if group.size == 1 else disks_of(replica_folder(folder))
        self.memory = None if disks is None else NodeMemory(folder, disks)
        self.held: set[str] = set()
        self._bytes_per_second = gigabytes_per_second * _GIGABYTE
        self._hurry = threading.Event()
        self._threads: list[threading.Thread] = []
        self._begun = self._done = self._failed = self._failures_before = 0
        self._name: str | None = None
        self._ranks_done = dist.PiggybackCounter(lambda: self._done)
        self._ranks_failed = dist.PiggybackCounter(lambda: self._failed)
        self.counters = [] if self.memory is None else [self._ranks_done, self._ranks_failed]
        if self.memory is None:
            log.warning("save_memory_replication: all ranks are on one node, so there is none to replicate to")
            return
        with group.all_or_none("preparing the folder of replicas"):
            if self.memory.is_leader:
                self.memory.sweep()

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is being replicated, from or to this node."""
        return any(thread.is_alive() for thread in self._threads)

    def poll(self, newest: str | None) -> str | None:
        """Begin to replicate ``newest`` in a thread, unless a replication is running. Call between two batches.

        The start is collective. The end of a replication is known after the next exchange of :attr:`counters`.

        Args:
            newest: name of the newest checkpoint, if any.

        Returns:
            Name of a checkpoint if its last replica was completed since the last call; otherwise ``None``.
        """
        if self.memory is None:
            return None
        arrived: str | None = None
        if self._name is not None and self._ranks_done.total == self._begun * dist.get_world_size():
            failures, self._failures_before = self._ranks_failed.total - self._failures_before, self._ranks_failed.total
            if failures == 0:
                arrived = self._name
                self.held = {arrived}
            else:
                self.held.discard(self._name)
            self._name = None
        if self._name is None and newest is not None and newest not in self.held:
            self._name = newest
            self._begun += 1
            self.held.add(newest)
            run = functools.partial(self._run, newest, self.memory.records(newest))
            threads = start_threads(run, 1, name="memory-replication") if self.memory.is_leader else []
            self._threads = threads
            if not threads:
                self._failed += self.memory.is_leader
                self._done += 1
        return arrived

    def _run(self, name: str, records: list[Manifest | None]) -> None:
        assert self.memory is not None
        try:
            self.memory.replicate(records, self._bytes_per_second, self._hurry)
        except Exception as e:  # noqa: BLE001 - training needs no replica; a lost rank is raised by its peers
            log.warning("checkpoint %s in memory was not replicated: %s: %s", name, type(e).__name__, e)
            self._failed += 1
        finally:
            self._done += 1

    def close(self) -> None:
        """Wait for the end of a replication, which continues without a limit of the rate.

        Return early, with a warning, if another rank has ended.
        """
        self._hurry.set()
        try:
            while self.is_busy:
                self._threads[0].join(_LOOK_SECONDS)
                dist.connect.check_nobody_left(f"replicating {self._name!r}")
        except RankError as e:
            log.warning("checkpoint %s in memory was not replicated: %s", self._name, e)
