"""Plan of a sharded save: the pieces of the state that each rank writes, and the entries of the index.

If several ranks have a piece, one of the ranks writes the piece. If all ranks split their tensors by the same rule
(:class:`~composerlite.checkpoint.format.sharded_layout.ShardLayout`), each rank computes its pieces from the rule
(docs/adr/0006). Otherwise the ranks send lists of their pieces to rank 0, and rank 0 divides the work. A plan is kept,
and used again for a later save of a state with the same keys, shapes, types and placements.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.tensor import DTensor

from composerlite.checkpoint.format.sharded_index import KEYS, Path, image_of, leaves
from composerlite.checkpoint.format.sharded_layout import ShardLayout, SplitTensor, StatePiece, balanced, split_of
from composerlite.checkpoint.format.torch_file import FileInMemory
from composerlite.checkpoint.place.directory import SaveHandle, ShardedDirectory
from composerlite.dist import Group, is_dense, local_shard
from composerlite.types import StateDict

log = logging.getLogger(__name__)
MOST_PLANS = 4
"""Number of plans kept for later saves."""
MOST_LISTED = 50_000
"""Most pieces of tensors that an index of DCP lists: about 9 MB. With more pieces, the index is a rule, not a list."""
LEAST_FILE_BYTES = 64 << 20
"""Least bytes of a data file if a rank writes several data files."""


class Proposal(NamedTuple):
    """Message of a rank to rank 0, for a new plan.

    Attributes:
        digest: of the rule; and, except in a training run, of the pieces beside the rule, equal on all ranks. Empty
            without a rule. Rank 0 compares the digests of all ranks.
        pieces: for rank 0 to divide. Without a rule: all pieces of the rank. With a rule: the pieces beside the rule;
            except in a training run, the share of the rank of these pieces.
        paths: of the keys of these pieces in the nested state.
    """

    digest: str
    pieces: list[StatePiece]
    paths: dict[str, Any]


@final
class RankState:
    """The state to save, in the pieces of this rank.

    Args:
        state: nested dicts.
        group: the ranks of the save.
        of_run: the state of a training run. Values and plain tensors are taken from rank 0, since ranks may differ;
            each rank writes its own random generators; a value without tensors is one entry of the index. If false,
            any rank may write a piece that all ranks have, and all dicts are flattened, as DCP does.

    Attributes:
        pieces: of this rank, in the order of the state.
        paths: of all keys in the nested state.
        data: the tensor, or the bytes of the value, of each piece.
        tensors: the distributed tensors, by key.
        proposed: the pieces in the last proposal.
        identity: number of ranks, this rank, pieces and paths. A plan is for a single identity.

    Raises:
        SaveError: a value cannot be pickled; names the key.
    """

    def __init__(self, state: StateDict, group: Group, *, of_run: bool = False) -> None:
        found = leaves(state, as_dcp=not of_run)
        self.paths = found.paths
        self.pieces: list[StatePiece] = []
        self.data: dict[dcp.MetadataIndex, Tensor | bytes] = {}
        self.tensors: dict[str, DTensor] = {}
        self.identity = group.size, group.rank, self.pieces, self.paths
        self._group = group
        self._of_run = of_run
        for key, value in found.values.items():
            is_own = group.is_first or not of_run or isinstance(value, DTensor) or found.paths[key][0] == "rng"
            if not is_own or (isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None):
                continue
            if isinstance(value, Tensor) and is_dense(value):
                if isinstance(value, DTensor):
                    self.tensors[key] = value
                offsets, sizes, local = local_shard(value)
                if not math.prod(sizes) and value.numel():  # other ranks have all of the tensor
                    continue
                piece = StatePiece(key, tuple(value.shape), value.dtype, offsets, sizes)
                # ``local`` is detached: training may replace the memory of its tensors before the copy is written.
                # A copy of memory does not keep the flags of conjugate and negative views.
                self.data[piece.metadata_index] = local.resolve_conj().resolve_neg()
            else:
                piece = StatePiece(key)
                bytes_of_value = FileInMemory()
                image_of(value, key, must_load=not of_run).write(bytes_of_value)
                self.data[piece.metadata_index] = bytes_of_value.getvalue()
            self.pieces.append(piece)

    @functools.cached_property
    def layout(self) -> ShardLayout | None:
        """The rule for the splits of the distributed tensors, as far as this rank knows.

        ``None`` if there are few pieces, if no rule covers the splits of a tensor, or if the proposals of the ranks
        differed.
        """
        split = {key: tensor for key, tensor in self.tensors.items() if tensor.numel()}
        if len(split) * self._group.size <= MOST_LISTED:
            return None
        own = {piece.key: piece for piece in self.pieces}
        meshes = {id(tensor.device_mesh): tensor.device_mesh.mesh for tensor in split.values()}
        is_in_order = all(mesh.flatten().tolist() == list(range(self._group.size)) for mesh in meshes.values())
        tensors: list[SplitTensor] = []
        for key, tensor in sorted(split.items()):
            found = split_of(self.paths[key], tensor) if is_in_order else None
            piece = None if found is None else found.piece(self._group.rank)[0]
            if found is None or piece is None or own.get(key) != (piece if piece.size_bytes else None):
                log.debug("no rule covers the splits of the tensor %s: listing all pieces", key)
                return None
            tensors.append(found)
        return ShardLayout(self._group.size, tuple(tensors))

    def propose(self) -> Proposal:
        """Return the proposal of this rank, without the pieces that follow from the rule."""
        layout = self.layout
        self.proposed = self.pieces
        if layout is None:
            return Proposal("", self.pieces, self.paths)
        listed = [piece for piece in self.pieces if piece.key not in layout.by_key]
        digest = layout.digest([] if self._of_run else listed)
        if not self._of_run:  # all ranks have these pieces: each proposes its share
            listed = balanced(listed, lambda piece: piece.size_bytes, self._group.size)[self._group.rank]
        self.proposed = listed
        keys = {piece.key for piece in listed}
        paths = {key: path for key, path in self.paths.items() if key in keys or key.startswith(KEYS)}
        return Proposal(digest, listed, paths)


# ── rank 0 ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def merge_pieces(ranks: Sequence[Sequence[StatePiece]]) -> tuple[list[list[int]], dict[str, Any]]:
    """Divide the pieces of all ranks: each piece is written once, and all ranks write about as many bytes.

    Args:
        ranks: pieces of each rank.

    Returns:
        For each rank, the positions of the pieces to write; and the entries of the index by key.

    Raises:
        ValueError: the parts of a tensor overlap, or do not make up the whole.
    """
    owners: dict[tuple[str, tuple[int, ...]], tuple[StatePiece, list[tuple[int, int]]]] = {}
    for rank, pieces in enumerate(ranks):
        for number, piece in enumerate(pieces):
            owners.setdefault((piece.key, piece.offsets), (piece, []))[1].append((rank, number))
    loads = [0] * len(ranks)
    written: list[list[int]] = [[] for _ in ranks]
    # Pieces of a single rank are assigned first. Then pieces of several ranks, the largest first, even out the bytes.
    for piece, owner in sorted(owners.values(), key=lambda one: (len(one[1]) > 1, -one[0].size_bytes)):
        rank, number = min(owner, key=lambda one: (loads[one[0]], one[0]))
        written[rank].append(number)
        loads[rank] += piece.size_bytes
    entries: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], torch.Size] = {}  # one object for equal shapes: the index is smaller
    for pieces, numbers in zip(ranks, written, strict=True):
        numbers.sort()
        for piece in (pieces[number] for number in numbers):
            if piece.shape is None or piece.dtype is None:
                entries[piece.key] = dcp.BytesStorageMetadata()
                continue
            shape, offsets, sizes = (
                shapes.setdefault(one, torch.Size(one)) for one in (piece.shape, piece.offsets, piece.sizes)
            )
            if piece.key not in entries:
                entries[piece.key] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=piece.dtype), shape, [])
            entries[piece.key].chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
    for key, entry in entries.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            _check_parts(key, entry)
    return written, entries


def _check_parts(key: str, entry: dcp.TensorStorageMetadata) -> None:
    """Raise ``ValueError`` if the parts of the tensor ``key`` overlap, or do not make up the whole.

    A part is compared only with parts that overlap along one dimension: the dimension with the most different offsets.
    """
    parts = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
    if sum(math.prod(chunk.sizes) for chunk in parts) != math.prod(entry.size):
        raise ValueError(f"the ranks hold parts of different states: those of {key!r} have another size")
    if len(parts) < 2:
        return
    along = max(range(len(entry.size)), key=lambda dim: len({chunk.offsets[dim] for chunk in parts}))
    active: list[dcp.ChunkStorageMetadata] = []
    for chunk in sorted(parts, key=lambda chunk: chunk.offsets[along]):
        active = [one for one in active if one.offsets[along] + one.sizes[along] > chunk.offsets[along]]
        for one in active:
            spans = zip(one.offsets, one.sizes, chunk.offsets, chunk.sizes, strict=True)
            if all(first < other + its and other < first + size for first, size, other, its in spans):
                raise ValueError(f"the ranks hold parts of different states: those of {key!r} overlap")
        active.append(chunk)


# ── all ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class Plan(NamedTuple):
    """The part of a rank in a plan of all ranks.

    Attributes:
        name: id of the first save with the plan. Ranks compare names to find a common plan.
        state: identity of the state of this rank.
        own: the pieces to write on this rank: first the pieces of the rule, in order.
        metadata: on rank 0, index without places: of all pieces, or of the pieces beside the rule. ``None`` elsewhere.
        layout: the rule; ``None``: no rule.
    """

    name: str
    state: tuple[int, int, list[StatePiece], dict[str, Path]]
    own: list[dcp.MetadataIndex]
    metadata: dcp.Metadata | None
    layout: ShardLayout | None


known_plans: list[Plan] = []
"""Plans of earlier saves of this process, the newest last."""


def plan_save(
    group: Group, contents: Callable[[], StateDict], folder: ShardedDirectory, handle: SaveHandle, *, of_run: bool
) -> tuple[Plan, SaveHandle, RankState]:
    """Plan a save, and begin the save of ``folder`` on rank 0. Collective, in the main thread.

    Args:
        group: the ranks of the save.
        contents: makes the state. If this fails on a rank, all ranks raise the error.
        folder: the directory.
        handle: of the save. All ranks get the handle of rank 0.
        of_run: see :class:`RankState`.

    Returns:
        The plan, the handle of rank 0, and the pieces of this rank.

    Raises:
        CheckpointExistsError: the directory has a checkpoint, and ``handle`` does not overwrite.
        SaveError: a value cannot be pickled.
        ValueError: the ranks do not have the parts of one state.
    """
    own: list[RankState] = []
    matching: dict[str, Plan] = {}

    def known() -> tuple[str, ...]:
        own.append(state := RankState(contents(), group, of_run=of_run))
        matching.update({plan.name: plan for plan in known_plans if plan.state == state.identity})
        return tuple(matching)

    def common(names: list[tuple[str, ...]]) -> tuple[str, SaveHandle] | None:
        name = min(set(names[0]).intersection(*names), default=None)
        if name is None:
            return None
        folder.begin(handle)
        return name, handle

    if (reply := group.all_reduce("comparing a save with the save before", known, common)) is not None:
        log.debug("reusing plan %s", reply[0])
        return matching[reply[0]], reply[1], own[0]
    plan, begun = _new_plan(group, own[0], folder, handle)
    known_plans.append(plan)
    del known_plans[:-MOST_PLANS]
    return plan, begun, own[0]


def _new_plan(group: Group, state: RankState, folder: ShardedDirectory, handle: SaveHandle) -> tuple[Plan, SaveHandle]:
    """Make a plan with the rule; if the digests of the ranks differ, make a plan from lists of all pieces."""
    index: list[dcp.Metadata] = []

    def divide(proposals: list[Proposal]) -> list[tuple[list[int], SaveHandle] | None]:
        if len({proposal.digest for proposal in proposals}) > 1:
            return [None] * len(proposals)
        written, entries = merge_pieces([proposal.pieces for proposal in proposals])
        paths = {key: path for proposal in reversed(proposals) for key, path in proposal.paths.items()}
        index.append(dcp.Metadata(entries, planner_data=paths))
        folder.begin(handle)
        return [(numbers, handle) for numbers in written]

    while (reply := group.reduce_scatter("planning a save", state.propose, divide)) is None:
        state.layout = None  # the ranks differ, and list all pieces in the next proposal
    numbers, begun = reply
    pieces = [] if state.layout is None else state.layout.pieces(group.rank)
    own = [piece.metadata_index for piece in (*pieces, *(state.proposed[number] for number in numbers))]
    return Plan(begun.id, state.identity, own, index[0] if index else None, state.layout), begun
