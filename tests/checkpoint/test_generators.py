"""Random generators go on from a checkpoint as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from composerlite.checkpoint import rng, safe_torch_load


def draw() -> tuple[object, ...]:
    """Something from every generator; normal numbers, too, of which two are drawn at a time."""
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_the_same_numbers_come_after_a_restore(tmp_path: Path) -> None:
    """Through a file that torch opens by itself; taking the states moves no generator."""
    draw()
    states = [rng.capture()]
    assert repr(rng.capture()) == repr(states[0])
    torch.save(states, tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    rng.restore(torch.load(tmp_path / "rng.pt"))
    assert [draw() for _ in range(3)] == expected


def test_every_rank_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """One that the saved run did not have goes on with its seed, and says so."""
    first = rng.capture()
    draw()
    states = [first, rng.capture()]
    expected = draw()
    rng.restore(states, rank=0)
    rng.restore(states, rank=1)
    assert draw() == expected
    before = rng.capture()
    rng.restore(states, rank=2)
    assert repr(rng.capture()) == repr(before)
    assert "generators for 2 ranks: rank 2 keeps its seed" in caplog.text


def test_the_states_of_composer_are_understood(tmp_path: Path) -> None:
    """There numpy's state is an array, and python's a tuple."""
    composer = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    torch.save({"rng": [composer]}, tmp_path / "theirs.pt")
    expected = draw()
    rng.restore(safe_torch_load(tmp_path / "theirs.pt")["rng"])
    assert draw() == expected


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_gpu_that_is_missing_is_said(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of a GPU goes on without one of its kind, with a warning; the other generators are restored."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has a GPU")
    state = {**rng.capture(), kind: torch.zeros(16, dtype=torch.uint8)}
    expected = draw()
    rng.restore([state])
    assert draw() == expected
    assert f"its {kind.upper()} generator is not restored" in caplog.text
