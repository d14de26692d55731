"""Seeds: whatever numpy takes is good for every rank."""

from __future__ import annotations

from typing import Any

import pytest
import seed_ranks
from trainer_parts import build

from composerlite.errors import ConfigError
from composerlite.testing import run_ranks


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 2, 2**32 - 1])
def test_the_largest_seeds_are_good_for_every_rank(seed: int) -> None:
    """Behind the largest one the seeds of ranks begin at 0 again; each rank has one of its own."""
    ranks = run_ranks(seed_ranks.train, 3, seed, dist_timeout=None)
    assert [own for _, own in ranks] == [(seed + rank) % 2**32 for rank in range(3)]
    assert len({str(drawn) for drawn, _ in ranks}) == 3


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7", True])
def test_a_seed_that_numpy_does_not_take_is_refused_before_training(seed: Any) -> None:
    """The error names the range."""
    with pytest.raises(ConfigError, match="seed"):
        build(seed=seed)
