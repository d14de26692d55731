"""Reading a checkpoint without running code in it.

``torch.load(weights_only=True)`` refuses every type that is not on a list. Its own list covers tensors and plain
values; :func:`safe_types` adds what callbacks of ordinary runs hold. Nothing on it runs code.
"""

from __future__ import annotations

import collections
import datetime
import pathlib
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.dtypes
import torch
from numpy._core import multiarray, numeric  # pyright: ignore[reportPrivateUsage]
from torch.torch_version import TorchVersion

from composerlite.errors import CheckpointNotFoundError, CorruptCheckpointError, UntrustedCheckpointError

__all__ = ["is_loadable", "safe_torch_load", "safe_types"]

# numpy pickles its arrays and scalars through these private functions; Composer's RNG states contain them.
_NUMPY = [multiarray._reconstruct, multiarray.scalar, numeric._frombuffer]  # type: ignore[attr-defined]
_DTYPES = [value for value in vars(numpy.dtypes).values() if isinstance(value, type)]
_REFUSED = re.compile(r"Unsupported (?:global|class|type)\S*:? (?:GLOBAL )?([\w.]+)")


def safe_types() -> list[Any]:
    """The types and functions that a checkpoint may name, besides those of ``torch.load(weights_only=True)``."""
    return [
        datetime.timedelta,
        datetime.datetime,
        datetime.date,
        datetime.timezone,
        collections.deque,
        collections.defaultdict,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        frozenset,
        slice,
        # the factories of defaultdicts
        *(list, dict, set, int, float, str, bool, tuple),
        np.ndarray,
        np.dtype,
        TorchVersion,
        *_NUMPY,
        *_DTYPES,
    ]


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def is_loadable(thing: Any) -> bool:
    """Whether a checkpoint that names the class or function ``thing`` loads without ``trust_checkpoint=True``."""
    from torch._weights_only_unpickler import _get_allowed_globals  # pyright: ignore[reportPrivateUsage]

    names = _get_allowed_globals()  # torch's own list; it has no public name
    added = [*safe_types(), *torch.serialization.get_safe_globals()]
    return _name(thing) in names or any(thing is (a[0] if isinstance(a, tuple) else a) for a in added)


def safe_torch_load(
    path: str | Path, map_location: str | torch.device | None = "cpu", *, trust_checkpoint: bool = False
) -> Any:
    """The contents of the torch file ``path``.

    Args:
        path: a local file.
        map_location: where tensors go.
        trust_checkpoint: load any type, **running whatever code the file holds**. Only for files you made yourself.

    Raises:
        CheckpointNotFoundError: there is no such file.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
        CorruptCheckpointError: it is damaged, or no torch file at all.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no checkpoint {str(path)!r}.")
    try:
        if trust_checkpoint:
            return torch.load(path, map_location=map_location, weights_only=False)
        with torch.serialization.safe_globals(safe_types()):
            return torch.load(path, map_location=map_location, weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as e:  # damaged bytes make the reader raise nearly anything
        if isinstance(e, pickle.UnpicklingError) and (match := _REFUSED.search(str(e))):
            name = match[1].rstrip(".")
            raise UntrustedCheckpointError(
                f"checkpoint {str(path)!r} holds {name}, which is not known to be safe to load. If it is yours, allow "
                f"the type with torch.serialization.add_safe_globals([{name.rsplit('.', 1)[-1]}]), or load with "
                "trust_checkpoint=True, which runs whatever code the file holds."
            ) from e
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise CorruptCheckpointError(
            f"checkpoint {str(path)!r} cannot be read, it is damaged or foreign: {reason}"
        ) from e
