"""Sharded checkpoints: directories that plain ``torch.distributed.checkpoint`` (DCP) reads and writes.

What ranks tell each other while they save and load goes through :class:`composerlite.dist.Group`, and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from torch.optim import Optimizer

from composerlite.checkpoint.format.sharded_index import key_path, read_index, untrusted
from composerlite.checkpoint.format.sharded_leaves import filled, inner_tensors, leaves, tensor_at
from composerlite.checkpoint.format.stored_item import item_contents
from composerlite.checkpoint.format.tensor_kinds import is_dense
from composerlite.checkpoint.format.torch_reader import ByteSource
from composerlite.checkpoint.load.sharded.items import Item, read_items
from composerlite.checkpoint.load.sharded.sharing import Told, Wishes
from composerlite.checkpoint.place.directory import (
    INDEX,
    LocalFolder,
    PathOrUri,
    folder_of,
)
from composerlite.checkpoint.place.turns import turn_at
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.trust.trusted import RefusedError
from composerlite.checkpoint.trust.validation import validate
from composerlite.dist import Group, SingleProcess, empty_shard_like, exchange, group_of
from composerlite.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    RankError,
)
from composerlite.storage import FileDigest, Helpers, make_folder, number_of
from composerlite.types import StateDict

__all__ = [
    "BytesStorageMetadata",
    "Metadata",
    "RemoteFileSystemReader",
    "TensorStorageMetadata",
    "flat",
    "key_path",
    "load",
    "load_flat",
    "load_leaves",
    "model_state",
    "optimizer_state",
    "read_whole",
    "set_model_state",
    "set_optimizer_state",
]

log = logging.getLogger(__name__)
T = TypeVar("T")
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


_ATTEMPTS = 20
_PAUSE_SECONDS = 0.02


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def read_whole(reader: RemoteFileSystemReader, group: Group, read: Callable[[RemoteFileSystemReader], T]) -> T:
    """What ``read`` makes of one checkpoint, the same on all ranks: the old one or the new one, if it is replaced.

    Every rank calls it. ``read`` may be called several times, and fails on all ranks if it does on one.
    """
    for attempt in range(_ATTEMPTS):
        is_last = attempt == _ATTEMPTS - 1
        try:
            if group.all_reduce("version", reader.version, lambda versions: len(set(versions)) == 1) or is_last:
                return read(reader)
        except (CheckpointError, RankError, FileNotFoundError) as e:
            if is_last or (isinstance(e, RankError) and not e.everywhere):
                raise
            if not group.all_reduce("what is there now", reader.was_replaced, any):
                raise
        log.info("%s was replaced while it was read: it is read again", reader.uri)
        reader.reset()
        time.sleep(_PAUSE_SECONDS * attempt)
    raise AssertionError("unreachable")


def load(reader: RemoteFileSystemReader, state: StateDict, *, group: Group | None = None) -> None:
    """Fill ``state``, of nested dicts, in place: tensors are filled, values replaced. See :func:`load_leaves`.

    Sparse and quantized tensors, and those of classes of their own, are replaced by others of their kind.
    """
    found = leaves(state, as_dcp=True, to_save=False)
    metadata = reader.read_metadata()
    inner: dict[str, dict[tuple[str, ...], str]] = {}
    wanted = {key: None if isinstance(v, Tensor) and not is_dense(v) else v for key, v in found.values.items()}
    for owner, key, steps in inner_tensors(metadata, list(found.values)):
        inner.setdefault(owner, {})[steps] = key
        wanted[key] = _target(metadata.state_dict_metadata[key], tensor_at(found.values[owner], steps))
    load_leaves(reader, wanted, group=group or group_of())
    for key, place in found.places.items():
        value = wanted[key]
        if key in inner:
            value = filled(value, {steps: wanted[name] for steps, name in inner[key].items()})
        if isinstance(found.values[key], Tensor) and wanted.get(key) is not found.values[key]:
            _check_kind(key, found.values[key], value, reader.uri)
            if found.values[key].layout in _COMPRESSED:
                found.values[key].resize_as_sparse_(value)  # into one with fewer numbers none could be copied
        if value is not found.values[key]:
            _set_element(state, place, value)


def _check_kind(key: str, own: Tensor, loaded: Any, uri: str) -> None:
    """See that ``loaded`` can take the place of ``own``, which is none that could be filled."""

    def kind(tensor: Any) -> Any:
        return type(tensor).__name__, tensor.layout, tensor.dtype, tuple(tensor.shape)

    if not isinstance(loaded, Tensor) or kind(own) != kind(loaded):
        has = kind(loaded) if isinstance(loaded, Tensor) else type(loaded).__name__
        raise IncompatibleCheckpointError(f"checkpoint {uri!r} has {has} for {key!r}, and here is {kind(own)}.")


def _target(stored: Any, live: Tensor | None) -> Tensor:
    """Where to read what is ``stored`` for the place that has ``live`` now."""
    dtype = stored.properties.dtype
    if live is None or live.shape != stored.size:
        return torch.empty(stored.size, dtype=dtype)
    return live if live.dtype is dtype else empty_shard_like(live, dtype)


def load_leaves(reader: RemoteFileSystemReader, state: StateDict, *, group: Group) -> None:
    """Fill ``state`` in place. What it has must be in the checkpoint, in the same shape.

    What several ranks want one of them reads, and sends it to the others. With a group of one's own each reads all.

    Args:
        reader: of the checkpoint.
        state: tensors to be filled, and values to be replaced, by the keys of the index.
        group: the ranks that load together.
    """
    planner = _LoadPlanner(reader.uri)

    def plan() -> LoadPlan:
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, group.is_first)
        return planner.create_local_plan()

    def read(plan: LoadPlan) -> None:
        reader.read_data(planner.finish_plan(plan), planner).wait()

    if not group.exchanges:
        own = group.agree("planning a load", plan)
        group.agree("reading a sharded checkpoint", lambda: read(own))
        return
    wishes: list[Wishes] = []

    def wish() -> Told:
        wishes.append(Wishes(plan(), planner, reader.place))
        return wishes[0].told

    told = group.all_reduce("planning a load", wish, list)
    own, transfers = wishes[0].divided(group, told)
    group.agree("reading a sharded checkpoint", lambda: read(own))
    exchange(f"checkpoint {reader.uri!r}", transfers)


def load_flat(reader: RemoteFileSystemReader, keys: Iterable[str]) -> dict[str, Any]:
    """The values of ``keys`` of the index, whole, in this process alone."""
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for key in keys:
        stored = metadata.state_dict_metadata[key]
        is_tensor = isinstance(stored, TensorStorageMetadata)
        state[key] = torch.empty(stored.size, dtype=stored.properties.dtype) if is_tensor else None
    if state:
        load_leaves(reader, state, group=SingleProcess())
    return state


@final
class _LoadPlanner(DefaultLoadPlanner):
    """DCP's own planner, but that values which are no tensors are read without running what they name."""

    def __init__(self, uri: str) -> None:
        super().__init__(flatten_state_dict=False)
        self._uri = uri

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        contents = _safe_contents(value.getvalue(), read_item.dest_index.fqn, self._uri)
        self.original_state_dict[read_item.dest_index.fqn] = contents


