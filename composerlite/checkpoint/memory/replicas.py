"""Replicas of checkpoints in memory: each node keeps the checkpoints of the previous node too, in case a node is lost.

Nodes form a ring. Each node has a folder of replicas beside the folder of checkpoints in memory. The replicas are the
files and the record of the previous node. On each node a single rank, the leader, sends and receives. A resumed run
looks for the parts on all nodes, since the order of the nodes may have changed.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import final

from composerlite import dist
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.node_disks import Disks, read_part, write_part
from composerlite.checkpoint.record.manifest import RESUMABLE, FileRecord, Manifest
from composerlite.errors import CorruptCheckpointError, bytes_text
from composerlite.storage import verify_file

log = logging.getLogger(__name__)


def replica_folder(folder: Path) -> Path:
    """Return the folder of replicas beside the folder of checkpoints ``folder``."""
    return folder.with_name(f"{folder.name}-replica")


@final
class NodeMemory:
    """Checkpoints of a run in the memory of this node, and replicas of the checkpoints of the previous node.

    Args:
        folder: folder of the checkpoints.
        disks: for each rank, the leader of the ranks with the same folder of replicas.

    Attributes:
        is_leader: this rank sends and receives for its node.
    """

    def __init__(self, folder: Path, disks: Disks) -> None:
        self._own, self._replicas = Catalog(folder), Catalog(replica_folder(folder))
        self._leaders = sorted(set(disks.leaders))
        self._rank = dist.get_global_rank()
        self.is_leader = disks.is_folder_leader

    # ── while training ───────────────────────────────────────────────────────────────────────────────────────────
    def sweep(self) -> None:
        """Remove incomplete replicas of killed processes. Call on leaders."""
        self._replicas.place.sweep(timedelta())
        records, faults = self._replicas.manifests_and_faults()
        if all(isinstance(fault, CorruptCheckpointError) for fault in faults.values()):
            known = {file.path for record in records for file in record.files}
            self._replicas.place.delete([path for path in self._replicas.files() if path not in known])

    def empty(self, moment: tuple[int, int]) -> None:
        """Delete the replicas of this node up to ``moment``, as in ``Manifest.moment``. Does nothing unless leader."""
        for manifest in self._replicas.manifests() if self.is_leader else ():
            if manifest.moment <= moment:
                delete_checkpoint(self._replicas.place, manifest)

    def records(self, name: str) -> list[Manifest | None]:
        """Return each rank's record of the checkpoint ``name``, by rank. Collective, in the main thread.

        ``None``: the rank is no leader, or has no readable record.
        """
        own: Manifest | None = None
        try:
            own = self._own.manifest_of(name) if self.is_leader else None
        except (OSError, CorruptCheckpointError) as e:  # this node sends nothing, and the other nodes do not wait
            log.warning("checkpoint %s in memory of this node cannot be replicated: %s", name, e)
        return dist.get_group().gather(own)

    def replicate(self, records: list[Manifest | None], bytes_per_second: float, hurry: threading.Event) -> None:
        """Send this node's part of a checkpoint to the next node, and receive the part of the previous node.

        Called on all leaders, in a background thread. Older replicas are deleted after the new replica is verified and
        committed.

        Args:
            records: records of the checkpoint by rank, from :meth:`records`.
            bytes_per_second: the highest rate at which this node sends.
            hurry: once set, the rate has no limit.

        Raises:
            Exception: a part was not sent, or not received. Replicas with other names stay.
        """
        position = self._leaders.index(self._rank)
        source, target = self._leaders[position - 1], self._leaders[(position + 1) % len(self._leaders)]
        own, incoming = records[self._rank], records[source]
        started, sent_bytes = time.monotonic(), 0

        def read(path: str, offset: int, size: int) -> bytes:
            nonlocal sent_bytes
            sent_bytes += size
            hurry.wait(max(0.0, started + sent_bytes / bytes_per_second - time.monotonic()))
            return read_part(self._own.folder / path, offset, size)

        moves = [dist.Move(self._rank, target, file.path, 0, file.size_bytes) for file in (own.here if own else ())]
        failure: Exception | None = None
        if incoming is not None:
            moves += [dist.Move(source, self._rank, file.path, 0, file.size_bytes) for file in incoming.here]
            try:
                _clear(self._replicas, incoming)
            except OSError as e:  # raised after this node has sent: the next node is waiting
                failure = e
        try:
            what = f"replicating {'nothing' if own is None else repr(own.name)}"
            dist.move(what, moves, read, functools.partial(_receive, self._replicas), in_background=True)
        except (OSError, CorruptCheckpointError) as e:
            failure = failure or e
        if failure is not None:
            if incoming is not None:
                _clear(self._replicas, incoming)
            raise failure
        if incoming is not None:
            _commit(self._replicas, incoming, incoming.here)
            for older in self._replicas.manifests():
                if older.name != incoming.name:
                    delete_checkpoint(self._replicas.place, older)
            size = bytes_text(incoming.size_bytes)
            log.debug("replicated %s (%s) from the node of rank %d", incoming.name, size, source)

    # ── when a run resumes ───────────────────────────────────────────────────────────────────────────────────────
    def find(self, run_name: str) -> list[Manifest]:
        """Return the checkpoints of a run with each part on some node, as an own part or a replica. Collective.

        Returns:
            The same records on all ranks.
        """
        group = dist.get_group()
        here: dict[str, Manifest] = {}
        held: list[tuple[str, int | None]] = []
        with group.all_or_none("listing the memory of all nodes"):
            for catalog in (self._own, self._replicas) if self.is_leader else ():
                for manifest in catalog.manifests():
                    if manifest.run_name == run_name and manifest.kind in RESUMABLE:
                        here[manifest.id] = manifest
                        held.append((manifest.id, manifest.node))
        first: dict[str, int] = {}
        nodes: dict[str, set[int | None]] = {}
        for rank, held_there in enumerate(group.gather(held)):
            for identity, node in held_there:
                first.setdefault(identity, rank)
                nodes.setdefault(identity, {None}).add(node)
        mine = [here[identity] for identity, rank in first.items() if rank == group.rank]  # each record is sent once
        found = [manifest for records in group.gather(mine) for manifest in records]
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
            for catalog, intact in ((self._own, own), (self._replicas, replica)) if self.is_leader else ():
                try:
                    if (there := catalog.manifest_of(manifest.name)) and there.id == manifest.id:
                        catalog.verify(there)
                        intact |= {file.node for file in there.here}
                except (CorruptCheckpointError, OSError) as e:
                    log.warning("a part of a checkpoint in memory cannot be used: %s", e)
        every = group.gather((own, replica))
        copies: list[tuple[int, int, FileRecord]] = []  # source, target, file
        for file in manifest.files:
            owners = [rank for rank, (in_own, _) in enumerate(every) if file.node in in_own]
            holders = [*owners, *(rank for rank, (_, in_replica) in enumerate(every) if file.node in in_replica)]
            if not holders:
                part = "the checkpoint" if file.node is None else f"the part of node {file.node}"
                raise CorruptCheckpointError(
                    f"checkpoint {manifest.name!r} in memory: no node has an intact copy of {part}. The log of a node "
                    "with a damaged copy names the fault."
                )
            targets = self._leaders if manifest.is_directory else self._leaders[:1]
            if file.node is not None:
                targets = owners or holders[:1]
            lacking = [rank for rank in targets if rank not in owners]
            copies += [(rank if rank in holders else holders[0], rank, file) for rank in lacking]
        arriving = [file for _, target, file in copies if target == self._rank]
        with group.all_or_none(what):
            if arriving and not own:
                _clear(self._own, manifest)  # a damaged part
            for source, target, file in copies:
                if source == target == self._rank:
                    path = _arriving(self._own.folder / file.path)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.unlink(missing_ok=True)
                    path.hardlink_to(self._replicas.folder / file.path)
        with group.all_or_none(what):
            dist.move(
                what,
                [dist.Move(one, other, file.path, 0, file.size_bytes) for one, other, file in copies if one != other],
                lambda path, *part: read_part((self._own if own else self._replicas).folder / path, *part),
                functools.partial(_receive, self._own),
            )
            _commit(self._own, manifest, arriving)
        if arriving:
            log.info("checkpoint %s: copied %d files to the memory of this node", manifest.name, len(arriving))


def _clear(catalog: Catalog, manifest: Manifest) -> None:
    """Delete the checkpoint of the same name, and the files that have arrived."""
    delete_checkpoint(catalog.place, manifest)
    for file in manifest.files:
        _arriving(catalog.folder / file.path).unlink(missing_ok=True)


def _arriving(path: Path) -> Path:
    """Return the temporary path of a file during its transfer. A sweep deletes the file after a kill."""
    return path.with_name(f".{path.name}.tmp-{0:016x}")


def _commit(catalog: Catalog, manifest: Manifest, files: Iterable[FileRecord]) -> None:
    """Verify ``files`` that have arrived and give them their names, the deciding file last.

    Raises:
        CorruptCheckpointError: a file is damaged. The checkpoint is deleted.
        OSError: a file cannot be read or renamed. The checkpoint is deleted.
    """
    try:
        for file in sorted(files, key=lambda file: file.path == manifest.deciders[0]):
            path = catalog.folder / file.path
            verify_file(_arriving(path), file.digest)
            _arriving(path).replace(path)
    except (OSError, CorruptCheckpointError):
        _clear(catalog, manifest)
        raise


def _receive(catalog: Catalog, path: str, offset: int, data: memoryview) -> None:
    write_part(_arriving(catalog.folder / path), offset, data)
