"""Writing a sharded checkpoint: each rank its files, the first one the index and the commit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import io
import logging
import math
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from composerlite.checkpoint.format.sharded_index import StorageInfo
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.place.directory import PathOrUri, SaveHandle, directory_at
from composerlite.checkpoint.place.lease import turn_of_this_node
from composerlite.checkpoint.record.manifest import versions
from composerlite.storage import FileDigest, Sink, StreamWriter, WorkerPool, number_of

__all__ = ["Order", "RemoteFileSystemWriter"]

log = logging.getLogger(__name__)
_ITEM_FRAME_BYTES = 16 << 10
_LEAST_FILE_BYTES = 64 << 20


class _FileWritten(NamedTuple):
    """A data file, on its way to the commit record. It travels as the place of an item that there is not."""

    name: str
    digest: FileDigest


class Order(NamedTuple):
    """What a rank needs to know to write its part."""

    claim: SaveHandle
    rank: int
    world_size: int


@final
class RemoteFileSystemWriter(StorageWriter):
    """Writes a sharded checkpoint for ``torch.distributed.checkpoint.save`` to a path or a URI.

    It is there whole, with a commit record, or not at all.

    Args:
        path: of the directory.
        thread_count: files that a rank writes at the same time.
        process_count: as OLMo-core has it; threads write here, and nothing is gained by processes.
        process_group: as OLMo-core has it; not needed.
        throttle_uploads: to a URI, one rank of each node uploads at a time, one file after the other.
        overwrite: replace what is there.

    Attributes:
        hand_over: called as soon as what is written may change.
        may_grow: take new memory for that rather than wait for the disk.
    """

    def __init__(
        self,
        path: PathOrUri,
        thread_count: int | None = None,
        process_count: int | None = None,
        process_group: Any = None,
        throttle_uploads: bool = False,
        *,
        overwrite: bool = False,
    ) -> None:
        super().__init__()
        number_of(process_count, 1, "process_count")
        self._threads = number_of(thread_count, min(4, os.cpu_count() or 1))
        self.hand_over: Callable[[], object] = lambda: None
        self.may_grow = False
        self._folder = directory_at(path, threads=thread_count)
        self._throttle = throttle_uploads and self._folder.path is None
        self._overwrite = overwrite
        self._started = time.perf_counter()
        self._claim: SaveHandle | None = None
        self._world_size = 1
        self._lock = threading.Lock()
        self._unread = 0
        self._save_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is, as DCP calls it."""
        return self._folder.uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again, in another directory if one is given."""
        if checkpoint_id is not None:
            self._folder.close()
            self._folder = directory_at(checkpoint_id, threads=self._threads)
        self._started = time.perf_counter()
        self._save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """What the index says of the save."""
        return StorageMeta(checkpoint_id=self._folder.uri, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed before there is a plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank: claim the directory, and tell the others where to write."""
        return [
            dataclasses.replace(plan, storage_data=order)
            for plan, order in zip(plans, self.orders(len(plans)), strict=True)
        ]

    def orders(self, count: int) -> list[Order]:
        """On the first of ``count`` ranks: claim the directory; what each of them needs to know."""
        self._claim = self._folder.claim(overwrite=self._overwrite)
        self._world_size = count
        return [Order(self._claim, rank, count) for rank in range(count)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part. What is written is durable when this returns."""
        claim, rank, world_size = cast("Order", plan.storage_data)
        self._claim = claim
        buckets = _buckets(plan.items, self._threads)
        self._unread = len(buckets)
        threads = 1 if self._throttle else max(1, len(buckets))
        try:
            with (
                turn_of_this_node() if self._throttle else contextlib.nullcontext(),
                WorkerPool(threads, name="checkpoint-save") as pool,
            ):
                jobs = [
                    pool.submit(
                        functools.partial(self._write_file, f"__{rank}_{number}{claim.suffix}.distcp", bucket, planner)
                    )
                    for number, bucket in enumerate(buckets)
                ]
                results = [result for job in jobs for result in job.result()]
        except BaseException:
            if world_size == 1:  # else others still write: whoever saves calls abandon when all have ended
                self.abandon()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        assert self._claim is not None
        values = {item.index: planner.resolve_data(item) for item in items if item.type is WriteItemType.BYTE_IO}
        most = sum(_item_bytes(item, values) for item in items)
        results: list[WriteResult] = []

        def fill(sink: Sink) -> None:
            if self.may_grow and isinstance(sink, StreamWriter):
                sink.may_grow = True
            for item in items:
                start = sink.size_bytes
                if (value := values.get(item.index)) is not None:
                    sink.write(cast("io.BytesIO", value).getvalue())
                else:
                    TorchImage(cast("Any", _compact(cast("Tensor", planner.resolve_data(item))))).write(sink)
                size = sink.size_bytes - start
                place = StorageInfo(relative_path=name, offset=start, length=size)
                results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=place))
            self._was_read()

        digest = self._folder.write(self._claim, name, most, fill)
        written = _FileWritten(name, digest)
        return [*results, WriteResult(MetadataIndex(f"file {name}"), digest.size_bytes, written)]

    def _was_read(self) -> None:
        """Take note of a file that was filled."""
        with self._lock:
            self._unread -= 1
            is_last = not self._unread
        if is_last:
            self.hand_over()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written: make the checkpoint exist."""
        assert self._claim is not None
        index, files = self.indexed(metadata, results)
        try:
            self._folder.commit(self._claim, index, {name: digest for name, (digest, _) in files.items()}, self.facts())
        except BaseException:
            self.abandon()
            raise
        self._claim = None
        size = sum(digest.size_bytes for digest, _ in files.values())
        log.info("saved checkpoint %s: %.1f MB in %d files", self._folder.uri, size / 1e6, len(files))

    def indexed(
        self, metadata: Metadata, results: list[list[WriteResult]]
    ) -> tuple[bytes, dict[str, tuple[FileDigest, int]]]:
        """The index, and what each file contains, with the rank that wrote it."""
        files: dict[str, tuple[FileDigest, int]] = {}
        places: dict[MetadataIndex, Any] = {}
        for rank, part in enumerate(results):
            for result in part:
                if type(result.storage_data) is _FileWritten:
                    files[result.storage_data.name] = result.storage_data.digest, rank
                else:
                    places[result.index] = result.storage_data
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()
        if (number := getattr(filesystem, "CURRENT_DCP_VERSION", None)) is not None:
            metadata.version = number
        return pickle.dumps(metadata), files

    def facts(self) -> Mapping[str, object]:
        """What the commit record says of the save."""
        return {
            "world_size": self._world_size,
            "timings": {"save": round(time.perf_counter() - self._started, 6)},
            "versions": versions(),
        }

    def abandon(self) -> None:
        """After an error, when no rank writes any more: remove what was written. Raises nothing; twice is fine."""
        claim, self._claim = self._claim, None
        if claim is not None:
            self._folder.abandon(claim)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URI may be one."""
        return True


def _compact(tensor: Tensor) -> Tensor:
    """The tensor in memory of this machine, and of no more of it than it needs."""
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided:
        return tensor
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if whole and type(tensor) is Tensor else tensor.clone(memory_format=torch.contiguous_format)


def _tensor_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _item_bytes(item: WriteItem, values: Mapping[MetadataIndex, Any]) -> int:
    """The most that an item takes in a file."""
    value = values.get(item.index)
    return _tensor_bytes(item) + _ITEM_FRAME_BYTES if value is None else len(value.getvalue())


def _buckets(items: Sequence[WriteItem], most: int) -> list[list[WriteItem]]:
    """The items of each file: about as many bytes in one as in the other, and none that is empty."""
    total = sum(_tensor_bytes(item) for item in items)
    count = max(1, min(most, len(items), -(-total // _LEAST_FILE_BYTES)))
    buckets: list[list[WriteItem]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for item in sorted(items, key=_tensor_bytes, reverse=True):
        load_bytes, number = heapq.heappop(loads)
        buckets[number].append(item)
        heapq.heappush(loads, (load_bytes + _tensor_bytes(item), number))
    return [bucket for bucket in buckets if bucket]
