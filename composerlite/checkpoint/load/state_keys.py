"""Change the keys of nested state dicts, in place: rename, remove, merge."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from composerlite.types import StateDict

if TYPE_CHECKING:
    from composerlite.checkpoint.load.sharded import Metadata

log = logging.getLogger(__name__)


def swap_param_keys(
    state_dict: StateDict,
    key_mapping: Mapping[str, str],
    metadata: Metadata | None = None,
    reverse: bool = False,
    quiet: bool = False,
) -> None:
    """Rename parameters in the state of a model and its optimizer, in place.

    Args:
        state_dict: ``{"model": …, "optim": …}``. The optimizer's state has ``state`` and ``param_groups``, or flat keys
            such as ``state.w.exp_avg`` and ``param_groups.w.lr``.
        key_mapping: new names by present names.
        metadata: of a checkpoint. A parameter keeps its name if the checkpoint does not have the new name.
        reverse: rename the other way, from the values of ``key_mapping`` to its keys.
        quiet: do not log the names.
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
    if isinstance(state_dict.get("optim"), dict):
        optim = cast("StateDict", state_dict["optim"])
        if isinstance(optim.get("state"), dict):
            _rename(optim["state"], names)
        for group in cast("list[StateDict]", optim.get("param_groups", [])):
            group["params"] = [names.get(name, name) for name in group["params"]]
        flat: dict[str, str] = {}
        for key in filter(lambda key: key.startswith(("state.", "param_groups.")), optim):
            kind, _, rest = key.partition(".")
            name, _, setting = rest.rpartition(".")
            flat[key] = f"{kind}.{names.get(name, name)}.{setting}"
        _rename(optim, flat)


def _rename(state: StateDict, names: Mapping[str, str]) -> None:
    """Rename keys, all at the same time, since two may be swapped."""
    items = {names.get(key, key): value for key, value in state.items()}
    state.clear()
    state.update(items)


def prune_state_dict(state_dict: StateDict, allowed_keys: set[str]) -> set[str]:
    """Remove all items but those with ``allowed_keys``, in place. Dicts that become empty are removed, too.

    Args:
        state_dict: nested dicts; may contain lists of dicts.
        allowed_keys: keys as in an index: the keys of the dicts and the indices in lists, joined with dots. An allowed
            key of a dict keeps all items in the dict.

    Returns:
        Keys of the removed values, without keys of removed dicts.
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
    """Return the dict ``value``, or the dicts in the list ``value``, each with the prefix of its keys.

    Empty: ``value`` is neither a dict nor a list of dicts.
    """
    if isinstance(value, dict):
        return [("", cast("StateDict", value))]
    if isinstance(value, list) and value and all(isinstance(inner, dict) for inner in cast("list[Any]", value)):
        return [(f"{number}.", inner) for number, inner in enumerate(cast("list[StateDict]", value))]
    return []


def merge_state_dicts(lhs: StateDict, rhs: StateDict) -> None:
    """Add the items that only ``rhs`` has to ``lhs``, in place, also in nested dicts and in dicts in lists.

    Args:
        lhs: nested dicts, changed in place.
        rhs: nested dicts.
    """
    for key, value in rhs.items():
        if key not in lhs:
            lhs[key] = value
            continue
        for (_, mine), (_, theirs) in zip(_dicts_in(lhs[key]), _dicts_in(value), strict=False):
            merge_state_dicts(mine, theirs)
