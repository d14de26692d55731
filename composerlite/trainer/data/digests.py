"""Digests of values: by some of them and not by all, so that they cost next to nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import xxhash

__all__ = ["digest_of", "sampled", "spread"]

_SAMPLED = 16
_SAMPLED_VALUES = 1024
_DEPTH = 4


def digest_of(batch: Any) -> str:
    """Digest of the shapes and some of the values of ``batch``. Of an object, its type alone."""
    digest = xxhash.xxh3_64()
    _add(digest, batch, _DEPTH)
    return digest.hexdigest()


def sampled(tensor: torch.Tensor) -> bytes:
    """Shape, type and some values of ``tensor``."""
    head = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return head
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    rows = [tensor[at].reshape(-1)[:_SAMPLED_VALUES] for at in spread(len(tensor))]
    values = [row.detach().cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8) for row in rows]
    return b"".join([head, *(value.numpy().tobytes() for value in values)])


def spread(length: int) -> list[int]:
    """Some places in a sequence of that length, its first and last among them."""
    return sorted({at * (length - 1) // (_SAMPLED - 1) for at in range(_SAMPLED)}) if length else []


def _add(digest: Any, value: Any, depth: int) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        digest.update(sampled(value))
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.shape} {value.dtype}".encode())
        if not value.dtype.hasobject:
            digest.update(value.reshape(-1)[: _SAMPLED * _SAMPLED_VALUES].tobytes())
    elif isinstance(value, str | bytes):
        digest.update(repr(value[:_SAMPLED_VALUES]).encode())
    elif value is None or isinstance(value, bool | int | float):
        digest.update(repr(value).encode())
    elif depth and isinstance(value, Mapping | Sequence):
        items = cast("Any", value).items() if isinstance(value, Mapping) else enumerate(cast("Any", value))
        for _, (key, item) in zip(range(_SAMPLED * _DEPTH), items, strict=False):
            digest.update(str(key).encode())
            _add(digest, item, depth - 1)
