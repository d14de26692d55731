"""The index of a sharded checkpoint, ``.metadata``, and the keys in the index for parts of a nested state.

An index is read without running code in the file, and is checked.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from composerlite._torch_compat import dcp_memory_format_class, dcp_storage_info_class
from composerlite.checkpoint.format import INDEX
from composerlite.checkpoint.format.torch_file import FileInMemory, Pickled, TorchImage
from composerlite.checkpoint.trust.trusted import RefusedError
from composerlite.checkpoint.trust.unpickler import RestrictedUnpickler
from composerlite.dist import is_dense
from composerlite.errors import CorruptCheckpointError, SaveError, UntrustedCheckpointError
from composerlite.types import StateDict, items_of, with_items

__all__ = [
    "KEYS",
    "Leaves",
    "Path",
    "StorageInfo",
    "filled",
    "image_of",
    "inner_tensors",
    "key_path",
    "leaves",
    "leaves_of",
    "nested",
    "owner_of",
    "read_index",
    "tensor_at",
    "untrusted",
    "value_bytes",
    "with_inner",
]

StorageInfo = dcp_storage_info_class()
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
            dcp_memory_format_class(),
        )
    },
    "torch.distributed.checkpoint.filesystem._StorageInfo": StorageInfo,
    "olmo_core.distributed.checkpoint.filesystem._StorageInfo": StorageInfo,
}


_no_tensors: Any = SimpleNamespace(read_now=lambda: None)
"""Storages for the unpickler: an index with a tensor is damaged."""


def read_index(data: bytes, uri: str) -> Metadata:
    """Read ``.metadata``: a pickle of known types only. All numbers are checked.

    Raises:
        UntrustedCheckpointError: the index names another type.
        CorruptCheckpointError: the data are no index.
    """
    try:
        found = RestrictedUnpickler(data, _no_tensors, _INDEX_TYPES).load()
        _check_index(found)
    except RefusedError as e:
        raise untrusted(uri, INDEX, e) from e
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: its {INDEX!r} is damaged or no index: {e}") from e
    return found


def _check_index(found: Any) -> None:
    """Raise ``ValueError`` if ``found`` is no index, or an index of another directory."""
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
        if type(index) is not MetadataIndex or type(place) is not StorageInfo:
            raise ValueError(f"a place that is {type(place).__name__}")
        if type(index.fqn) is not str or not (index.offset is None or type(index.offset) is torch.Size):
            raise ValueError(f"a place of the key {index.fqn!r} at {index.offset!r}")
        name, numbers = place.relative_path, (place.offset, place.length)
        parts = name.split("/") if type(name) is str else [".."]
        if name[:1] == "/" or ".." in parts or set(parts) <= {"", "."} or "\0" in name:
            raise ValueError(f"data in {name!r}, which is not in its directory")
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
            raise ValueError(f"data of {name!r} at {numbers}")
    if found.planner_data is not None and (
        type(found.planner_data) is not dict or not all(_is_path(*item) for item in found.planner_data.items())
    ):
        raise ValueError("paths of keys that are none")


def _is_path(key: Any, path: Any) -> bool:
    """Return true for a path to a leaf, and for the keys of a dict: see ``KEYS``."""
    if type(key) is not str or type(path) is not tuple:
        return False
    if key.startswith(KEYS):
        hash(path)  # else a TypeError: keys of no dict
        return True
    return bool(path) and all(type(step) in (str, int) for step in path)


def _check_tensor(key: str, stored: TensorStorageMetadata) -> None:
    properties, shape = stored.properties, stored.size
    if type(properties) is not TensorProperties or not isinstance(cast("Any", properties).dtype, torch.dtype):
        raise ValueError(f"{key!r} has no type of numbers")
    if type(shape) is not torch.Size or min(shape, default=0) < 0 or type(stored.chunks) is not list:
        raise ValueError(f"{key!r} has no shape")
    for chunk in stored.chunks:
        if type(chunk) is not ChunkStorageMetadata or not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            raise ValueError(f"{key!r} has a part that is none")
        if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"{key!r} of the shape {tuple(shape)} has a part beyond it")


def key_path(metadata: Metadata, key: str) -> tuple[str | int, ...]:
    """Return the path of ``key`` of the index in the nested state dict."""
    return (metadata.planner_data or {}).get(key, (key,))


def untrusted(uri: str, key: str, refused: RefusedError) -> UntrustedCheckpointError:
    """Return the error for an unknown type at ``key`` of the checkpoint at ``uri``."""
    kind = refused.name.rsplit(".", 1)[-1]
    hint = (
        f" If it is yours, allow it with torch.serialization.add_safe_globals([{kind}])." if refused.allowable else ""
    )
    return UntrustedCheckpointError(
        f"checkpoint {uri!r}: {key!r} holds {refused.name}, which is not known to be safe to load.{hint}"
    )


# ── a nested state in leaves ─────────────────────────────────────────────────────────────────────────────────────────
Path = tuple[str | int, ...]
_INSIDE = ".*"
KEYS = "\0"
"""Before the key of a dict, in the paths of the index: all keys of the dict other than text."""


@final
class Leaves(NamedTuple):
    """A nested state as a flat dict, with the keys of DCP.

    Attributes:
        values: tensors and values, by key.
        paths: of the keys in the nested state, in the form of the index: with text for all keys of dicts.
        places: keys and numbers of the way to each value in the nested state.
    """

    values: dict[str, Any]
    paths: dict[str, Path]
    places: dict[str, tuple[Any, ...]]


def leaves(state: StateDict, *, as_dcp: bool = False, to_save: bool = True) -> Leaves:
    """Return the tensors and values of ``state`` by their keys in an index.

    A value without tensors stays whole, since empty dicts would be lost in pieces. Tuples, deques and other containers
    stay whole as in DCP, with all containers above up to a dict or a list with a tensor of its own. Dicts with keys
    other than text stay whole, too.

    If a whole value has distributed tensors, all tensors of the value get keys of their own, and tensors without
    numbers (``meta``) take their places in the value. The path of such a tensor begins with the key of the value and
    ``.*``. :func:`filled` puts the tensors back.

    Args:
        state: nested dicts.
        as_dcp: take all dicts apart, also dicts without tensors, and lists with dicts, as DCP does.
        to_save: take distributed tensors out of whole values.

    Raises:
        SaveError: two parts of the state have the same key, or two keys of a dict are the same as text.
    """
    found = Leaves({}, {}, {})

    def add(name: str, value: Any, path: Path, place: tuple[Any, ...]) -> None:
        if name in found.values:
            raise SaveError(f"two parts of the state have the key {name!r} in a sharded checkpoint: rename one.")
        found.values[name], found.paths[name], found.places[name] = value, path, place

    def visit(value: Any, path: Path, place: tuple[Any, ...]) -> None:
        if isinstance(value, Mapping) and (as_dcp or not path or _is_split(cast("Mapping[Any, Any]", value))):
            if other := _keys_without_text(cast("Mapping[Any, Any]", value), path):
                found.paths[KEYS + ".".join(map(str, path))] = other
            for key, inner in cast("Mapping[Any, Any]", value).items():
                visit(inner, (*path, str(key)), (*place, key))
            return
        if type(value) is list and (_is_split_by_dcp(value) if as_dcp else _holds(value, Tensor)):
            for number, inner in enumerate(cast("list[Any]", value)):
                visit(inner, (*path, number), (*place, number))
            return
        name = ".".join(map(str, path))
        if to_save and not isinstance(value, Tensor) and _holds_deep(value, DTensor):
            value, tensors = _emptied(value, path)
            for steps, tensor in tensors.items():
                inner = (name + _INSIDE, *steps)
                add(".".join(inner), tensor, inner, ())
        add(name, value, path, place)

    try:
        visit(state, (), ())
    except RecursionError as e:
        raise SaveError("the state holds itself, or is nested too deeply to be saved.") from e
    return found


def _keys_without_text(value: Mapping[Any, Any], path: Path) -> tuple[Any, ...]:
    """Return the keys of ``value`` other than text.

    Raises:
        SaveError: two keys are the same as text.
    """
    other = [key for key in value if type(key) is not str]
    if other and len({str(key) for key in value}) < len(value):
        texts = sorted(str(key) for key in value)
        twice = next(one for one, next_one in itertools.pairwise(texts) if one == next_one)
        raise SaveError(
            f"the state has two keys at {'/'.join(map(str, path))!r} that are both written as {twice!r}, and a sharded "
            "checkpoint cannot tell them apart. Rename one."
        )
    return tuple(key for key in other if _is_plain_key(key))


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_plain_key, cast("tuple[Any, ...]", key)))
    return type(key) in (str, int, bool, float, type(None), bytes)


def _is_split(value: Mapping[Any, Any]) -> bool:
    return _holds(value, Tensor) and all(type(key) is str for key in value)


def _holds(value: Any, kind: type) -> bool:
    """Return true if ``value`` is of ``kind``, or has such a value in dicts and lists."""
    if isinstance(value, Mapping):
        return any(_holds(inner, kind) for inner in cast("Mapping[Any, Any]", value).values())
    if type(value) is list:
        return any(_holds(inner, kind) for inner in cast("Sequence[Any]", value))
    return isinstance(value, kind)


def _holds_deep(value: Any, kind: type) -> bool:
    """Return true if ``value`` is of ``kind``, or has such a value in any container."""
    return isinstance(value, kind) or any(_holds_deep(inner, kind) for _, inner in items_of(value))


def _is_split_by_dcp(value: Any) -> bool:
    """Return true if DCP takes the list apart."""
    if type(value) is not list:
        return isinstance(value, Tensor | Mapping)
    return any(map(_is_split_by_dcp, cast("list[Any]", value)))


# ── tensors in a value that stays whole ──────────────────────────────────────────────────────────────────────────────
def _emptied(value: Any, path: Path) -> tuple[Any, dict[tuple[str, ...], Tensor]]:
    """Return ``value`` with tensors without numbers, and the tensors by their keys in ``value``, as text."""
    found: dict[tuple[str, ...], Tensor] = {}

    def visit(node: Any, steps: tuple[str, ...]) -> Any:
        if isinstance(node, DTensor) or (isinstance(node, Tensor) and is_dense(node)):
            found[steps] = node
            return torch.empty(node.shape, dtype=node.dtype, device="meta")
        if isinstance(node, dict):
            _keys_without_text(cast("dict[Any, Any]", node), (*path, *steps))
        return with_items(node, lambda key, inner: visit(inner, (*steps, str(key))))

    return visit(value, ()), found


def owner_of(metadata: Metadata, key: str) -> str | None:
    """Return the key of the value around the tensor ``key``, if there is a value."""
    path: Any = (metadata.planner_data or {}).get(key, ())
    if len(path) < 2 or not str(path[0]).endswith(_INSIDE):
        return None
    owner = str(path[0]).removesuffix(_INSIDE)
    return owner if isinstance(metadata.state_dict_metadata.get(owner), BytesStorageMetadata) else None


def inner_tensors(metadata: Metadata, keys: Sequence[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each tensor of the values ``keys``: key of the value, key of the tensor, keys in the value, as text."""
    wanted = set(keys)
    for key in metadata.state_dict_metadata:
        owner = owner_of(metadata, key)
        if owner is not None and owner in wanted:
            yield owner, key, tuple(map(str, (metadata.planner_data or {})[key][1:]))


