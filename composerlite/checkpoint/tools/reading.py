"""Read the contents of a checkpoint of any form: keys with shapes, all values, or some parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from composerlite.checkpoint.foreign.keys import NOTHING, flat_weights, found_at
from composerlite.checkpoint.foreign.systems import model_in, recognised, what_is_recognised
from composerlite.checkpoint.format import MODEL
from composerlite.checkpoint.format.packing import HEADER_BYTES, is_packed_beginning
from composerlite.checkpoint.format.torch_reader import TorchFile
from composerlite.checkpoint.format.weight_files import TORCH_SUFFIX, WEIGHTS_SUFFIX
from composerlite.checkpoint.load.reader import deepspeed_contents, opened, readable
from composerlite.checkpoint.load.resolve import deepspeed_save, fetched, is_read_in_place
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.place.place import Folder
from composerlite.checkpoint.tools.surveying import Found, pointed
from composerlite.devices import rng
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.storage import is_uri, parse_uri
from composerlite.types import StateDict, items_of

_WEIGHTS = ("model.", "state.model.", "state.integrations.")
"""Beginnings of the keys of weights in a directory, and of the state of integrations."""
_MOST_TEXT, _MOST_ITEMS = 60, 8


# ── parts of a checkpoint ────────────────────────────────────────────────────────────────────────────────────────────
def model_directory(found: Found) -> ShardedDirectory | None:
    """Return the directory with the model; for a step, the folder of the model in the step. ``None``: there is none.

    A safetensors file is returned as a directory, too.
    """
    if found.kind == "step":
        return ShardedDirectory(found.place.inside(""), f"{found.name}/{MODEL}")
    if found.name.endswith(WEIGHTS_SUFFIX):
        folder, _, file = found.name.rpartition("/")
        return ShardedDirectory(found.place.inside(""), folder, file)
    if any(file.path.startswith(f"{found.name}/") for file in found.files):
        return ShardedDirectory(found.place.inside(""), found.name)
    return None


def _deepspeed_folder(found: Found) -> str | None:
    """Return the folder with one save of DeepSpeed's engine; ``None`` for other checkpoints."""
    is_folder = found.manifest is None and found.name not in {file.path for file in found.files}
    return deepspeed_save(found.place, found.name) if is_folder else None


def _train_files(found: Found) -> list[str]:
    """Return the paths of the files with the train states of a step's ranks; empty for other kinds."""
    start = f"{found.name}/train/rank"
    return [file.path for file in found.files if found.kind == "step" and file.path.startswith(start)]


# ── keys and shapes ──────────────────────────────────────────────────────────────────────────────────────────────────
def contents_of(found: Found) -> Any:
    """Return the contents of a checkpoint with tensors on the device ``meta``.

    The bytes of tensors are not read, unless the file is compressed.

    Raises:
        CheckpointNotFoundError: the files are gone.
        CorruptCheckpointError: the bytes differ from the record or the checksums.
        UntrustedCheckpointError: a type in the checkpoint is not known to be safe.
    """
    if (save := _deepspeed_folder(found)) is not None:
        return deepspeed_contents(found.place, save)
    if (directory := model_directory(found)) is None:
        return _shapes_in_file(found.name, found)
    shapes = _read_directory(directory, shapes_only=True)
    if found.kind != "step":
        return shapes
    beside = {path.removeprefix(f"{found.name}/"): _shapes_in_file(path, found) for path in _train_files(found)}
    return {MODEL: shapes, **beside}


