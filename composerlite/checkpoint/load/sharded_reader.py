"""Reading a sharded checkpoint: the index, the requests of a rank, and ranged reads straight into place.

A request is for a part of a stored tensor, or for a value. :func:`requests_of` makes the requests to fill a state,
:meth:`RemoteFileSystemReader.read` fulfils requests, near ones together.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import itertools
import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import torch
import xxhash
from filelock import FileLock
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from composerlite.checkpoint.format.folder_index import index_of, is_folder_index
from composerlite.checkpoint.format.sharded_index import untrusted
from composerlite.checkpoint.format.sharded_layout import chunks_at, item_bytes
from composerlite.checkpoint.format.torch_reader import (
    ByteSource,
    StoredTensor,
    Window,
    item_contents,
    predicted,
    runs_of,
    stored_tensor,
)
from composerlite.checkpoint.load.reader import validate
from composerlite.checkpoint.place.directory import INDEX, ON_ALL_NODES, PathOrUri, ShardedDirectory
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.trust.trusted import RefusedError
from composerlite.devices import DeviceCopier, DeviceRing, shared_ring
from composerlite.dist import shard_box
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError, naming
from composerlite.storage import FileDigest, ObjectStore, ParallelReader, WorkerPool, make_folder, number_of, parse_uri
from composerlite.types import Piece

__all__ = [
    "DistCPObjectStoreReader",
    "FileSystemReaderWithValidation",
    "RemoteFileSystemReader",
    "Request",
    "requests_of",
    "safe_contents",
]

log = logging.getLogger(__name__)
T = TypeVar("T")
_FETCH_SECONDS = 7200
"""Time that another rank of this machine may take to fetch a file."""


def safe_contents(data: bytes, key: str, uri: str) -> Any:
    """Load the value ``key`` of the checkpoint at ``uri`` from its bytes, without running code in the bytes.

    Raises:
        UntrustedCheckpointError: the value names a type that is not known to be safe.
        CorruptCheckpointError: the bytes are damaged.
    """
    try:
        if key.endswith(".json"):  # of a folder of another program
            return json.loads(data)
        return item_contents(data)
    except RefusedError as e:
        raise untrusted(uri, key, e) from e
    except (CorruptCheckpointError, ValueError, RecursionError) as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: {key!r} cannot be read: {e}") from e


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class Request(NamedTuple):
    """A part of a stored tensor, or a value, that a rank wants.

    Attributes:
        piece: key and offsets of the stored piece.
        target: memory for the part, of the shape of the part; ``None`` for a value.
        sizes: of the stored piece, by dimension.
        dtype: of the stored piece.
        offsets: where the part begins in the stored piece, by dimension.
    """

    piece: MetadataIndex
    target: Tensor | None = None
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    offsets: tuple[int, ...] = ()


def requests_of(metadata: Metadata, state: Mapping[str, Any], uri: str) -> list[Request]:
    """Return the requests to fill the tensors of ``state``, in place, and to read the other values of its keys.

    Args:
        metadata: index of the checkpoint.
        state: by the keys of the index; of a distributed tensor the part of this rank is filled.
        uri: of the checkpoint, for errors.

    Raises:
        IncompatibleCheckpointError: the checkpoint does not have a key, or has a tensor of another shape.
    """
    found: list[Request] = []
    for key, value in state.items():
        stored = metadata.state_dict_metadata.get(key)
        if stored is None:
            raise IncompatibleCheckpointError(f"checkpoint {uri!r} has no key {key!r}.")
        if not isinstance(stored, TensorStorageMetadata):
            found.append(Request(MetadataIndex(key)))
            continue
        if not isinstance(value, Tensor) or value.shape != stored.size:
            here = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise IncompatibleCheckpointError(
                f"checkpoint {uri!r} has {key!r} with the shape {tuple(stored.size)}, and here it is {here}."
            )
        local = value.detach()
        starts, lengths = (0,) * value.dim(), tuple(value.shape)
        if isinstance(value, DTensor):
            (starts, lengths), local = shard_box(value), value.to_local().detach()
        if not math.prod(lengths):
            continue
        for chunk in chunks_at(stored, (starts, lengths)):
            first = [max(a, b) for a, b in zip(starts, chunk.offsets, strict=True)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(starts, lengths, chunk.offsets, chunk.sizes, strict=True)]
            if all(begin < end for begin, end in zip(first, ends, strict=True)):
                target = local
                for dim, (begin, end) in enumerate(zip(first, ends, strict=True)):
                    target = target.narrow(dim, begin - starts[dim], end - begin)
                offsets = tuple(begin - at for begin, at in zip(first, chunk.offsets, strict=True))
                index, dtype = MetadataIndex(key, chunk.offsets), stored.properties.dtype
                found.append(Request(index, target, tuple(chunk.sizes), dtype, offsets))
    return found


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class RemoteFileSystemReader(StorageReader):
    """Reads a sharded checkpoint for ``torch.distributed.checkpoint.load`` from a path or a URI.

    A checkpoint with a record is verified while it is read. For a checkpoint without a record, or one that another
    program has changed, a warning is logged. Only the bytes that the plan needs are read. Before a file on this machine
    is read, the function named by ``CHECKPOINT_VALIDATION_FUNCTION`` is called with the file.

    Args:
        path: of the checkpoint's directory.
        thread_count: threads that read at the same time.
        pre_download: first copy the files that are needed to this machine.
        work_dir: folder for these copies, kept for the next load. ``None``: a temporary folder.

    Attributes:
        bytes_read: bytes of data files read so far.
        verified: numbers of the chunks that were read and verified, by the name of the data file on this machine.
        ring: memory through which data goes to devices.
        brought: a folder with files of the checkpoint that were fetched from other disks.
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
        self._folder = ShardedDirectory.of(path, threads=thread_count)
        self._work_dir = work_dir if pre_download else None
        self.bytes_read = 0
        self.ring = shared_ring
        self.brought: Path | None = None
        self._lock = threading.Lock()
        is_temporary = pre_download and work_dir is None
        self._temporary = tempfile.TemporaryDirectory(prefix="composerlite-") if is_temporary else None
        self._forget()

    def _forget(self) -> None:
        self._metadata: Metadata | None = None
        self._manifest: Manifest | None = None
        self._index_digest = ""
        self._is_raw = False
        self.verified: dict[str, set[int]] = {}

    @property
    def uri(self) -> str:
        """Path or URI of the checkpoint, for messages."""
        return self._folder.uri

    @property
    def checkpoint_id(self) -> str:
        """Path or URI of the checkpoint, as DCP names it."""
        return self._folder.uri

    @property
    def place(self) -> str:
        """Equal on all ranks that read the same files; different if nodes have a directory each."""
        node = None if self._manifest is None else self._manifest.node
        return f"{self._index_digest} on {node}: {self._folder.identity()}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again, with another checkpoint if ``checkpoint_id`` is given."""
        if checkpoint_id is not None:
            self._folder.close()
            self._folder = ShardedDirectory.of(checkpoint_id, threads=self._threads)
        self._forget()

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
            UntrustedCheckpointError: the index names a type that is not known to be safe.
        """
        if self._metadata is None:
            if (here := self._folder.path) is not None and (here / INDEX).is_file():
                validate(here / INDEX)
            try:
                data, self._manifest = self._folder.described()
            except FileNotFoundError as e:
                raise self._folder.missing() from e
            self._index_digest = xxhash.xxh3_128_hexdigest(data)
            self._metadata = index_of(data, self.uri)
            self._is_raw = is_folder_index(data)
        return self._metadata

    def version(self) -> str:
        """Return a digest of the index. Raises as :meth:`read_metadata`."""
        self.read_metadata()
        return self._index_digest

    def was_replaced(self) -> bool:
        """Return true if the checkpoint was replaced, or deleted, since the index was read."""
        try:
            index, manifest = self._folder.described()
        except (FileNotFoundError, CorruptCheckpointError):
            return bool(self._index_digest)
        before = None if self._manifest is None else self._manifest.id
        now = None if manifest is None else manifest.id
        return before != now or xxhash.xxh3_128_hexdigest(index) != self._index_digest

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
        """Read the items of ``plan`` and pass them to ``planner``. Raises as :meth:`read` does.

        Args:
            plan: items to read.
            planner: gives the target tensor of each item, and takes values.

        Returns:
            A future that is done.
        """
        stored = self.read_metadata().state_dict_metadata
        requests: list[Request] = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                requests.append(Request(item.storage_index))
                continue
            target, entry = planner.resolve_tensor(item).detach(), stored[item.storage_index.fqn]
            if tuple(target.shape) != tuple(item.lengths) or not isinstance(entry, TensorStorageMetadata):
                raise IncompatibleCheckpointError(
                    f"{item.dest_index.fqn!r}: {tuple(item.lengths)} is to go to {tuple(target.shape)}"
                )
            sizes = _chunk_sizes(entry, item.storage_index)
            offsets = tuple(item.storage_offsets)
            requests.append(Request(item.storage_index, target, sizes, entry.properties.dtype, offsets))
        values = self.read(requests)
        for item, request in zip(plan.items, requests, strict=True):
            if request.target is None:
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
            CorruptCheckpointError: the bytes are not those that were saved, or a file is gone.
            IncompatibleCheckpointError: a file is on the disk of another node, or its data were transformed.
            UntrustedCheckpointError: an item names a type that is not known to be safe.
        """
        places = self.read_metadata().storage_data
        if self._manifest is None and not self.bytes_read:
            log.warning("checkpoint %s has no record: loading it unverified", self.uri)
        items: dict[MetadataIndex, _Item] = {}
        files: dict[str, list[_Item]] = {}
        for request in requests:
            index = request.piece
            if index not in items:
                place = places.get(index)
                if place is None:
                    raise CorruptCheckpointError(f"checkpoint {self.uri!r}: {index.fqn!r} has no data.")
                if place.transform_descriptors:
                    raise IncompatibleCheckpointError(
                        f"checkpoint {self.uri!r}: {index.fqn!r} is stored with {list(place.transform_descriptors)}: "
                        "only data that are stored as they are can be read. Read it with torch.distributed.checkpoint."
                    )
                items[index] = _Item(place.offset, place.length, [])
                files.setdefault(place.relative_path, []).append(items[index])
            items[index].requests.append(request)
        values: dict[str, bytes] = {}
        with WorkerPool(max(1, min(len(files), self._threads)), name="checkpoint-load") as pool:
            share = max(1, self._threads // max(1, len(files)))
            for done in [
                pool.submit(functools.partial(self._read_file, name, wanted, share)) for name, wanted in files.items()
            ]:
                values.update(done.result())
        return values

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return true: any path or URI is valid."""
        return True

    def close(self) -> None:
        """Close connections and remove temporary files. May be called twice."""
        self._folder.close()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def __enter__(self) -> RemoteFileSystemReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_file(self, name: str, items: list[_Item], threads: int) -> dict[str, bytes]:
        """Fulfil the requests to one file; return its values by key."""
        digest: FileDigest | None = None
        if self._manifest is not None:
            path = f"{self._folder.name}/{name}"
            digest = next((record.digest for record in self._manifest.files if record.path == path), None)
            if digest is None:
                raise CorruptCheckpointError(f"checkpoint {self.uri!r}: its record does not have the file {name!r}.")
        try:
            with self._opened(name, digest, threads) as source:
                reading = _FileReading(source, self._count, self.ring, is_raw=self._is_raw, is_ours=digest is not None)
                values = reading.read(items)
                if isinstance(source, ParallelReader):
                    with self._lock:
                        self.verified.setdefault(name, set()).update(source.verified)
            return values
        except FileNotFoundError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}: its file {name!r} is gone.") from e
        except RefusedError as e:
            raise untrusted(self.uri, name, e) from e
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}, file {name!r}: {e}") from e

    def _opened(
        self, name: str, digest: FileDigest | None, threads: int
    ) -> contextlib.AbstractContextManager[ByteSource]:
        """Open a data file: in the directory, among the files fetched from other disks, or after a download."""
        here, path = self._folder.path, self._folder.at(name)
        if here is not None and self._folder.has(name):
            validate(here / name)
        elif here is not None and self.brought is not None:  # the node that has the file has validated it
            return Folder(self.brought).opened(name, digest, threads=threads)
        elif here is not None:
            nodes = {file.path: file.node for file in (() if self._manifest is None else self._manifest.files)}
            if (node := nodes.get(path)) is not None:
                raise IncompatibleCheckpointError(
                    f"checkpoint {self.uri!r}: its file {name!r} was saved to the disk of node {node} of its run, and "
                    f"is not on this one. {ON_ALL_NODES}"
                )
        folder = self._copies()
        if folder is None or here is not None:
            return self._folder.place.opened(path, digest, threads=threads)
        copy = folder / name
        make_folder(copy.parent)
        with FileLock(folder / ".lock", timeout=_FETCH_SECONDS):  # other ranks of this machine want the same files
            if not copy.exists() or (digest is not None and copy.stat().st_size != digest.size_bytes):
                self._folder.place.fetch(path, copy, digest)
        validate(copy)
        return Folder(folder).opened(name, digest, threads=threads)

    def _copies(self) -> Path | None:
        """Return the folder for copies of the files of this checkpoint, and of no other save or place."""
        if self._temporary is not None:
            return Path(self._temporary.name)
        key = f"{self.uri}\0{self._index_digest}".encode()
        return None if self._work_dir is None else Path(self._work_dir) / f"sharded-{xxhash.xxh3_128_hexdigest(key)}"

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size


def _chunk_sizes(stored: TensorStorageMetadata, index: MetadataIndex) -> tuple[int, ...]:
    """Return the sizes of the piece of a tensor that is stored as ``index``."""
    offsets = index.offset
    if offsets is None:
        if index.index is not None and index.index < len(stored.chunks):
            return tuple(stored.chunks[index.index].sizes)
    else:
        for chunk in chunks_at(stored, (tuple(offsets), (1,) * len(offsets))):
            if chunk.offsets == offsets:
                return tuple(chunk.sizes)
    raise CorruptCheckpointError(f"{index.fqn!r} has no part at {index.offset}")


@final
class FileSystemReaderWithValidation(RemoteFileSystemReader):
    """Reads a sharded checkpoint from a folder, verified by the record, if there is one.

    The function that the environment variable ``CHECKPOINT_VALIDATION_FUNCTION`` names is called with each file first.

    Args:
        path: of the checkpoint's directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)


@final
class DistCPObjectStoreReader(RemoteFileSystemReader):
    """Reads a sharded checkpoint from an object store, after a download of the files that this rank needs.

    The ranks of one machine download each file once. The files stay, for this checkpoint only.

    Args:
        source_path: the directory's name in the store.
        destination_path: a folder of this machine for the files.
        object_store: is not closed.
        device_mesh: accepted as in Composer; not needed.
    """

    def __init__(
        self, source_path: str, destination_path: str, object_store: ObjectStore, device_mesh: Any = None
    ) -> None:
        super().__init__(
            ShardedDirectory.in_store(object_store, source_path), pre_download=True, work_dir=destination_path
        )


# ── items of one file ────────────────────────────────────────────────────────────────────────────────────────────────
_SMALL_BYTES = 256 << 10
"""An item of another program up to this size is read as a whole."""
_PROBE_BYTES = 4096
"""Bytes at the beginning and the end of a larger item that say where the numbers are."""
_LEAST_RUN_BYTES = 64 << 10
"""If the runs of a box are shorter, the bytes between the runs are read, too."""
_BATCH_BYTES = 128 << 20
_SLOT_BYTES = 16 << 20
_SLOTS = 2  # one is filled from the file, the other is copied to the device


@final
class _Item(NamedTuple):
    """A piece in a file, and the requests for the piece."""

    offset: int
    size_bytes: int
    requests: list[Request]


@final
class _Target(NamedTuple):
    """Place of the numbers of a request in the file, and their destination.

    Attributes:
        request: the part.
        shape: of the stored piece.
        runs: offset in the file and bytes of each run of numbers, in order.
        scratch: memory that is filled first, and copied to the target; ``None``: the target itself is filled.
        copier: copies to the device of the target, if there is one.
    """

    request: Request
    shape: tuple[int, ...]
    runs: list[tuple[int, int]]
    scratch: Tensor | None
    copier: DeviceCopier | None


@final
class _FileReading:
    """Reads items of one file.

    Args:
        source: the file.
        progress: is called with each number of bytes read.
        ring: memory for data that goes to devices.
        is_raw: an item is the numbers alone; otherwise a ``.pt`` file.
        is_ours: this package wrote the file, so that the place of numbers in an item is known.
    """

    def __init__(
        self,
        source: ByteSource,
        progress: Callable[[int], object],
        ring: DeviceRing,
        *,
        is_raw: bool,
        is_ours: bool,
    ) -> None:
        self._source = source
        self._progress = progress
        self._ring = ring
        self._is_raw = is_raw
        self._is_ours = is_ours

    def read(self, items: Iterable[_Item]) -> dict[str, bytes]:
        """Fill the targets of all requests; return the bytes of the values by key.

        Raises:
            CorruptCheckpointError: the bytes are not those that were saved, or no tensors of that shape.
            RefusedError: an item names a type that is not known to be safe.
        """
        values: dict[str, bytes] = {}
        for batch in _batches(sorted(items, key=lambda item: item.offset), _BATCH_BYTES, lambda item: item.size_bytes):
            located = self._located(batch)
            targets = [
                self._target(request, stored, item.offset)
                for item in batch
                if (stored := located.get(item.offset)) is not None
                for request in item.requests
            ]
            whole = [(item, bytearray(item.size_bytes)) for item in batch if item.offset not in located]
            pieces: list[Piece] = [(item.offset, _address(data), len(data)) for item, data in whole]
            for target in targets:
                if target.copier is None and target.request.target is not None:
                    memory = target.request.target if target.scratch is None else target.scratch
                    address = memory.data_ptr()
                    for offset, size in target.runs:
                        pieces.append((offset, address, size))
                        address += size
            if pieces:
                self._source.read_into(pieces, self._progress)
            for item, data in whole:
                values.update(_use_whole(item, data))
            for target in targets:
                _copy_scratch(target)
            self._read_to_devices([target for target in targets if target.copier is not None])
        return values

    def _located(self, items: Sequence[_Item]) -> dict[int, StoredTensor]:
        """Find the numbers of tensors, by the offset of the item; other items are read as a whole."""
        found: dict[int, StoredTensor] = {}
        probes: list[tuple[_Item, list[tuple[int, bytearray]]]] = []
        for item in items:
            wanted = item.requests[0]
            if wanted.target is None or wanted.dtype is None:
                continue
            if self._is_raw:
                found[item.offset] = StoredTensor(wanted.sizes, wanted.dtype, 0)
            elif self._is_ours and _is_as_predicted(wanted, item.size_bytes):
                found[item.offset] = predicted(wanted.sizes, wanted.dtype)[0]
            elif item.size_bytes > _SMALL_BYTES:
                starts = (0, item.size_bytes - _PROBE_BYTES)
                probes.append((item, [(start, bytearray(_PROBE_BYTES)) for start in starts]))
        if probes:
            pieces = [
                (item.offset + start, _address(data), len(data)) for item, parts in probes for start, data in parts
            ]
            self._source.read_into(pieces, self._progress)
        for item, parts in probes:
            stored = stored_tensor(Window(self._source, item.offset, item.size_bytes, parts))
            wanted = item.requests[0]
            if stored is not None and (stored.shape, stored.dtype) == (wanted.sizes, wanted.dtype):
                found[item.offset] = stored
        return found

    def _target(self, request: Request, stored: StoredTensor, offset: int) -> _Target:
        """Prepare to fill the target of a request: directly if possible, else through memory of our own."""
        target, width = request.target, stored.dtype.itemsize
        assert target is not None
        runs = list(runs_of(stored.shape, request.offsets, target.shape))
        count = sum(count for _, count in runs)
        is_short = len(runs) > 1 and runs[0][1] * width < _LEAST_RUN_BYTES
        if is_short:
            runs = [(runs[0][0], runs[-1][0] + runs[-1][1] - runs[0][0])]
        copier = None
        is_direct = not is_short and _takes_bytes(target, stored.dtype, count)
        if is_direct:
            copier = self._ring.copier_of(target.untyped_storage())
            is_direct = copier is not None or target.device.type == "cpu"
        scratch = None if is_direct else torch.empty(sum(n for _, n in runs), dtype=stored.dtype)
        in_file = [(offset + stored.start + start * width, n * width) for start, n in runs]
        return _Target(request, stored.shape, in_file, scratch, copier)

    def _read_to_devices(self, targets: Sequence[_Target]) -> None:
        """Fill targets on a device through slots of the ring: a slot is filled while another is copied."""
        if not targets:
            return
        cuts: list[tuple[_Target, int, int, int]] = []  # target, offset in the file, offset in the target, bytes
        for target in targets:
            done = 0
            for offset, size in target.runs:
                for start in range(0, size, _SLOT_BYTES):
                    cut = min(_SLOT_BYTES, size - start)
                    cuts.append((target, offset + start, done, cut))
                    done += cut
        groups = _batches(cuts, _SLOT_BYTES, lambda cut: cut[3])
        first = targets[0].request.target
        assert first is not None
        with self._ring.slots(_SLOT_BYTES, first.device, _SLOTS) as slots:
            for group in groups:
                slot = slots.next()
                ends = list(itertools.accumulate((size for *_, size in group), initial=0))
                pieces = [
                    (offset, slot.data_ptr() + at, size) for (_, offset, _, size), at in zip(group, ends, strict=False)
                ]
                self._source.read_into(pieces, self._progress)
                for (target, _, start, size), at in zip(group, ends, strict=False):
                    tensor, copier = target.request.target, target.copier
                    assert tensor is not None
                    assert copier is not None
                    begin = int(tensor.storage_offset()) * tensor.itemsize + start
                    slots.is_copied(copier, copier.load(slot[at : at + size], tensor.untyped_storage(), begin))


def _batches(items: Sequence[T], most_bytes: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield ``items`` in batches of at most ``most_bytes``, or of one larger item."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and total + size > most_bytes:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def _is_as_predicted(wanted: Request, size_bytes: int) -> bool:
    """Return true if an item of this size is a tensor as this package writes it."""
    assert wanted.dtype is not None
    return math.prod(wanted.sizes) * wanted.dtype.itemsize < size_bytes == item_bytes(wanted.sizes, wanted.dtype)


def _address(data: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data))


def _use_whole(item: _Item, data: bytearray) -> dict[str, bytes]:
    """Copy the parts of a tensor to their targets, or return the bytes of a value by its key."""
    key = item.requests[0].piece.fqn
    if item.requests[0].target is None:
        return {key: bytes(data)}
    contents: Any = item_contents(data)
    if not isinstance(contents, Tensor) or tuple(contents.shape) != item.requests[0].sizes:
        raise CorruptCheckpointError(f"{key!r} is not the tensor that the index says")
    for request in item.requests:
        part, target = contents, request.target
        assert target is not None
        for dim, (start, length) in enumerate(zip(request.offsets, target.shape, strict=True)):
            part = part.narrow(dim, start, length)
        target.copy_(part)
    return {}


def _copy_scratch(target: _Target) -> None:
    tensor, scratch = target.request.target, target.scratch
    if tensor is None or scratch is None or not scratch.numel():
        return
    if tensor.numel() == scratch.numel():
        tensor.copy_(scratch.view(tensor.shape))
    else:  # with numbers between the runs
        strides = [math.prod(target.shape[dim + 1 :]) for dim in range(tensor.dim())]
        tensor.copy_(scratch.as_strided(tensor.shape, strides))


def _takes_bytes(target: Tensor, dtype: torch.dtype, count: int) -> bool:
    """Return true if ``target`` is a plain tensor of ``count`` numbers in a row."""
    return (
        type(target) is Tensor
        and target.device.type != "meta"
        and target.dtype is dtype
        and target.layout is torch.strided
        and target.is_contiguous()
        and target.numel() == count
        and not (target.is_conj() or target.is_neg())
    )
