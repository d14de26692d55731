"""Reading files of a sharded checkpoint: only the bytes that are wanted, near ones together, straight into place."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import xxhash
from filelock import FileLock
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from composerlite.checkpoint.format.folder_index import index_of
from composerlite.checkpoint.format.sharded_index import untrusted
from composerlite.checkpoint.format.sharded_layout import chunks_at
from composerlite.checkpoint.format.torch_reader import (
    ByteSource,
    StoredTensor,
    Window,
    item_contents,
    predicted,
    runs_of,
    stored_tensor,
)
from composerlite.checkpoint.format.weight_files import is_folder_index
from composerlite.checkpoint.load.reader import validate
from composerlite.checkpoint.place.directory import INDEX, ON_ALL_NODES, PathOrUri, ShardedDirectory
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.trust.trusted import RefusedError
from composerlite.devices import DeviceCopier, DeviceRing, RingSlots, shared_ring
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError, naming
from composerlite.storage import FileDigest, ObjectStore, ParallelReader, WorkerPool, make_folder, number_of, parse_uri
from composerlite.types import Piece

__all__ = [
    "DistCPObjectStoreReader",
    "FileSystemReaderWithValidation",
    "RemoteFileSystemReader",
    "safe_contents",
]

log = logging.getLogger(__name__)
_FETCH_SECONDS = 7200
"""Time that another rank of this machine may take to fetch a file."""


def safe_contents(data: bytes, key: str, uri: str) -> Any:
    try:
        if key.endswith(".json"):  # of a folder of another program
            return json.loads(data)
        return item_contents(data)
    except RefusedError as e:
        raise untrusted(uri, key, e) from e
    except (CorruptCheckpointError, ValueError, RecursionError) as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: {key!r} cannot be read: {e}") from e


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class RemoteFileSystemReader(StorageReader):
    """Reads a sharded checkpoint for ``torch.distributed.checkpoint.load`` from a path or a URI.

    What has a commit record is verified as it is read; of what has none, or was written anew by another program, a
    warning says so. Only the bytes that the plan needs are read. What lies on this machine the function that
    ``CHECKPOINT_VALIDATION_FUNCTION`` names sees first.

    Args:
        path: of the checkpoint's directory.
        thread_count: threads that read at the same time.
        pre_download: first bring the files that are needed to this machine.
        work_dir: where to; they stay there for the next time. ``None``: to a temporary folder.

    Attributes:
        bytes_read: of data files, so far.
        verified: numbers of the chunks that were read and verified, by the name of the data file on this machine.
        ring: what goes to devices passes through it.
        brought: a folder with files of the checkpoint that are on other disks, to be read from.
        warns: log a warning where the checkpoint cannot be verified.
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
        self._fetching = pre_download
        self._work_dir = work_dir
        self.bytes_read = 0
        self.ring = shared_ring
        self.brought: Path | None = None
        self.warns = True
        self._lock, self._fetch_lock = threading.Lock(), threading.Lock()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._forget()

    def _forget(self) -> None:
        self._metadata: Metadata | None = None
        self._manifest: Manifest | None = None
        self._found: Manifest | None = None
        self._index_digest = ""
        self._is_raw = False
        self.verified: dict[str, set[int]] = {}

    @property
    def uri(self) -> str:
        """The place of the checkpoint, for messages."""
        return self._folder.uri

    @property
    def checkpoint_id(self) -> str:
        """The same, as DCP calls it."""
        return self._folder.uri

    @property
    def place(self) -> str:
        """The same on all ranks that read the same files; another where nodes have one directory each."""
        node = None if self._manifest is None else self._manifest.node
        return f"{self._index_digest} on {node}: {self._folder.identity()}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again, with another checkpoint if one is given."""
        if checkpoint_id is not None:
            self._folder.close()
            self._folder = ShardedDirectory.of(checkpoint_id, threads=self._threads)
        self._forget()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read once.

        Args:
            *args: ignored; torch passes them.
            **kwargs: the same.

        Returns:
            Index of the checkpoint, read once.

        Raises:
            CheckpointNotFoundError: there is no sharded checkpoint.
            CorruptCheckpointError: it is damaged.
            UntrustedCheckpointError: it names what is not known to be safe.
        """
        if self._metadata is None:
            if (here := self._folder.path) is not None and (here / INDEX).is_file():
                validate(here / INDEX)
            try:
                data, self._found = self._folder.described()
            except FileNotFoundError as e:
                raise self._folder.missing() from e
            self._manifest = self._found
            self._index_digest = xxhash.xxh3_128_hexdigest(data)
            if self._manifest is None:
                self._warn("checkpoint %s has no record: loading it unverified")
            self._metadata = index_of(data, self.uri)
            self._is_raw = is_folder_index(data)
        return self._metadata

    def _warn(self, message: str) -> None:
        if self.warns:
            log.warning(message, self.uri)

    def version(self) -> str:
        """Digest that tells this checkpoint from another in its place. Raises as :meth:`read_metadata`."""
        self.read_metadata()
        return self._index_digest

    def was_replaced(self) -> bool:
        """Return true if the checkpoint was replaced, or deleted, since it was opened."""
        try:
            index, manifest = self._folder.described()
        except (FileNotFoundError, CorruptCheckpointError):
            return bool(self._index_digest)
        before = None if self._found is None else self._found.id
        now = None if manifest is None else manifest.id
        return before != now or xxhash.xxh3_128_hexdigest(index) != self._index_digest

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: this reader has its own index.

        Args:
            metadata, is_coordinator: ignored; torch passes them.
            *args: the same.
            **kwargs: the same.
        """

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of ``plan`` and pass them to ``planner``. Raises as :meth:`read_metadata` does.

        Args:
            plan: items to read.
            planner: gives the target tensor of each item, and takes values that are no tensors.

        Returns:
            A future that is done.
        """
        files = self._items(plan, planner)
        with WorkerPool(max(1, min(len(files), self._threads)), name="checkpoint-load") as pool:
            share = max(1, self._threads // max(1, len(files)))
            for done in [
                pool.submit(functools.partial(self._read_file, name, items, share)) for name, items in files.items()
            ]:
                done.result()
        future: Future[None] = Future()
        future.set_result(None)  # pyright: ignore[reportArgumentType]
        return future

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

    def _items(self, plan: LoadPlan, planner: LoadPlanner) -> dict[str, list[Item]]:
        """Collect the items to read of each file."""
        metadata = self.read_metadata()
        items: dict[MetadataIndex, Item] = {}
        files: dict[str, list[Item]] = {}
        for wanted in plan.items:
            index = wanted.storage_index
            item = items.get(index)
            if item is None:
                place = metadata.storage_data.get(index)
                if place is None:
                    raise CorruptCheckpointError(f"checkpoint {self.uri!r}: {index.fqn!r} has no data.")
                if place.transform_descriptors:
                    raise IncompatibleCheckpointError(
                        f"checkpoint {self.uri!r}: {index.fqn!r} is stored with {list(place.transform_descriptors)}: "
                        "only data that are stored as they are can be read. Read it with torch.distributed.checkpoint."
                    )
                item = items[index] = Item(index.fqn, place.offset, place.length, is_raw=self._is_raw)
                files.setdefault(place.relative_path, []).append(item)
            if wanted.type is LoadItemType.BYTE_IO:
                item.take_bytes.append(self._taker(planner, wanted))
            else:
                stored = metadata.state_dict_metadata[index.fqn]
                item.shape = _chunk_shape(stored, index)
                item.dtype = stored.properties.dtype  # type: ignore[union-attr]
                item.boxes.append(Box(planner, wanted, self._lock))
        return files

    def _taker(self, planner: LoadPlanner, wanted: ReadItem) -> Callable[[bytes], object]:
        def take(data: bytes) -> None:
            safe_contents(data, wanted.storage_index.fqn, self.uri)  # DCP's own planner would run what it names
            with self._lock:
                planner.load_bytes(wanted, io.BytesIO(data))

        return take

    def _read_file(self, name: str, items: list[Item], threads: int) -> None:
        digest = self._digest(name)
        if self._manifest is not None and digest is None:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}: its record does not have the file {name!r}.")
        try:
            with self._opened(name, digest, threads) as source:
                read_items(source, items, ours=self._manifest is not None, progress=self._count, ring=self.ring)
                if isinstance(source, ParallelReader):
                    with self._lock:
                        self.verified.setdefault(name, set()).update(source.verified)
        except FileNotFoundError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}: its file {name!r} is gone.") from e
        except RefusedError as e:
            raise untrusted(self.uri, name, e) from e
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}, file {name!r}: {e}") from e

    def _opened(
        self, name: str, digest: FileDigest | None, threads: int
    ) -> contextlib.AbstractContextManager[ByteSource]:
        here = self._folder.path
        if here is not None and self._folder.has(name):  # else its node has seen to that
            validate(here / name)
        place, path = self._folder.place, self._folder.at(name)
        if here is not None and not self._folder.has(name):
            if self.brought is not None:
                return Folder(self.brought).opened(name, digest, threads=threads)
            self._refuse_elsewhere(name)
        if not self._fetching or here is not None:
            return place.opened(path, digest, threads=threads)
        folder = self._cache()
        copy = folder / name
        make_folder(copy.parent)
        # Other ranks of this machine want the same files.
        with self._fetch_lock, FileLock(folder / ".lock", timeout=_FETCH_SECONDS):
            if not copy.exists() or (digest is not None and copy.stat().st_size != digest.size_bytes):
                place.fetch(path, copy, digest)
        validate(copy)
        return Folder(folder).opened(name, digest, threads=threads)

    def _refuse_elsewhere(self, name: str) -> None:
        """Raise if the missing file ``name`` was saved to the disk of another node."""
        nodes = {file.path: file.node for file in (() if self._manifest is None else self._manifest.files)}
        if (node := nodes.get(self._folder.at(name))) is not None:
            raise IncompatibleCheckpointError(
                f"checkpoint {self.uri!r}: its file {name!r} was saved to the disk of node {node} of its run, and is "
                f"not on this one. {ON_ALL_NODES}"
            )

    def _cache(self) -> Path:
        """A folder for the files of this checkpoint alone: those of another save, or place, have another."""
        if self._work_dir is None:
            self._temporary = self._temporary or tempfile.TemporaryDirectory(prefix="composerlite-")
            return Path(self._temporary.name)
        key = f"{self.uri}\0{self._index_digest}".encode()
        return Path(self._work_dir) / f"sharded-{xxhash.xxh3_128_hexdigest(key)}"

    def _digest(self, name: str) -> FileDigest | None:
        if self._manifest is None:
            return None
        path = f"{self._folder.name}/{name}"
        return next((record.digest for record in self._manifest.files if record.path == path), None)

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size


def _chunk_shape(stored: Any, index: MetadataIndex) -> tuple[int, ...]:
    """The shape of the part of a tensor that is stored as ``index``."""
    offsets = index.offset
    chunks = stored.chunks if offsets is None else chunks_at(stored, (tuple(offsets), (1,) * len(offsets)))
    if index.index is not None and index.index < len(chunks):
        chunk = chunks[index.index]
        if offsets is None or chunk.offsets == offsets:
            return tuple(chunk.sizes)
    for chunk in chunks:
        if chunk.offsets == offsets:
            return tuple(chunk.sizes)
    raise CorruptCheckpointError(f"{index.fqn!r} has no part at {index.offset}")


@final
class FileSystemReaderWithValidation(RemoteFileSystemReader):
    """Reads a sharded checkpoint from a folder, verified by its commit record, if it has one.

    Each file is first shown to the function that the environment variable ``CHECKPOINT_VALIDATION_FUNCTION`` names.

    Args:
        path: of the checkpoint's directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)