def _shapes_in_file(path: str, found: Found) -> Any:
    """Read the shapes in a file. A compressed file in a bucket is downloaded first."""
    place = found.place
    if place.path_of(path) is None:
        size = place.size(path)
        digest = next((record.digest for record in found.records if record.path == path), None)
        verifiable = digest if digest is not None and digest.chunk_bytes else None  # verifies single chunks
        body = size if verifiable is None else verifiable.body_bytes
        with place.opened(path, verifiable) as source, readable(Path(place.uri(path))):
            if not is_packed_beginning(source.read(0, min(body, HEADER_BYTES))):
                return TorchFile(source, body, map_location="meta", check_sums=digest is None).contents
    with fetched(place.path_of(path) or place.uri(path)) as local, opened(local, map_location="meta") as file:
        return file.contents


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def whole_contents(found: Found, *, weights_only: bool = False) -> Any:
    """Load a checkpoint, and verify the bytes if there is a record. For a step, load model and optimizer only.

    Args:
        found: the checkpoint.
        weights_only: read only the model, and the state of integrations if there is one.

    Raises:
        CheckpointNotFoundError: the files are gone.
        CorruptCheckpointError: the bytes differ from the record or the checksums.
        UntrustedCheckpointError: a type in the checkpoint is not known to be safe.
        ConfigError: a library for the compression is not installed.
    """
    if (save := _deepspeed_folder(found)) is not None:
        contents = deepspeed_contents(found.place, save)
        return _weights_in(contents) if weights_only else contents
    if (directory := model_directory(found)) is not None:
        return _read_directory(directory, _WEIGHTS if weights_only else ("",))
    with fetched(found.place.path_of(found.name) or found.uri) as path:
        return _read_file(path, weights_only=weights_only)


def model_and_integrations(text: str) -> Any:
    """Load the model and the state of integrations from the checkpoint at the path, URI or address ``text``.

    Returns:
        ``{'state': {'model': …, 'integrations': …}}``; without integrations the model alone,
        an argument for :func:`weights_of`.

    Raises:
        ConfigError: ``text`` is a folder of several checkpoints, or the URI names no store.
        CheckpointError: as :func:`whole_contents`.
    """
    if is_uri(text) and parse_uri(text)[0] in ("http", "https"):
        with fetched(text) as path:
            return _read_file(path, weights_only=True)
    with pointed(text) as target:
        return whole_contents(target.the_one(whole=True), weights_only=True)


def metadata_of(found: Found) -> StateDict:
    """Return ``state/metadata`` of a run's checkpoint, without reading a tensor. Archives of DeepSpeed have none."""
    if found.kind == "deepspeed":
        return {}
    directory = model_directory(found)
    contents: Any = contents_of(found) if directory is None else _read_directory(directory, ("state.metadata.",))
    metadata = found_at(contents, "state.metadata")
    return metadata if isinstance(metadata, dict) else {}


def weights_of(contents: Any, source: str) -> StateDict:
    """Return the tensors and the extra state of the model in ``contents``, by name.

    Raises:
        IncompatibleCheckpointError: there is no model. The message names ``source``.
    """
    if found := flat_weights(model_in(contents), source):
        return found
    hint = "'composerlite checkpoint inspect' shows its contents"
    raise IncompatibleCheckpointError(f"{source!r} holds no model: {hint}. {what_is_recognised()}")


def _read_directory(folder: ShardedDirectory, wanted: tuple[str, ...] = ("",), *, shapes_only: bool = False) -> Any:
    """Return the values in a directory whose keys begin with an item of ``wanted``; all values if no key does.

    With ``shapes_only`` no value is read: tensors are on the device ``meta``, and ``...`` stands for other values.
    """
    from composerlite.checkpoint.format.sharded_index import nested
    from composerlite.checkpoint.load import sharded  # slow to import, and most checkpoints are files

    with sharded.RemoteFileSystemReader(folder) as reader:
        metadata = reader.read_metadata()
        every = list(metadata.state_dict_metadata)
        keys = [key for key in every if f"{key}.".startswith(wanted)] or every
        values = sharded.unread(metadata, keys, device="meta") if shapes_only else sharded.load_flat(reader, keys)
    if shapes_only:
        values = {key: ... if one is None else one for key, one in values.items()}
    contents = nested(metadata, "", keys, values)
    if shapes_only or not isinstance(contents, dict):
        return contents
    contents = sharded.as_in_a_file(cast("StateDict", contents))
    if isinstance(contents.get("rng"), list):  # a directory has a row of bytes for each generator
        generators = cast("list[Any]", contents["rng"])
        contents["rng"] = [rng.unpacked(one) if isinstance(one, Tensor) else one for one in generators]
    return contents


def _read_file(path: Path, *, weights_only: bool) -> Any:
    if is_read_in_place(path):
        return _read_directory(ShardedDirectory(Folder(path.parent), "", path.name))
    with opened(path) as file:
        if weights_only:
            file.contents = _weights_in(file.contents)
        file.read()
        return file.contents


