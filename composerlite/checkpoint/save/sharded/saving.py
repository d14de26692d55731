"""A checkpoint of a training state as a directory, of which each rank copies and writes its own part."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from composerlite import dist
from composerlite._torch_compat import storage_id
from composerlite.checkpoint.format.sharded_index import leaves, value_bytes
from composerlite.checkpoint.format.torch_file import StorageCopy
from composerlite.checkpoint.place.directory import FinalizedManifest, ShardedDirectory
from composerlite.checkpoint.place.node_disks import ONE_DISK, Disks
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.save.hand_over import HandOver
from composerlite.checkpoint.save.sharded.planned import PlannedSave, plan_save
from composerlite.storage import HostMemory, WorkerPool
from composerlite.types import StateDict

__all__ = ["Shards", "expected_bytes"]

_ALIGNMENT = 64


def expected_bytes(contents: StateDict) -> int:
    """About how many bytes this rank will copy of ``contents``, without asking the others.

    What several ranks have is written by one of them, and which one is known only when it is planned: each is counted
    its share.
    """
    sizes: dict[int, int] = {}
    for tensor in leaves(contents).values.values():
        if isinstance(tensor, DTensor):
            storage = tensor.to_local().untyped_storage()
            dimensions = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
            replicas = math.prod(ranks for ranks, placement in dimensions if placement.is_replicate())
            sizes[storage_id(storage)] = storage.nbytes() // replicas
        elif isinstance(tensor, Tensor) and dist.get_global_rank() == 0:
            sizes[storage_id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())


@final
class Shards:
    """What this rank writes of the checkpoint in ``folder``. All ranks make it together, in the main thread.

    Tensors that are distributed are written by the ranks that have them, those that several have by one of them. All
    else is that of rank 0, but for the generators, of which each rank has its own.

    Args:
        contents: makes what is saved.
        folder: the directory.
        overwrite: replace what is there.
        disks: which ranks see the same one.
    """

    def __init__(
        self, contents: Callable[[], StateDict], folder: ShardedDirectory, *, overwrite: bool, disks: Disks = ONE_DISK
    ) -> None:
        self.gathers = False
        self.is_plain = True
        self.seconds: dict[str, float] = {}
        self.weights_crc: Sequence[int] = ()
        self._folder = folder
        self._disks = disks
        self._planner = _Planner()
        self._save: PlannedSave = plan_save(
            folder, contents, group=dist.get_group(), overwrite=overwrite, reuse_plan=True, planner=self._planner
        )
        if disks.are_several:
            self._join(overwrite=overwrite)
        self._planner.find_tensors(self._save.items)
        self._copies = self._lay_out()
        last = self._copies[-1] if self._copies else None
        self.size_bytes = 0 if last is None else last.offset + last.storage.nbytes()
        self._results: Any = None
        self._helper: WorkerPool | None = None
        self._writing: Future[None] | None = None

    def _join(self, *, overwrite: bool) -> None:
        """Make the directory on the disks that rank 0 does not see. All of them or none, and all ranks know."""

        def each() -> None:
            if self._disks.is_keeper and not self._save.group.is_first:
                self._folder.join(self._save.claim, overwrite=overwrite)

        try:
            self._save.group.agree("making the directory on other disks", each)
        except BaseException:
            self._folder.abandon(self._save.claim)
            raise

    def _lay_out(self) -> list[StorageCopy]:
        """A place in one memory for each storage that this rank writes something of."""
        copies: list[StorageCopy] = []
        seen: set[int] = set()
        end = 0
        for tensor in self._planner.tensors.values():
            storage = tensor.untyped_storage()
            if storage_id(storage) not in seen:
                seen.add(storage_id(storage))
                copies.append(StorageCopy(storage, end))
                end = -(-(end + storage.nbytes()) // _ALIGNMENT) * _ALIGNMENT
        return copies

    def storages(self) -> list[StorageCopy]:
        """What is to be copied before training changes it."""
        return self._copies

    def staged_in(self, memory: HostMemory) -> None:
        """From now on the bytes are those in ``memory``."""
        staged = {storage_id(s): memory.view(offset, s.nbytes()) for s, offset in self._copies if s.nbytes()}
        for index, tensor in self._planner.tensors.items():
            view = staged.get(storage_id(tensor.untyped_storage()))
            if view is not None:
                storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
                place = (tensor.storage_offset(), tensor.size(), tensor.stride())
                copy = torch.empty(0, dtype=tensor.dtype)
                self._planner.tensors[index] = copy.set_(storage, *place)  # pyright: ignore[reportArgumentType]
        self._copies = []

    def write(self, memory: HostMemory | None, ring_bytes: int, *, may_grow: bool = False) -> None:
        """Write the files of this rank: until they are durable, or with ``may_grow`` until they may change."""
        if not may_grow:
            self._write()
            return
        moment = HandOver()
        self._save.tell_when_read(moment.take_place, may_grow=True)
        self._helper = WorkerPool(1, name="checkpoint-shards")
        self._writing = self._helper.submit(self._write)
        self._writing.add_done_callback(lambda _: moment.end())
        moment.wait()

    def _write(self) -> None:
        self._results = self._save.write()
        self._let_go()

    def finish(self) -> Any:
        """Wait until the files are durable; what rank 0 needs to know of them."""
        if self._writing is not None:
            self._writing.result()
        return self._results

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Give the directory its index, its name and its manifest."""
        self._folder.record = manifest
        self._save.commit(list(parts))
        committed = self._folder.manifest()
        assert committed is not None
        return committed

    def seal(self, manifest: Manifest, parts: Sequence[Any]) -> FinalizedManifest:
        """On rank 0, where there are several disks: the index and the record of all files."""
        self._folder.record = manifest
        index, files = self._save.indexed(list(parts))
        digests = {name: digest for name, (digest, _) in files.items()}
        nodes = {name: self._disks.nodes[rank] for name, (_, rank) in files.items()}
        return self._folder.sealed(index, digests, {}, nodes)

    def prepare(self, sealed: FinalizedManifest) -> None:
        """Make this disk's part durable, so that nothing is left but to rename it."""
        if self._disks.is_keeper:
            self._folder.prepare(sealed, self._disks.nodes[dist.get_global_rank()])

    def complete(self) -> None:
        """Give this disk's part its name and its commit record."""
        if self._disks.is_keeper:
            self._folder.complete()

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the directory unless it has its name, or may have."""
        if self._helper is not None:  # it writes to the end, also what nobody waits for
            self._helper.close()
        self._let_go()
        if not may_be_committed:
            self._save.abandon()
            self._folder.abandon(self._save.claim)
        self._folder.close()

    def _let_go(self) -> None:
        """Of tensors, and of the memory of the snapshot, which another save may be given."""
        self._planner.forget()
        self._copies = []


@final
class _Planner(DefaultSavePlanner):
    """Plans as DCP does, but for what is not distributed: ranks may differ in it, and it is taken from the first one.

    What holds no tensor is one value, pickled when the plan is made.

    Attributes:
        tensors: what this rank writes; those of the plan, or copies of them.
    """

    def __init__(self) -> None:
        super().__init__(dedup_save_to_lowest_rank=False)
        self.tensors: dict[MetadataIndex, Tensor] = {}
        self._values: dict[str, bytes] = {}

    def set_up_planner(
        self, state_dict: StateDict, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        found = leaves(state_dict)
        self.state_dict, self.mappings = found.values, found.paths
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if not self.is_coordinator:
            items = [item for item in plan.items if self._is_of_this_rank(item)]
            names = {item.index.fqn for item in items}
            paths = {name: path for name, path in self.mappings.items() if name in names}
            plan = dataclasses.replace(plan, items=items, planner_data=paths)
        values = [item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO]
        self._values = {name: value_bytes(self.state_dict[name], name) for name in values}
        self.plan = plan
        return plan

    def _is_of_this_rank(self, item: WriteItem) -> bool:
        name = item.index.fqn
        return isinstance(self.state_dict[name], DTensor) or self.mappings[name][0] == "rng"

    def find_tensors(self, items: Sequence[WriteItem]) -> None:
        """Find the tensors that are to be written."""
        for item in items:
            if item.type is not WriteItemType.BYTE_IO:
                tensor: Tensor = self.lookup_object(item.index).detach()
                self.tensors[item.index] = tensor.resolve_conj().resolve_neg()  # copies keep memory, and no such marks

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self._values[write_item.index.fqn])
        return self.tensors[write_item.index]

    def forget(self) -> None:
        """Let go of everything that was to be written."""
        self.tensors, self._values, self.state_dict = {}, {}, {}
