"""Precision: the number formats that a model trains in."""

from __future__ import annotations

import contextlib
from enum import StrEnum

import torch

from composerlite.errors import ConfigError

__all__ = ["Precision", "ensure_precision", "get_precision_context"]


class Precision(StrEnum):
    """The number formats of training.

    ``FP32`` computes in float32. ``AMP_BF16`` and ``AMP_FP16`` keep parameters in float32 and run matrix products
    in the shorter format (torch autocast); ``AMP_FP16`` needs a GPU and scales the loss.
    """

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"

    @classmethod
    def _missing_(cls, value: object) -> Precision:
        found = next((p for p in cls if str(value).lower() == p.value), None)
        if found is None:
            raise ConfigError(f"precision={value!r} does not exist. Known: {', '.join(cls)}.")
        return found


def ensure_precision(precision: str | Precision | None, device: torch.device) -> Precision:
    """``precision`` checked against ``device``; by default ``amp_fp16`` on a CUDA GPU and ``fp32`` elsewhere."""
    if precision is None:
        return Precision.AMP_FP16 if device.type == "cuda" else Precision.FP32
    precision = Precision(precision)
    if precision is Precision.AMP_FP16 and device.type != "cuda":
        raise ConfigError(f"precision='amp_fp16' needs a CUDA GPU, not {device.type!r}: use 'amp_bf16' or 'fp32'.")
    return precision


def get_precision_context(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context in which forward pass and loss run."""
    if precision is Precision.FP32:
        return contextlib.nullcontext()
    dtype = torch.bfloat16 if precision is Precision.AMP_BF16 else torch.float16
    return torch.autocast(device.type, dtype=dtype)
