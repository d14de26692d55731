"""Checkpoints in memory (such as ``/dev/shm``): the private folder, and replicas on the next node of the run.

Nodes form a ring. Each node has a folder of replicas beside the folder of checkpoints in memory. The replicas are the
files and the record of the previous node. On each node a single rank, the leader, sends and receives. A resumed run
looks for the parts on all nodes, since the order of the nodes may have changed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias, final

from composerlite import dist
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.node_disks import Disks, disks_of, read_part, write_part
from composerlite.checkpoint.record.record import RESUMABLE, FileRecord, Manifest
from composerlite.errors import ConfigError, CorruptCheckpointError, RankError, bytes_text
from composerlite.storage import verify_file
from composerlite.threads import start_threads

log = logging.getLogger(__name__)
_Copy: TypeAlias = tuple[int, int, FileRecord]
"""A file to copy: rank with the file, rank without the file, record of the file."""
_LOOK_SECONDS = 0.2
"""Seconds between two checks for a lost rank, in :meth:`Replication.close`."""


def make_private(folder: Path, *, levels: int) -> None:
    """Make ``folder`` and the folders above, ``levels`` in all, for this user alone (mode 0700). Collective.

    The first rank of each node makes the folders. The parent of the uppermost of these folders must exist.

    Raises:
        ConfigError: an existing folder is a link, belongs to another user, or is writable by others: a checkpoint in
            the folder may have been planted.
    """
    paths = [*reversed(folder.parents[: levels - 1]), folder]
    with dist.get_group().all_or_none("preparing a folder in memory"):
        for path in paths if dist.get_local_rank() == 0 else ():
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise ConfigError(
                    f"save_memory_folder: {str(path)!r} is refused: expected a folder of user {os.geteuid()} that "
                    f"others cannot write to, and found {stat.filemode(status.st_mode)} of user {status.st_uid}. "
                    "Its checkpoints may belong to somebody else. Remove it, or give another folder."
                )
            path.chmod(0o700)


# ── replicas on another node ─────────────────────────────────────────────────────────────────────────────────────────
def replica_folder(folder: Path) -> Path:
    """Return the folder of replicas beside the folder of checkpoints ``folder``."""
    return folder.with_name(f"{folder.name}-replica")


def open_replication(folder: Path, gigabytes_per_second: float) -> Replication | None:
    """Prepare the folder of replicas, and delete incomplete replicas of killed processes. Collective.

    Args:
        folder: folder of checkpoints in memory. The folder above is for this user alone: see :func:`make_private`.
        gigabytes_per_second: highest rate at which a node sends; 1 GB is 10⁹ bytes.

    Returns:
        The replication. ``None``, with a warning, if all ranks see the same folder: then nothing is replicated.
    """
    group, replicas = dist.get_group(), replica_folder(folder)
    make_private(replicas, levels=1)
    disks = None if group.size == 1 else disks_of(replicas)
    if disks is None:
        log.warning("save_memory_replication: all ranks are on one node, so no other node can hold replicas")
        return None
    return group.agree("preparing the folder of replicas", lambda: Replication(folder, disks, gigabytes_per_second))


@final
class Replication:
    """Sends the newest checkpoint in memory to the next node, one checkpoint after the other.

    All nodes replicate the same checkpoint, and keep their parts until all nodes have the next checkpoint. So parts and
    replicas make a whole checkpoint whichever node is lost. All ranks make an instance and call every method.

    Args:
        folder: folder of checkpoints in memory.
        disks: for each rank, the leader of the ranks with the same folder of replicas.
        gigabytes_per_second: highest rate at which a node sends; 1 GB is 10⁹ bytes.

    Attributes:
        replicas: the folder of replicas.
        is_leader: this rank sends and receives for its node.
        counters: the caller must exchange these counters between the ranks with each batch.
        held: names of the checkpoints that retention must not delete. At a resume the caller adds all checkpoints in
            the folder, since the replicas may belong to any of these.
    """

    def __init__(self, folder: Path, disks: Disks, gigabytes_per_second: float) -> None:
        self._own, self.replicas = Catalog(folder), Catalog(replica_folder(folder))
        self._leaders = sorted(set(disks.leaders))
        self.is_leader = disks.is_folder_leader
        self._bytes_per_second = gigabytes_per_second * 1e9
        self.held: set[str] = set()
        self._hurry = threading.Event()
        self._threads: list[threading.Thread] = []
        self._begun = self._done = 0
        self._failed = False  # true if the last replication failed on this rank
        self._name, self._is_running = "", False  # the last checkpoint begun, and whether the replication is running
        self.counters = [dist.PiggybackCounter(lambda: self._done), dist.PiggybackCounter(lambda: int(self._failed))]
        if self.is_leader:
            self.replicas.place.sweep(timedelta())
            records, faults = self.replicas.manifests_and_faults()
            if all(isinstance(fault, CorruptCheckpointError) for fault in faults.values()):
                known = {file.path for record in records for file in record.files}
                self.replicas.place.delete([path for path in self.replicas.files() if path not in known])

    # ── while training ───────────────────────────────────────────────────────────────────────────────────────────
    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is being replicated, from or to this node."""
        return any(thread.is_alive() for thread in self._threads)

    def poll(self, newest: str | None) -> str | None:
        """Begin to replicate ``newest`` in a thread, unless a replication is running. Call between two batches.

        The start is collective. The end of a replication is known after the next exchange of :attr:`counters`. A failed
        replication is not begun again: the next checkpoint is replicated.

        Args:
            newest: name of the newest checkpoint, if any.

        Returns:
            Name of a checkpoint if its last replica was completed since the last call; otherwise ``None``.
        """
        arrived: str | None = None
        ranks_done, ranks_failed = (counter.total for counter in self.counters)
        if self._is_running and ranks_done == self._begun * dist.get_world_size():
            self._is_running = False
            if ranks_failed == 0:
                arrived = self._name
                self.held = {arrived}
            else:
                self.held.discard(self._name)
        if not self._is_running and newest is not None and newest not in (self._name, *self.held):
            self._name, self._is_running = newest, True
            self._begun += 1
            self.held.add(newest)
            own = next(iter(self._own.manifests([newest])), None) if self.is_leader else None
            self._failed = self.is_leader and own is None  # deleted or damaged: send nothing
            run = functools.partial(self._replicate, newest, dist.get_group().gather(own))
            self._threads = start_threads(run, 1, name="memory-replication") if self.is_leader else []
            if not self._threads:
                run()
        return arrived

    def _replicate(self, name: str, records: list[Manifest | None]) -> None:
        """Send this node's part of a checkpoint to the next node, and receive the part of the previous node.

        Called on all ranks, on leaders in a background thread. Older replicas are deleted after the new replica is
        verified and committed. After an error the older replicas stay.

        Args:
            name: name of the checkpoint.
            records: records of the checkpoint by rank; ``None``: the rank is no leader, or has no readable record.
        """
        started, sent_bytes = time.monotonic(), 0

        def read(path: str, offset: int, size: int) -> bytes:
            nonlocal sent_bytes
            sent_bytes += size
            self._hurry.wait(max(0.0, started + sent_bytes / self._bytes_per_second - time.monotonic()))
            return read_part(self._own.folder / path, offset, size)

        try:
            if self.is_leader:
                rank = dist.get_global_rank()
                position = self._leaders.index(rank)
                source, target = self._leaders[position - 1], self._leaders[(position + 1) % len(self._leaders)]
                own, incoming = records[rank], records[source]
                copies = [(rank, target, file) for file in (own.here if own else ())]
                copies += [(source, rank, file) for file in (incoming.here if incoming else ())]
                _transfer(f"replicating {name!r}", copies, read, self.replicas.folder, in_background=True)
                if incoming is not None:
                    for older in self.replicas.manifests():
                        if older.name != name:
                            delete_checkpoint(self.replicas.place, older)
                    log.debug("replicated %s (%s) from rank %d", name, bytes_text(incoming.size_bytes), source)
        except Exception as e:  # noqa: BLE001 - training needs no replica; a lost rank is raised by its peers
            log.warning("checkpoint %s in memory was not replicated: %s: %s", name, type(e).__name__, e)
            self._failed = True
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

    # ── when a run resumes ───────────────────────────────────────────────────────────────────────────────────────
    def find(self, run_name: str) -> list[Manifest]:
        """Return the complete checkpoints of a run: some node has each part, as own part or replica. Collective.

        Returns:
            The same records on all ranks.
        """
        group = dist.get_group()
        here: list[Manifest] = []
        with group.all_or_none("listing the checkpoints in memory of all nodes"):
            for catalog in (self._own, self.replicas) if self.is_leader else ():
                here += [one for one in catalog.manifests() if one.run_name == run_name and one.kind in RESUMABLE]
        first: dict[str, int] = {}
        nodes: dict[str, set[int | None]] = {}
        for rank, there in enumerate(group.gather([(one.id, one.node) for one in here])):
            for identity, node in there:
                first.setdefault(identity, rank)
                nodes.setdefault(identity, {None}).add(node)
        mine = {one.id: one for one in here if first[one.id] == group.rank}  # each record is sent once
        found = [manifest for records in group.gather(mine) for manifest in records.values()]
        return [one for one in found if {file.node for file in one.files} <= nodes[one.id]]

    def bring(self, manifest: Manifest) -> None:
        """Copy the missing parts of a checkpoint to the folders in memory, verified. Collective.

        ``manifest`` is a result of :meth:`find`. A part of a lost node is added to the folder of checkpoints of the
        node with the replica: a load reads parts from any node.
        Nodes without a part get the index. A checkpoint in a single file is copied to the node of rank 0.

        Raises:
            CorruptCheckpointError: no node has an intact copy of some part. Intact parts are unchanged.
        """
        group, what = dist.get_group(), f"copying checkpoint {manifest.name!r} to the memory of all nodes"
        own, replica = set[int | None](), set[int | None]()  # numbers of nodes with intact files in a folder here
        with group.all_or_none(what):
            for catalog, intact in ((self._own, own), (self.replicas, replica)) if self.is_leader else ():
                try:
                    if (there := catalog.manifest_of(manifest.name)) and there.id == manifest.id:
                        catalog.verify(there)
                        intact |= {file.node for file in there.here}
                except (CorruptCheckpointError, OSError) as e:
                    log.warning("ignoring a part of a checkpoint in memory: %s", e)
        every = group.gather((own, replica))
        copies: list[_Copy] = []
        for file in manifest.files:
            owners = [rank for rank, (in_own, _) in enumerate(every) if file.node in in_own]
            holders = [*owners, *(rank for rank, (_, in_replica) in enumerate(every) if file.node in in_replica)]
            if not holders:
                part = "the checkpoint" if file.node is None else f"the part of node {file.node}"
                raise CorruptCheckpointError(
                    f"checkpoint {manifest.name!r} in memory: no node has an intact copy of {part}. The log of "
                    "each node with a damaged copy describes the damage."
                )
            targets = self._leaders if manifest.is_directory else self._leaders[:1]
            if file.node is not None:
                targets = owners or holders[:1]
            copies += [(rank if rank in holders else holders[0], rank, file) for rank in targets if rank not in owners]
        arriving = [file for _, target, file in copies if target == group.rank]
        with group.all_or_none(what):
            if arriving and not own:
                delete_checkpoint(self._own.place, manifest)  # a damaged part
            for source, target, file in copies:
                if source == target == group.rank:
                    path = _arriving(self._own.folder / file.path)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.unlink(missing_ok=True)  # of a call that failed on another rank
                    path.hardlink_to(self.replicas.folder / file.path)
        with group.all_or_none(what):
            folder = (self._own if own else self.replicas).folder
            _transfer(what, copies, lambda path, *part: read_part(folder / path, *part), self._own.folder)
        if arriving:
            log.info("checkpoint %s: copied %d files to the memory of this node", manifest.name, len(arriving))


