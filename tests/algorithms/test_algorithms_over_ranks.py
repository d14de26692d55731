"""Algorithms on two ranks that train one model."""

from __future__ import annotations

from typing import Any

import algorithm_ranks
import pytest
import torch

from composerlite.testing import run_ranks


@pytest.mark.parametrize("name", ["sam", "adaptive clipping"])
@pytest.mark.parametrize(
    "how",
    [{}, {"ddp_sync_strategy": "forced_sync"}, {"parallelism_config": {"fsdp": {}}}],
    ids=["ddp", "forced", "fsdp"],
)
def test_gradients_are_those_of_all_ranks(name: str, how: dict[str, Any]) -> None:
    """Two ranks with half a batch each end where one with whole batches does, sharded or not."""
    expected = algorithm_ranks.train_with(name, 8, {})
    for arguments in (how, {**how, "device_train_microbatch_size": 2}):
        for weights in run_ranks(algorithm_ranks.train_with, 2, name, 4, arguments):
            for key, weight in expected.items():
                torch.testing.assert_close(weights[key], weight)


@pytest.mark.parametrize("microbatch", [None, 2])
def test_ranks_train_on_where_parameters_have_no_gradient(microbatch: int | None) -> None:
    """Layers are frozen on all, blocks are left out on each by its own draw, and the copies stay the same."""
    (frozen, weights), (other_frozen, other_weights) = run_ranks(algorithm_ranks.train_without_some, 2, microbatch)
    assert frozen == other_frozen
    assert 0 < len(frozen) < len(weights)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_what_ranks_would_wait_for_is_refused() -> None:
    """Before training, with the way out."""
    for errors in run_ranks(algorithm_ranks.refusals, 2):
        assert len(errors) == 3
        assert "and LayerFreezing leaves some out. Leave ddp_sync_strategy out, or pass 'forced_sync'" in errors[0]
        assert "LayerFreezing does not support models sharded over ranks" in errors[1]
        assert "Pass stochastic_method='sample'" in errors[2]
