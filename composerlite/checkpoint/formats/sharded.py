"""Sharded checkpoints: directories that plain ``torch.distributed.checkpoint`` (DCP) reads and writes.

The only module of this package that touches ``torch.distributed``. What ranks tell each other while they save and load
goes through :class:`_Ranks`, and nowhere else.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import heapq
import io
import logging
import math
import os
import pickle
import platform
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar, cast, final

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper  # pyright: ignore[reportPrivateUsage] - see _Ranks
from torch.futures import Future
from torch.optim import Optimizer

from composerlite.checkpoint.formats.directory import INDEX, CheckpointFolder, Claim, LocalFolder, PathOrUri, folder_of
from composerlite.checkpoint.formats.sharded_reading import Item, read_items
from composerlite.checkpoint.formats.stored_item import item_contents
from composerlite.checkpoint.formats.torch_file import TorchImage
from composerlite.checkpoint.formats.torch_reader import ByteSource
from composerlite.checkpoint.manifest import Manifest
from composerlite.checkpoint.trusted import RefusedError
from composerlite.checkpoint.unpickler import RestrictedUnpickler
from composerlite.errors import (
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)
from composerlite.storage import FileDigest, Sink, make_folder
from composerlite.types import StateDict

__all__ = [
    "BytesStorageMetadata",
    "Metadata",
    "RemoteFileSystemReader",
    "RemoteFileSystemWriter",
    "TensorStorageMetadata",
    "copied",
    "flat",
    "is_distributed",
    "key_path",
    "load",
    "load_flat",
    "model_state",
    "optimizer_state",
    "save",
    "set_model_state",
    "set_optimizer_state",
]

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_StorageInfo: Any = filesystem._StorageInfo  # pyright: ignore[reportPrivateUsage] - the class that the format has for it
_ITEM_FRAME_BYTES = 16 << 10
_LEAST_FILE_BYTES = 64 << 20
_INDEX_TYPES: dict[str, type] = {
    **{
        f"torch.distributed.checkpoint.metadata.{kind.__name__}": kind
        for kind in (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
            dcp_metadata._MEM_FORMAT_ENCODING,  # pyright: ignore[reportPrivateUsage]
        )
    },
    "torch.distributed.checkpoint.filesystem._StorageInfo": _StorageInfo,
    "olmo_core.distributed.checkpoint.filesystem._StorageInfo": _StorageInfo,
}


# ── between ranks ────────────────────────────────────────────────────────────────────────────────────────────────────
def is_distributed() -> bool:
    """Whether this process is one of several that work together."""
    return dist.is_available() and dist.is_initialized()


@final
class _Ranks:
    """The ranks that save or load together; without ``torch.distributed`` this process alone.

    Each method is called by all of them. What one raises all raise. A seam: the collectives are torch's, on ``group``.
    """

    def __init__(self, group: Any) -> None:
        self._wrapper = _DistWrapper(group, is_distributed(), 0)
        self.rank: int = self._wrapper.rank
        self.count: int = self._wrapper.get_world_size()
        self.is_first: bool = self._wrapper.is_coordinator

    def deal(self, step: str, each: Callable[[], T], first: Callable[[list[T]], list[R]]) -> R:
        """What ``first`` makes for this rank, on the first one, of what ``each`` gave on every rank."""
        return self._plainly(lambda: self._wrapper.reduce_scatter(step, each, first))

    def gather(self, step: str, each: Callable[[], T], first: Callable[[list[T]], R]) -> R:
        """The same for all ranks."""
        return self._plainly(lambda: self._wrapper.all_reduce(step, each, first))

    def _plainly(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except CheckpointException as e:
            rank, (error, _) = min(e.failures.items())
            if self.count > 1:
                error.add_note(f"on rank {rank}; {len(e.failures)} of {self.count} ranks failed")
        raise error


def save(
    folder: CheckpointFolder, state: StateDict, *, group: Any = None, overwrite: bool, threads: int | None = None
) -> None:
    """Save ``state`` to ``folder``, together with the other ranks of ``group``. It is there whole or not at all."""
    ranks = _Ranks(group)
    writer = RemoteFileSystemWriter(folder, thread_count=threads, overwrite=overwrite)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    found: list[Metadata] = []

    def each() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), ranks.is_first)
        writer.set_up_storage_writer(ranks.is_first, rank=ranks.rank)
        return writer.prepare_local_plan(planner.create_local_plan())

    def first(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        found.append(metadata)
        return writer.prepare_global_plan(plans)

    try:
        plan = planner.finish_plan(ranks.deal("plan", each, first))
        ranks.gather(
            "write",
            lambda: writer.write_data(plan, planner).wait(),
            lambda results: writer.finish(found[0], results),
        )
    except BaseException:
        writer.abandon()
        raise


def load(reader: RemoteFileSystemReader, state: StateDict, *, group: Any = None, is_flat: bool = False) -> None:
    """Fill ``state`` in place. What it has must be in the checkpoint, in the same shape.

    Args:
        reader: of the checkpoint.
        state: tensors to be filled, and values to be replaced. With ``is_flat`` it has no dicts in it.
        group: the ranks that load together.
        is_flat: whether the keys of ``state`` are those of the index.
    """
    ranks = _Ranks(group)
    planner = _LoadPlanner(reader.uri, is_flat=is_flat)

    def each() -> LoadPlan:
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, ranks.is_first)
        reader.set_up_storage_reader(metadata, ranks.is_first)
        return reader.prepare_local_plan(planner.create_local_plan())

    plan = ranks.deal("plan", each, lambda plans: reader.prepare_global_plan(planner.create_global_plan(plans)))
    ranks.gather("read", lambda: reader.read_data(planner.finish_plan(plan), planner).wait(), lambda _: None)


def load_flat(reader: RemoteFileSystemReader, keys: Iterable[str]) -> dict[str, Any]:
    """The values of ``keys`` of the index, whole, in this process alone."""
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for key in keys:
        stored = metadata.state_dict_metadata[key]
        is_tensor = isinstance(stored, TensorStorageMetadata)
        state[key] = torch.empty(stored.size, dtype=stored.properties.dtype) if is_tensor else None
    if state:
        load(reader, state, is_flat=True)
    return state


@final
class _LoadPlanner(DefaultLoadPlanner):
    """DCP's own planner, but that values which are no tensors are read without running what they name."""

    def __init__(self, uri: str, *, is_flat: bool) -> None:
        super().__init__(flatten_state_dict=not is_flat)
        self._uri = uri

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        contents = _safe_contents(value.getvalue(), read_item.dest_index.fqn, self._uri)
        if self.flatten_state_dict:
            _set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], contents)
        else:
            self.original_state_dict[read_item.dest_index.fqn] = contents