@final
class DistCPObjectStoreReader(RemoteFileSystemReader):
    """Reads a sharded checkpoint from an object store; brings the files that this rank needs to this machine first.

    The ranks of one machine bring each file once. Files stay, for this very checkpoint only.

    Args:
        source_path: the directory's name in the store.
        destination_path: a folder of this machine for the files.
        object_store: which stays open.
        device_mesh: as Composer has it; not needed.
    """

    def __init__(
        self, source_path: str, destination_path: str, object_store: ObjectStore, device_mesh: Any = None
    ) -> None:
        super().__init__(
            ShardedDirectory.in_store(object_store, source_path), pre_download=True, work_dir=destination_path
        )


# ── items of one file ────────────────────────────────────────────────────────────────────────────────────────────────
_SMALL_BYTES = 256 << 10
"""An item up to this size is read as a whole."""
_PROBE_BYTES = 4096
_LEAST_RUN_BYTES = 64 << 10
_BATCH_BYTES = 128 << 20
_SLOT_BYTES = 16 << 20
_SLOTS = 2  # one is read from the file, the other is copied to the device


@final
class Box:
    """A part of a stored tensor that one item of a plan wants, and where it goes."""

    def __init__(self, planner: LoadPlanner, wanted: ReadItem, lock: threading.Lock) -> None:
        self._planner = planner
        self._wanted = wanted
        self._lock = lock
        self.offsets: Sequence[int] = wanted.storage_offsets
        self.lengths: Sequence[int] = wanted.lengths

    def target(self) -> Tensor:
        """The tensor, of the shape of the box, that it goes to."""
        with self._lock:
            target = self._planner.resolve_tensor(self._wanted).detach()
        if tuple(target.shape) != tuple(self.lengths):
            raise IncompatibleCheckpointError(
                f"{self._wanted.dest_index.fqn!r}: {tuple(self.lengths)} is to go to {tuple(target.shape)}"
            )
        return target

    def done(self, target: Tensor) -> None:
        """Hand the target over, filled."""
        with self._lock:
            self._planner.commit_tensor(self._wanted, target)


