"""Reading shared between ranks.

If several ranks want the same numbers, one rank reads the numbers and sends them to the others. If nodes have disks of
their own, files on the disks of other nodes are fetched before they are read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import xxhash
from torch import Tensor

from composerlite import dist
from composerlite.checkpoint.load.reader import validate
from composerlite.checkpoint.load.sharded_reader import RemoteFileSystemReader, Request, requests_of
from composerlite.checkpoint.place.directory import ON_ALL_NODES
from composerlite.checkpoint.place.node_disks import read_part, write_part
from composerlite.checkpoint.record.record import FileRecord
from composerlite.errors import CheckpointNotFoundError, IncompatibleCheckpointError, bytes_text
from composerlite.types import batches

log = logging.getLogger(__name__)

_PARCEL_BYTES = 1 << 20
"""Most bytes of tensors that are sent together. Larger tensors are sent alone."""
Ranks = tuple[int, ...]


# ── several ranks want the same numbers ──────────────────────────────────────────────────────────────────────────────
def plan_load(
    reader: RemoteFileSystemReader, state: Mapping[str, Any], group: dist.Group
) -> tuple[list[Request], list[dist.TensorTransfer]]:
    """Plan which requests this rank reads, and the transfers between ranks after the reads. Collective.

    Args:
        reader: of the checkpoint.
        state: tensors to be filled, and other values, by the keys of the index.
        group: the ranks that load together.

    Returns:
        The requests that this rank reads, and the transfers in which this rank sends or receives.

    Raises:
        IncompatibleCheckpointError: on every rank, if the checkpoint does not fit the state of a rank.
    """
    made: list[Request] = []
    shared: dict[Ranks, list[tuple[bytes, Request]]] = {}

    def report() -> dict[bytes, int]:
        made.extend(requests_of(reader.read_metadata(), state, reader.uri))
        if group.exchanges:
            shared.update(shared_requests(made, state, reader.place))
        return {
            xxhash.xxh3_128_digest(repr(ranks).encode() + b"".join(name for name, _ in named)): len(ranks)
            for ranks, named in shared.items()
        }

    if not group.all_reduce("planning a load", report, all_alike):
        return made, []  # each rank reads all of its own requests
    places = reader.read_metadata().storage_data
    common = {id(request) for named in shared.values() for _, request in named}
    own = [request for request in made if id(request) not in common]
    transfers: list[tuple[bytes, dist.TensorTransfer]] = []
    for ranks, named in shared.items():
        named.sort(key=lambda pair: (places[pair[1].piece].relative_path, places[pair[1].piece].offset, pair[0]))
        by_reader: dict[int, list[tuple[bytes, Tensor]]] = {rank: [] for rank in ranks}
        total, done = sum(request.target.nbytes for _, request in named if request.target is not None), 0
        for name, request in named:  # each rank reads requests that are next to each other in a file
            assert request.target is not None
            rank = ranks[done * len(ranks) // total]
            by_reader[rank].append((name, request.target))
            done += request.target.nbytes
            if rank == group.rank:
                own.append(request)
        for rank, targets in by_reader.items():
            for parcel in batches(targets, _PARCEL_BYTES, lambda one: one[1].nbytes):
                transfers.append((parcel[0][0], dist.TensorTransfer(rank, ranks, [tensor for _, tensor in parcel])))
    transfers.sort(key=lambda pair: pair[0])  # all ranks make their transfers in one order
    return own, [transfer for _, transfer in transfers]


def shared_requests(
    requests: Iterable[Request], state: Mapping[str, Any], place: str
) -> dict[Ranks, list[tuple[bytes, Request]]]:
    """Return the requests that other ranks should have too, by the placements of tensors, each with a name.

    The name is a digest of the request, so it is the same on all ranks with the same request. Values are left out,
    since values are small.

    Args:
        requests: of this rank.
        state: tensors that the requests fill, by key.
        place: equal on ranks that read the same files.

    Returns:
        For each set of ranks: the names and the requests of this rank that these ranks share, sorted by name.
    """
    found: dict[Ranks, list[tuple[bytes, Request]]] = {}
    known: dict[Any, Ranks] = {}
    for request in requests:
        if request.target is None:
            continue
        tensor: Any = state[request.piece.fqn]
        form = (id(tensor.device_mesh), tensor.placements) if dist.is_distributed_tensor(tensor) else None
        if form not in known:
            known[form] = tuple(dist.shards.ranks_with_same_part(tensor) or ())
        if len(known[form]) > 1:
            piece, target = request.piece, request.target
            text = repr((place, piece.fqn, piece.offset, request.offsets, tuple(target.shape), target.dtype))
            found.setdefault(known[form], []).append((xxhash.xxh3_128_digest(text.encode()), request))
    for named in found.values():
        named.sort(key=lambda pair: pair[0])
    return found


def all_alike(reports: Sequence[Mapping[bytes, int]]) -> bool:
    """Return true if all ranks of each set have reported the same requests.

    Args:
        reports: of each rank: for each set of ranks with the same parts of tensors, a digest of the set and its
            requests, and the number of ranks in the set.
    """
    senders = Counter(digest for report in reports for digest in report)
    return all(senders[digest] == count for report in reports for digest, count in report.items())


# ── files on the disks of other nodes ────────────────────────────────────────────────────────────────────────────────
def fetch_from_nodes(reader: RemoteFileSystemReader, wanted: Mapping[str, Any], source: str) -> None:
    """Fetch the data of ``wanted`` that the disk of this node does not have. Collective.

    If all files are in one folder there is nothing to do. Otherwise each rank gets the missing parts from a rank of a
    node with the file. The parts are in ``reader.brought``, a temporary folder of the rank. The reader verifies them.

    Args:
        reader: of the checkpoint.
        wanted: tensors to fill, and other values, by the keys of the index; other keys on each rank.
        source: the checkpoint, for messages.

    Raises:
        CheckpointNotFoundError: the folder of a rank has no record.
        IncompatibleCheckpointError: no rank has a file.
        UntrustedCheckpointError: the validation function refused a file.
    """
    group, here, record = dist.get_group(), reader.folder.path, reader.manifest
    if group.size == 1 or here is None or not group.broadcast(record is not None and record.node is not None):
        return
    lacks: dict[str, list[tuple[int, int]]] = {}
    with group.all_or_none(f"looking for the parts of {source}"):
        if record is None:
            raise CheckpointNotFoundError(f"{source} is there for rank 0, and has no record in {reader.uri!r}")
        files = {file.path.removeprefix(f"{record.name}/"): file for file in record.files}
        has = frozenset(name for name in files if reader.folder.has(name))
        metadata = reader.read_metadata()
        for request in requests_of(metadata, wanted, reader.uri):
            place = metadata.storage_data[request.piece]
            if place.relative_path not in has:
                lacks.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
        reader.brought = target = reader.brought or reader.temporary_folder()
        for name in lacks:  # sparse, of the full size
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with (target / name).open("ab") as file:
                file.truncate(files[name].size_bytes)
    everyone = group.gather((has, lacks))
    with group.all_or_none(f"looking for the parts of {source}"):
        moves = _moves(everyone, files, source)
        for name in {move.name for move in moves if move.source == group.rank}:
            validate(here / name)
    with group.all_or_none(f"bringing parts of {source} to the nodes that need them"):
        dist.move(
            f"bringing parts of {source}",
            moves,
            lambda name, offset, size: read_part(here / name, offset, size),
            lambda name, offset, data: write_part(target / name, offset, data),
        )
    if size := sum(move.size_bytes for move in moves if move.target == group.rank):
        log.info("fetched %s of %s from the disks of other nodes", bytes_text(size), source)


def _moves(
    everyone: Sequence[tuple[Container[str], Mapping[str, list[tuple[int, int]]]]],
    files: Mapping[str, FileRecord],
    source: str,
) -> list[dist.Move]:
    """List the moves, the same on every rank, from the files and the missing ranges of each rank."""
    moves: list[dist.Move] = []
    for target, (_, lacks) in enumerate(everyone):
        for name, ranges in lacks.items():
            holders = [rank for rank, (has, _) in enumerate(everyone) if name in has]
            if not holders:
                raise IncompatibleCheckpointError(
                    f"{source}: its file {files[name].path!r} was saved to the disk of node {files[name].node} of its "
                    f"run, and no rank of this one has it. {ON_ALL_NODES}"
                )
            for begin, end in _merged(ranges, files[name]):
                moves.append(dist.Move(holders[len(moves) % len(holders)], target, name, begin, end - begin))
    return moves


def _merged(ranges: Iterable[tuple[int, int]], record: FileRecord) -> list[tuple[int, int]]:
    """Return the ranges without overlaps, extended to whole chunks, since the reader verifies whole chunks."""
    chunk = record.chunk_bytes or max(1, record.size_bytes)
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        begin, end = begin // chunk * chunk, min(-(-end // chunk) * chunk, record.size_bytes)
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