def _set_element(root: Any, path: Sequence[str | int], value: Any) -> None:
    for part in path[:-1]:
        root = root[part]
    root[path[-1]] = value


def _safe_contents(data: bytes, key: str, uri: str) -> Any:
    try:
        return item_contents(data)
    except RefusedError as e:
        raise _untrusted(uri, key, e) from e
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: {key!r} cannot be read: {e}") from e


def _untrusted(uri: str, key: str, refused: RefusedError) -> UntrustedCheckpointError:
    kind = refused.name.rsplit(".", 1)[-1]
    hint = (
        f" If it is yours, allow it with torch.serialization.add_safe_globals([{kind}])." if refused.allowable else ""
    )
    return UntrustedCheckpointError(
        f"checkpoint {uri!r}: {key!r} holds {refused.name}, which is not known to be safe to load.{hint}"
    )


# ── the index ────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class _NoStorages:
    """An index has no tensors."""

    def storage(self, identity: Any) -> Any:
        raise ValueError("an index with a tensor in it")

    def read_now(self) -> None:
        """There is nothing to be read."""


def _read_index(data: bytes, uri: str) -> Metadata:
    """What ``.metadata`` says, made of known types only, every number of which can be.

    Raises:
        UntrustedCheckpointError: it names something else.
        CorruptCheckpointError: it is no index.
    """
    try:
        found = RestrictedUnpickler(data, _NoStorages(), _INDEX_TYPES).load()
        _check_index(found)
    except RefusedError as e:
        raise _untrusted(uri, INDEX, e) from e
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: its {INDEX!r} is damaged or no index: {e}") from e
    return found


