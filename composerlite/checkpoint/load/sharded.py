"""Loading sharded checkpoints: directories in the format of ``torch.distributed.checkpoint`` (DCP).

Each rank reads its own parts of tensors, directly into live tensors where possible. If several ranks want the same
numbers, one rank reads the numbers and sends them to the others. If nodes have disks of their own, files on the disks
of other nodes are fetched before they are read. Ranks communicate through :class:`composerlite.dist.Group` only, never
through DCP.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.nn.parameter import is_lazy

from composerlite import dist
from composerlite.checkpoint.contents import RestorePlan, half_loaded, tensor_pairs, with_tensors
from composerlite.checkpoint.format.sharded_index import leaves, nested
from composerlite.checkpoint.load.reader import validate
from composerlite.checkpoint.load.sharded_reader import RemoteFileSystemReader, Request, requests_of, safe_contents
from composerlite.checkpoint.place.directory import ON_ALL_NODES, ShardedDirectory, StepFolder
from composerlite.checkpoint.place.node_disks import read_part, write_part
from composerlite.dist import Group, empty_shard_like, exchange, group_of, is_dense
from composerlite.errors import CheckpointError, CheckpointNotFoundError, IncompatibleCheckpointError
from composerlite.storage.disk.reader import units_of
from composerlite.types import Piece, StateDict, batches

_PARCEL_BYTES = 1 << 20
"""Most bytes of a parcel: tensors that are sent together. Larger tensors are sent alone."""
_LEAST_PARCELS = 16
"""Least number of parcels of each rank, if tensors are small."""
Ranks = tuple[int, ...]


def load_directory(folder: ShardedDirectory, plan: RestorePlan, step: StepFolder | None = None) -> RestorePlan:
    """Read the directory ``folder`` into a state. Collective.

    The keys of the directory are compared with the state first. Then tensors are read in place.

    Args:
        folder: the directory; closed at the end.
        plan: what to restore.
        step: the step whose model and optimizer are in ``folder``, with a file of the train state of each rank; closed
            at the end. ``None``: the directory is no part of a step.

    Returns:
        ``plan``, with the contents. Nothing but tensors has changed in the state.

    Raises:
        CheckpointError: as :func:`composerlite.checkpoint.load_checkpoint`, on every rank.
    """
    group = dist.get_group()
    with contextlib.nullcontext() if step is None else step, RemoteFileSystemReader(folder) as reader:
        # The index first: a save that replaces a step deletes the files of the old index before other files.
        metadata = group.agree(f"reading the index of {plan.source}", reader.read_metadata)
        check_one_index(group.gather(reader.index_digest), reader.uri)
        beside: StateDict = {}
        if step is not None:
            place, paths = step.place, step.rank_files
            files = group.from_first(
                f"reading the train states of {step.uri}",
                lambda: {path: place.read(path) for _, path in sorted(paths().items())},
            )
            beside["train"] = [safe_contents(data, name, step.uri) for name, data in files.items()]
        stored = metadata.state_dict_metadata
        tensors = {key: one for key, one in unread(metadata, stored, device="meta").items() if one is not None}
        # Rank 0 reads the values, for every rank.
        keys = dict.fromkeys(key for key in stored if key not in tensors)
        fetch_from_nodes(reader, keys if group.is_first else {}, plan.source)
        what = f"reading the small parts of {plan.source}"
        read = group.from_first(what, lambda: reader.read(requests_of(metadata, keys, reader.uri)))
        values = {key: safe_contents(data, key, reader.uri) for key, data in read.items()}
        with group.all_or_none("checking that the checkpoint fits the run"):
            held = nested(metadata, "", list(stored), {**values, **tensors})
            whole = as_in_a_file({**cast("StateDict", held), **beside}) if isinstance(held, dict) else held
            wanted, live = plan.matched(whole)
        key_of, targets, taken = {id(tensor): key for key, tensor in tensors.items()}, dict[str, Tensor](), set[int]()
        for tensor, live_one in tensor_pairs(wanted, live):
            key = key_of.get(id(tensor))
            if key is not None and key not in targets:  # a weight may have two names
                targets[key] = _live_or_new(tensor, live_one, taken)
        wanted = with_tensors(wanted, {id(tensors[key]): target for key, target in targets.items()})
        fetch_from_nodes(reader, targets, plan.source)
        with half_loaded(bool(targets)):
            load_leaves(reader, targets, group=group)
        plan.contents, plan.verified = wanted, reader.verified
        return plan


def check_one_index(digests: Sequence[str], uri: str) -> None:
    """Raise CheckpointError if the ranks read different indexes of checkpoint ``uri``."""
    if len({*digests}) > 1:
        raise CheckpointError(
            f"the ranks read different indexes of checkpoint {uri!r}. If another process replaced the checkpoint "
            "meanwhile, load it again."
        )


def as_in_a_file(contents: StateDict) -> StateDict:
    """Return the contents of a run's directory as in a file: with empty dicts, and a list of generators by rank."""
    by_rank: Any = contents.get("rng")
    if isinstance(by_rank, dict) and by_rank and all(key.isdecimal() for key in cast("StateDict", by_rank)):
        # A rank saves its generators under its number.
        contents = {**contents, "rng": [by_rank[key] for key in sorted(cast("StateDict", by_rank), key=int)]}
    state: Any = contents.get("state")
    if isinstance(state, dict):
        state = cast("StateDict", state)
        for optimizer in state.get("optimizers", {}).values():
            if isinstance(optimizer, dict):
                cast("StateDict", optimizer).setdefault("state", {})
        if isinstance(pairs := state.get("algorithms"), list):
            state["algorithms"] = [tuple(pair) if isinstance(pair, list) else pair for pair in cast("list[Any]", pairs)]
        if isinstance(state.get("dataset_state"), dict):
            state["dataset_state"] = {"train": None, "eval": {}, **state["dataset_state"]}
    return contents


