"""Writing a sharded checkpoint: each rank its files, the first one the index and the commit.

:class:`ShardWriter` is what saves of composerlite write with; :class:`RemoteFileSystemWriter` below it may be given to
``torch.distributed.checkpoint.save``, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import math
import os
import pickle
import tempfile
import time
import uuid
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import torch
from filelock import FileLock
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from composerlite import dist
from composerlite._torch_compat import storage_id
from composerlite.checkpoint.contents import versions
from composerlite.checkpoint.format.sharded_index import StorageInfo, leaves
from composerlite.checkpoint.format.sharded_layout import ShardLayout, balanced, file_name
from composerlite.checkpoint.format.torch_file import StorageCopy, TorchImage
from composerlite.checkpoint.memory.folder import make_own
from composerlite.checkpoint.place.directory import (
    LEAST_CHUNK_BYTES,
    MOST_CHUNKS,
    PathOrUri,
    SaveHandle,
    ShardedDirectory,
)
from composerlite.checkpoint.place.node_disks import Disks
from composerlite.checkpoint.place.place import NewFile
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.save.sharded_plan import LEAST_FILE_BYTES, Planner, plan_together
from composerlite.errors import bytes_text
from composerlite.storage import FileDigest, HostMemory, Sink, WorkerPool, chunk_bytes_for, number_of
from composerlite.types import StateDict

__all__ = [
    "RemoteFileSystemWriter",
    "SealedIndex",
    "ShardWriter",
    "expected_bytes",
    "in_one_piece",
    "record_of_directory",
]

log = logging.getLogger(__name__)
_ITEM_FRAME_BYTES = 16 << 10
_ALIGNMENT = 64
_TURN_SECONDS = 7200
"""Time that a throttled save waits for other ranks of this machine."""


class _FileWritten(NamedTuple):
    """A data file, on its way to the commit record. It travels as the place of an item that there is not."""

    name: str
    digest: FileDigest
    not_finite: str | None


class SealedIndex(NamedTuple):
    """Contents of the deciding file of each disk, before the record is added.

    Attributes:
        content: of the index.
        files: digest and rank of each data file, by name.
        manifest: the record, without files.
    """

    content: bytes
    files: Mapping[str, tuple[FileDigest, int]]
    manifest: Manifest


class WriteAssignment(NamedTuple):
    """Assignment of a rank: all that it needs to write its shards."""

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
        watched: names of tensors that should be finite, by their place in the index.
        threads: files that a rank writes at the same time.
        layout: the rule that the plan follows, where it does.
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
        self.threads = number_of(thread_count, min(4, os.cpu_count() or 1))
        self.watched: Mapping[MetadataIndex, str] = {}
        self.layout: ShardLayout | None = None
        self._folder = ShardedDirectory.of(path, threads=thread_count)
        self._throttle = throttle_uploads and self._folder.path is None
        self._overwrite = overwrite
        self._started = time.perf_counter()
        self._claim: SaveHandle | None = None
        self._world_size = 1
        self._save_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint, in DCP's term."""
        return self._folder.uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again, in another directory if one is given."""
        if checkpoint_id is not None:
            self._folder.close()
            self._folder = ShardedDirectory.of(checkpoint_id, threads=self.threads)
        self._started = time.perf_counter()
        self._save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Return the entry of the index about the save."""
        return StorageMeta(checkpoint_id=self._folder.uri, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all is set up with the plan.

        Args:
            is_coordinator: ignored; torch passes it.
            *args: the same.
            **kwargs: the same.
        """

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the directory on the first rank, and add the place to write to every plan."""
        return [
            dataclasses.replace(plan, storage_data=assignment)
            for plan, assignment in zip(plans, self.assignments(len(plans)), strict=True)
        ]

    def assignments(self, count: int) -> list[WriteAssignment]:
        """Claim the directory on the first of ``count`` ranks; return the assignment of each."""
        self._claim = SaveHandle.new(overwrite=self._overwrite)
        self._folder.begin(self._claim)
        self._world_size = count
        return [WriteAssignment(self._claim, rank, count) for rank in range(count)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part. What is written is durable when this returns.

        Args:
            plan: items of this rank.
            planner: gives the data of each item.

        Returns:
            A future with one result for each item.
        """
        claim, rank, world_size = cast("WriteAssignment", plan.storage_data)
        self._claim = claim
        layout = self.layout
        files = _files(plan.items, self.threads) if layout is None else _files_by_rule(plan.items, layout, rank)
        threads = 1 if self._throttle else max(1, len(files))
        try:
            with (
                _turn_of_this_node() if self._throttle else contextlib.nullcontext(),
                WorkerPool(threads, name="checkpoint-save") as pool,
            ):
                jobs = [
                    pool.submit(
                        functools.partial(self._write_file, file_name(rank, number, claim.suffix), items, planner)
                    )
                    for number, items in enumerate(files)
                ]
                results = [result for job in jobs for result in job.result()]
            if layout is not None:  # rank 0 knows the places that follow from the rule
                known = {part.metadata_index: place for part, place in layout.places(rank, claim.suffix)}
                results = [result for result in results if known.get(result.index) != result.storage_data]
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
        not_finite: list[str] = []

        def fill(sink: Sink) -> None:
            for item in items:
                start = sink.size_bytes
                if (value := values.get(item.index)) is not None:
                    sink.write(cast("io.BytesIO", value).getvalue())
                else:
                    tensor = _compact(cast("Tensor", planner.resolve_data(item)))
                    image = TorchImage(cast("Any", tensor))
                    if (watched := self.watched.get(item.index)) is not None:
                        image.watch([(watched, tensor)])
                    image.write(sink)
                    not_finite.extend([] if image.not_finite is None else [image.not_finite])
                size = sink.size_bytes - start
                place = StorageInfo(relative_path=name, offset=start, length=size)
                results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=place))

        most_chunks = MOST_CHUNKS if self.layout is None else self.layout.most_chunks
        chunk_bytes = chunk_bytes_for(most, LEAST_CHUNK_BYTES, most_chunks)
        (digest,) = self._folder.write(self._claim, [NewFile(name, most, fill, chunk_bytes)])
        written = _FileWritten(name, digest, next(iter(not_finite), None))
        return [*results, WriteResult(MetadataIndex(f"file {name}"), digest.size_bytes, written)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint on the first rank, when all have written.

        Args:
            metadata: index of the checkpoint, without the places of the data.
            results: results of :meth:`write_data` of each rank.
        """
        index, files = self.indexed(metadata, results)
        record = record_of_directory(self._folder.name, self._world_size)
        seconds = {"save": round(time.perf_counter() - self._started, 6)}
        self.commit(index, files, dataclasses.replace(record, timings=seconds))
        size = sum(digest.size_bytes for digest, _ in files.values())
        log.debug("wrote checkpoint %s (%s in %d files)", self._folder.uri, bytes_text(size), len(files))

    def indexed(
        self, metadata: Metadata, results: list[list[WriteResult]]
    ) -> tuple[bytes, dict[str, tuple[FileDigest, int]]]:
        """The index, and what each file contains, with the rank that wrote it.

        Args:
            metadata: index of the checkpoint, without the places of the data.
            results: results of :meth:`write_data` of each rank.

        Returns:
            Serialized index; digest and rank of each file, by name.
        """
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
        if self.layout is not None:
            assert self._claim is not None
            return self.layout.pack(metadata, self._claim.suffix), files
        return pickle.dumps(metadata), files

    def commit(
        self,
        index: bytes,
        files: Mapping[str, tuple[FileDigest, int]],
        record: Manifest,
        nodes: Sequence[int] = (),
    ) -> Manifest:
        """Put the deciding file, in the process that claimed the directory or has joined the save.

        Args:
            index: as :meth:`indexed` returns it.
            files: as well.
            record: of the checkpoint, but for these files.
            nodes: by rank, the node whose disk has its files; empty: one folder has all.

        Returns:
            The record.
        """
        placed = {name: (digest, nodes[rank] if nodes else None) for name, (digest, rank) in files.items()}
        try:
            return self._folder.commit(index, placed, record)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove the files written so far, after an error, when no rank writes. Raises nothing; may be called twice."""
        self._folder.abandon()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return true: any path or URI is valid."""
        return True


@contextlib.contextmanager
def _turn_of_this_node() -> Generator[None]:
    """Let one thread or process of this machine and user at a time execute the block.

    Where others may have made the folder of the lock file nobody waits, and the log says so: the file may be a link, or
    be locked for good.

    Raises:
        TimeoutError: others held the lock for longer than two hours.
    """
    folder = Path(tempfile.gettempdir(), f"composerlite-{os.getuid()}")
    if (reason := make_own(folder)) is None:
        # Shared by the calls of a thread: a handler of a signal that saves in the middle of a save does not wait.
        with FileLock(folder / ".turn", timeout=_TURN_SECONDS, is_singleton=True):
            yield
        return
    log.warning(
        "throttle_uploads: the ranks of this machine upload at the same time, since %s is not used: %s. Remove it, or "
        "let TMPDIR name a folder of this user's own.",
        folder,
        reason,
    )
    yield


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor in no more memory than it needs, on its device where it is in one piece there."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        part = in_one_piece(tensor)
        if part is not None:
            return part
        tensor = tensor.cpu()
    if tensor.layout is not torch.strided:
        return tensor
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if whole and type(tensor) is Tensor else tensor.clone(memory_format=torch.contiguous_format)


def in_one_piece(tensor: Tensor) -> Tensor | None:
    """Return a plain tensor that has a storage to itself, in the same memory; ``None`` where that cannot be."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    if not plain or not tensor.is_contiguous() or tensor.is_quantized or not tensor.numel():
        return None
    first, size = tensor.storage_offset() * tensor.itemsize, tensor.numel() * tensor.itemsize
    storage: Any = tensor.untyped_storage()[first : first + size]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def _tensor_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _item_bytes(item: WriteItem, values: Mapping[MetadataIndex, Any]) -> int:
    """The most that an item takes in a file."""
    value = values.get(item.index)
    return _tensor_bytes(item) + _ITEM_FRAME_BYTES if value is None else len(value.getvalue())


def _files(items: Sequence[WriteItem], most: int) -> list[list[WriteItem]]:
    """The items of each file: about as many bytes in one as in the other, and none that is empty."""
    sizes = [_tensor_bytes(item) for item in items]
    count = max(1, min(most, len(items), -(-sum(sizes) // LEAST_FILE_BYTES)))
    return [[items[number] for number in group] for group in balanced(sizes, count) if group]


def _files_by_rule(items: Sequence[WriteItem], layout: ShardLayout, rank: int) -> list[list[WriteItem]]:
    """The items of each file as ``layout`` has them, and those that it does not cover after them in the last one."""
    left = {item.index: item for item in items}
    files = [[left.pop(part.metadata_index) for part in parts] for parts in layout.files(rank)] or [[]]
    files[-1] += left.values()
    return [file for file in files if file]


# ── saves of composerlite ────────────────────────────────────────────────────────────────────────────────────────────
@final
class ShardWriter:
    """Writer of this rank's shards of the checkpoint in ``folder``. All ranks make it together, in the main thread.

    Args:
        contents: makes what is saved. If it fails on a rank, all raise that.
        folder: the directory.
        overwrite: replace what is there.
        group: the ranks that save together; ``None``: all.
        disks: which ranks see the same folder, where nodes have disks of their own.
        of_run: it is a checkpoint of a run, whose record says what :meth:`commit` is given; see :class:`Planner`.
        threads: files that a rank writes at the same time.
        throttle: only one rank of a node uploads at a time.
        reuse_plan: use the plan of an earlier save if on no rank a key, shape, type or placement differs.
        watched: storages of weights: the record of a run's checkpoint says if one has a value that is not finite.

    Attributes:
        committed: the record of the checkpoint, on the first rank of each disk once it is committed.
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
        throttle: bool = False,
        reuse_plan: bool = False,
        watched: Container[int] = (),
    ) -> None:
        self.gathers = False
        self.seconds: dict[str, float] = {}
        self.weights_crc: Sequence[int] = ()
        self.committed: Manifest | None = None
        self._folder = folder
        self._group = dist.get_group() if group is None else group
        self._disks = disks
        self._results: list[WriteResult] = []
        self._copies: list[StorageCopy] = []
        self._places: dict[int, _Place] = {}
        self._planner = Planner(of_run=of_run)
        self._writer = RemoteFileSystemWriter(
            folder, thread_count=threads, throttle_uploads=throttle, overwrite=overwrite
        )

        def local_plan() -> SavePlan:
            self._planner.set_up_planner(contents(), self._writer.storage_meta(), self._group.is_first)
            return self._planner.create_local_plan()

        try:
            known, self._assignment = plan_together(
                self._group,
                self._planner,
                local_plan,
                self._writer.assignments,
                reuse=reuse_plan,
                files=self._writer.threads,
            )
        except BaseException:
            self._writer.abandon()
            folder.close()
            raise
        self._plan = self._planner.finish_plan(dataclasses.replace(known.final, storage_data=self._assignment))
        self._metadata = known.metadata
        self._writer.layout = known.layout
        if disks is not None:
            self._join(disks)
        self._planner.find_tensors(self._plan.items)
        self._writer.watched = {
            index: "/".join(map(str, self._planner.mappings[index.fqn][1:]))
            for index, tensor in self._planner.tensors.items()
            if storage_id(tensor.untyped_storage()) in watched
        }
        self.size_bytes = self._lay_out()

    def _join(self, disks: Disks) -> None:
        """Make the directory on the disks that rank 0 does not see. All of them or none, and all ranks know."""

        def each() -> None:
            if disks.is_folder_leader and not self._group.is_first:
                self._folder.begin(self._assignment.claim)

        try:
            self._group.agree("making the directory on other disks", each)
        except BaseException:
            self.close(may_be_committed=False)
            raise

    def _lay_out(self) -> int:
        """Find a place in one memory for each storage that this rank writes something of; how much that takes.

        Of a storage of which little is written only the part is copied that is.
        """
        spans: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        for tensor in self._planner.tensors.values():
            storage, (first, end) = tensor.untyped_storage(), _span(tensor)
            _, least, most = spans.get(storage_id(storage), (storage, first, end))
            spans[storage_id(storage)] = storage, min(first, least), max(end, most)
        size = 0
        for number, (storage, first, end) in spans.items():
            first -= first % _ALIGNMENT  # whatever the types of the tensors in it
            if 2 * (end - first) >= storage.nbytes():
                first, end = 0, storage.nbytes()
            whole = end - first == storage.nbytes()
            self._copies.append(StorageCopy(storage if whole else storage[first:end], size))  # pyright: ignore
            self._places[number] = _Place(size, first, end - first)
            size = -(-(size + end - first) // _ALIGNMENT) * _ALIGNMENT
        return size

    def storages(self) -> list[StorageCopy]:
        """Return the storages to copy before training changes them."""
        return self._copies

    def staged_in(self, memory: HostMemory, start: int = 0) -> None:
        """Read the bytes from ``memory`` from now on, beginning at ``start``."""
        copies = {
            number: torch.frombuffer(memory.view(start + place.offset, place.size), dtype=torch.uint8).untyped_storage()
            for number, place in self._places.items()
            if place.size
        }
        for index, tensor in self._planner.tensors.items():
            number = storage_id(tensor.untyped_storage())
            if number in copies:
                offset = tensor.storage_offset() - self._places[number].first // tensor.itemsize
                copy = torch.empty(0, dtype=tensor.dtype)
                copy.set_(copies[number], offset, tensor.size(), tensor.stride())  # pyright: ignore[reportArgumentType]
                self._planner.tensors[index] = copy
        self._copies = []

    def write(self, memory: HostMemory | None) -> None:
        """Write the files of this rank, and wait until they are durable."""
        self._results = self._writer.write_data(self._plan, self._planner).wait()
        self._release()

    def finish(self, manifest: Manifest) -> list[WriteResult]:
        """Return the places of the items and the digests of the files, for rank 0."""
        return self._results

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Commit on rank 0, and return the record."""
        self.commit_part(self.seal(manifest, parts))
        assert self.committed is not None
        return self.committed

    def seal(self, manifest: Manifest, parts: Sequence[Any]) -> SealedIndex:
        """Return the index, the digests of all files and the record, on rank 0."""
        assert self._metadata is not None
        index, files = self._writer.indexed(dataclasses.replace(self._metadata), list(parts))
        return SealedIndex(index, files, manifest.marked(_not_finite(parts)))

    def commit_part(self, sealed: SealedIndex) -> None:
        """Put the deciding file, on the first rank of each disk."""
        if self._disks is None or self._disks.is_folder_leader:
            nodes = () if self._disks is None else self._disks.nodes
            self.committed = self._writer.commit(sealed.content, sealed.files, sealed.manifest, nodes)

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the directory unless it is committed, or may be. May be called twice."""
        self._release()
        if not may_be_committed:
            self._writer.abandon()
        self._folder.close()

    def _release(self) -> None:
        """Drop the tensors and the memory of the snapshot, which another save may be given."""
        self._planner.forget()
        self._copies = []


def record_of_directory(name: str, world_size: int, *, kind: str = "sharded") -> Manifest:
    """Return the record of the directory ``name`` that is of no run, but for its files."""
    return Manifest(
        name=name,
        kind=kind,
        template=name,
        run_name="",
        timestamp={"batch": 0},
        files=(),
        world_size=world_size,
        versions=versions(),
    )


def _not_finite(results: Sequence[Sequence[WriteResult]]) -> list[str | None]:
    """Return the :attr:`_FileWritten.not_finite` of the files of all ranks."""
    files = (result.storage_data for part in results for result in part)
    return [file.not_finite for file in files if type(file) is _FileWritten]


class _Place(NamedTuple):
    """Range of a storage to copy, and its destination."""

    offset: int
    first: int
    size: int


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that ``tensor`` has, and the end of the last."""
    if not tensor.numel():
        return 0, 0
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(first) * tensor.itemsize, int(last + 1) * tensor.itemsize


def expected_bytes(contents: StateDict) -> int:
    """Estimate the bytes of ``contents`` that this rank will copy, without asking the others.

    A replicated tensor is written by one rank, and which one is known only when it is planned: each is counted
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
