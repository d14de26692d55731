"""Names of files in a folder of weights without a DCP index: weights in safetensors or torch, and other states."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, cast

from composerlite.errors import CorruptCheckpointError

MOST_HEADER_BYTES = 100_000_000
"""Largest accepted header of a file, as in the safetensors library, and largest accepted index."""
Read = Callable[[str, int, int], bytes]
"""Reads bytes of a file: name, offset, number of bytes."""
WEIGHTS_SUFFIX = ".safetensors"
TORCH_SUFFIX = ".bin"
_OF_TORCH = re.compile(r"(?:diffusion_)?pytorch_model(?:-\d+-of-\d+)?\.bin|.+\.bin\.index\.json")
"""Names of weights in the format of torch, and of the index."""
VALUES = re.compile(
    r"(?:optimizer|scheduler)(?:_\d+)?\.(?:pt|bin)|scaler\.pt|trainer_state\.json|rng_state(?:_\d+)?\.pth|random_states_\d+\.pkl"
)
"""Names of files that the Trainer of transformers or accelerate saves with the weights: optimizer, scheduler, …"""
MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
"""Names of files of model states of DeepSpeed. Groups: rank of data parallelism, if any, and of model parallelism."""


def holds_model_states(names: Collection[str]) -> bool:
    """Return true for the names of the files in a folder with one save of DeepSpeed's engine."""
    return any(map(MODEL_STATES.fullmatch, names))


def holds_weights(names: Collection[str]) -> bool:
    """Return true for the names of the files in a folder with weights in safetensors or the format of torch."""
    return are_safetensors(names) or any(map(_OF_TORCH.fullmatch, names))


def are_safetensors(names: Collection[str]) -> bool:
    """Return true for the names of the files in a folder with weights in safetensors."""
    return any(name.endswith((WEIGHTS_SUFFIX, f"{WEIGHTS_SUFFIX}.index.json")) for name in names)


def weight_files(names: Collection[str], size: Callable[[str], int], read: Read) -> list[str]:
    """Return the sorted names of files of weights in a folder: the files in the index, or all without an index.

    Args:
        names: of all files in the folder.
        size: gives the size of a file in bytes.
        read: reads a file.

    Raises:
        CorruptCheckpointError: the index is damaged or names a missing file, or there are several indexes.
    """
    suffix = WEIGHTS_SUFFIX if are_safetensors(names) else TORCH_SUFFIX
    indexes = sorted(name for name in names if name.endswith(f"{suffix}.index.json"))
    if not indexes:
        chosen = (name for name in names if name.endswith(suffix))
        return sorted(name for name in chosen if suffix == WEIGHTS_SUFFIX or _OF_TORCH.fullmatch(name))
    if len(indexes) > 1:
        raise CorruptCheckpointError(f"the folder has several indexes: {', '.join(indexes)}.")
    if (length := size(indexes[0])) > MOST_HEADER_BYTES:
        raise CorruptCheckpointError(f"{indexes[0]!r} has {length} bytes.")
    data = read(indexes[0], 0, length)
    try:
        listed = set(cast("dict[str, Any]", json.loads(data)["weight_map"]).values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CorruptCheckpointError(f"{indexes[0]!r} is not an index: {e}") from e
    for name in listed:
        if not isinstance(name, str) or name not in names or not name.endswith(suffix):
            raise CorruptCheckpointError(f"{indexes[0]!r} names {str(name)[:100]!r}, not a file in its folder.")
    return sorted(listed)