@dataclass
class Item:
    """One item of a file, and what is wanted of it.

    Attributes:
        name: of it, for messages.
        offset: where it begins in the file.
        size_bytes: of it.
        shape: of the tensor in it; ``None``: it holds something else.
        dtype: of the tensor.
        boxes: what is wanted of the tensor.
        take_bytes: takes the bytes of what is no tensor.
        is_raw: a tensor is its numbers, with no frame around them.
    """

    name: str
    offset: int
    size_bytes: int
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    boxes: list[Box] = field(default_factory=list[Box])
    take_bytes: list[Callable[[bytes], object]] = field(default_factory=list[Callable[[bytes], object]])
    is_raw: bool = False


def read_items(
    source: ByteSource,
    items: Iterable[Item],
    *,
    ours: bool,
    progress: Callable[[int], object] = int,
    ring: DeviceRing = shared_ring,
) -> None:
    """Read the requested parts of ``items`` of one file. What goes to a device passes through ``ring``.

    Args:
        source: the file.
        items: in any order.
        ours: whether this package has written the file: then it is known where numbers lie before a byte is read.
        progress: is called with each number of bytes read.

    Raises:
        CorruptCheckpointError: the bytes are not those that were saved, or no tensors of that shape.
        RefusedError: an item names something that is not known to be safe.
    """
    with contextlib.closing(_ToDevices(ring)) as to_devices:
        for batch in _batches(sorted(items, key=lambda item: item.offset)):
            readings = [_Reading(source, item, ours, to_devices) for item in batch]
            while readings:
                to_devices.begin()
                pieces = [piece for reading in readings for piece in reading.wanted()]
                if pieces:
                    source.read_into(pieces, progress)
                readings = [reading for reading in readings if not reading.advance()]


