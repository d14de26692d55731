"""The index of a sharded checkpoint, ``.metadata``: read without running what it names, and checked."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, cast, final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from composerlite._torch_compat import dcp_memory_format_class, dcp_storage_info_class
from composerlite.checkpoint.format import INDEX
from composerlite.checkpoint.trust.trusted import RefusedError
from composerlite.checkpoint.trust.unpickler import RestrictedUnpickler
from composerlite.errors import CorruptCheckpointError, UntrustedCheckpointError

__all__ = ["StorageInfo", "key_path", "read_index", "untrusted"]

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


@final
class _NoStorages:
    """An index has no tensors."""

    def storage(self, identity: Any) -> Any:
        raise ValueError("an index with a tensor in it")

    def read_now(self) -> None:
        """There is nothing to be read."""


def read_index(data: bytes, uri: str) -> Metadata:
    """What ``.metadata`` says, made of known types only, every number of which can be.

    Raises:
        UntrustedCheckpointError: it names something else.
        CorruptCheckpointError: it is no index.
    """
    try:
        found = RestrictedUnpickler(data, _NoStorages(), _INDEX_TYPES).load()
        _check_index(found)
    except RefusedError as e:
        raise untrusted(uri, INDEX, e) from e
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: its {INDEX!r} is damaged or no index: {e}") from e
    return found


def _check_index(found: Any) -> None:
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
        name, numbers = place.relative_path, (place.offset, place.length)
        parts = PurePosixPath(name).parts if type(name) is str else ()
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise ValueError(f"data in {name!r}, which is not in its directory")
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
            raise ValueError(f"data of {name!r} at {numbers}")
    paths = found.planner_data
    if paths is not None and (
        type(paths) is not dict or not all(type(k) is str and type(v) is tuple for k, v in paths.items())
    ):
        raise ValueError("paths of keys that are none")


def _check_tensor(key: str, stored: TensorStorageMetadata) -> None:
    properties, shape = stored.properties, stored.size
    if type(properties) is not TensorProperties or not isinstance(cast("Any", properties).dtype, torch.dtype):
        raise ValueError(f"{key!r} has no type of numbers")
    if type(shape) is not torch.Size or type(stored.chunks) is not list:
        raise ValueError(f"{key!r} has no shape")
    for chunk in stored.chunks:
        if type(chunk) is not ChunkStorageMetadata or not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            raise ValueError(f"{key!r} has a part that is none")
        if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"{key!r} of the shape {tuple(shape)} has a part beyond it")


def key_path(metadata: Metadata, key: str) -> tuple[str | int, ...]:
    """Where ``key`` of the index belongs in the nested state dict."""
    return (metadata.planner_data or {}).get(key, (key,))


def untrusted(uri: str, key: str, refused: RefusedError) -> UntrustedCheckpointError:
    """What to raise where ``key`` of the checkpoint at ``uri`` names what is not known to be safe."""
    kind = refused.name.rsplit(".", 1)[-1]
    hint = (
        f" If it is yours, allow it with torch.serialization.add_safe_globals([{kind}])." if refused.allowable else ""
    )
    return UntrustedCheckpointError(
        f"checkpoint {uri!r}: {key!r} holds {refused.name}, which is not known to be safe to load.{hint}"
    )