def filled(value: Any, tensors: Mapping[tuple[str, ...], Any]) -> Any:
    """Return ``value`` with ``tensors`` put in, by their keys in ``value``, as text."""

    def visit(node: Any, steps: tuple[str, ...]) -> Any:
        if steps in tensors:
            return tensors[steps]
        return with_items(node, lambda key, inner: visit(inner, (*steps, str(key))))

    return visit(value, ())


def tensor_at(value: Any, steps: Sequence[str]) -> Tensor | None:
    """Return the tensor in ``value`` at the keys ``steps``, as text."""
    for step in steps:
        value = next((inner for key, inner in items_of(value) if str(key) == step), None)
    return value if isinstance(value, Tensor) else None


_UNPICKLED = (SaveError, pickle.PickleError, AttributeError, TypeError, ValueError, RecursionError)
"""Errors of values that cannot be pickled, or cannot be loaded."""
_DEEPEST = 8


def image_of(value: Any, name: str, *, must_load: bool = True) -> TorchImage:
    """Return a ``.pt`` file of ``value``.

    Raises:
        SaveError: the value cannot be pickled; or, with ``must_load``, cannot be loaded without ``trust_checkpoint``.
            The message names the place in the value, below ``name``.
    """
    try:
        return TorchImage(value, must_load=must_load)
    except _UNPICKLED as e:
        path, error = _failing(value, name, e, must_load)
        said = "" if isinstance(error, SaveError) else " cannot be written"
        raise SaveError(f"{path!r}{said}: {error}") from error


