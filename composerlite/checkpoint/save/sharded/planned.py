"""Saving a sharded checkpoint: planned by all ranks together, then written and committed in any thread."""

from __future__ import annotations

import dataclasses
import io
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from composerlite.checkpoint.format.sharded_index import leaves, value_bytes
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.save.sharded.copy import Staged
from composerlite.checkpoint.save.sharded.plan_merge import PackedPlan, Share, merge_plans
from composerlite.checkpoint.save.sharded.writing import Order, RemoteFileSystemWriter
from composerlite.dist import Group, Vote, get_local_world_size
from composerlite.storage import FileDigest
from composerlite.types import StateDict

__all__ = ["PlannedSave", "plan_save"]

log = logging.getLogger(__name__)
_MOST_PLANS = 4


@final
@dataclass(frozen=True)
class _KnownPlan:
    """A plan that all ranks made together before.

    Attributes:
        name: of it, the same on every rank.
        count: of the ranks.
        local: what this rank wanted to write.
        final: what it writes, without what others write already.
        metadata: of the whole, on the first rank.
    """

    name: str
    count: int
    local: SavePlan
    final: SavePlan
    metadata: Metadata | None


_known: list[_KnownPlan] = []  # the newest last
_known_lock = threading.Lock()


@final
class PlannedSave:
    """A save that every rank has the plan of. Nothing is written yet.

    :meth:`run` is the whole of what is left. Who commits more than the directory has :attr:`vote` run :meth:`write` and
    :meth:`commit` as parts of that, and calls :meth:`abandon` after an error.

    Attributes:
        group: the ranks that save together.
        vote: theirs over this save.
        claim: of the directory.
    """

    def __init__(
        self,
        writer: RemoteFileSystemWriter,
        planner: DefaultSavePlanner,
        known: _KnownPlan,
        order: Order,
        group: Group,
        vote: Vote,
    ) -> None:
        self.group = group
        self.vote = vote
        self._writer = writer
        self._planner = planner
        self._plan = planner.finish_plan(dataclasses.replace(known.final, storage_data=order))
        self._metadata = known.metadata
        self.claim = order.claim

    def run(self) -> None:
        """Write and commit, together with the other ranks. It is there whole or not at all."""
        try:
            self.vote.run(self.write, self.commit)
        except BaseException:
            self.abandon()
            raise

    def run_with(self, staged: Staged, run: Callable[[], object]) -> None:
        """:meth:`run`, or ``run`` which has it as a part, with ``staged`` told what may change, and at its end."""
        self.tell_when_read(staged.hand_over, may_grow=staged.may_grow)
        try:
            run()
        finally:
            staged.end()
        staged.prepare_next()

    def tell_when_read(self, tell: Callable[[], object], *, may_grow: bool) -> None:
        """Have :meth:`write` call ``tell`` as soon as what it writes may change, and take memory for that if it may."""
        self._writer.hand_over, self._writer.may_grow = tell, may_grow

    @property
    def items(self) -> Sequence[WriteItem]:
        """What this rank writes."""
        return self._plan.items

    def write(self) -> list[WriteResult]:
        """Write this rank's part."""
        return self._writer.write_data(self._plan, self._planner).wait()

    def commit(self, results: list[list[WriteResult]]) -> None:
        """On the first rank: make the directory a checkpoint."""
        assert self._metadata is not None
        self._writer.finish(dataclasses.replace(self._metadata), results)

    def indexed(self, results: list[list[WriteResult]]) -> tuple[bytes, dict[str, tuple[FileDigest, int]]]:
        """On the first rank, for who commits himself: the index, and what each file contains, with its rank."""
        assert self._metadata is not None
        return self._writer.indexed(dataclasses.replace(self._metadata), results)

    def abandon(self) -> None:
        """After an error, when no rank writes any more: remove what was written, unless it may be committed."""
        if not self.vote.may_be_committed:
            self._writer.abandon()


