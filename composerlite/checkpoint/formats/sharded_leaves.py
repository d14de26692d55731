"""Which parts of a nested state get keys of their own in the index of a sharded checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from composerlite.errors import SaveError
from composerlite.types import StateDict

__all__ = ["Path", "leaves"]

Path = tuple[str | int, ...]


def leaves(state: StateDict) -> tuple[dict[str, Any], dict[str, Path]]:
    """``state`` without dicts in it, by the keys that DCP gives, and where each belongs in the nested one.

    Tensors are leaves, as in DCP. What holds none stays together as one leaf, and is loaded as it was: in pieces, empty
    dicts would be lost, and keys that are no text would become text.

    Raises:
        SaveError: two leaves have the same key, or a distributed tensor has a key that is no text.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}

    def visit(value: Any, path: Path) -> None:
        if isinstance(value, Mapping) and (not path or _is_split(cast("Mapping[Any, Any]", value), path)):
            for key, inner in cast("Mapping[str, Any]", value).items():
                visit(inner, (*path, key))
            return
        if type(value) is list and _holds(value, Tensor):
            for number, inner in enumerate(cast("list[Any]", value)):
                visit(inner, (*path, number))
            return
        name = ".".join(map(str, path))
        if name in flat:
            raise SaveError(f"two parts of the state have the key {name!r} in a sharded checkpoint: rename one.")
        flat[name], paths[name] = value, path

    visit(state, ())
    return flat, paths


def _is_split(value: Mapping[Any, Any], path: Path) -> bool:
    if not _holds(value, Tensor):
        return False
    other = [key for key in value if type(key) is not str]
    if other and _holds(value, DTensor):
        raise SaveError(
            f"the state at {'/'.join(map(str, path))!r} has tensors that are distributed over ranks, and the key "
            f"{other[0]!r}, which is no text: a sharded checkpoint cannot keep it. Use text for keys."
        )
    return not other


def _holds(value: Any, kind: type) -> bool:
    """Whether ``value`` is of that kind, or has such a one in its dicts and lists."""
    if isinstance(value, Mapping):
        return any(_holds(inner, kind) for inner in cast("Mapping[Any, Any]", value).values())
    if type(value) is list:
        return any(_holds(inner, kind) for inner in cast("Sequence[Any]", value))
    return isinstance(value, kind)
