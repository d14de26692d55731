"""A run that is interrupted and goes on with other ranks and another way of spreading the model, at random."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from topology_legs import SPREAD, Leg, Shape, go

from composerlite.testing import run_ranks

shapes = st.builds(Shape, st.integers(1, 5), st.integers(1, 7), st.integers(13, 40), st.integers(0, 1000))
chains = st.lists(st.sampled_from(list(SPREAD)), min_size=2, max_size=4).flatmap(
    lambda kinds: st.lists(st.integers(1, 3), min_size=len(kinds), max_size=len(kinds)).map(
        lambda lengths: [Leg(kind, sum(lengths[: n + 1])) for n, kind in enumerate(kinds)]
    )
)

PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # each try takes seconds: nothing is shrunk


def check(shape: Shape, chain: list[Leg]) -> None:
    """Each part begins to the bit with what the one before ended with; all see the samples of one process."""
    with tempfile.TemporaryDirectory() as scratch:
        alone = go(shape, Leg("one", chain[-1].end), Path(scratch, "alone"))
        seen, batch, before = list[list[int]](), 0, None
        for leg in chain:
            world_size, _ = SPREAD[leg.spread]
            ranks = run_ranks(go, world_size, shape, leg, Path(scratch, "chain"), dist_timeout=None)
            assert all(outcome.batch == batch for outcome in ranks)
            if before is not None:
                for outcome in ranks:
                    assert outcome.began.keys() == before.keys()
                    assert [key for key in before if not torch.equal(outcome.began[key], before[key])] == []
            # Ranks that share layers have the same samples.
            shares = [outcome.seen for outcome in ranks][:: 2 if "TP" in leg.spread else 1]
            seen += [[sample for share in parts for sample in share] for parts in zip(*shares, strict=True)]
            batch, before = leg.end, ranks[0].ended
        assert seen == alone.seen
        assert before is not None
        for key, tensor in alone.ended.items():
            torch.testing.assert_close(before[key], tensor, rtol=1e-3, atol=1e-4)


@hypothesis.settings(max_examples=3, phases=PHASES)
@hypothesis.given(shapes, chains)
def test_a_run_goes_on_however_its_ranks_change(shape: Shape, chain: list[Leg]) -> None:
    """Weights and optimizer are the same to the bit, and so is the order of samples, through files and directories."""
    check(shape, chain)


@pytest.mark.soak
@hypothesis.settings(max_examples=100, phases=PHASES)
@hypothesis.given(shapes, chains)
def test_many_runs_go_on_however_their_ranks_change(shape: Shape, chain: list[Leg]) -> None:
    """The same, for many more."""
    check(shape, chain)