def _arriving(path: Path) -> Path:
    """Return the temporary path of a file during its transfer. A sweep deletes the file after a kill."""
    return path.with_name(f".{path.name}.tmp-{0:016x}")


def _transfer(
    what: str,
    copies: Sequence[_Copy],
    read: Callable[[str, int, int], bytes],
    folder: Path,
    *,
    in_background: bool = False,
) -> None:
    """Send and receive files. Verify all received files, then rename the files to the final names.

    The deciding file is renamed last. This rename commits the checkpoint.

    Args:
        what: name of the operation, for errors.
        copies: the files, of each checkpoint the deciding file first. A file for a rank from the same rank is at its
            temporary path already.
        read, in_background: as in :func:`composerlite.dist.move`.
        folder: target of the received files.

    Raises:
        CorruptCheckpointError: a received file is damaged. Existing files are unchanged.
        OSError: a file cannot be read, written or renamed.
    """
    rank = dist.get_global_rank()
    moves = [dist.Move(one, other, file.path, 0, file.size_bytes) for one, other, file in copies if one != other]
    arriving = [(_arriving(folder / file.path), file) for _, target, file in copies if target == rank]

    def write(path: str, offset: int, data: memoryview) -> None:
        write_part(_arriving(folder / path), offset, data)

    try:
        dist.move(what, moves, read, write, in_background=in_background)
        for path, file in arriving:
            verify_file(path, file.digest)
        for path, file in reversed(arriving):
            path.replace(folder / file.path)
    finally:
        for path, _ in arriving:
            path.unlink(missing_ok=True)