def _check_index(found: Any) -> None:
    if type(found) is not Metadata or type(found.state_dict_metadata) is not dict:
        raise ValueError(f"it holds {type(found).__name__}")
    for key, stored in found.state_dict_metadata.items():
        if type(key) is not str:
            raise ValueError("a key that is no text")
        if type(stored) is TensorStorageMetadata:
            _check_tensor(key, stored)
        elif type(stored) is not BytesStorageMetadata:
            raise ValueError(f"{key!r} is {type(stored).__name__}")
    if type(found.storage_data) is not dict:
        raise ValueError("it does not say where its data are")
    for index, place in found.storage_data.items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo:
            raise ValueError(f"a place that is {type(place).__name__}")
        name, numbers = place.relative_path, (place.offset, place.length)
        parts = PurePosixPath(name).parts if type(name) is str else ()
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise ValueError(f"data in {name!r}, which is not in its directory")
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
            raise ValueError(f"data of {name!r} at {numbers}")
    paths = found.planner_data
    if paths is not None and (
        type(paths) is not dict or not all(type(k) is str and type(v) is tuple for k, v in paths.items())
    ):
        raise ValueError("paths of keys that are none")


def _check_tensor(key: str, stored: TensorStorageMetadata) -> None:
    properties, shape = stored.properties, stored.size
    if type(properties) is not TensorProperties or not isinstance(cast("Any", properties).dtype, torch.dtype):
        raise ValueError(f"{key!r} has no type of numbers")
    if type(shape) is not torch.Size or type(stored.chunks) is not list:
        raise ValueError(f"{key!r} has no shape")
    for chunk in stored.chunks:
        if type(chunk) is not ChunkStorageMetadata or not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            raise ValueError(f"{key!r} has a part that is none")
        if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"{key!r} of the shape {tuple(shape)} has a part beyond it")


def key_path(metadata: Metadata, key: str) -> tuple[str | int, ...]:
    """Where ``key`` of the index belongs in the nested state dict."""
    return (metadata.planner_data or {}).get(key, (key,))