def _set_element(root: Any, path: Sequence[Any], value: Any) -> None:
    for part in path[:-1]:
        root = root[part]
    root[path[-1]] = value


def _safe_contents(data: bytes, key: str, uri: str) -> Any:
    try:
        return item_contents(data)
    except RefusedError as e:
        raise untrusted(uri, key, e) from e
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: {key!r} cannot be read: {e}") from e


def flat(state: StateDict) -> dict[str, Any]:
    """``state`` without dicts in it, with the keys that it has in an index."""
    return leaves(state, as_dcp=True, to_save=False).values


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class RemoteFileSystemReader(StorageReader):
    """Reads a sharded checkpoint for ``torch.distributed.checkpoint.load`` from a path or a URI.

    What has a commit record is verified as it is read; of what has none a warning says so. Only the bytes that the plan
    needs are read. What lies on this machine the function that ``CHECKPOINT_VALIDATION_FUNCTION``
    names sees first.

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
        self._threads = number_of(thread_count, min(8, (os.cpu_count() or 1) + 2))
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

    @property
    def place(self) -> str:
        """The same on all ranks that read the same files; another where nodes have one directory each."""
        node = None if self._manifest is None else self._manifest.node
        return f"{self._index_digest} on {node}: {self._folder.identity()}"

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
            if isinstance(self._folder, LocalFolder) and (index := self._folder.path / INDEX).is_file():
                validate(index)
            try:
                data, self._manifest = self._folder.described()
            except FileNotFoundError as e:
                raise self._folder.missing() from e
            self._index_digest = xxhash.xxh3_128_hexdigest(data)
            if self._manifest is None:
                log.warning("checkpoint %s has no manifest: it is loaded unverified", self.uri)
            elif (digest := self._digest(INDEX)) is None or digest.xxh3_128 != self._index_digest:
                raise CorruptCheckpointError(
                    f"checkpoint {self.uri!r}: its {INDEX!r} is not the one that was saved. If another program has "
                    f"saved here since, delete its manifest, '.manifest/{self._folder.name}.json' beside it."
                )
            self._metadata = read_index(data, self.uri)
        return self._metadata

    def version(self) -> str:
        """What tells this checkpoint from another in its place. Raises as :meth:`read_metadata`."""
        self.read_metadata()
        return self._index_digest

    def was_replaced(self) -> bool:
        """Whether another checkpoint has come to its place since it was opened, or is about to."""
        try:
            if any(True for _ in self._folder.begun()):
                return True
            index = xxhash.xxh3_128_hexdigest(self._folder.index())
            return index != self._index_digest or self._folder.manifest() != self._manifest
        except (FileNotFoundError, CorruptCheckpointError):
            return bool(self._index_digest)

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
        with Helpers(max(1, min(len(files), self._threads)), name="checkpoint-load") as pool:
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
            raise untrusted(self.uri, name, e) from e
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"checkpoint {self.uri!r}, file {name!r}: {e}") from e

    def _opened(
        self, name: str, digest: FileDigest | None, threads: int
    ) -> contextlib.AbstractContextManager[ByteSource]:
        if isinstance(self._folder, LocalFolder) and self._folder.has(name):  # else its node has seen to that
            validate(self._folder.path / name)
        if not self._fetching or isinstance(self._folder, LocalFolder):
            return self._folder.opened(name, digest, threads=threads)
        folder = self._cache()
        path = folder / name
        make_folder(path.parent)
        with self._fetch_lock, turn_at(folder / ".lock"):  # other ranks of this machine want the same files
            if not path.exists() or (digest is not None and path.stat().st_size != digest.size_bytes):
                self._folder.fetch(name, digest, path)
        validate(path)
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
