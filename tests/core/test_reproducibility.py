"""Seeds and deterministic kernels."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from composerlite.core import seed_all
from composerlite.core.numerics import MAX_SEED, configure_deterministic_mode, get_random_seed, seed_context
from composerlite.errors import ConfigError


def draw() -> tuple[float, float, float]:
    """One number of each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_seed_fixes_every_generator() -> None:
    """After the same seed python, numpy and torch draw the same numbers."""
    seed_all(3)
    first = draw()
    seed_all(3)
    assert draw() == first
    seed_all(4)
    assert 0 <= get_random_seed() <= MAX_SEED  # from the operating system: moves no generator
    assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_a_seed_out_of_range_is_an_error(seed: int) -> None:
    """numpy's range is the range; the error names it."""
    with pytest.raises(ConfigError, match=f"from 0 to {MAX_SEED}"):
        seed_all(seed)


def test_a_seed_context_moves_no_generator() -> None:
    """What is drawn within a context changes nothing outside it, after an exception neither."""
    seed_all(3)
    expected = draw()
    seed_all(3)

    def fail() -> None:
        with seed_context(99):
            draw()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert draw() == expected


@pytest.mark.usefixtures("restore_torch")
def test_deterministic_mode_asks_torch_for_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is told, and cuBLAS gets the workspace that it needs for it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    configure_deterministic_mode()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
