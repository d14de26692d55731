"""Comparison of a sharded checkpoint with the model and optimizer to load into. Errors list the differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from composerlite.checkpoint.load import sharded
from composerlite.dist import is_dense
from composerlite.errors import IncompatibleCheckpointError

_MOST_LISTED = 20


def check_fit(
    reader: sharded.RemoteFileSystemReader, wanted: Mapping[str, Any], *, strict: bool, owned: Sequence[str]
) -> None:
    """Compare the requested keys and shapes with the keys and shapes of a checkpoint.

    Args:
        reader: of the checkpoint.
        wanted: values of the model and optimizer, by the keys of the checkpoint. ``None`` fits any stored value.
        strict: missing keys, unexpected keys and different dtypes are errors.
        owned: prefixes of keys, without the dot. A key of the checkpoint with such a prefix is unexpected if the key is
            not in ``wanted``.

    Raises:
        IncompatibleCheckpointError: keys, shapes or dtypes differ; lists at most 20 differences of each kind.
    """
    stored = reader.read_metadata().state_dict_metadata
    missing, shapes, dtypes = [], [], []
    for key, value in wanted.items():
        there = stored.get(key)
        is_stored_tensor = isinstance(there, sharded.TensorStorageMetadata)
        if there is None:
            missing.append(key)
        elif value is None:  # stands for any value
            continue
        elif is_stored_tensor != (isinstance(value, Tensor) and (is_dense(value) or value.is_meta)):
            have, want = ("plain numbers", "something else")[:: 1 if is_stored_tensor else -1]
            shapes.append(f"{key}: {have} in the checkpoint, {want} here")
        elif is_stored_tensor:
            if value.shape != there.size:
                shapes.append(f"{key}: {tuple(there.size)} in the checkpoint, {tuple(value.shape)} here")
            if value.dtype is not there.properties.dtype:
                dtypes.append(f"{key}: {there.properties.dtype} in the checkpoint, {value.dtype} here")
    prefixes = tuple(f"{name}." for name in owned)
    found = {"of another shape": shapes}
    if strict:
        unexpected = [key for key in stored if key not in wanted and key.startswith(prefixes)]
        found = {"missing in the checkpoint": missing, "unexpected": unexpected, **found, "of another type": dtypes}
    if any(found.values()):
        lists = "; ".join(f"{len(keys)} {what}: {_listed(keys)}" for what, keys in found.items() if keys)
        way_out = " strict=False loads the rest." if strict and owned and not shapes else ""
        raise IncompatibleCheckpointError(f"checkpoint {reader.uri!r} does not fit: {lists}.{way_out}")


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MOST_LISTED} more" if len(keys) > _MOST_LISTED else ""
    return ", ".join(keys[:_MOST_LISTED]) + more


def is_group_members(key: str) -> bool:
    """Return true for a key such as ``optim.param_groups.0.params``. A flattened state has no such keys."""
    return key.startswith("optim.param_groups.") and key.count(".") == 3 and key.endswith(".params")


def check_groups(
    reader: sharded.RemoteFileSystemReader, groups: Sequence[Sequence[str]], *, flatten: bool, strict: bool
) -> None:
    """Check that the optimizer has the groups of the checkpoint.

    Args:
        reader: of the checkpoint.
        groups: names of the parameters in each group of the optimizer, as in the checkpoint.
        flatten: the checkpoint has a flattened state, with keys ``optim.param_groups.<parameter>.<setting>``.
        strict: parameters only here or only in the checkpoint are an error. Not checked with ``flatten``.

    Raises:
        IncompatibleCheckpointError: the groups differ; lists the differences.
    """
    stored = reader.read_metadata().state_dict_metadata
    saved: dict[str, Any] = {}  # number of the group of each parameter; in a flattened state the settings
    if flatten:
        tensors, start = sharded.TensorStorageMetadata, "optim.param_groups."
        keys = [key for key, one in stored.items() if key.startswith(start) and not isinstance(one, tensors)]
        for key, value in sharded.load_flat(reader, keys).items():
            name, _, setting = key.removeprefix(start).rpartition(".")
            saved.setdefault(name, {})[setting] = value
    else:
        for key, names in sharded.load_flat(reader, filter(is_group_members, stored)).items():
            saved.update(dict.fromkeys(names, int(key.split(".")[2])))
    problems: list[str] = []
    for number, names in enumerate(groups):
        group_of = {name: repr(saved[name]) for name in names if name in saved}
        own = next(iter(group_of.values()), "") if flatten else str(number)
        if moved := _listed([name for name, group in group_of.items() if group != own]):
            problems.append(f"{moved} in group {number} were saved in another group, or with other settings")
    here = set[str]().union(*groups)
    if strict and saved and not flatten and saved.keys() != here:
        problems.append(f"only here or only in the checkpoint: {_listed(sorted(saved.keys() ^ here))}")
    if problems:
        raise IncompatibleCheckpointError(
            f"checkpoint {reader.uri!r}: the optimizer has other parameter groups: {_listed(problems)}. Make the "
            "optimizer with the saved groups, or load without it."
        )
