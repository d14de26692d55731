"""Reading a sharded checkpoint: the index, the requests of a rank, and ranged reads directly into tensors.

A request is for a part of a stored tensor, or for a value (anything but a tensor, stored as a pickle or as JSON).
:func:`requests_of` makes the requests to fill a state. :meth:`RemoteFileSystemReader.read` fulfils requests.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import logging
import math
import operator
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import xxhash
from filelock import FileLock
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from composerlite.checkpoint.format.byte_sources import ByteSource
from composerlite.checkpoint.format.folder_index import index_of, is_folder_index
from composerlite.checkpoint.format.sharded_layout import chunks_at, item_place
from composerlite.checkpoint.format.torch_reader import in_slots, item_contents, untrusted
from composerlite.checkpoint.load.reader import validate
from composerlite.checkpoint.place.directory import INDEX, MODEL, ON_ALL_NODES, PathOrUri, ShardedDirectory
from composerlite.checkpoint.place.place import Folder, OnBytes
from composerlite.checkpoint.record.record import FileRecord, Manifest
from composerlite.checkpoint.trust.unpickler import RefusedError
from composerlite.devices import DeviceCopier, DeviceRing, shared_ring
from composerlite.dist import local_shard
from composerlite.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError, naming
from composerlite.storage import ObjectStore, ParallelReader, WorkerPool, make_folder, number_of, parse_uri
from composerlite.types import Closing, Piece, batches

log = logging.getLogger(__name__)
_FETCH_SECONDS = 7200
"""Longest wait for the lock of a folder of copies, while another rank of this machine downloads."""


def safe_contents(data: bytes, key: str, uri: str) -> Any:
    """Load the value ``key`` of the checkpoint at ``uri`` from ``data``, without running code in ``data``.

    Raises:
        UntrustedCheckpointError: the value names an unknown type.
        CorruptCheckpointError: the bytes are damaged.
    """
    try:
        if key.endswith(".json") and not data.startswith(b"PK"):  # a JSON file in a folder of another program
            return json.loads(data)
        return item_contents(data)
    except RefusedError as e:
        raise untrusted(f"checkpoint {uri!r}: {key!r}", e) from e
    except (CorruptCheckpointError, ValueError, RecursionError) as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: {key!r} cannot be read: {e}") from e


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class Request(NamedTuple):
    """A request of a rank for a part of a stored tensor, or for the bytes of a value.

    Attributes:
        piece: key and offsets of the stored piece. A value has no offsets.
        place: place of the piece: file, offset in the file, and bytes.
        target: memory for the part, of the shape of the part.
        sizes: of the stored piece, by dimension.
        dtype: of the stored piece.
        offsets: where the part begins in the stored piece, by dimension.
    """

    piece: MetadataIndex
    place: Any
    target: Tensor
    sizes: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]


def requests_of(metadata: Metadata, state: Mapping[str, Any], uri: str) -> list[Request]:
    """Return the requests to fill the tensors of ``state``, in place, and to read the other values of ``state``.

    Args:
        metadata: index of the checkpoint.
        state: tensors and values by the keys of the index. Of a distributed tensor, the part of this rank is filled.
        uri: of the checkpoint, for errors.

    Raises:
        IncompatibleCheckpointError: the checkpoint does not have a key, has a tensor of another shape, or has
            transformed data.
        CorruptCheckpointError: the index does not have the place of a piece.
    """
    found: list[Request] = []
    for key, value in state.items():
        stored = metadata.state_dict_metadata.get(key)
        if stored is None:
            raise IncompatibleCheckpointError(f"checkpoint {uri!r} has no key {key!r}.")
        if not isinstance(stored, TensorStorageMetadata):
            place = _place_of(metadata, MetadataIndex(key), uri)
            data = torch.empty(place.length, dtype=torch.uint8, device="cpu")
            found.append(Request(MetadataIndex(key), place, data, (place.length,), data.dtype, (0,)))
            continue
        if not isinstance(value, Tensor) or value.shape != stored.size:
            here = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise IncompatibleCheckpointError(
                f"checkpoint {uri!r} has {key!r} with the shape {tuple(stored.size)}, and here it is {here}."
            )
        starts, lengths, local = local_shard(value)
        for chunk in chunks_at(stored, (starts, lengths)) if math.prod(lengths) else ():
            both = zip(starts, lengths, chunk.offsets, chunk.sizes, strict=True)
            spans = [(max(start, at), min(start + length, at + size)) for start, length, at, size in both]
            if all(begin < end for begin, end in spans):
                target = local
                for dim, (begin, end) in enumerate(spans):
                    target = target.narrow(dim, begin - starts[dim], end - begin)
                offsets = tuple(begin - at for (begin, _), at in zip(spans, chunk.offsets, strict=True))
                index, dtype, sizes = MetadataIndex(key, chunk.offsets), stored.properties.dtype, tuple(chunk.sizes)
                found.append(Request(index, _place_of(metadata, index, uri), target, sizes, dtype, offsets))
    return found


def _place_of(metadata: Metadata, piece: MetadataIndex, uri: str) -> Any:
    """Return the place of a piece. Raises as :func:`requests_of`."""
    place = metadata.storage_data.get(piece)
    if place is None:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: {piece.fqn!r} has no data.")
    if place.transform_descriptors:
        raise IncompatibleCheckpointError(
            f"checkpoint {uri!r}: {piece.fqn!r} is stored with {list(place.transform_descriptors)}: read the "
            "checkpoint with torch.distributed.checkpoint."
        )
    return place


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class RemoteFileSystemReader(StorageReader, Closing):
    """Reads a sharded checkpoint for ``torch.distributed.checkpoint.load`` from a path or a URI.

    A checkpoint with a record is verified during the read. A checkpoint without a record is read unverified, with a
    warning. Only needed bytes are read; from a verified file, whole chunks. Before a file on this machine is read, the
    function in the environment variable ``CHECKPOINT_VALIDATION_FUNCTION`` is called with the file.

    A context manager; otherwise call :meth:`close`.

    Args:
        path: path or URI of the checkpoint's directory; or a ``ShardedDirectory``, which the reader closes.
        thread_count: number of reading threads; ``None``: at most 8.
        pre_download: first copy the files from a bucket to this machine.
        work_dir: folder for these copies, kept for the next load. ``None``: a temporary folder, until :meth:`close`.

    Attributes:
        bytes_read: bytes of data files read so far.
        verified: numbers of the verified chunks, by the name of the data file; only of files on this machine.
        ring: memory for data on the way to devices.
        folder: directory of the checkpoint.
        manifest: the record, once the index is read; ``None``: there is no record.
        index_digest: digest of the index; empty before the index is read.
        brought: a folder with parts of files, fetched from the disks of other nodes.
    """

    def __init__(
        self,
        path: PathOrUri,
        *,
        thread_count: int | None = None,
        pre_download: bool = False,
        work_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if work_dir is not None:
            with naming("work_dir", work_dir):
                parse_uri(os.fspath(work_dir))
        self._threads = number_of(thread_count, min(8, (os.cpu_count() or 1) + 2))
        self.folder = ShardedDirectory.of(path, threads=thread_count)
        self.bytes_read = 0
        self.ring = shared_ring
        self._resources = contextlib.ExitStack()
        self._copies = Path(work_dir or self.temporary_folder()) if pre_download else None
        """Folder for copies of checkpoints."""
        self.reset()

    def temporary_folder(self) -> Path:
        """Make a folder that is deleted by :meth:`close`."""
        return Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-")))

    @property
    def uri(self) -> str:
        """Path or URI of the checkpoint, for messages."""
        return self.folder.uri

    @property
    def place(self) -> str:
        """Text to compare between ranks: equal on ranks with the same files; differs if each node has a directory."""
        node = None if self.manifest is None else self.manifest.node
        return f"{self.index_digest} on {node}: {self.folder.identity()}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the index. The next read loads the index again.

        Args:
            checkpoint_id: path or URI of a checkpoint to read from now on; ``None``: the same checkpoint.
        """
        if checkpoint_id is not None:
            self.folder.close()
            self.folder = ShardedDirectory.of(checkpoint_id, threads=self._threads)
        self.brought: Path | None = None
        self._metadata: Metadata | None = None
        self.manifest: Manifest | None = None
        self._records: Mapping[str, FileRecord] = {}
        self.index_digest = ""
        self._is_raw = False
        self.verified: dict[str, set[int]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index. The file is read once.

        Args:
            *args: ignored; torch passes them.
            **kwargs: ignored.

        Returns:
            Index of the checkpoint.

        Raises:
            CheckpointNotFoundError: there is no sharded checkpoint.
            CorruptCheckpointError: the index is damaged.
            UntrustedCheckpointError: the index names an unknown type, or the validation function refused the index.
        """
        if self._metadata is None:
            if (here := self.folder.path) is not None and (here / INDEX).is_file():
                validate(here / INDEX)
            try:
                data, self.manifest = self.folder.described()
            except FileNotFoundError as e:
                raise CheckpointNotFoundError(
                    f"there is no sharded checkpoint {self.uri!r}: it has no {INDEX!r}. The model and the optimizer of "
                    f"a step are in its directory {MODEL!r}."
                ) from e
            self._records = {file.path: file for file in (() if self.manifest is None else self.manifest.files)}
            self.index_digest = xxhash.xxh3_128_hexdigest(data)
            self._metadata = index_of(data, self.uri)
            self._is_raw = is_folder_index(data)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: this reader has its own index.

        Args:
            metadata, is_coordinator: ignored; torch passes them.
            *args: ignored.
            **kwargs: ignored.
        """

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of ``plan`` and pass them to ``planner``. Raises as :func:`requests_of` and :meth:`read` do.

        Args:
            plan: items to read.
            planner: gives the target tensor of each item, and takes values.

        Returns:
            A future that is done.
        """
        metadata = self.read_metadata()
        requests: list[Request] = []
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                requests += requests_of(metadata, {key: None}, self.uri)
                continue
            target, entry = planner.resolve_tensor(item).detach(), metadata.state_dict_metadata[key]
            if tuple(target.shape) != tuple(item.lengths) or not isinstance(entry, TensorStorageMetadata):
                raise IncompatibleCheckpointError(
                    f"{item.dest_index.fqn!r}: {tuple(item.lengths)} cannot be copied to {tuple(target.shape)}"
                )
            at = tuple(item.storage_index.offset or ())
            place, offsets = _place_of(metadata, item.storage_index, self.uri), tuple(item.storage_offsets)
            chunks = chunks_at(entry, (at, (1,) * len(at)))
            sizes = next(tuple(chunk.sizes) for chunk in chunks if tuple(chunk.offsets) == at)
            requests.append(Request(item.storage_index, place, target, sizes, entry.properties.dtype, offsets))
        values = self.read(requests)
        for item, request in zip(plan.items, requests, strict=True):
            if item.type is LoadItemType.BYTE_IO:
                data = values[item.storage_index.fqn]
                safe_contents(data, item.storage_index.fqn, self.uri)  # the planner of DCP would run code in the bytes
                planner.load_bytes(item, io.BytesIO(data))
            else:
                planner.commit_tensor(item, request.target)
        future: Future[None] = Future()
        future.set_result(None)  # pyright: ignore[reportArgumentType]
        return future

    def read(self, requests: Sequence[Request]) -> dict[str, bytes]:
        """Fill the targets of ``requests``; return the bytes of the values by key.

        Raises:
            CorruptCheckpointError: the bytes differ from the saved bytes, or a file is gone.
            IncompatibleCheckpointError: a file is on the disk of another node.
            UntrustedCheckpointError: an item names an unknown type, or the validation function refused a file.
        """
        if self.manifest is None and not self.bytes_read:
            log.warning("checkpoint %s has no record: loading it unverified", self.uri)
        files: dict[str, list[Request]] = {}
        for request in requests:
            files.setdefault(request.place.relative_path, []).append(request)
        with WorkerPool(max(1, min(len(files), self._threads)), name="checkpoint-load") as pool:
            share = max(1, self._threads // max(1, len(files)))
            jobs = [pool.submit(functools.partial(self._read_file, *one, share)) for one in files.items()]
            self.bytes_read += sum(job.result() for job in jobs)
        return {one.piece.fqn: one.target.numpy().tobytes() for one in requests if one.piece.offset is None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return true: any path or URI is valid."""
        return True

    def close(self) -> None:
        """Close connections and remove temporary files. May be called twice."""
        self.folder.close()
        self._resources.close()

    def _read_file(self, name: str, requests: list[Request], threads: int) -> int:
        """Fulfil the requests to a file; return the number of bytes read."""
        record = self._records.get(self.folder.at(name))
        if record is None and self.manifest is not None:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}: its record does not have the file {name!r}.")
        try:
            with self._opened(name, record, threads) as source:
                size_bytes = self._read_items(source, requests, is_ours=record is not None)
                if isinstance(source, ParallelReader):
                    self.verified.setdefault(name, set()).update(source.verified)
            return size_bytes
        except FileNotFoundError as e:
            raise CorruptCheckpointError(
                f"checkpoint {self.uri!r}: its file {name!r} is missing. If another process replaced the "
                "checkpoint meanwhile, load it again."
            ) from e
        except RefusedError as e:
            raise untrusted(f"checkpoint {self.uri!r}: {name!r}", e) from e
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}, file {name!r}: {e}") from e

    def _read_items(self, source: ByteSource, requests: Iterable[Request], *, is_ours: bool) -> int:
        """Fill the targets of all requests to one file; return the number of bytes read.

        Args:
            source: the file.
            requests: requests to the file.
            is_ours: this package wrote the file, so the place of numbers in an item is known. Items of another program
                are read as a whole.

        Raises:
            CorruptCheckpointError: the bytes differ from the saved bytes, or an item is no tensor of the requested
                shape.
            RefusedError: an item names an unknown type.
        """
        counts: list[int] = []
        ordered = sorted(requests, key=lambda one: one.place.offset)
        for batch in batches(ordered, _BATCH_BYTES, lambda one: one.place.length):
            targets = [_target_of(request, self.ring, is_ours=is_ours, is_raw=self._is_raw) for request in batch]
            pieces: list[Piece] = []
            for target in targets:
                address = target.memory.data_ptr()
                for offset, size in target.runs if target.copier is None else ():
                    pieces.append((offset, address, size))
                    address += size
            source.read_into(pieces, counts.append)
            for (piece, _, tensor, sizes, _, offsets), memory, numbers, _, _ in targets:
                if numbers is None:
                    part: Any = item_contents(memory.numpy().tobytes())
                    if not isinstance(part, Tensor) or tuple(part.shape) != sizes:
                        raise CorruptCheckpointError(f"{piece.fqn!r} is not the tensor in the index")
                    for dim, (begin, length) in enumerate(zip(offsets, tensor.shape, strict=True)):
                        part = part.narrow(dim, begin, length)
                    tensor.copy_(part)
                elif numbers is not tensor:
                    tensor.copy_(numbers)
            self._read_to_devices(source, [target for target in targets if target.copier is not None], counts.append)
        return sum(counts)

    def _read_to_devices(self, source: ByteSource, targets: Sequence[_Target], progress: OnBytes) -> None:
        """Fill targets on a device through slots of the ring: a slot is filled while another is copied."""
        if not targets:
            return
        # Each item: (target, offset in the storage of the target), offset in the file, size in bytes.
        cuts: list[tuple[tuple[_Target, int], int, int]] = []
        for target in targets:
            begin = int(target.request.target.storage_offset()) * target.request.target.itemsize
            for offset, size in target.runs:
                for start in range(0, size, _SLOT_BYTES):
                    cut = min(_SLOT_BYTES, size - start)
                    cuts.append(((target, begin), offset + start, cut))
                    begin += cut
        with self.ring.slots(_SLOT_BYTES, targets[0].request.target.device, _SLOTS) as slots:
            for batch in in_slots(slots, cuts, _SLOT_BYTES):
                source.read_into([(offset, one.data_ptr(), one.nbytes) for _, offset, one in batch], progress)
                for (target, begin), _, one in batch:
                    assert target.copier is not None
                    storage = target.request.target.untyped_storage()
                    slots.is_copied(target.copier, target.copier.load(one, storage, begin))

    def _opened(
        self, name: str, record: FileRecord | None, threads: int
    ) -> contextlib.AbstractContextManager[ByteSource]:
        """Open a data file: in the directory, in ``brought``, in the bucket, or as a copy in ``work_dir``."""
        here, place, path = self.folder.path, self.folder.place, self.folder.at(name)
        digest = None if record is None else record.digest
        if here is not None and self.folder.has(name):
            validate(here / name)
        elif here is not None and self.brought is not None:  # the node with the file has validated the file
            place, path = Folder(self.brought), name
        elif here is not None and record is not None and record.node is not None:
            raise IncompatibleCheckpointError(
                f"checkpoint {self.uri!r}: its file {name!r} was saved to the disk of node {record.node} of its run, "
                f"and is not on this one. {ON_ALL_NODES}"
            )
        elif here is None and self._copies is not None:
            key = xxhash.xxh3_128_hexdigest(f"{self.uri}\0{self.index_digest}".encode())
            folder = self._copies / f"sharded-{key}"  # has files of this checkpoint, and of no other save or place
            copy = folder / name
            make_folder(copy.parent)
            with FileLock(folder / ".lock", timeout=_FETCH_SECONDS):  # other ranks of this machine want the same files
                if not copy.exists() or (digest is not None and copy.stat().st_size != digest.size_bytes):
                    place.fetch(path, copy, digest)
            validate(copy)
            place, path = Folder(folder), name
        return place.opened(path, digest, threads=threads)