def _live_or_new(unread: Tensor, live: Tensor | None, taken: set[int]) -> Tensor:
    """Return the live tensor if shape and type are equal, or a new tensor to fill.

    The address of a returned live tensor is added to ``taken``. No two tensors are read into the same memory, since
    the order of the reads would decide the result.
    """
    if live is not None and not is_lazy(live) and live.shape == unread.shape and not live.is_meta:
        dist.shards.make_fillable(live)
        local = dist.local_shard(live).local
        address = local.data_ptr() if local.numel() else 0
        if live.dtype is unread.dtype and is_dense(local) and address not in taken:
            taken |= {address} - {0}
            return live
        if dist.is_distributed_tensor(live):
            return dist.empty_shard_like(live, unread.dtype)
    return torch.empty(unread.shape, dtype=unread.dtype)


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def load(
    reader: RemoteFileSystemReader, state: StateDict, *, group: Group | None = None, only: Container[str] | None = None
) -> None:
    """Fill ``state``, of nested dicts, in place: tensors are filled, values are replaced. Collective.

    Sparse tensors, and tensors of a subclass, are replaced by tensors of the same class, layout, type and shape. A
    value of ``None`` is replaced by any value or tensor of the checkpoint.

    Args:
        reader: of the checkpoint.
        state: to fill.
        group: the ranks of the load; ``None``: all.
        only: keys of the index to load; ``None``: all keys of ``state``.

    Raises:
        IncompatibleCheckpointError: the checkpoint does not have a key, has a tensor of another shape, or has different
            numbers for two names of one tensor. Raised on all ranks.
    """
    found = leaves(state, as_dcp=True)
    wanted = {key: value for key, value in found.values.items() if only is None or key in only}
    stored = reader.read_metadata().state_dict_metadata
    for key, value in wanted.items():
        if isinstance(value, Tensor):
            dist.shards.make_fillable(value)
            wanted[key] = value if is_dense(value) else None
        elif value is None and key in stored:
            wanted.update(unread(reader.read_metadata(), [key]))
    tied = dist.tied_names(wanted)
    for key in (key for _, *others in tied for key in others):  # read apart, to compare the numbers
        wanted[key] = empty_shard_like(found.values[key], found.values[key].dtype)
    group = group or group_of()
    load_leaves(reader, wanted, group=group)
    group.agree("checking tensors with several names", lambda: _check_tied(wanted, tied, reader.uri))
    wanted |= {key: found.values[key] for _, *others in tied for key in others}
    for key, value in wanted.items():
        if value is (own := found.values[key]):
            continue
        if isinstance(own, Tensor):
            if (has := _form_of(value)) != (needed := _form_of(own)):
                text = f"checkpoint {reader.uri!r} has {has} for {key!r}, and here is {needed}."
                raise IncompatibleCheckpointError(text)
            dist.shards.make_fillable(own, value)
        holder, step = found.holders[key]
        holder[step] = value


def _form_of(value: Any) -> Any:
    is_tensor = isinstance(value, Tensor)
    return (type(value).__name__, value.layout, value.dtype, tuple(value.shape)) if is_tensor else type(value).__name__


