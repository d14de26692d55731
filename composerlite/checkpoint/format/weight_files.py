"""Files of weights in a folder that has no index of its own: safetensors or torch, and what is saved beside them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, cast

from composerlite.errors import CorruptCheckpointError, UntrustedCheckpointError

__all__ = [
    "MODEL_STATES",
    "MOST_HEADER_BYTES",
    "TORCH_SUFFIX",
    "WEIGHTS_SUFFIX",
    "folder_index",
    "holds_model_states",
    "holds_weights",
    "is_folder_index",
    "is_safetensors",
]

MOST_HEADER_BYTES = 100_000_000
"""As the library itself allows."""
_Read = Callable[[str, int, int], bytes]
_MARK = b'{"files": '
WEIGHTS_SUFFIX = ".safetensors"
_INDEX_SUFFIX = f"{WEIGHTS_SUFFIX}.index.json"
TORCH_SUFFIX = ".bin"
_OF_TORCH = re.compile(r"(?:diffusion_)?pytorch_model(?:-\d+-of-\d+)?\.bin|.+\.bin\.index\.json")
"""What programs call weights that torch has saved, and their index."""
_VALUES = re.compile(
    r"(?:optimizer|scheduler)(?:_\d+)?\.(?:pt|bin)|scaler\.pt|trainer_state\.json|rng_state(?:_\d+)?\.pth|random_states_\d+\.pkl"
)
"""What the Trainer of transformers and accelerate save beside weights."""
MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
"""What the engine of DeepSpeed calls the file of a rank of data and one of model parallelism."""


def holds_model_states(names: Collection[str]) -> bool:
    """Return true for the names of a folder with one save of DeepSpeed's engine."""
    return any(map(MODEL_STATES.fullmatch, names))


def is_safetensors(beginning: bytes) -> bool:
    """Return true if a file that begins so is one of safetensors."""
    if len(beginning) < 9 or beginning[8:9] != b"{":
        return False
    (length,) = struct.unpack("<Q", beginning[:8])
    return length <= MOST_HEADER_BYTES


def holds_weights(names: Collection[str]) -> bool:
    """Return true for the names of a folder with weights in safetensors, or in ``pytorch_model.bin`` and the like."""
    return _are_safetensors(names) or any(map(_OF_TORCH.fullmatch, names))


def _are_safetensors(names: Collection[str]) -> bool:
    return any(name.endswith((WEIGHTS_SUFFIX, _INDEX_SUFFIX)) for name in names)


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

    Of files of torch it has what their pickles say of tensors, read by the restricted unpickler.

    Args:
        names: of all files in the folder.
        size: gives the size of one.
        read: reads so many bytes of one, from an offset.
        only: take this file alone.

    Returns:
        What :func:`~composerlite.checkpoint.format.folder_index.index_of` reads; ``None``: there are no weights.

    Raises:
        CorruptCheckpointError: a file is none, or is listed and not there.
        UntrustedCheckpointError: a file of torch holds a type that is not known to be safe.
    """
    files = [only] if only is not None else _files(names, size, read)
    if not files:
        return None
    values = {} if only is not None else {name: size(name) for name in names if _VALUES.fullmatch(name)}
    is_torch = only is None and not _are_safetensors(names)
    told = {
        "files": {} if is_torch else {name: [size(name), _header(name, size(name), read)] for name in files},
        "torch": {name: _tensors_of_torch(name, size(name), read) for name in files} if is_torch else {},
        "values": values,
    }
    return json.dumps(told).encode()


def _files(names: Collection[str], size: Callable[[str], int], read: _Read) -> list[str]:
    """Return the files of weights: those that the index names, or all."""
    suffix = WEIGHTS_SUFFIX if _are_safetensors(names) else TORCH_SUFFIX
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
        raise CorruptCheckpointError(f"{indexes[0]!r} is no index: {e}") from e
    for name in listed:
        if not isinstance(name, str) or name not in names or not name.endswith(suffix):
            raise CorruptCheckpointError(f"{indexes[0]!r} names {str(name)[:100]!r}, which is no file of its folder.")
    return sorted(listed)


def _header(name: str, size: int, read: _Read) -> str:
    try:
        (length,) = struct.unpack("<Q", read(name, 0, 8)) if size >= 8 else (size,)
        if length > min(MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        return read(name, 8, length).decode()
    except ValueError as e:
        raise CorruptCheckpointError(f"{name!r} is no safetensors file, or damaged: {e}") from e


class _Bytes(NamedTuple):
    """One file of the folder, as the reader of torch files takes it."""

    name: str
    read_of: _Read

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        return self.read_of(self.name, offset, size)

    def read_into(self, targets: object, progress: object = None) -> None:
        """Numbers are not read here."""
        raise AssertionError("no tensor is read for an index")


def _tensors_of_torch(name: str, size: int, read: _Read) -> list[tuple[str, str, list[int], int]]:
    """Return name, type, shape and first byte of each tensor in a file of torch."""
    from torch import Tensor  # a listing does without

    from composerlite.checkpoint.format.torch_reader import TorchFile
    from composerlite.checkpoint.trust.trusted import RefusedError

    source = _Bytes(name, read)
    try:
        file = TorchFile(source, size, peek=source.read, map_location="meta", check_sums=True)
    except RefusedError as e:
        raise UntrustedCheckpointError(
            f"{name!r} holds {e.name}, which is not known to be safe to load: a folder of weights is tensors by name."
        ) from e
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(f"{name!r} is no file of torch, or damaged: {e}") from e
    contents, records = file.contents, file.unread()
    if not isinstance(contents, dict):
        raise CorruptCheckpointError(f"{name!r} holds {type(contents).__name__} and no state dict.")
    found: list[tuple[str, str, list[int], int]] = []
    for key, tensor in cast("dict[Any, Any]", contents).items():
        if type(key) is not str:
            raise CorruptCheckpointError(f"{name!r} has a key that is {type(key).__name__}, and no name of a tensor.")
        record = records.get(id(tensor.untyped_storage())) if isinstance(tensor, Tensor) else None
        if record is None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise CorruptCheckpointError(
                f"{name!r}: {key!r} is not numbers row by row. If the file is yours, save it anew: "
                "torch.save({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)"
            )
        start = record.offset + int(tensor.storage_offset()) * tensor.itemsize
        found.append((key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
    return found