def flat(state: StateDict) -> dict[str, Any]:
    """``state`` without dicts in it, with the keys that it has in an index."""
    return flatten_state_dict(state)[0]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class RemoteFileSystemReader(StorageReader):
    """Reads a sharded checkpoint for ``torch.distributed.checkpoint.load`` from a path or a URI.

    What has a commit record is verified as it is read; of what has none a warning says so. Only the bytes that the plan
    needs are read.

    Args:
        path: of the checkpoint's directory.
        thread_count: threads that read at the same time.
        pre_download: first bring the files that are needed to this machine.
        work_dir: where to; they stay there for the next time. ``None``: to a temporary folder.

    Attributes:
        bytes_read: of data files, so far.
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
        self._threads = _threads(thread_count, min(8, (os.cpu_count() or 1) + 2))
        self._folder = folder_of(path, threads=thread_count)
        self._fetching = pre_download
        self._work_dir = work_dir
        self.bytes_read = 0
        self._lock, self._fetch_lock = threading.Lock(), threading.Lock()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._forget()

    def _forget(self) -> None:
        self._metadata: Metadata | None = None
        self._manifest: Manifest | None = None
        self._index_digest = ""

    @property
    def uri(self) -> str:
        """Where the checkpoint is, for messages."""
        return self._folder.uri

    @property
    def checkpoint_id(self) -> str:
        """The same, as DCP calls it."""
        return self._folder.uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again, with another checkpoint if one is given."""
        if checkpoint_id is not None:
            self._folder.close()
            self._folder = folder_of(checkpoint_id, threads=self._threads)
        self._forget()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read once.

        Raises:
            CheckpointNotFoundError: there is no sharded checkpoint.
            CorruptCheckpointError: it is damaged.
            UntrustedCheckpointError: it names what is not known to be safe.
        """
        if self._metadata is None:
            try:
                data = self._folder.index()
            except FileNotFoundError as e:
                raise self._folder.missing() from e
            self._manifest = self._folder.manifest()
            self._index_digest = xxhash.xxh3_128_hexdigest(data)
            if self._manifest is None:
                log.warning("checkpoint %s has no manifest: it is loaded unverified", self.uri)
            elif (digest := self._digest(INDEX)) is None or digest.xxh3_128 != self._index_digest:
                raise CorruptCheckpointError(
                    f"checkpoint {self.uri!r}: its {INDEX!r} is not the one that was saved. If another program has "
                    f"saved here since, delete its manifest, '.manifest/{self._folder.name}.json' beside it."
                )
            self._metadata = _read_index(data, self.uri)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed: the index is this reader's own."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` wants and give it to ``planner``. Raises what :meth:`read_metadata` does."""
        files = self._items(plan, planner)
        with ThreadPoolExecutor(max(1, min(len(files), self._threads))) as pool:
            share = max(1, self._threads // max(1, len(files)))
            for done in [pool.submit(self._read_file, name, items, share) for name, items in files.items()]:
                done.result()
        future: Future[None] = Future()
        future.set_result(None)  # pyright: ignore[reportArgumentType]
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URI may be one."""
        return True

    def close(self) -> None:
        """Let go of connections and temporary files; twice is fine."""
        self._folder.close()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def __enter__(self) -> RemoteFileSystemReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _items(self, plan: LoadPlan, planner: LoadPlanner) -> dict[str, list[Item]]:
        """What is wanted of each file."""
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
                item = items[index] = Item(index.fqn, place.offset, place.length)
                files.setdefault(place.relative_path, []).append(item)
            if wanted.type is LoadItemType.BYTE_IO:
                item.take_bytes.append(self._taker(planner, wanted))
            else:
                stored = metadata.state_dict_metadata[index.fqn]
                item.shape = _chunk_shape(stored, index)
                item.dtype = stored.properties.dtype  # type: ignore[union-attr]
                item.boxes.append(_Box(planner, wanted, self._lock))
        return files

    def _taker(self, planner: LoadPlanner, wanted: ReadItem) -> Callable[[bytes], object]:
        def take(data: bytes) -> None:
            _safe_contents(data, wanted.storage_index.fqn, self.uri)  # DCP's own planner would run what it names
            with self._lock:
                planner.load_bytes(wanted, io.BytesIO(data))

        return take

    def _read_file(self, name: str, items: list[Item], threads: int) -> None:
        digest = self._digest(name)
        if self._manifest is not None and digest is None:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}: its manifest does not have the file {name!r}.")
        try:
            with self._opened(name, digest, threads) as source:
                read_items(source, items, ours=self._manifest is not None, progress=self._count)
        except FileNotFoundError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}: its file {name!r} is gone.") from e
        except RefusedError as e:
            raise _untrusted(self.uri, name, e) from e
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}, file {name!r}: {e}") from e

    def _opened(
        self, name: str, digest: FileDigest | None, threads: int
    ) -> contextlib.AbstractContextManager[ByteSource]:
        if not self._fetching or isinstance(self._folder, LocalFolder):
            return self._folder.opened(name, digest, threads=threads)
        folder = self._cache()
        path = folder / name
        with self._fetch_lock:
            make_folder(path.parent)
            if not path.exists() or (digest is not None and path.stat().st_size != digest.size_bytes):
                self._folder.fetch(name, digest, path)
        return LocalFolder(folder).opened(name, digest, threads=threads)

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
    if index.index is not None and index.index < len(stored.chunks):
        chunk = stored.chunks[index.index]
        if index.offset is None or chunk.offsets == index.offset:
            return tuple(chunk.sizes)
    for chunk in stored.chunks:
        if chunk.offsets == index.offset:
            return tuple(chunk.sizes)
    raise CorruptCheckpointError(f"{index.fqn!r} has no part at {index.offset}")


@final
class _Box:
    """What one item of a plan wants of a stored tensor."""

    def __init__(self, planner: LoadPlanner, wanted: ReadItem, lock: threading.Lock) -> None:
        self._planner = planner
        self._wanted = wanted
        self._lock = lock
        self.offsets: Sequence[int] = wanted.storage_offsets
        self.lengths: Sequence[int] = wanted.lengths

    def target(self) -> Tensor:
        with self._lock:
            target = self._planner.resolve_tensor(self._wanted).detach()
        if tuple(target.shape) != tuple(self.lengths):
            raise IncompatibleCheckpointError(
                f"{self._wanted.dest_index.fqn!r}: {tuple(self.lengths)} is to go to {tuple(target.shape)}"
            )
        return target

    def done(self, target: Tensor) -> None:
        with self._lock:
            self._planner.commit_tensor(self._wanted, target)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class _FileWritten(NamedTuple):
    """A data file, on its way to the commit record. It travels as the place of an item that there is not."""

    name: str
    digest: FileDigest


class _Order(NamedTuple):
    """What a rank needs to know to write its part."""

    claim: Claim
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
        throttle_uploads: one file of a rank is uploaded at a time.
        overwrite: replace what is there.
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
        _threads(process_count, 1, "process_count")
        self._threads = 1 if throttle_uploads else _threads(thread_count, min(4, os.cpu_count() or 1))
        self._folder = folder_of(path, threads=thread_count)
        self._overwrite = overwrite
        self._started = time.perf_counter()
        self._claim: Claim | None = None
        self._world_size = 1
        self._save_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is, as DCP calls it."""
        return self._folder.uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again, in another directory if one is given."""
        if checkpoint_id is not None:
            self._folder.close()
            self._folder = folder_of(checkpoint_id, threads=self._threads)
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
        self._claim = self._folder.claim(overwrite=self._overwrite)
        self._world_size = len(plans)
        return [
            dataclasses.replace(plan, storage_data=_Order(self._claim, rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part. What is written is durable when this returns."""
        claim, rank, world_size = cast("_Order", plan.storage_data)
        self._claim = claim
        buckets = _buckets(plan.items, self._threads)
        try:
            with ThreadPoolExecutor(max(1, len(buckets)), thread_name_prefix="checkpoint-save") as pool:
                jobs = [
                    pool.submit(self._write_file, f"__{rank}_{number}{claim.suffix}.distcp", bucket, planner)
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
            for item in items:
                start = sink.size_bytes
                if (value := values.get(item.index)) is not None:
                    sink.write(cast("io.BytesIO", value).getvalue())
                else:
                    TorchImage(cast("Any", _compact(cast("Tensor", planner.resolve_data(item))))).write(sink)
                size = sink.size_bytes - start
                place = _StorageInfo(relative_path=name, offset=start, length=size)
                results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=place))

        digest = self._folder.write(self._claim, name, most, fill)
        written = _FileWritten(name, digest)
        return [*results, WriteResult(MetadataIndex(f"file {name}"), digest.size_bytes, written)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written: make the checkpoint exist."""
        assert self._claim is not None
        every = [result for part in results for result in part]
        files = {r.storage_data.name: r.storage_data.digest for r in every if type(r.storage_data) is _FileWritten}
        metadata.storage_data = {r.index: r.storage_data for r in every if type(r.storage_data) is not _FileWritten}
        metadata.storage_meta = self.storage_meta()
        if (number := getattr(filesystem, "CURRENT_DCP_VERSION", None)) is not None:
            metadata.version = number
        facts: Mapping[str, object] = {
            "world_size": self._world_size,
            "timings": {"save": round(time.perf_counter() - self._started, 6)},
            "versions": _versions(),
        }
        try:
            self._folder.commit(self._claim, pickle.dumps(metadata), files, facts)
        except BaseException:
            self.abandon()
            raise
        self._claim = None
        size = sum(digest.size_bytes for digest in files.values())
        log.info("saved checkpoint %s: %.1f MB in %d files", self._folder.uri, size / 1e6, len(files))

    def abandon(self) -> None:
        """After an error, when no rank writes any more: remove what was written. Raises nothing; twice is fine."""
        claim, self._claim = self._claim, None
        if claim is not None:
            self._folder.abandon(claim)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URI may be one."""
        return True


def _threads(count: int | None, default: int, name: str = "thread_count") -> int:
    if count is not None and count < 1:
        raise ConfigError(f"{name}={count}: want 1 or more, or None")
    return default if count is None else count


def _versions() -> dict[str, str]:
    return {
        "composerlite": version("composerlite"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


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


# ── models and optimizers ────────────────────────────────────────────────────────────────────────────────────────────
def _options(*, flatten: bool = False, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(cpu_offload=True, flatten_optimizer_state_dict=flatten, strict=strict)


def model_state(model: nn.Module) -> StateDict:
    """The state of ``model``, sharded as it is, in this machine's memory."""
    return get_model_state_dict(model, options=_options())


def optimizer_state(model: nn.Module, optim: Optimizer, *, flatten: bool) -> StateDict:
    """The state of ``optim`` by the names of the parameters. An optimizer that has none gets one, of zeros."""
    return get_optimizer_state_dict(model, optim, options=_options(flatten=flatten))


def set_model_state(model: nn.Module, state: StateDict, *, strict: bool) -> None:
    """Give ``model`` the state."""
    set_model_state_dict(model, state, options=_options(strict=strict))


def set_optimizer_state(model: nn.Module, optim: Optimizer, state: StateDict, *, flatten: bool, strict: bool) -> None:
    """Give ``optim`` the state."""
    set_optimizer_state_dict(model, optim, state, options=_options(flatten=flatten, strict=strict))


def copied(state: StateDict) -> StateDict:
    """A copy of ``state`` that training does not change any more: tensors in this machine's memory."""
    known: dict[int, Tensor] = {}

    def copy_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in known:
                known[id(value)] = value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
            return known[id(value)]
        if type(value) in (dict, collections.OrderedDict):
            return {key: copy_of(inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(copy_of(inner) for inner in value)
        return copy.deepcopy(value)

    return copy_of(state)