def _check_tied(loaded: StateDict, tied: Iterable[Sequence[str]], uri: str) -> None:
    """Raise if the numbers loaded for several names of one tensor differ in a bit."""

    def bits(key: str) -> Tensor:
        return dist.local_shard(loaded[key]).local.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)

    different = [names for names in tied if any(not torch.equal(bits(names[0]), bits(name)) for name in names[1:])]
    if different:
        raise IncompatibleCheckpointError(
            f"checkpoint {uri!r} has different values for one tied tensor: "
            f"{'; '.join(', '.join(names) for names in different[:20])}. Load into separate tensors, as in a "
            "model without tied weights, or keep only one of these names in the state dict."
        )


def load_leaves(reader: RemoteFileSystemReader, state: StateDict, *, group: Group) -> None:
    """Fill ``state`` in place. The checkpoint must have all keys of ``state``, with the same shapes. Collective.

    If several ranks need the same part of a tensor, one rank reads the part and sends the part to the others. Each rank
    reads all values.

    Args:
        reader: of the checkpoint.
        state: tensors to fill, and values to replace, by the keys of the index.
        group: the ranks of the load.

    Raises:
        IncompatibleCheckpointError: on every rank, if the checkpoint does not fit the state of a rank.
        CheckpointError: ranks have read different indexes, or data cannot be read.
    """
    own: list[Request] = []
    shared: dict[Ranks, list[Request]] = {}

    def report() -> tuple[str, dict[bytes, int]]:
        own.extend(requests_of(reader.read_metadata(), state, reader.uri))
        if group.exchanges:
            shared.update(shared_requests(own, state))
        return reader.index_digest, digests_of(shared, reader.place)

    def all_alike(reports: Sequence[tuple[str, Mapping[bytes, int]]]) -> bool:
        """Return true if all ranks of each set of ranks have reported the same requests."""
        check_one_index([version for version, _ in reports], reader.uri)
        senders = Counter(digest for _, report in reports for digest in report)
        return all(senders[digest] == count for _, report in reports for digest, count in report.items())

    transfers: list[tuple[tuple[int, Ranks], dist.TensorTransfer]] = []
    if group.all_reduce("planning a load", report, all_alike):  # otherwise each rank reads all of its own requests
        common = {id(request) for requests in shared.values() for request in requests}
        own = [request for request in own if id(request) not in common]
        for ranks, requests in shared.items():
            requests.sort(key=lambda one: (one.place.relative_path, one.place.offset, one.piece.fqn))
            total, done = sum(one.target.nbytes for one in requests), 0
            # Each rank reads requests that are next to each other in a file, and about as many bytes as the others.
            most = min(_PARCEL_BYTES, total // (_LEAST_PARCELS * len(ranks)))
            for parcel in batches(requests, most, lambda one: one.target.nbytes):
                rank, place_in_share = divmod(done * len(ranks), total)
                tensors = [one.target for one in parcel]
                # All ranks make their transfers in one order, in which the readers take turns.
                transfers.append(((place_in_share, ranks), dist.TensorTransfer(ranks[rank], ranks, tensors)))
                done += sum(tensor.nbytes for tensor in tensors)
                if ranks[rank] == group.rank:
                    own += parcel
    with group.all_or_none("reading a sharded checkpoint"):
        for key, data in reader.read(own).items():
            state[key] = safe_contents(data, key, reader.uri)
    if group.exchanges:
        exchange(f"checkpoint {reader.uri!r}", [one for _, one in sorted(transfers, key=lambda pair: pair[0])])


def load_flat(reader: RemoteFileSystemReader, keys: Iterable[str]) -> dict[str, Any]:
    """Return the tensors and values of ``keys`` of the index, whole, in host memory. Not collective."""
    state = unread(reader.read_metadata(), keys)
    load_leaves(reader, state, group=Group())
    return state


def unread(metadata: Metadata, keys: Iterable[str], *, device: str = "cpu") -> dict[str, Any]:
    """Return, by key of the index, a new tensor to fill for each tensor, and ``None`` for each value."""
    found: dict[str, Any] = {}
    for key in keys:
        stored: Any = metadata.state_dict_metadata[key]
        is_tensor = isinstance(stored, TensorStorageMetadata)
        found[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device=device) if is_tensor else None
    return found


# ── several ranks want the same numbers ──────────────────────────────────────────────────────────────────────────────
def shared_requests(requests: Iterable[Request], state: Mapping[str, Any]) -> dict[Ranks, list[Request]]:
    """Return the requests that other ranks should have, too, by the tuple of these ranks.

    The ranks follow from the placements of tensors. Values are left out, since values are small.

    Args:
        requests: of this rank.
        state: tensors that the requests fill, by key.
    """
    found: dict[Ranks, list[Request]] = {}
    known: dict[Any, Ranks] = {}
    for request in requests:
        if request.piece.offset is None:
            continue
        tensor: Any = state[request.piece.fqn]
        form = (id(tensor.device_mesh), tensor.placements) if dist.is_distributed_tensor(tensor) else None
        if form not in known:
            known[form] = tuple(dist.shards.ranks_with_same_part(tensor))
        if len(known[form]) > 1:
            found.setdefault(known[form], []).append(request)
    return found


def digests_of(shared: Mapping[Ranks, Iterable[Request]], place: str) -> dict[bytes, int]:
    """Return, for each set of ranks, a digest of the set and the requests, and the number of ranks in the set.

    The digest is the same on all ranks with the same requests.

    Args:
        shared: the requests that the ranks of each set should have.
        place: equal on ranks that read the same files.
    """
    digests: dict[bytes, int] = {}
    for ranks, requests in shared.items():
        texts = sorted(
            repr((one.piece.fqn, one.piece.offset, one.offsets, tuple(one.target.shape), one.target.dtype))
            for one in requests
        )
        digests[xxhash.xxh3_128_digest("\n".join([repr(ranks), place, *texts]).encode())] = len(ranks)
    return digests


# ── files on the disks of other nodes ────────────────────────────────────────────────────────────────────────────────
def fetch_from_nodes(reader: RemoteFileSystemReader, wanted: Mapping[str, Any], source: str) -> None:
    """Fetch the data of ``wanted`` that the disk of this node does not have. Collective.

    If all files are in one folder there is nothing to do. Otherwise each rank gets the missing parts from a rank of a
    node with the file. The parts are written to ``reader.brought``, a temporary folder of the rank. The reader verifies
    the parts.

    Args:
        reader: of the checkpoint.
        wanted: tensors to fill, and other values, by the keys of the index. Keys may differ between ranks.
        source: the checkpoint, for messages.

    Raises:
        IncompatibleCheckpointError: no rank has a file.
        UntrustedCheckpointError: the validation function refused a file.
    """
    group, here, record = dist.get_group(), reader.folder.path, reader.manifest
    if group.size == 1 or here is None or not group.broadcast(record is not None and record.node is not None):
        return
    lacks: dict[str, list[Piece]] = {}
    with group.all_or_none(f"finding the parts of {source}"):
        if record is None:
            raise CheckpointNotFoundError(f"{source} has no record in {str(here)!r}")
        files = {file.path.removeprefix(f"{record.name}/"): file for file in record.files}
        has = frozenset(name for name in files if reader.folder.has(name))
        for _, place, *_ in requests_of(reader.read_metadata(), wanted, reader.uri):
            if place.relative_path not in has:
                lacks.setdefault(place.relative_path, []).append((place.offset, 0, place.length))
        reader.brought = target = reader.brought or reader.temporary_folder()
        for name in lacks:  # make a sparse file of the full size
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with (target / name).open("ab") as file:
                file.truncate(files[name].size_bytes)
    everyone = group.gather((has, lacks))
    with group.all_or_none(f"finding the parts of {source}"):
        moves: list[dist.Move] = []  # the same on every rank
        for rank, (_, pieces_of) in enumerate(everyone):
            for name, pieces in pieces_of.items():
                holders = [other for other, (names, _) in enumerate(everyone) if name in names]
                if not holders:
                    raise IncompatibleCheckpointError(
                        f"{source}: its file {files[name].path!r} was saved to the disk of node {files[name].node} "
                        f"of its run, and no rank of this run has it. {ON_ALL_NODES}"
                    )
                size = files[name].size_bytes
                # The reader verifies whole chunks.
                chunk = files[name].chunk_bytes or max(1, size)
                for begin, end in units_of(sorted(pieces), chunk_bytes=chunk, size_bytes=size, unit_bytes=size):
                    moves.append(dist.Move(holders[len(moves) % len(holders)], rank, name, begin, end - begin))
        for name in {move.name for move in moves if move.source == group.rank}:
            validate(here / name)
    with group.all_or_none(f"sending parts of {source} between nodes"):
        dist.move(
            f"sending parts of {source}",
            moves,
            lambda name, offset, size: read_part(here / name, offset, size),
            lambda name, offset, data: write_part(target / name, offset, data),
        )
