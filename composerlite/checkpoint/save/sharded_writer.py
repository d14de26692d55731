"""Writing a sharded checkpoint: each rank writes its files, then rank 0 makes the index and commits.

Saves of composerlite use :class:`ShardWriter`. :class:`RemoteFileSystemWriter` is for
``torch.distributed.checkpoint.save``. Both call :func:`write_files` and :func:`index_bytes`.

A piece is a part of a tensor, or another value, that a rank writes. A rule (:class:`ShardLayout`) computes the places
of pieces in the files, so the index does not list these places.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pickle
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from composerlite import dist
from composerlite._torch_compat import storage_id
from composerlite.checkpoint.format.sharded_index import StorageInfo, leaves
from composerlite.checkpoint.format.sharded_layout import MOST_CHUNKS, ShardLayout, balanced, file_name
from composerlite.checkpoint.format.torch_file import StorageCopy, TorchImage
from composerlite.checkpoint.place.directory import LEAST_CHUNK_BYTES, PathOrUri, SaveHandle, ShardedDirectory
from composerlite.checkpoint.place.node_disks import Disks
from composerlite.checkpoint.place.place import NewFile
from composerlite.checkpoint.record.record import Manifest, SavedRun
from composerlite.checkpoint.save.sharded_plan import LEAST_FILE_BYTES, plan_save
from composerlite.storage import FileDigest, HostMemory, StreamWriter, WorkerPool, chunk_bytes_for, number_of
from composerlite.types import StateDict

_ITEM_FRAME_BYTES = 16 << 10
"""Most bytes of a tensor's item in a file besides the numbers."""
_ALIGNMENT = 64
_THREADS = min(4, os.cpu_count() or 1)
Data = Mapping[MetadataIndex, Tensor | bytes]
"""The pieces of a rank, by index: tensors, or the bytes of other values."""


@final
class WrittenFile(NamedTuple):
    """Facts for rank 0 about a data file of a rank.

    Attributes:
        name: in the directory.
        digest: of the file.
        places: offset and size, in bytes, of the pieces with a place that does not follow from the rule.
        not_finite: name of a watched tensor with a NaN or infinite value; ``None``: there is no such tensor.
    """

    name: str
    digest: FileDigest
    places: Mapping[MetadataIndex, tuple[int, int]]
    not_finite: str | None


SealedIndex = tuple[bytes, Mapping[str, tuple[FileDigest, int | None]], Manifest]
"""The arguments of :meth:`ShardedDirectory.commit` on each disk."""