@final
class _ToDevices:
    """Slots for numbers on their way to devices, one at a time, which is shared by all that is read together.

    Args:
        ring: has them, from the first that is needed on.
    """

    def __init__(self, ring: DeviceRing) -> None:
        self.ring = ring
        self._stack = contextlib.ExitStack()
        self._slots: RingSlots | None = None
        self._slot: Tensor | None = None
        self._used = 0

    def begin(self) -> None:
        """Begin another slot when one is asked for: what was taken is copied."""
        self._slot = None

    def take(self, size: int, device: torch.device) -> Tensor:
        """Return up to ``size`` bytes of the slot, or none."""
        if self._slots is None:
            self._slots = self._stack.enter_context(self.ring.slots(_SLOT_BYTES, device, _SLOTS))
        if self._slot is None:
            self._slot, self._used = self._slots.next(), 0
        part = self._slot[self._used : self._used + size]
        self._used += part.numel()
        return part

    def copy(self, copier: DeviceCopier, part: Tensor, target: Tensor, start: int) -> None:
        """Queue a copy of ``part``, which is filled, to its place in ``target``."""
        assert self._slots is not None
        first = int(target.storage_offset()) * target.itemsize
        self._slots.is_copied(copier, copier.load(part, target.untyped_storage(), first + start))

    def close(self) -> None:
        """Wait until all is copied."""
        self._stack.close()


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Batches of as many items as the memory for them takes, which most large ones do not need."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.size_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@final
class _Buffer:
    """A part of an item, read into a buffer of our own."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.data = bytearray(size)

    def piece(self, offset: int) -> Piece:
        address = ctypes.addressof((ctypes.c_char * len(self.data)).from_buffer(self.data))
        return offset + self.start, address, len(self.data)


@final
class _Reading:
    """One item on its way: what is to be read next, until all is there.

    An item of ours is read at once, its frame beside its numbers. A foreign one first shows its beginning and its end.
    What does not hold what was expected, or is of a rarer kind, is read as a whole.
    """

    def __init__(self, source: ByteSource, item: Item, ours: bool, to_devices: _ToDevices) -> None:
        self._source = source
        self._to_devices = to_devices
        self._item = item
        self._whole = item.shape is None or item.size_bytes <= _SMALL_BYTES
        self._frame: list[_Buffer] = []
        self._expected: StoredTensor | None = None
        self._filled: list[_Filled] = []
        if item.is_raw and item.shape is not None and item.dtype is not None:
            self._whole = False
            self._fill(StoredTensor(item.shape, item.dtype, 0))
        elif self._whole:
            self._frame = [_Buffer(0, item.size_bytes)]
        elif ours and item.shape is not None and item.dtype is not None:
            self._expect(*predicted(item.shape, item.dtype))
        else:
            self._frame = [_Buffer(0, _PROBE_BYTES), _Buffer(item.size_bytes - _PROBE_BYTES, _PROBE_BYTES)]

    def _expect(self, stored: StoredTensor, end: int) -> None:
        size = self._item.size_bytes
        if not stored.start < end < size or size - end > _SMALL_BYTES:
            self._whole, self._frame = True, [_Buffer(0, size)]
            return
        self._frame = [_Buffer(0, stored.start), _Buffer(end, size - end)]
        self._fill(stored)

    def _fill(self, stored: StoredTensor) -> None:
        self._expected = stored
        self._filled = [_Filled(box, stored, self._to_devices) for box in self._item.boxes]

    def wanted(self) -> Iterator[Piece]:
        """Yield the pieces to read before :meth:`advance` is called."""
        offset = self._item.offset
        for part in self._frame:
            yield part.piece(offset)
        for filled in self._filled:
            for start, address, size in filled.pieces():
                yield offset + start, address, size

    def advance(self) -> bool:
        """Use the pieces that were read; return true when the item is complete."""
        if self._whole:
            self._use_whole(self._frame[0].data)
            return True
        if self._frame:
            parts = [(part.start, part.data) for part in self._frame]
            found = stored_tensor(Window(self._source, self._item.offset, self._item.size_bytes, parts))
            self._frame = []
            if found is None or (found.shape, found.dtype) != (self._item.shape, self._item.dtype):
                self._filled, self._whole, self._frame = [], True, [_Buffer(0, self._item.size_bytes)]
                return False
            if found != self._expected:
                self._fill(found)
                return False
        self._filled = [filled for filled in self._filled if not filled.advance()]
        return not self._filled

    def _use_whole(self, data: bytearray) -> None:
        for take in self._item.take_bytes:
            take(bytes(data))
        if not self._item.boxes:
            return
        contents: Any = item_contents(data)
        if not isinstance(contents, Tensor) or tuple(contents.shape) != self._item.shape:
            raise CorruptCheckpointError(f"{self._item.name!r} is not the tensor that the index says")
        for box in self._item.boxes:
            part = contents
            for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = box.target()
            target.copy_(part)
            box.done(target)


@final
class _Filled:
    """A box and the memory that its numbers are read to: the target's own where that can be; a slot, for a device.

    Args:
        box: what is wanted. stored: of what.
        to_devices: has the slots.
    """

    def __init__(self, box: Box, stored: StoredTensor, to_devices: _ToDevices) -> None:
        self._box = box
        self._stored = stored
        self._target = box.target()
        item_bytes = stored.dtype.itemsize
        self._runs = list(runs_of(stored.shape, box.offsets, box.lengths))
        count = sum(count for _, count in self._runs)
        self._span = (self._runs[0][0], self._runs[-1][0] + self._runs[-1][1]) if self._runs else (0, 0)
        short = len(self._runs) > 1 and self._runs[0][1] * item_bytes < _LEAST_RUN_BYTES
        if short:  # it is quicker to read over what lies between
            self._runs = [(self._span[0], self._span[1] - self._span[0])]
        direct = not short and _takes_bytes(self._target, stored.dtype, count)
        self._to_devices = to_devices
        self._copier = to_devices.ring.copier_of(self._target.untyped_storage()) if direct else None
        self._done = 0  # bytes on their way to the device
        self._part: Tensor | None = None
        direct = direct and (self._copier is not None or self._target.device.type == "cpu")
        self._scratch = None if direct else torch.empty(sum(n for _, n in self._runs), dtype=stored.dtype)

    def pieces(self) -> Iterator[Piece]:
        item_bytes = self._stored.dtype.itemsize
        if self._copier is not None:
            yield from self._next_pieces(sum(count for _, count in self._runs) * item_bytes)
            return
        address = (self._target if self._scratch is None else self._scratch).data_ptr()
        for start, count in self._runs:
            yield self._stored.start + start * item_bytes, address, count * item_bytes
            address += count * item_bytes

    def _next_pieces(self, size: int) -> Iterator[Piece]:
        """Yield the next pieces to read to a slot, as far as that has room."""
        self._part = self._to_devices.take(size - self._done, self._target.device)
        item_bytes, address = self._stored.dtype.itemsize, self._part.data_ptr()
        skipped, left = self._done, self._part.numel()
        for start, count in self._runs:
            length = count * item_bytes
            begin = min(skipped, length)
            take = min(length - begin, left)
            if take:
                yield self._stored.start + start * item_bytes + begin, address, take
            skipped, left, address = skipped - begin, left - take, address + take

    def advance(self) -> bool:
        """Copy the bytes that were read; return true if all were."""
        part, self._part = self._part, None
        if self._copier is not None and part is not None:
            if part.numel():
                self._to_devices.copy(self._copier, part, self._target, self._done)
            self._done += part.numel()
            if self._done < self._target.numel() * self._target.itemsize:
                return False
        self._end()
        return True

    def _end(self) -> None:
        if self._scratch is not None and self._runs:
            lengths = list(self._box.lengths)
            if math.prod(lengths) == self._scratch.numel():
                box = self._scratch.view(lengths)
            else:
                strides = [math.prod(self._stored.shape[dim + 1 :]) for dim in range(len(lengths))]
                box = self._scratch.as_strided(lengths, strides)
            self._target.copy_(box)
        self._box.done(self._target)


def _takes_bytes(target: Tensor, dtype: torch.dtype, count: int) -> bool:
    return (
        type(target) is Tensor
        and target.device.type != "meta"
        and target.dtype is dtype
        and target.layout is torch.strided
        and target.is_contiguous()
        and target.numel() == count
        and not (target.is_conj() or target.is_neg())
    )
