"""The keys of nested state dicts, and of the index of a sharded checkpoint, in which they are joined by dots."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, final

from composerlite.checkpoint.format.sharded_index import key_path
from composerlite.checkpoint.format.sharded_leaves import KEYS, filled, inner_tensors, owner_of
from composerlite.types import StateDict

if TYPE_CHECKING:
    from composerlite.checkpoint.load.sharded.reader import Metadata

__all__ = ["leaves_of", "merge_state_dicts", "nested", "prune_state_dict", "swap_param_keys", "with_inner"]

log = logging.getLogger(__name__)


def leaves_of(metadata: Metadata, key: str) -> list[str]:
    """The keys of the index that ``key`` stands for."""
    if key in metadata.state_dict_metadata:
        return [key, *(inner for _, inner, _ in inner_tensors(metadata, [key]))]
    return [leaf for leaf in metadata.state_dict_metadata if leaf.startswith(f"{key}.")]


def nested(metadata: Metadata, prefix: str, leaves: Sequence[str], values: Mapping[str, Any]) -> Any:
    """The dict that ``leaves`` make up, below ``prefix``."""
    tree = _Tree()
    values = with_inner(metadata, leaves, values)
    for leaf in leaves:
        if owner_of(metadata, leaf) in values:
            continue
        path = key_path(metadata, leaf)
        depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == prefix), 0)
        node = tree
        for number, part in enumerate(path[depth:-1], depth):
            node = node.setdefault(_true_key(metadata, path[:number], part), _Tree())
        node[_true_key(metadata, path[:-1], path[-1])] = values[leaf]
    return _with_lists(tree)


def _true_key(metadata: Metadata, path: Sequence[Any], part: Any) -> Any:
    """The key that ``part`` of the index stands for in the dict at ``path``; a number of a list as :class:`_Place`."""
    if type(part) is int:
        return _Place(part)
    others: Sequence[Any] = (metadata.planner_data or {}).get(KEYS + ".".join(map(str, path)), ())
    return next((key for key in others if str(key) == part), part)


@final
class _Place(int):
    """A number of a list, as opposed to a key of a dict."""


def with_inner(metadata: Metadata, leaves: Sequence[str], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """``values`` of ``leaves``, those that tensors with keys of their own belong into with these."""
    inner: dict[str, dict[tuple[str, ...], Any]] = {}
    for owner, key, steps in inner_tensors(metadata, leaves):
        if key in values:
            inner.setdefault(owner, {})[steps] = values[key]
    return (
        {**values, **{owner: filled(values[owner], tensors) for owner, tensors in inner.items()}} if inner else values
    )


class _Tree(dict[Any, Any]):
    """A dict that is being put together, as opposed to one that was saved as a value."""


def _with_lists(tree: Any) -> Any:
    """``tree`` with lists where the keys are 0, 1, 2 …; values are left as they are."""
    if not isinstance(tree, _Tree):
        return tree
    made = {key: _with_lists(value) for key, value in tree.items()}
    if made and all(type(key) is _Place for key in made) and sorted(made) == list(range(len(made))):
        return [made[number] for number in range(len(made))]
    return {int(key) if type(key) is _Place else key: value for key, value in made.items()}


def swap_param_keys(
    state_dict: StateDict,
    key_mapping: Mapping[str, str],
    metadata: Metadata | None = None,
    reverse: bool = False,
    quiet: bool = False,
) -> None:
    """Rename parameters in the state of a model and its optimizer, in place.

    Args:
        state_dict: ``{"model": …, "optim": …}``, the optimizer's in either layout.
        key_mapping: new names by present names.
        metadata: of a checkpoint: a parameter whose new name it does not have keeps the present one.
        reverse: from the new names to the present ones.
        quiet: do not log what is renamed.
    """
    names = {
        old: new
        for old, new in key_mapping.items()
        if metadata is None or f"model.{new}" in metadata.state_dict_metadata
    }
    if reverse:
        names = {new: old for old, new in names.items()}
    if not names:
        return
    if not quiet:
        for old, new in names.items():
            log.info("renamed %s to %s", old, new)
    if isinstance(state_dict.get("model"), dict):
        _rename(state_dict["model"], names)
    optim = state_dict.get("optim")
    if isinstance(optim, dict):
        _rename_in_optimizer(cast("StateDict", optim), names)


def _rename_in_optimizer(optim: StateDict, names: Mapping[str, str]) -> None:
    if isinstance(optim.get("state"), dict):
        _rename(optim["state"], names)
    for group in cast("list[StateDict]", optim.get("param_groups", [])):
        group["params"] = [names.get(name, name) for name in group["params"]]
    flat = {key: _renamed_flat(key, names) for key in optim if key.startswith(("state.", "param_groups."))}
    if any(old != new for old, new in flat.items()):
        items = {flat.get(key, key): value for key, value in optim.items()}
        optim.clear()
        optim.update(items)


def _rename(state: StateDict, names: Mapping[str, str]) -> None:
    """Rename keys, all at once: two may change places."""
    items = {names.get(key, key): value for key, value in state.items()}
    state.clear()
    state.update(items)


def _renamed_flat(key: str, names: Mapping[str, str]) -> str:
    """``state.<name>.<field>`` with another name."""
    kind, _, rest = key.partition(".")
    name, _, setting = rest.rpartition(".")
    return f"{kind}.{names.get(name, name)}.{setting}"


def prune_state_dict(state_dict: StateDict, allowed_keys: set[str]) -> set[str]:
    """Remove what is not among ``allowed_keys``, in place; returns the keys of what was removed.

    Args:
        state_dict: nested dicts.
        allowed_keys: as in an index: the keys of the dicts one after the other, with dots between.
    """
    removed: set[str] = set()

    def prune(node: StateDict, prefix: str) -> None:
        for key, value in list(node.items()):
            full = f"{prefix}{key}"
            if full in allowed_keys:
                continue
            inner = _dicts_in(value)
            for place, below in inner:
                prune(below, f"{full}.{place}" if place else f"{full}.")
            if not any(below for _, below in inner):
                if not inner:
                    removed.add(full)
                del node[key]

    prune(state_dict, "")
    return removed


def _dicts_in(value: Any) -> list[tuple[str, StateDict]]:
    """The dicts that ``value`` is or holds, if it is a list of such, and what stands before their keys."""
    if isinstance(value, dict):
        return [("", cast("StateDict", value))]
    if isinstance(value, list) and value and all(isinstance(inner, dict) for inner in cast("list[Any]", value)):
        return [(f"{number}.", inner) for number, inner in enumerate(cast("list[StateDict]", value))]
    return []


def merge_state_dicts(lhs: StateDict, rhs: StateDict) -> None:
    """Give ``lhs``, in place, what only ``rhs`` has. Nested dicts are merged likewise, and those in lists."""
    for key, value in rhs.items():
        if key not in lhs:
            lhs[key] = value
            continue
        for (_, mine), (_, theirs) in zip(_dicts_in(lhs[key]), _dicts_in(value), strict=False):
            merge_state_dicts(mine, theirs)