def _weights_in(contents: Any) -> Any:
    """Return the model in ``contents``. If there is a state of integrations, return both, nested as in a run."""
    integrations = found_at(contents, "state.integrations")
    if integrations is NOTHING:
        return model_in(contents)
    return {"state": {"model": model_in(contents), "integrations": integrations}}


# ── without a record ─────────────────────────────────────────────────────────────────────────────────────────────────
def read_without_record(found: Found) -> str:
    """Read a checkpoint without a record, and compare the bytes with the checksums in the files.

    Memory holds a single item of a directory at a time; of other forms, the whole checkpoint.

    Returns:
        A sentence for the user, with the system that saved the checkpoint.

    Raises:
        CheckpointNotFoundError: the files are gone.
        CorruptCheckpointError: a checksum, a size or a name of a file is wrong.
        UntrustedCheckpointError: a type in the checkpoint is not known to be safe.
    """
    from composerlite.checkpoint.load.sharded_reader import RemoteFileSystemReader, safe_contents  # slow to import

    system = recognised(contents_of(found)) or "of an unknown system"
    sentence = f"{system}. It has no record: every byte was read, and the checksums inside its files match"
    directory = None if _deepspeed_folder(found) is not None else model_directory(found)
    if directory is None:
        whole_contents(found)
        return sentence
    items: dict[tuple[str, int], tuple[str, int]] = {(path, 0): (path, -1) for path in _train_files(found)}
    with RemoteFileSystemReader(directory) as reader:
        for index, stored in reader.read_metadata().storage_data.items():
            path = directory.at(stored.relative_path)
            if path.endswith(TORCH_SUFFIX) and index.fqn != stored.relative_path:  # many weights in one torch file
                items[path, 0] = (path, -1)
            elif not path.endswith(WEIGHTS_SUFFIX):  # safetensors have no checksums
                items[path, stored.offset] = (index.fqn, stored.length)
    for (path, offset), (key, length) in items.items():
        try:
            size = directory.place.size(path) if length < 0 else length
            with directory.place.opened(path, None, threads=1) as source:
                safe_contents(source.read(offset, size), key, directory.uri)
        except FileNotFoundError as e:
            raise CorruptCheckpointError(f"checkpoint {directory.uri!r}: its file {path!r} is gone.") from e
    return sentence


# ── leaves ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Leaf(NamedTuple):
    """Value below one key of a checkpoint.

    Attributes:
        path: the keys from the top of the checkpoint to the value.
        kind: ``'tensor'``, ``'array'``, the name of the type of a plain value, or ``'value'`` for a value not read.
        dtype: type of the numbers in a tensor or an array.
        shape: shape of a tensor or an array.
        size_bytes: size of a tensor or an array in bytes.
        value: a plain value as text, shortened.
    """

    path: tuple[str, ...]
    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    size_bytes: int | None = None
    value: str | None = None


def leaves_in(contents: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys and the value of each leaf of nested dicts and lists.

    Empty dicts are leaves, and so are lists without tensors, arrays, dicts or lists.
    """
    items = list(items_of(contents))
    is_nested = any(isinstance(value, Tensor | np.ndarray | Mapping | list | tuple) for _, value in items)
    if items and (is_nested or isinstance(contents, Mapping)):
        for key, value in items:
            yield from leaves_in(value, (*path, str(key)))
    else:
        yield path, contents


def leaves_of_contents(contents: Any) -> Iterator[Leaf]:
    """Describe each leaf of nested dicts and lists, in order."""
    for path, value in leaves_in(contents):
        if isinstance(value, Tensor | np.ndarray):
            kind, shape = "tensor" if isinstance(value, Tensor) else "array", tuple(value.shape)
            dtype = str(value.dtype).removeprefix("torch.")
            yield Leaf(path, kind, dtype, shape, math.prod(shape) * value.dtype.itemsize)
        elif value is ...:
            yield Leaf(path, "value", value="in a data file")
        elif isinstance(value, list | tuple) and (count := len(cast("Sequence[Any]", value))) > _MOST_ITEMS:
            yield Leaf(path, type(value).__name__, value=f"{count} items")  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield Leaf(path, type(value).__name__, value=shortened(value))


def shortened(value: Any) -> str:
    """Return ``repr(value)``, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
