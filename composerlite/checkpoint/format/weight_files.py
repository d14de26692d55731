"""Files of weights in a folder that has no index of its own: safetensors, and what programs save beside them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Collection
from typing import Any, cast

import xxhash

from composerlite.errors import CorruptCheckpointError

__all__ = [
    "MOST_HEADER_BYTES",
    "WEIGHTS_SUFFIX",
    "digest_of_index",
    "folder_index",
    "holds_weights",
    "is_folder_index",
    "is_part_of_weights",
    "is_safetensors",
]

MOST_HEADER_BYTES = 100_000_000
"""As the library itself allows."""
_Read = Callable[[str, int, int], bytes]
_MARK = b'{"files": '
WEIGHTS_SUFFIX = ".safetensors"
_INDEX_SUFFIX = f"{WEIGHTS_SUFFIX}.index.json"
_VALUES = re.compile(
    r"(?:optimizer|scheduler)\.(?:pt|bin)|scaler\.pt|trainer_state\.json|rng_state(?:_\d+)?\.pth|random_states_\d+\.pkl"
)
"""What the Trainer of transformers and accelerate save beside weights."""
_PART = re.compile(r"model(?:-\d+-of-\d+)?_[0-9a-f]{8}\.safetensors")


def is_safetensors(beginning: bytes) -> bool:
    """Return true if a file that begins so is one of safetensors."""
    if len(beginning) < 9 or beginning[8:9] != b"{":
        return False
    (length,) = struct.unpack("<Q", beginning[:8])
    return length <= MOST_HEADER_BYTES


def holds_weights(names: Collection[str]) -> bool:
    """Return true for the names of a folder with weights in safetensors."""
    return any(name.endswith((WEIGHTS_SUFFIX, _INDEX_SUFFIX)) for name in names)


def is_part_of_weights(name: str) -> bool:
    """Return true for what a save of ours to a bucket calls a file of weights: no other program gives such a name."""
    return _PART.fullmatch(name) is not None


def digest_of_index(data: bytes) -> str:
    """Return the XXH3-128 of the file ``*.safetensors.index.json`` that ``data`` of :func:`folder_index` was made with.

    Empty: there was none, or ``data`` is another index.
    """
    return str(json.loads(data)["index"]) if is_folder_index(data) else ""


def is_folder_index(data: bytes) -> bool:
    """Return true for what :func:`folder_index` has made."""
    return data.startswith(_MARK)


def folder_index(
    names: Collection[str],
    size: Callable[[str], int],
    read: _Read,
    *,
    only: str | None = None,
) -> bytes | None:
    """Make an index of the files of a folder: their sizes, and the headers of those of safetensors, unchecked.

    Args:
        names: of all files in the folder.
        size: gives the size of one.
        read: reads so many bytes of one, from an offset.
        only: take this file alone.

    Returns:
        What :func:`~composerlite.checkpoint.format.folder_index.index_of` reads; ``None``: there are no weights.

    Raises:
        CorruptCheckpointError: a file is none, or is listed and not there.
    """
    files, index = ([only], "") if only is not None else _files(names, size, read)
    if not files:
        return None
    values = {} if only is not None else {name: size(name) for name in names if _VALUES.fullmatch(name)}
    told = {
        "files": {name: [size(name), _header(name, size(name), read)] for name in files},
        "values": values,
        "index": index,
    }
    return json.dumps(told).encode()


def _files(names: Collection[str], size: Callable[[str], int], read: _Read) -> tuple[list[str], str]:
    """Return the files of weights: those that the index names, with a digest of it, or all."""
    indexes = sorted(name for name in names if name.endswith(_INDEX_SUFFIX))
    if not indexes:
        return sorted(name for name in names if name.endswith(WEIGHTS_SUFFIX)), ""
    if len(indexes) > 1:
        raise CorruptCheckpointError(f"the folder has several indexes: {', '.join(indexes)}.")
    if (length := size(indexes[0])) > MOST_HEADER_BYTES:
        raise CorruptCheckpointError(f"{indexes[0]!r} has {length} bytes.")
    data = read(indexes[0], 0, length)
    try:
        listed = set(cast("dict[str, Any]", json.loads(data)["weight_map"]).values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CorruptCheckpointError(f"{indexes[0]!r} is no index: {e}") from e
    for name in listed:
        if not isinstance(name, str) or name not in names or not name.endswith(WEIGHTS_SUFFIX):
            raise CorruptCheckpointError(f"{indexes[0]!r} names {str(name)[:100]!r}, which is no file of its folder.")
    return sorted(listed), xxhash.xxh3_128_hexdigest(data)


def _header(name: str, size: int, read: _Read) -> str:
    try:
        (length,) = struct.unpack("<Q", read(name, 0, 8)) if size >= 8 else (size,)
        if length > min(MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        return read(name, 8, length).decode()
    except ValueError as e:
        raise CorruptCheckpointError(f"{name!r} is no safetensors file, or damaged: {e}") from e