def value_bytes(value: Any, name: str, *, must_load: bool = False) -> bytes:
    """Return the bytes of the ``.pt`` file of a small ``value``. Raises as :func:`image_of`."""
    sink = FileInMemory()
    image_of(value, name, must_load=must_load).write(sink)
    return sink.file.getvalue()


def _failing(value: Any, path: str, error: Exception, must_load: bool, depth: int = 0) -> tuple[str, Exception]:
    """Return the innermost place in ``value`` with the error, at most ``_DEEPEST`` containers deep."""
    for key, inner in items_of(value) if depth < _DEEPEST else ():
        try:
            Pickled(inner, must_load=must_load)
        except _UNPICKLED as e:
            return _failing(inner, f"{path}/{key}", e, must_load, depth + 1)
    return path, error


# ── a nested state from its keys ─────────────────────────────────────────────────────────────────────────────────────
def leaves_of(metadata: Metadata, key: str) -> list[str]:
    """Return the keys of the index for ``key``: the key itself, or all keys below."""
    if key in metadata.state_dict_metadata:
        return [key, *(inner for _, inner, _ in inner_tensors(metadata, [key]))]
    return [leaf for leaf in metadata.state_dict_metadata if leaf.startswith(f"{key}.")]


def nested(metadata: Metadata, prefix: str, leaves: Sequence[str], values: Mapping[str, Any]) -> Any:
    """Return the dict, or list, below ``prefix`` with the ``values`` of the keys ``leaves``."""
    values = with_inner(metadata, leaves, values)
    items: list[tuple[Path, Any]] = []
    for leaf in leaves:
        if owner_of(metadata, leaf) not in values:
            path = key_path(metadata, leaf)
            depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == prefix), 0)
            items.append((path[depth:], values[leaf]))
    return _built(metadata, prefix, items)


def _built(metadata: Metadata, prefix: str, items: Sequence[tuple[Path, Any]]) -> Any:
    """Return the container below ``prefix`` with the ``items``: the rest of the path, and the value, of each."""
    children: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, value in items:
        children.setdefault(path[0], []).append((path[1:], value))
    others: Sequence[Any] = (metadata.planner_data or {}).get(KEYS + prefix, ())
    made: dict[Any, Any] = {}
    for step, inner in children.items():
        last_path, last = inner[-1]
        key = step if type(step) is int else next((other for other in others if str(other) == step), step)
        made[key] = last if not last_path else _built(metadata, f"{prefix}.{step}" if prefix else str(step), inner)
    if made and all(type(step) is int for step in children) and sorted(made) == list(range(len(made))):
        return [made[number] for number in range(len(made))]
    return made


def with_inner(metadata: Metadata, leaves: Sequence[str], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``values`` with tensors of other keys put into the values around the tensors."""
    inner: dict[str, dict[tuple[str, ...], Any]] = {}
    for owner, key, steps in inner_tensors(metadata, leaves):
        if key in values:
            inner.setdefault(owner, {})[steps] = values[key]
    return {**values, **{owner: filled(values[owner], tensors) for owner, tensors in inner.items()}}
