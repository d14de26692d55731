"""Contents of a checkpoint: its keys, with shapes and types. Bytes of tensors are read of compressed files only."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from composerlite.checkpoint.format import MODEL
from composerlite.checkpoint.format.packing import is_packed_beginning
from composerlite.checkpoint.format.torch_reader import ByteSource
from composerlite.checkpoint.format.weight_files import holds_model_states
from composerlite.checkpoint.load.deepspeed_folder import deepspeed_contents
from composerlite.checkpoint.load.reader import RawFile, opened, readable
from composerlite.checkpoint.load.resolve import deepspeed_save, fetched
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.tools.surveying import Found
from composerlite.errors import CheckpointNotFoundError

__all__ = ["Leaf", "contents_of", "leaves_in", "leaves_of_contents", "model_directory", "shortened"]

_MOST_TEXT, _MOST_ITEMS = 60, 8
_BEGINNING_BYTES = 512
_PAGE_BYTES = 4096
"""What the reader of a file's directory expects at a time."""


class Leaf(NamedTuple):
    """Value below one key of a checkpoint.

    Attributes:
        path: the keys that lead to it.
        kind: its type: ``'tensor'``, ``'array'`` or that of a plain value.
        dtype: of its numbers, if it is a tensor or an array.
        shape: of it, likewise.
        size_bytes: of its numbers.
        text: the value, shortened, if it is neither.
    """

    path: tuple[str, ...]
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    size_bytes: int = 0
    text: str = ""


def contents_of(place: Place, found: Found) -> Any:
    """Return the contents of a checkpoint, with tensors that have a shape and no numbers.

    Raises:
        CheckpointNotFoundError: its files are gone.
        CorruptCheckpointError: what was read are not the bytes that were saved.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
    """
    paths = [file.path for file in found.files]
    if not paths:
        raise CheckpointNotFoundError(f"{place.uri(found.name)!r}: its files are gone.")
    if found.kind == "step":
        files = [path for path in paths if path.startswith(f"{found.name}/train/") and path.endswith(".pt")]
        parts = {path.removeprefix(f"{found.name}/"): _file(place, path, found) for path in files}
        return {MODEL: _directory(ShardedDirectory(place.inside(""), f"{found.name}/{MODEL}")), **parts}
    if (save := deepspeed_in(place, found)) is not None:
        return deepspeed_contents(place, save)
    directory = model_directory(place, found)
    return _file(place, found.name, found) if directory is None else _directory(directory)


def deepspeed_in(place: Place, found: Found) -> str | None:
    """The folder with the files of one save of DeepSpeed's engine, if that is what was found."""
    if found.manifest is not None or not holds_model_states([file.path.rpartition("/")[2] for file in found.files]):
        return None
    return deepspeed_save(place, found.name) if found.name not in {file.path for file in found.files} else None


def model_directory(place: Place, found: Found) -> ShardedDirectory | None:
    """The directory of the checkpoint, in which its model is; of a step the one in it. ``None``: it is one file."""
    if found.kind == "step":
        return ShardedDirectory(place.inside(""), f"{found.name}/{MODEL}")
    if found.name.endswith(".safetensors"):
        folder, _, file = found.name.rpartition("/")
        return ShardedDirectory(place, folder, file)
    if any(file.path.startswith(f"{found.name}/") for file in found.files):
        return ShardedDirectory(place.inside(""), found.name)
    return None


def _directory(folder: ShardedDirectory) -> Any:
    from composerlite.checkpoint.format.sharded_index import nested
    from composerlite.checkpoint.load import sharded  # slow to import, and most checkpoints are files

    with sharded.RemoteFileSystemReader(folder) as reader:
        metadata = reader.read_metadata()
    values: dict[str, Any] = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
        if isinstance(stored, sharded.TensorStorageMetadata)
        else _Pickled()
        for key, stored in metadata.state_dict_metadata.items()
    }
    return nested(metadata, "", list(values), values)


class _Pickled:
    """A value that is in a data file, which was not opened."""

    def __repr__(self) -> str:
        return "in a data file"


