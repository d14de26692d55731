"""Replicas of checkpoints in memory: each node keeps those of the node before it, for a node that loses its memory.

Nodes form a ring. Each node has a folder of replicas beside its folder of checkpoints in memory. The replicas are the
files and the record that the node before it has written. A resumed run detects again which node has which part.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, final

from composerlite import dist
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.node_disks import Disks
from composerlite.checkpoint.record.manifest import RESUMABLE, FileRecord, Manifest
from composerlite.errors import CorruptCheckpointError, bytes_text
from composerlite.storage import verify_file

__all__ = ["NodeMemory", "replica_folder"]

log = logging.getLogger(__name__)


def replica_folder(folder: Path) -> Path:
    """Return the folder of the replicas that are beside the checkpoints in ``folder``."""
    return folder.with_name(f"{folder.name}-replica")


@final
class _HeldPart(NamedTuple):
    """A part of a checkpoint, in the memory of one node.

    Attributes:
        node: number of the node in the record; ``None``: the whole checkpoint.
        is_replica: another node has written it.
    """

    node: int | None
    is_replica: bool


@final
class _Delivery(NamedTuple):
    """Files that a rank gets in its folder.

    Attributes:
        node: number of the node whose files are copied, and of the record unless ``is_addition``; ``None``: all files.
        is_addition: the target adds the files of a missing node to its own.
    """

    source: int
    target: int
    node: int | None
    is_addition: bool = False


@final
class NodeMemory:
    """Checkpoints of a run in the memory of this node, and the replicas of those of the node before it.

    Args:
        folder: of the checkpoints.
        disks: which ranks see the same folder of replicas.

    Attributes:
        is_leader: this rank is the one that sends and receives for its node.
    """

    def __init__(self, folder: Path, disks: Disks) -> None:
        self._own, self._replicas = Catalog(folder), Catalog(replica_folder(folder))
        self._leaders = sorted(set(disks.leaders))
        self._rank = dist.get_global_rank()
        self.is_leader = disks.is_folder_leader

    # ── while training ───────────────────────────────────────────────────────────────────────────────────────────
    def sweep(self) -> None:
        """Remove incomplete replicas that a killed process has left; on leaders."""
        self._replicas.place.sweep(timedelta())
        known = {file.path for manifest in self._replicas.manifests() for file in manifest.files}
        self._replicas.place.delete([path for path in self._replicas.files() if path not in known])

    def empty(self, moment: tuple[int, int]) -> None:
        """Delete replicas whose ``Manifest.moment`` is at most ``moment``; on leaders."""
        for manifest in self._replicas.manifests():
            if manifest.moment <= moment:
                delete_checkpoint(self._replicas.place, manifest)

    def records(self, name: str) -> list[Manifest | None]:
        """Return the record of the checkpoint ``name`` of each leader, on all ranks.

        ``None``: the rank is no leader, or has no readable record. Every rank calls this, in the main thread.
        """
        own: Manifest | None = None
        try:
            own = self._own.manifest_of(name) if self.is_leader else None
        except (OSError, CorruptCheckpointError) as e:  # this node sends nothing, and the others do not wait
            log.warning("checkpoint %s in memory of this node cannot be replicated: %s", name, e)
        return dist.get_group().gather(own)

    def replicate(self, records: list[Manifest | None], bytes_per_second: float, hurry: threading.Event) -> None:
        """Send this node's part of a checkpoint to the next node, and keep that of the node before it.

        On all leaders, in a thread of its own. Older replicas are deleted after the new one is verified and committed.

        Args:
            records: of the checkpoint, from :meth:`records`.
            bytes_per_second: the highest rate.
            hurry: once set, there is no limit.

        Raises:
            Exception: this node's part was not sent, or the other part not kept. Replicas with other names stay.
        """
        position = self._leaders.index(self._rank)
        source, target = self._leaders[position - 1], self._leaders[(position + 1) % len(self._leaders)]
        own, incoming = records[self._rank], records[source]
        limit = _BandwidthLimit(bytes_per_second, hurry)

        def read(path: str, offset: int, size: int) -> bytes:
            limit.wait_for(size)
            return _read(self._own, path, offset, size)

        moves = [dist.Move(self._rank, target, file.path, 0, file.size_bytes) for file in (own.here if own else ())]
        failure: Exception | None = None
        if incoming is not None:
            moves += [dist.Move(source, self._rank, file.path, 0, file.size_bytes) for file in incoming.here]
            try:
                _clear(self._replicas, incoming)
            except OSError as e:  # raised after this node has sent, for which the next node waits
                failure = e
        try:
            what = f"replicating {'nothing' if own is None else repr(own.name)}"
            dist.move(what, moves, read, lambda *part: _write(self._replicas, *part), in_background=True)
        except (OSError, CorruptCheckpointError) as e:
            failure = failure or e
        if failure is not None:
            if incoming is not None:
                _clear(self._replicas, incoming)
            raise failure
        if incoming is not None:
            _commit(self._replicas, incoming)
            for older in self._replicas.manifests():
                if older.name != incoming.name:
                    delete_checkpoint(self._replicas.place, older)
            log.debug(
                "replicated %s (%s) from the node of rank %d", incoming.name, bytes_text(incoming.size_bytes), source
            )

    # ── when a run resumes ───────────────────────────────────────────────────────────────────────────────────────
    def find(self, run_name: str) -> list[Manifest]:
        """Return the checkpoints of a run whose every part is on some node, its own or a replica; on all ranks.

        Every rank calls this.
        """
        group = dist.get_group()
        here: dict[str, Manifest] = {}
        held: list[tuple[str, int | None]] = []
        with group.all_or_none("looking at the memory of all nodes"):
            for catalog in (self._own, self._replicas) if self.is_leader else ():
                for manifest in catalog.manifests():
                    if manifest.run_name == run_name and manifest.kind in RESUMABLE:
                        here[manifest.id] = manifest
                        held.append((manifest.id, manifest.node))
        first: dict[str, int] = {}
        nodes: dict[str, set[int | None]] = {}
        for rank, told in enumerate(group.gather(held)):
            for identity, node in told:
                first.setdefault(identity, rank)
                nodes.setdefault(identity, {None}).add(node)
        mine = [here[identity] for identity, rank in first.items() if rank == group.rank]  # each once
        found = [manifest for its in group.gather(mine) for manifest in its]
        return [one for one in found if {file.node for file in one.files} <= nodes[one.id]]

    def bring(self, manifest: Manifest) -> None:
        """Copy parts of a checkpoint to the nodes that have none, and verify them. Every rank calls this.

        A part is read from the node that wrote it if it is intact there, otherwise from its replica. A node without a
        part gets a part that no node owns, or only the files that all nodes have. With fewer nodes than before, the
        node with the replica keeps each remaining part.

        Raises:
            CorruptCheckpointError: no node has an intact copy of some part. Intact parts are unchanged.
        """
        group, what = dist.get_group(), f"bringing checkpoint {manifest.name!r} to the memory of all nodes"
        good: list[_HeldPart] = []
        faults: list[str] = []
        with group.all_or_none(what):
            for catalog in (self._own, self._replicas) if self.is_leader else ():
                try:
                    if (there := catalog.manifest_of(manifest.name)) and there.id == manifest.id:
                        catalog.verify(there)
                        good.append(_HeldPart(there.node, is_replica=catalog is self._replicas))
                except (CorruptCheckpointError, OSError) as e:
                    faults.append(str(e))
        everyone = group.gather((good, faults))
        with group.all_or_none(what):
            plan = self._plan(manifest, [parts for parts, _ in everyone], [f for _, its in everyone for f in its])
            sources = self._sources(manifest, good)
            for one in plan:
                if one.target == self._rank and not one.is_addition:
                    _clear(self._own, manifest)
            for one in plan:  # the target has the replica
                if one.source == one.target == self._rank:
                    for file in self._files(manifest, one):
                        path = self._own.folder / file.path
                        path = path if one.is_addition else _arriving(path)
                        sources[file.path].place.fetch(file.path, path, file.digest)
        moves = [
            dist.Move(one.source, one.target, file.path, 0, file.size_bytes)
            for one in plan
            if one.source != one.target
            for file in self._files(manifest, one)
        ]
        with group.all_or_none(what):
            dist.move(
                what,
                moves,
                lambda path, offset, size: _read(sources[path], path, offset, size),
                lambda *part: _write(self._own, *part),
            )
        with group.all_or_none(what):
            for one in plan:
                if one.target == self._rank and not one.is_addition:
                    _commit(self._own, dataclasses.replace(manifest, node=one.node))
        for one in plan:
            if one.target == self._rank:
                log.info("checkpoint %s: copied a part from the memory of rank %d's node", manifest.name, one.source)

    def _plan(self, manifest: Manifest, everyone: list[list[_HeldPart]], faults: Iterable[str]) -> list[_Delivery]:
        """List which rank gets which files from which other rank: the same on every rank."""
        own: dict[int | None, int] = {}
        holders: dict[int | None, int] = {}
        for is_replica in (False, True):
            for rank, parts in enumerate(everyone):
                for part in parts:
                    if part.is_replica == is_replica:
                        holders.setdefault(part.node, rank)
                        if not is_replica:
                            own.setdefault(part.node, rank)
        parts = sorted({file.node for file in manifest.files} - {None}, key=lambda node: node or 0)
        if lost := [node for node in (parts or [None]) if node not in holders]:
            what = "it" if lost[0] is None else f"the part of node {lost[0]}"
            raise CorruptCheckpointError(
                f"checkpoint {manifest.name!r} in memory: no node has an intact copy of {what}. " + " ".join(faults)
            )
        if not parts:
            target = self._leaders[0]
            has_it = any(not part.is_replica for part in everyone[target])
            return [] if has_it else [_Delivery(holders[None], target, None)]
        lacking = [node for node in parts if node not in own]
        vacant = [rank for rank in self._leaders if rank not in own.values()]
        plan = [_Delivery(holders[node], rank, node) for node, rank in zip(lacking, vacant, strict=False)]
        plan += [_Delivery(holders[node], holders[node], node, is_addition=True) for node in lacking[len(vacant) :]]
        unused, any_holder = max(node or 0 for node in parts) + 1, holders[parts[0]]
        plan += [_Delivery(any_holder, rank, unused + number) for number, rank in enumerate(vacant[len(lacking) :])]
        return plan

    def _sources(self, manifest: Manifest, good: Iterable[_HeldPart]) -> dict[str, Catalog]:
        """Map each file to the catalog that this rank reads it from: its own part rather than a replica."""
        sources: dict[str, Catalog] = {}
        for part in sorted(good, key=lambda part: part.is_replica):
            for file in dataclasses.replace(manifest, node=part.node).here:
                sources.setdefault(file.path, self._replicas if part.is_replica else self._own)
        return sources

    def _files(self, manifest: Manifest, one: _Delivery) -> list[FileRecord]:
        files = dataclasses.replace(manifest, node=one.node).here
        return [file for file in files if file.node is not None or not one.is_addition]


@final
class _BandwidthLimit:
    """Limits the average rate at which a thread sends."""

    def __init__(self, bytes_per_second: float, hurry: threading.Event) -> None:
        self._bytes_per_second = bytes_per_second
        self._hurry = hurry
        self._started = time.monotonic()
        self._sent = 0

    def wait_for(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` more bytes may be sent."""
        self._sent += size_bytes
        due = self._started + self._sent / self._bytes_per_second
        self._hurry.wait(max(0.0, due - time.monotonic()))


