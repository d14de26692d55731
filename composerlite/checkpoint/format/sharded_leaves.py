"""Which parts of a nested state get keys of their own in the index of a sharded checkpoint."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.tensor import DTensor

from composerlite.checkpoint.format.tensor_kinds import is_dense
from composerlite.checkpoint.format.torch_file import file_bytes
from composerlite.errors import SaveError
from composerlite.types import StateDict, items_of, with_items

__all__ = [
    "KEYS",
    "Leaves",
    "Path",
    "Whole",
    "filled",
    "inner_tensors",
    "leaves",
    "owner_of",
    "tensor_at",
    "value_bytes",
]

Path = tuple[str | int, ...]
_INSIDE = ".*"
KEYS = "\0"
"""What the key begins with under which the paths have the keys of a dict that are no text, all of them, where the rest
is the key of the dict."""


@final
class Leaves(NamedTuple):
    """A nested state without dicts in it, by the keys that DCP gives.

    Attributes:
        values: of the leaves.
        paths: where each belongs, as the index has it: with text for all keys of dicts.
        places: where each is in the state.
    """

    values: dict[str, Any]
    paths: dict[str, Path]
    places: dict[str, tuple[Any, ...]]


@final
class Whole(NamedTuple):
    """A tensor that is saved as a value: it is no numbers of which a part could be read."""

    tensor: Tensor


def leaves(state: StateDict, *, as_dcp: bool = False, to_save: bool = True) -> Leaves:
    """``state`` in leaves: tensors, and what holds none that is to have a key of its own.

    That stays together and is loaded as it was: in pieces, empty dicts would be lost. So does what DCP does not look
    into: tuples, deques, and all above them up to a dict or a list that has a tensor of its own; and dicts with keys
    that are no text.

    If there are tensors in such a leaf that are distributed over ranks, all its tensors get keys of their own, and
    tensors without numbers (``meta``) stand for them in the leaf. The path of such a tensor begins with the key of the
    leaf and ``.*``, which is no path of anything else, for DCP too: :func:`filled` puts them back.

    Args:
        state: nested dicts.
        as_dcp: take all dicts apart, whatever they hold, and lists with dicts in them, as DCP does.
        to_save: give the tensors that are distributed keys of their own also where they are in a leaf, and make those
            that are saved as values :class:`Whole`.

    Raises:
        SaveError: two leaves have the same key, or two keys of a dict are the same as text.
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
        if to_save and isinstance(value, Tensor) and not is_dense(value):
            value = Whole(value)
        elif to_save and not isinstance(value, Tensor) and _holds_deep(value, DTensor):
            value, tensors = _emptied(value, path)
            for steps, tensor in tensors.items():
                inner = (name + _INSIDE, *steps)
                add(".".join(inner), tensor, inner, ())
        add(name, value, path, place)

    visit(state, (), ())
    return found


def _keys_without_text(value: Mapping[Any, Any], path: Path) -> tuple[Any, ...]:
    """The keys of ``value`` that are no text.

    Raises:
        SaveError: two are the same as text.
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
    """Whether ``value`` is of that kind, or has such a one in its dicts and lists."""
    if isinstance(value, Mapping):
        return any(_holds(inner, kind) for inner in cast("Mapping[Any, Any]", value).values())
    if type(value) is list:
        return any(_holds(inner, kind) for inner in cast("Sequence[Any]", value))
    return isinstance(value, kind)


def _holds_deep(value: Any, kind: type) -> bool:
    """The same of all containers."""
    return isinstance(value, kind) or any(_holds_deep(inner, kind) for _, inner in items_of(value))


def _is_split_by_dcp(value: Any) -> bool:
    """Whether DCP takes the list apart."""
    if type(value) is not list:
        return isinstance(value, Tensor | Mapping)
    return any(map(_is_split_by_dcp, cast("list[Any]", value)))


# ── tensors in a leaf ────────────────────────────────────────────────────────────────────────────────────────────────
def _emptied(value: Any, path: Path) -> tuple[Any, dict[tuple[str, ...], Tensor]]:
    """``value`` with tensors without numbers for its tensors, and these, by the keys that lead there, as text."""
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
    """The key of the leaf that the tensor ``key`` belongs into; ``None`` for a leaf."""
    path: Any = (metadata.planner_data or {}).get(key, ())
    if len(path) < 2 or not str(path[0]).endswith(_INSIDE):
        return None
    owner = str(path[0]).removesuffix(_INSIDE)
    return owner if isinstance(metadata.state_dict_metadata.get(owner), BytesStorageMetadata) else None


def inner_tensors(metadata: Metadata, keys: Sequence[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(key of the leaf, key, keys that lead there) of each tensor that is in one of the leaves ``keys``."""
    wanted = set(keys)
    for key in metadata.state_dict_metadata:
        owner = owner_of(metadata, key)
        if owner is not None and owner in wanted:
            yield owner, key, tuple(map(str, (metadata.planner_data or {})[key][1:]))


def filled(value: Any, tensors: Mapping[tuple[str, ...], Any]) -> Any:
    """``value``, a leaf, with ``tensors`` by the keys that lead there, as text."""

    def visit(node: Any, steps: tuple[str, ...]) -> Any:
        if steps in tensors:
            return tensors[steps]
        return with_items(node, lambda key, inner: visit(inner, (*steps, str(key))))

    return visit(value, ())


def tensor_at(value: Any, steps: Sequence[str]) -> Tensor | None:
    """The tensor in ``value`` that the keys ``steps``, as text, lead to."""
    for step in steps:
        value = next((inner for key, inner in items_of(value) if str(key) == step), None)
    return value if isinstance(value, Tensor) else None


def value_bytes(value: Any, name: str) -> bytes:
    """The ``.pt`` file of the leaf ``name``, as an item of the checkpoint.

    Raises:
        SaveError: it cannot be pickled, or cannot be loaded back.
    """
    try:
        return file_bytes(value.tensor if type(value) is Whole else value)
    except SaveError as e:
        raise SaveError(f"{name!r}: {e}") from e
    except (pickle.PickleError, AttributeError, TypeError, ValueError) as e:  # what cannot be pickled raises any
        raise SaveError(f"{name!r} cannot be written: {e}") from e