@final
class _Planner(DefaultSavePlanner):
    """Plans as DCP does, but for tensors where DCP does not look; and pickles values as they are loaded here."""

    def __init__(self) -> None:
        super().__init__(dedup_save_to_lowest_rank=False)

    def set_up_planner(
        self, state_dict: StateDict, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        found = leaves(state_dict, as_dcp=True)
        self.state_dict, self.mappings = found.values, found.paths
        self.is_coordinator = is_coordinator

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's name
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(value_bytes(object, write_item.index.fqn))
        return object


def plan_save(
    folder: ShardedDirectory,
    state: Callable[[], StateDict],
    *,
    group: Group,
    overwrite: bool,
    threads: int | None = None,
    throttle: bool = False,
    reuse_plan: bool = False,
    planner: DefaultSavePlanner | None = None,
) -> PlannedSave:
    """Plan a save of ``state`` to ``folder``, together with the other ranks, in the main thread.

    Args:
        folder: the directory.
        state: makes what is saved. If it fails on a rank, all raise that.
        group: the ranks that save together.
        overwrite: replace what is there.
        threads: files that a rank writes at the same time.
        throttle: only one rank of a node uploads at a time.
        reuse_plan: use the plan of an earlier save if on no rank a key, shape, type or placement differs.
        planner: says what each rank writes; by default what DCP's says, as far as it looks.
    """
    writer = RemoteFileSystemWriter(folder, thread_count=threads, throttle_uploads=throttle, overwrite=overwrite)
    planner = planner or _Planner()

    def local_plan() -> SavePlan:
        planner.set_up_planner(state(), writer.storage_meta(), group.is_first)
        return planner.create_local_plan()

    try:
        made = _plan_again(group, writer, local_plan) if reuse_plan else None
        if made is None:
            made = _plan(group, writer, planner, local_plan if not reuse_plan else lambda: planner.plan)
            if reuse_plan:
                _remember(made[0])
        vote = group.vote(f"saving {folder.uri}", patience=get_local_world_size() if throttle else 1)
        return PlannedSave(writer, planner, *made, group, vote)
    except BaseException:
        writer.abandon()
        raise


def _plan(
    group: Group, writer: RemoteFileSystemWriter, planner: DefaultSavePlanner, local_plan: Callable[[], SavePlan]
) -> tuple[_KnownPlan, Order]:
    """Make a plan with all ranks, and claim the directory."""
    found: list[Metadata] = []
    local: list[SavePlan] = []

    def each() -> PackedPlan:
        local.append(local_plan())
        return PackedPlan.of(local[0])

    def first(plans: list[PackedPlan]) -> list[tuple[str, Share, Order]]:
        shares, metadata = merge_plans(plans)
        found.append(metadata)
        name = secrets.token_hex(8)
        return [(name, share, order) for share, order in zip(shares, writer.orders(len(plans)), strict=True)]

    name, share, order = group.reduce_scatter("planning a save", each, first)
    known = _KnownPlan(name, group.size, local[0], share.of(local[0]), found[0] if found else None)
    return known, order


def _plan_again(
    group: Group, writer: RemoteFileSystemWriter, local_plan: Callable[[], SavePlan]
) -> tuple[_KnownPlan, Order] | None:
    """The plan that all ranks know already for what they want to write; ``None`` if there is none."""
    matching: dict[str, _KnownPlan] = {}

    def each() -> set[str]:
        plan = local_plan()
        with _known_lock:
            candidates = [known for known in _known if known.count == group.size and known.local == plan]
        matching.update({known.name: known for known in candidates if known.metadata is not None or not group.is_first})
        return set(matching)

    def first(names: list[set[str]]) -> list[tuple[str, Order] | None]:
        name = min(set.intersection(*names), default=None)
        if name is None:
            return [None] * len(names)
        return [(name, order) for order in writer.orders(len(names))]

    if (dealt := group.reduce_scatter("comparing a save with the one before", each, first)) is None:
        return None
    name, order = dealt
    log.debug("plan %s is used again", name)
    return matching[name], order


def _remember(plan: _KnownPlan) -> None:
    with _known_lock:
        _known.append(plan)
        del _known[:-_MOST_PLANS]
