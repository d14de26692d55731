"""Reading a checkpoint without running code in it.

``torch.load(weights_only=True)`` refuses every type that is not on a list. Its own list covers tensors and plain
values; :func:`safe_types` adds what callbacks of ordinary runs hold. Nothing on it runs code.
"""

from __future__ import annotations

import collections
import datetime
import errno
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

# How torch says what it refuses: a name that is not allowed, one that never is, a type that it cannot fill.
_NOT_ALLOWED = re.compile(r"Unsupported global: GLOBAL ([\w.]+\w)")
_BLOCKED = re.compile(r"unsupported GLOBAL ([\w.]+\w) whose module")
_NOT_FILLED = re.compile(r"but got <class '(\w+\.[\w.]+)'>")
_ADVICE = ("Weights only load failed", "Please file an issue", "Check the documentation")


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
        bytes,  # how an empty array is written
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
    except MemoryError:
        raise
    except Exception as e:  # damaged bytes make the reader raise nearly anything
        # EINVAL: what is left of the file sends the reader to a place before its start.
        if isinstance(e, OSError) and e.errno != errno.EINVAL:
            raise
        if isinstance(e, pickle.UnpicklingError) and (refusal := _refusal(str(e))) is not None:
            raise UntrustedCheckpointError(
                f"checkpoint {str(path)!r} holds {refusal}load with trust_checkpoint=True, which runs whatever code "
                "the file holds."
            ) from e
        raise CorruptCheckpointError(
            f"checkpoint {str(path)!r} cannot be read, it is damaged or foreign: {_reason(e)}"
        ) from e


def _refusal(message: str) -> str | None:
    """What torch refused to load, and the way out up to the word "or"; ``None`` if it failed for another reason."""
    if match := _NOT_ALLOWED.search(message):
        kind = match[1].rsplit(".", 1)[-1]
        return (
            f"{match[1]}, which is not known to be safe to load. If it is yours, allow the type with "
            f"torch.serialization.add_safe_globals([{kind}]), or "
        )
    if match := _BLOCKED.search(message):
        return f"{match[1]}, which can do anything to this machine. Only if the file is yours "
    if match := _NOT_FILLED.search(message):
        return f"{match[1]} in a form that is not known to be safe to load. If it is yours "
    return None


def _reason(e: Exception) -> str:
    """What is wrong with the file, without torch's advice to load it in spite of that."""
    lines = [line for line in str(e).splitlines() if line.strip() and not line.startswith(_ADVICE)]
    return lines[0].split(". ")[0] if lines else type(e).__name__