FileSystemReaderWithValidation = RemoteFileSystemReader
"""Composer's name of the reader."""


@final
class DistCPObjectStoreReader(RemoteFileSystemReader):
    """Reads a sharded checkpoint from an object store, after a download of the files for this rank.

    The ranks of a machine download each file once. The files are kept, in a folder for this checkpoint only.

    Args:
        source_path: the directory's name in the store.
        destination_path: a folder of this machine for the files.
        object_store: the store; not closed.
        device_mesh: accepted as in Composer; not needed.
    """

    def __init__(
        self, source_path: str, destination_path: str, object_store: ObjectStore, device_mesh: Any = None
    ) -> None:
        super().__init__(
            ShardedDirectory.in_store(object_store, source_path), pre_download=True, work_dir=destination_path
        )


# ── items of one file ────────────────────────────────────────────────────────────────────────────────────────────────
_LEAST_RUN_BYTES = 64 << 10
"""If the runs (numbers next to each other in the file) of a request are shorter, the bytes in between are read, too."""
_BATCH_BYTES = 128 << 20
"""Most bytes of items of one file that are read at once, unless a single item is larger."""
_SLOT_BYTES = 16 << 20
_SLOTS = 2  # a slot is filled from the file while the other is copied to the device


@final
class _Target(NamedTuple):
    """The bytes of a request in the file, and their destination.

    Attributes:
        request: the request.
        memory: the target of the request, or memory to fill first.
        numbers: the numbers in ``memory``, in the shape of the target, to copy to the target; ``None``: the memory gets
            the whole item, written by another program.
        runs: for each run of bytes next to each other in the file, offset and size, in order.
        copier: copier of the device, if the bytes go directly to a target on a device; otherwise ``None``.
    """

    request: Request
    memory: Tensor
    numbers: Tensor | None
    runs: list[tuple[int, int]]
    copier: DeviceCopier | None