def _clear(catalog: Catalog, manifest: Manifest) -> None:
    """Delete the checkpoint of that name, and what has arrived of one."""
    delete_checkpoint(catalog.place, manifest)
    for file in manifest.files:
        _arriving(catalog.folder / file.path).unlink(missing_ok=True)


def _arriving(path: Path) -> Path:
    """Return the temporary path of a file during its transfer. A sweep deletes the file after a kill."""
    return path.with_name(f".{path.name}.tmp-{0:016x}")


def _commit(catalog: Catalog, manifest: Manifest) -> None:
    """Commit the files that have arrived as a checkpoint, or delete them if one is damaged.

    Raises:
        CorruptCheckpointError: a file is damaged.
        OSError: a file cannot be read or renamed.
    """
    decider, *others = manifest.here
    try:
        for file in others:
            path = catalog.folder / file.path
            _arriving(path).replace(path)
            catalog.place.verify(file)
        arrived = _arriving(catalog.folder / decider.path)
        verify_file(arrived, decider.digest)
        arrived.replace(catalog.folder / decider.path)
    except (OSError, CorruptCheckpointError):
        _clear(catalog, manifest)
        raise


def _read(catalog: Catalog, path: str, offset: int, size: int) -> bytes:
    with (catalog.folder / path).open("rb") as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise OSError(f"{str(catalog.folder / path)!r} ends before byte {offset + size}")
    return data


def _write(catalog: Catalog, path: str, offset: int, data: memoryview) -> None:
    target = _arriving(catalog.folder / path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(data)