# ── one rank ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def files_of(data: Data, threads: int, layout: ShardLayout | None) -> list[list[MetadataIndex]]:
    """Divide the pieces of a rank into files.

    Args:
        data: the pieces.
        threads: largest number of files. The files have about the same size. Ignored with a ``layout``.
        layout: the rule. With a rule all pieces are in a single file, in order.
    """
    files = [list(data)]
    if layout is None:
        sizes = {index: value.nbytes if isinstance(value, Tensor) else 0 for index, value in data.items()}
        count = max(1, min(threads, len(data), -(-sum(sizes.values()) // LEAST_FILE_BYTES)))
        files = balanced(data, sizes.__getitem__, count)
    return [file for file in files if file]


def write_files(
    folder: ShardedDirectory,
    handle: SaveHandle,
    rank: int,
    data: Data,
    threads: int,
    layout: ShardLayout | None,
    watched: Mapping[MetadataIndex, str],
) -> list[WrittenFile]:
    """Write the data files of a rank, several at the same time. The files are durable when this returns.

    Args:
        folder: the directory.
        handle: of the save.
        rank: of the writer, for the names of files.
        data: pieces to write; with a ``layout``, the pieces of the rule come first.
        threads: number of files to write at the same time.
        layout: the rule of the plan, if there is a rule.
        watched: names of tensors whose values should be finite.
    """
    files = files_of(data, threads, layout)
    known = {} if layout is None else layout.places(rank, handle.suffix)  # places that follow from the rule
    most_chunks = MOST_CHUNKS if layout is None else layout.most_chunks

    def write(number: int) -> WrittenFile:
        """Write a file. Each tensor in the file has the form of a whole ``.pt`` file, as in DCP."""
        name = file_name(rank, number, handle.suffix)
        part = {index: data[index] for index in files[number]}
        most = sum(one.nbytes + _ITEM_FRAME_BYTES if isinstance(one, Tensor) else len(one) for one in part.values())
        written: dict[MetadataIndex, tuple[int, int]] = {}
        not_finite: list[str | None] = []

        def fill(sink: StreamWriter) -> None:
            for index, value in part.items():
                start = sink.size_bytes
                if isinstance(value, Tensor):
                    tensor: Any = in_one_piece(value.detach())
                    image = TorchImage(tensor, watched=[(watched[index], tensor)] if index in watched else ())
                    image.write(sink)
                    not_finite.append(image.not_finite)
                else:
                    sink.write(value)
                size = sink.size_bytes - start
                if known.get(index) != StorageInfo(name, start, size):
                    written[index] = start, size

        file = NewFile(name, most, fill, chunk_bytes_for(most, LEAST_CHUNK_BYTES, most_chunks))
        digest = folder.write(handle, file)
        return WrittenFile(name, digest, written, next(filter(None, not_finite), None))

    with WorkerPool(max(1, len(files)), name="checkpoint-save") as pool:
        jobs = [pool.submit(functools.partial(write, number)) for number in range(len(files))]
        return [job.result() for job in jobs]


def in_one_piece(tensor: Tensor) -> Tensor:
    """Return a plain, contiguous tensor that fills a storage: a view of the same memory, or else a copy on the CPU."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    if not plain or not tensor.is_contiguous() or tensor.is_quantized or not tensor.numel():
        return tensor.cpu().clone(memory_format=torch.contiguous_format)
    first, end = _span(tensor)
    storage: Any = tensor.untyped_storage()[first:end]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


# ── rank 0 ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def index_bytes(
    index: Metadata, written: Iterable[Sequence[WrittenFile]], layout: ShardLayout | None, suffix: str
) -> bytes:
    """Return the content of ``.metadata``: a pickled index of DCP, or a rule with the rest of the index.

    Args:
        index: index of DCP, without places; with a rule, only of pieces that the rule does not cover.
        written: files of each rank.
        layout: the rule.
        suffix: of the names of the data files.
    """
    places: Any = {
        piece: StorageInfo(file.name, offset, size)
        for part in written
        for file in part
        for piece, (offset, size) in file.places.items()
    }
    index = dataclasses.replace(index, storage_data=places, version=filesystem.CURRENT_DCP_VERSION)
    return pickle.dumps(index) if layout is None else layout.pack(index, suffix)


def record_of_directory(name: str, world_size: int, *, kind: str = "sharded", batch: int = 0) -> Manifest:
    """Return the record, without files, of the directory ``name`` that no training run saves."""
    run = SavedRun(name="", timestamp={"batch": batch}, world_size=world_size)
    return Manifest(name=name, kind=kind, template=name, run=run, files=())


# ── for torch.distributed.checkpoint ─────────────────────────────────────────────────────────────────────────────────
@final
class RemoteFileSystemWriter(StorageWriter):
    """Writes a sharded checkpoint for ``torch.distributed.checkpoint.save`` to a path or a URI.

    The checkpoint exists whole, with a record, or not at all.

    Args:
        path: of the directory.
        thread_count: number of files for a rank to write at the same time; ``None``: up to four.
        process_count: accepted as in OLMo-core; composerlite writes with threads.
        process_group: accepted as in OLMo-core; not needed.
        throttle_uploads: to a URI, a rank uploads a single file at a time.
        overwrite: replace a checkpoint in the directory.
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
        self._threads = number_of(thread_count, _THREADS)
        self._folder = ShardedDirectory.of(path, threads=thread_count)
        if throttle_uploads and self._folder.path is None:
            self._threads = 1
        self._overwrite = overwrite
        self._handle: SaveHandle | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Change to the directory ``checkpoint_id``; ``None``: keep the directory."""
        if checkpoint_id is not None:
            self._folder.close()
            self._folder = ShardedDirectory.of(checkpoint_id, threads=self._threads)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: :meth:`prepare_global_plan` puts all facts for a rank into the plan.

        Args:
            is_coordinator: ignored; torch passes it.
            *args: ignored.
            **kwargs: ignored.
        """

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save on rank 0, and add the handle of the save, the rank and the number of ranks to every plan."""
        self._handle = SaveHandle(overwrite=self._overwrite)
        self._folder.begin(self._handle)
        return [
            dataclasses.replace(plan, storage_data=(self._handle, rank, len(plans))) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of this rank, durably.

        Args:
            plan: items of this rank.
            planner: gives the data of each item.

        Returns:
            A future with a :class:`WrittenFile` for each file, for :meth:`finish`.
        """
        handle, rank, ranks = plan.storage_data
        if self._handle is not None:  # a planner with a cache gives the handle of an earlier save
            handle = self._handle
        try:
            data: dict[MetadataIndex, Tensor | bytes] = {}
            for item in plan.items:
                value: Any = planner.resolve_data(item)
                data[item.index] = value.getvalue() if item.type is WriteItemType.BYTE_IO else value
            written = write_files(self._folder, handle, rank, data, self._threads, None, {})
        except BaseException:
            if ranks == 1:  # otherwise other ranks may still write to the directory
                self._folder.abandon()
            raise
        future: Future[Any] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Commit the checkpoint on rank 0, after all ranks have written.

        Args:
            metadata: index of the checkpoint, without the places of the data.
            results: of :meth:`write_data` of each rank.
        """
        assert self._handle is not None
        record = record_of_directory(self._folder.name, len(results))
        index = index_bytes(metadata, results, None, self._handle.suffix)
        self._folder.commit(index, {file.name: (file.digest, None) for part in results for file in part}, record)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return true: any path or URI is valid."""
        return True


# ── saves of composerlite ────────────────────────────────────────────────────────────────────────────────────────────
@final
class ShardWriter:  # a RankWriter, which this module cannot import
    """Writer of this rank's pieces of the checkpoint in ``folder``. All ranks create the writer, in the main thread.

    Args:
        contents: makes the state to save. If this fails on a rank, all ranks raise the error.
        folder: the directory.
        overwrite: replace a checkpoint in the directory.
        group: the ranks of the save; ``None``: all.
        disks: the folder of each rank, if nodes have disks of their own.
        of_run: the state of a training run: see :class:`~composerlite.checkpoint.save.sharded_plan.RankState`.
        threads: number of files to write at the same time on this rank; ``None``: up to four.
        watched: ids of storages of weights. The record names a weight there with a NaN or infinite value.
    """

    def __init__(
        self,
        contents: Callable[[], StateDict],
        folder: ShardedDirectory,
        *,
        overwrite: bool,
        group: dist.Group | None = None,
        disks: Disks | None = None,
        of_run: bool = False,
        threads: int | None = None,
        watched: Container[int] = (),
    ) -> None:
        self.size_bytes = 0
        self.storages: Sequence[StorageCopy] = ()
        self.seconds: Mapping[str, float] = {}
        self.not_finite: str | None = None
        self._folder = folder
        self._disks = disks
        self._threads = _THREADS if threads is None else threads
        group = dist.get_group() if group is None else group
        self._rank = group.rank
        handle = SaveHandle(overwrite=overwrite)
        try:
            self._plan, self._handle, state = plan_save(group, contents, folder, handle, of_run=of_run)
            if disks is not None:
                begins = disks.is_folder_leader and not group.is_first
                group.agree("creating the directory on other disks", lambda: begins and folder.begin(self._handle))
        except BaseException:
            self.close(may_be_committed=False)
            raise
        self._data = {index: state.data[index] for index in self._plan.own}
        self._watched = {
            index: "/".join(map(str, state.paths[index.fqn][1:]))
            for index, tensor in self._data.items()
            if isinstance(tensor, Tensor) and storage_id(tensor.untyped_storage()) in watched
        }
        self._starts: dict[int, int] = {}
        """Offset of each storage's first byte in the snapshot, even if the byte is not copied; by id of the storage."""
        self._lay_out()

    def _lay_out(self) -> None:
        """Choose a place in the snapshot for each storage with data of this rank.

        If less than half of a storage is written, only the part from the first byte to the last is copied.
        """
        spans: dict[int, tuple[Any, int, int]] = {}
        for tensor in self._data.values():
            if isinstance(tensor, Tensor) and tensor.numel():
                storage, (first, end) = tensor.untyped_storage(), _span(tensor)
                _, least, most = spans.get(storage_id(storage), (storage, first, end))
                spans[storage_id(storage)] = storage, min(first, least), max(end, most)
        self.storages = copies = list[StorageCopy]()
        for number, (storage, first, end) in spans.items():
            first -= first % _ALIGNMENT  # for tensors of any type
            if 2 * (end - first) < storage.nbytes():
                storage = storage[first:end]
            else:
                first = 0
            copies.append(StorageCopy(storage, self.size_bytes))
            self._starts[number] = self.size_bytes - first
            self.size_bytes = -(-(self.size_bytes + storage.nbytes()) // _ALIGNMENT) * _ALIGNMENT

    def write(self, manifest: Manifest, memory: HostMemory | None = None) -> list[WrittenFile]:
        """Write the files of this rank, durably, and return facts about the files for rank 0."""
        if memory is not None:  # replace the tensors by the copies
            for index, tensor in self._data.items():
                if isinstance(tensor, Tensor) and tensor.numel():
                    first, end = _span(tensor)
                    place = self._starts[storage_id(tensor.untyped_storage())] + first
                    storage = torch.frombuffer(memory.view(place, end - first), dtype=torch.uint8).untyped_storage()
                    copy: Any = torch.empty(0, dtype=tensor.dtype)
                    self._data[index] = copy.set_(storage, 0, tensor.size(), tensor.stride())
            self.storages = []
        layout = self._plan.layout
        written = write_files(self._folder, self._handle, self._rank, self._data, self._threads, layout, self._watched)
        self._data, self.storages = {}, []
        self.not_finite = next((file.not_finite for file in written if file.not_finite), None)
        return written

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Commit on rank 0, and return the record. ``parts`` are the results of :meth:`write` of all ranks."""
        return self._folder.commit(*self.seal(manifest, parts))

    def seal(self, manifest: Manifest, parts: Sequence[Sequence[WrittenFile]]) -> SealedIndex:
        """Return the index, the digests of all files and the record, on rank 0."""
        assert self._plan.metadata is not None
        index = index_bytes(self._plan.metadata, parts, self._plan.layout, self._handle.suffix)
        nodes = [None] * len(parts) if self._disks is None else self._disks.nodes
        files = {file.name: (file.digest, node) for node, part in zip(nodes, parts, strict=True) for file in part}
        return index, files, manifest

    def commit_part(self, sealed: SealedIndex) -> Manifest | None:
        """Write the deciding file, on the first rank of each disk. The file makes the checkpoint valid on the disk.

        An error removes the files of the disk. Other ranks do nothing. Return the record on rank 0.
        """
        assert self._disks is not None
        manifest = self._folder.commit(*sealed) if self._disks.is_folder_leader else None
        return manifest if self._rank == 0 else None

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the files of the save unless the checkpoint is committed, or may be. May be called twice."""
        self._data, self.storages = {}, []  # another save may use the memory of the snapshot
        if not may_be_committed:
            self._folder.abandon()
        self._folder.close()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets, in bytes, of the start and end of ``tensor`` in the storage. ``tensor`` is not empty."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(first) * tensor.itemsize, int(last + 1) * tensor.itemsize


def expected_bytes(contents: StateDict) -> int:
    """Estimate the bytes of ``contents`` to copy on this rank for a save, without communication.

    The plan later chooses a rank for each replicated tensor. Here each rank counts an equal share of a replicated
    ``DTensor``, and rank 0 counts all plain tensors.
    """
    sizes: dict[int, int] = {}
    for tensor in leaves(contents).values.values():
        if isinstance(tensor, DTensor):
            storage = tensor.to_local().untyped_storage()
            dimensions = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
            replicas = math.prod(ranks for ranks, placement in dimensions if placement.is_replicate())
            sizes[storage_id(storage)] = storage.nbytes() // replicas
        elif isinstance(tensor, Tensor) and dist.is_dense(tensor) and dist.get_global_rank() == 0:
            sizes[storage_id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())