def _target_of(request: Request, ring: DeviceRing, *, is_ours: bool, is_raw: bool) -> _Target:
    """Prepare to fill the target of a request: directly if possible, otherwise through new memory.

    Args:
        request: the request.
        ring: memory for data that goes to devices.
        is_ours: this package wrote the file.
        is_raw: the file is a safetensors file.
    """
    _, place, target, sizes, dtype, offsets = request
    numbers_bytes = math.prod(sizes) * dtype.itemsize
    # Values, and items of safetensors files, have no header. Other items are files in the format of torch.
    is_raw = is_raw or request.piece.offset is None
    start, item_bytes = 0, numbers_bytes if is_raw else -1
    if not is_raw and is_ours and numbers_bytes < place.length:
        start, item_bytes = item_place(sizes, dtype)
    if item_bytes != place.length:
        memory = torch.empty(place.length, dtype=torch.uint8)
        return _Target(request, memory, None, [(place.offset, place.length)], None)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]  # in numbers, not in bytes
    inner = len(sizes)  # the dimensions from ``inner`` on are requested in full
    while inner > 0 and target.shape[inner - 1] == sizes[inner - 1]:
        inner -= 1
    count = math.prod(target.shape[max(0, inner - 1) :])  # numbers of a run
    outer = itertools.product(*map(range, target.shape[: max(0, inner - 1)]))
    begin = sum(map(operator.mul, offsets, strides))
    starts = [begin + sum(map(operator.mul, at, strides)) for at in outer] if count else []
    is_short = len(starts) > 1 and count * dtype.itemsize < _LEAST_RUN_BYTES
    if is_short:
        starts, count = starts[:1], starts[-1] + count - starts[0]
    runs = [(place.offset + start + first * dtype.itemsize, count * dtype.itemsize) for first in starts]
    is_plain = type(target) is Tensor and target.layout is torch.strided and target.is_contiguous()
    is_changed = target.dtype is not dtype or target.is_conj() or target.is_neg()
    if is_plain and not (is_short or is_changed or target.is_meta):
        copier = ring.copier_of(target.untyped_storage())
        if copier is not None or target.device.type == "cpu":
            return _Target(request, target, target, runs, copier)
    memory = torch.empty(len(starts) * count, dtype=dtype)
    numbers = memory.as_strided(target.shape, strides) if is_short else memory.view(target.shape)
    return _Target(request, memory, numbers, runs, None)