def _file(place: Place, path: str, found: Found) -> Any:
    if (here := place.path_of(path)) is not None:
        return _local_file(here)
    size = next(file.size_bytes for file in found.files if file.path == path)
    digest = next((record.digest for record in found.records if record.path == path), None)
    verifiable = digest if digest is not None and digest.chunk_bytes else None  # in parts
    with place.opened(path, None) as unverified, place.opened(path, verifiable) as source:
        if is_packed_beginning(unverified.read(0, min(size, _BEGINNING_BYTES))):
            with fetched(place.uri(path)) as local:
                return _local_file(local)
        headers = _HeaderBytes(unverified, size)
        with readable(Path(place.uri(path))):
            body, comment = (size, 0) if verifiable is None else (verifiable.body_bytes, verifiable.tail_bytes)
            checks_sums = digest is None
            raw = RawFile(source, body, headers.peek, checks_sums, headers.expect, comment_bytes=comment)
            return raw.torch_file(map_location="meta").contents


@final
class _HeaderBytes:
    """The headers of records, which lie all over an object: read at once, where it is known which they are."""

    def __init__(self, source: ByteSource, size_bytes: int) -> None:
        self._source = source
        self._size_bytes = size_bytes
        self._expected: dict[int, int] = {}
        self._pages: dict[int, bytes] = {}

    def expect(self, offset: int, size: int) -> None:
        """These bytes will be asked for."""
        self._expected[offset] = size

    def peek(self, offset: int, size: int) -> bytes:
        """So many bytes, unverified."""
        if self._expected:
            self._read_expected()
        start = offset // _PAGE_BYTES * _PAGE_BYTES
        page = self._pages.get(start, b"")
        if offset + size <= start + len(page):
            return page[offset - start : offset - start + size]
        return self._source.read(offset, size)

    def _read_expected(self) -> None:
        wanted = [(offset, min(size, self._size_bytes - offset)) for offset, size in self._expected.items()]
        self._expected = {}
        *places, total = itertools.accumulate((size for _, size in wanted), initial=0)
        memory = bytearray(total)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        pairs = list(zip(wanted, places, strict=True))
        self._source.read_into([(offset, address + place, size) for (offset, size), place in pairs])
        self._pages |= {offset: bytes(memory[place : place + size]) for (offset, size), place in pairs}


def _local_file(path: Path) -> Any:
    with opened(path, map_location="meta") as (file, *_):
        return file.contents


# ── leaves ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def leaves_in(contents: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of nested dicts and lists, each after its keys. Empty dicts and lists are leaves."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(contents, Mapping):
        items = cast("Mapping[Any, Any]", contents).items()
    elif isinstance(contents, list | tuple) and not isinstance(contents, Leaf):
        listed = cast("Sequence[Any]", contents)
        if any(isinstance(value, Tensor | np.ndarray | Mapping | list | tuple) for value in listed):
            items = enumerate(listed)
    is_leaf = True
    for key, value in items:
        is_leaf = False
        yield from leaves_in(value, (*path, str(key)))
    if is_leaf:
        yield path, contents


def leaves_of_contents(contents: Any) -> Iterator[Leaf]:
    """Yield name, kind and size of each leaf of nested dicts and lists, in order, without the numbers in it."""
    for path, value in leaves_in(contents):
        if isinstance(value, Leaf):
            yield value._replace(path=path)
        elif isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            yield Leaf(path, "tensor", dtype, tuple(value.shape), value.numel() * value.element_size())
        elif isinstance(value, np.ndarray):
            yield Leaf(path, "array", str(value.dtype), value.shape, value.nbytes)
        elif isinstance(value, _Pickled):
            yield Leaf(path, "value", text=repr(value))
        elif isinstance(value, list | tuple) and (count := len(cast("Sequence[Any]", value))) > _MOST_ITEMS:
            yield Leaf(path, type(value).__name__, text=f"{count} items")  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield Leaf(path, type(value).__name__, text=shortened(value))


def shortened(value: Any) -> str:
    """The value as text, of one line at most."""
    text = repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
