"""The index of a sharded checkpoint, ``.metadata``, and the keys in the index for parts of a nested state.

The format is the format of DCP, ``torch.distributed.checkpoint``. An index is read without running code in the file,
and is checked.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp

from composerlite._torch_compat import dcp_memory_format_class, dcp_storage_info_class
from composerlite.checkpoint.format import INDEX
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.format.torch_reader import untrusted
from composerlite.checkpoint.trust.unpickler import RefusedError, RestrictedUnpickler
from composerlite.errors import CorruptCheckpointError, SaveError
from composerlite.types import StateDict, items_of

StorageInfo = dcp_storage_info_class()
_KINDS: list[type] = [*(getattr(dcp, name) for name in dcp.__all__), dcp_memory_format_class(), StorageInfo]
_INDEX_TYPES = {f"{kind.__module__}.{kind.__name__}": kind for kind in _KINDS}
"""Types that an index may name. The public names of the module of DCP are classes that hold data, and nothing else."""
_INDEX_TYPES["olmo_core.distributed.checkpoint.filesystem._StorageInfo"] = StorageInfo


def read_index(data: bytes, uri: str) -> dcp.Metadata:
    """Read ``.metadata``: a pickle of known types only. All numbers are checked.

    Raises:
        UntrustedCheckpointError: the index names another type.
        CorruptCheckpointError: the data are no index.
    """
    try:
        found = RestrictedUnpickler(data, None, _INDEX_TYPES).load()
        _check_index(found)
    except RefusedError as e:
        raise untrusted(f"checkpoint {uri!r}: {INDEX!r}", e) from e
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: its {INDEX!r} is damaged or not an index: {e}") from e
    return found


def _check_index(found: Any) -> None:
    """Raise ``ValueError``, ``TypeError`` or ``AttributeError`` if ``found`` is no valid index.

    Numbers must be in range, and paths of files must be inside the directory.
    """
    if type(found) is not dcp.Metadata or not type(found.state_dict_metadata) is type(found.storage_data) is dict:
        raise ValueError(f"it holds {type(found).__name__}, or does not record where its data are")
    for key, stored in found.state_dict_metadata.items():
        if type(key) is not str or type(stored) not in (dcp.TensorStorageMetadata, dcp.BytesStorageMetadata):
            raise ValueError(f"{key!r} is {type(stored).__name__}")
        if isinstance(stored, dcp.BytesStorageMetadata):
            continue
        properties, shape = stored.properties, stored.size
        is_typed = type(properties) is dcp.TensorProperties and isinstance(cast("Any", properties).dtype, torch.dtype)
        has_shape = type(shape) is torch.Size and min(shape, default=0) >= 0
        if not is_typed or not has_shape or type(stored.chunks) is not list:
            raise ValueError(f"{key!r} has no shape or no dtype")
        for chunk in stored.chunks:
            spans = zip(chunk.offsets, chunk.sizes, shape, strict=True)
            if any(start < 0 or length < 0 or start + length > size for start, length, size in spans):
                raise ValueError(f"{key!r} of the shape {tuple(shape)} has a part outside the shape")
    for index, place in found.storage_data.items():
        has_types = type(index) is dcp.MetadataIndex and type(place) is StorageInfo and type(index.fqn) is str
        if not has_types or not (index.offset is None or type(index.offset) is torch.Size):
            raise ValueError(f"a place that is {type(place).__name__} of {type(index).__name__}")
        name, numbers = place.relative_path, (place.offset, place.length)
        parts = name.split("/") if type(name) is str else [".."]
        if name[:1] == "/" or ".." in parts or set(parts) <= {"", "."} or "\0" in name:
            raise ValueError(f"data in {name!r}, which is not in its directory")
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
            raise ValueError(f"data of {name!r} at {numbers}")
    for key, path in ({} if found.planner_data is None else found.planner_data).items():
        is_path = type(key) is str and type(path) is tuple and bool(path)
        hash(path)  # raises TypeError if a key in ``path`` cannot be the key of a dict
        if not is_path or not (key.startswith(KEYS) or all(type(step) in (str, int) for step in path)):
            raise ValueError(f"the path {path!r} of the key {key!r}")


# ── a nested state in leaves ─────────────────────────────────────────────────────────────────────────────────────────
Path = tuple[str | int, ...]
KEYS = "\0"
"""Prefix of special entries in the paths of the index. The prefix is followed by the key of a dict in the index. The
entry lists the keys of that dict that are not text, since all other entries have the keys of dicts as text.
"""


@final
class Leaves(NamedTuple):
    """A nested state as a flat dict, with the keys of DCP.

    Attributes:
        values: tensors and values, by key.
        paths: path of each key in the nested state, as in the index: all keys of dicts are text.
        holders: the dict or list with each value, and the key or number of the value there.
    """

    values: dict[str, Any]
    paths: dict[str, Path]
    holders: dict[str, tuple[Any, Any]]


def leaves(state: StateDict, *, as_dcp: bool = False) -> Leaves:
    """Return the tensors and values of ``state`` by their keys in an index.

    Tuples, deques and other containers stay whole, as in DCP: tensors in these containers do not count as tensors of
    the dict or list around the container. A distributed tensor in a whole value cannot be saved.

    In the state of a run, a dict or list without tensors stays whole, since a split would lose empty dicts. Dicts with
    keys other than text stay whole, too. The pairs of name and state of algorithms count as lists.

    Args:
        state: nested dicts.
        as_dcp: split all dicts, dicts without tensors included, and lists with dicts, as DCP does. If false, ``state``
            is the state of a run.

    Raises:
        SaveError: two parts of the state have the same key, two keys of a dict are the same as text, or ``state`` is
            nested too deeply.
    """
    found = Leaves({}, {}, {})
    run = {} if as_dcp else state.get("state", {})
    if "algorithms" in run:
        state = {**state, "state": {**run, "algorithms": list(map(list, run["algorithms"]))}}

    def visit(value: Any, path: Path, holder: tuple[Any, Any]) -> None:
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value)
            if as_dcp or not path or (_is_split(items, as_dcp=False) and all(type(key) is str for key in items)):
                other = [key for key in items if type(key) is not str]
                if other and len(set(map(str, items))) < len(items):
                    twice = Counter(map(str, items)).most_common(1)[0][0]
                    where = "/".join(map(str, path))
                    raise SaveError(f"the state has two keys at {where!r} that both become {twice!r}.")
                if plain := tuple(filter(_is_plain_key, other)):
                    found.paths[KEYS + ".".join(map(str, path))] = plain
                for key, inner in items.items():
                    visit(inner, (*path, str(key)), (items, key))
                return
        if type(value) is list and _is_split(value, as_dcp=as_dcp):
            for number, inner in enumerate(cast("list[Any]", value)):
                visit(inner, (*path, number), (value, number))
            return
        name = ".".join(map(str, path))
        if name in found.values:
            raise SaveError(f"two parts of the state have the key {name!r} in a sharded checkpoint: rename one.")
        found.values[name], found.paths[name], found.holders[name] = value, path, holder

    try:
        visit(state, (), (None, None))
    except RecursionError as e:
        raise SaveError("the state contains itself, or is nested too deeply to be saved.") from e
    return found


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_plain_key, cast("tuple[Any, ...]", key)))
    return type(key) in (str, int, bool, float, type(None), bytes)


def _is_split(value: Any, *, as_dcp: bool) -> bool:
    """Return true if ``value`` is a tensor, or has a tensor in lists and dicts; with ``as_dcp`` a dict is enough."""
    if type(value) is list:
        return any(_is_split(inner, as_dcp=as_dcp) for inner in cast("list[Any]", value))
    if isinstance(value, Mapping) and not as_dcp:
        return any(_is_split(inner, as_dcp=False) for inner in cast("Mapping[Any, Any]", value).values())
    return isinstance(value, Tensor | Mapping)


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────
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
        for key, inner in items_of(value) if name.count("/") < _DEEPEST else ():
            image_of(inner, f"{name}/{key}", must_load=must_load)  # raises for the innermost place with the error
        said = "" if isinstance(e, SaveError) else " cannot be written"
        raise SaveError(f"{name!r}{said}: {e}") from e


# ── a nested state from its keys ─────────────────────────────────────────────────────────────────────────────────────
def leaves_of(metadata: dcp.Metadata, key: str) -> list[str]:
    """Return the keys of the index for ``key``: the key itself, or all keys below."""
    if key in metadata.state_dict_metadata:
        return [key]
    return [leaf for leaf in metadata.state_dict_metadata if leaf.startswith(f"{key}.")]


def nested(metadata: dcp.Metadata, prefix: str, leaves: Sequence[str], values: Mapping[str, Any]) -> Any:
    """Return the dict, or list, below ``prefix`` with the ``values`` of the keys ``leaves``."""
    items: list[tuple[Path, Any]] = []
    for leaf in leaves:
        path = (metadata.planner_data or {}).get(leaf, (leaf,))
        depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == prefix), 0)
        items.append((path[depth:], values[leaf]))
    return _built(metadata, prefix, items)


def _built(metadata: dcp.Metadata, prefix: str, items: Sequence[tuple[Path, Any]]) -> Any:
    """Return the container below ``prefix``. Each of ``items`` has a path relative to ``prefix``, and a value."""
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
