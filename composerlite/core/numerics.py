"""Precision, seeds and deterministic kernels. ``composerlite.devices.rng`` saves and restores random generators."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
from collections.abc import Generator
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from composerlite.devices import rng
from composerlite.errors import ConfigError
from composerlite.other_trainers import way_here

if TYPE_CHECKING:
    from composerlite.devices import Device

__all__ = [
    "MAX_SEED",
    "Precision",
    "configure_deterministic_mode",
    "ensure_precision",
    "get_precision_context",
    "get_random_seed",
    "seed_all",
    "seed_context",
    "seed_of_rank",
    "seed_torch",
]

MAX_SEED = 2**32 - 1
"""Largest seed of numpy."""


def get_random_seed() -> int:
    """Return a seed from the operating system, in [0, MAX_SEED]. Random generators are not changed."""
    return secrets.randbelow(MAX_SEED + 1)


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed of a rank.

    Args:
        seed: seed of the run.
        rank: number of the rank.

    Returns:
        ``seed + rank``, modulo ``MAX_SEED + 1``.
    """
    return (seed + rank) % (MAX_SEED + 1)


def seed_all(seed: int) -> None:
    """Seed python, numpy and torch (all devices).

    Raises:
        ConfigError: ``seed`` is not in [0, MAX_SEED].
    """
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed={seed}: expected a number from 0 to {MAX_SEED}.")
    random.seed(seed)
    np.random.seed(seed)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's generators of all devices.

    Without an accelerator only the CPU has a generator, and seeding it directly is faster: :func:`torch.manual_seed`
    records a stack trace for each kind of device, which takes up to milliseconds.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def seed_context(seed: int) -> Generator[None]:
    """Seed all generators inside the context, and restore their states afterwards."""
    before = rng.capture()
    try:
        seed_all(seed)
        yield
    finally:
        rng.restore([before])


def configure_deterministic_mode() -> None:
    """Make torch use deterministic kernels, or raise if an operation has none. Slower on GPUs."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Precision(StrEnum):
    """Number format of training.

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
            if (way := way_here("Precision", str(value))) is not None:
                raise ConfigError(f"precision={value!r} does not exist: here it is precision={way}.")
            raise ConfigError(f"precision={value!r} does not exist. Known: {', '.join(cls)}.")
        return found


def ensure_precision(precision: str | Precision | None, device: Device | torch.device) -> Precision:
    """Return ``precision``, checked against ``device``.

    Args:
        precision: a precision or its value; ``None`` for ``amp_fp16`` on a CUDA GPU and ``fp32`` elsewhere.
        device: device of the model.

    Returns:
        The precision.
    """
    if precision is None:
        return Precision.AMP_FP16 if device.type == "cuda" else Precision.FP32
    precision = Precision(precision)
    if precision is Precision.AMP_FP16 and device.type != "cuda":
        raise ConfigError(f"precision='amp_fp16' needs a CUDA GPU, not {device.type!r}: use 'amp_bf16' or 'fp32'.")
    return precision


def get_precision_context(
    precision: Precision, device: Device | torch.device
) -> contextlib.AbstractContextManager[object]:
    """Return the context for the forward pass and the loss.

    Args:
        precision: precision of the run.
        device: device of the model.

    Returns:
        A ``torch.autocast`` context; for ``fp32`` a context without effect.
    """
    if precision is Precision.FP32:
        return contextlib.nullcontext()
    dtype = torch.bfloat16 if precision is Precision.AMP_BF16 else torch.float16
    return torch.autocast(device.type, dtype=dtype)
