"""Several ranks of which one is asked to end: all end after the same batch, with a checkpoint of it, and go on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import preempted_ranks
import pytest
import torch
from preempted_ranks import LAST

from composerlite.checkpoint import Catalog
from composerlite.testing import run_ranks


def train(folder: Path, at: Any, how: dict[str, Any]) -> list[dict[str, Any]]:
    """What two ranks tell."""
    return run_ranks(functools.partial(preempted_ranks.train, **how), 2, folder, at, dist_timeout=None)


HOWS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP": {"fsdp": True},
}


@pytest.mark.parametrize("how", list(HOWS.values()), ids=list(HOWS))
def test_one_rank_that_is_asked_ends_all(tmp_path: Path, how: dict[str, Any]) -> None:
    """In a forward pass, in an evaluation, at an epoch's edge: nothing is lost, and the end is that of a run that was
    left alone, bit for bit."""
    whole = train(tmp_path / "whole", None, how)
    assert [rank["code"] for rank in whole] == [0, 0]
    ended = 0
    parts: list[list[dict[str, Any]]] = []
    for at in ((1, "after_forward", 1, 1), (0, "eval_batch_end", 4, 2), (1, "after_backward", 5, 1), None):
        ranks = train(tmp_path / "run", at, how)
        parts.append(ranks)
        assert [(rank["first"], rank["code"]) for rank in ranks] == [(ended, 143 if at else 0)] * 2
        ended = ranks[0]["last"]
        assert ranks[1]["last"] == ended
        if at is not None:
            assert ended in (at[2], at[2] + 1, at[2] + 2)
            assert Catalog(tmp_path / "run").manifests()[-1].batch == ended
    assert ended == LAST
    for rank in (0, 1):
        for what in ("seen", "evaluated"):
            assert [one for part in parts for one in part[rank][what]] == whole[rank][what]
        weights = parts[-1][rank]["weights"]
        assert [name for name, tensor in whole[rank]["weights"].items() if not torch.equal(weights[name], tensor)] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_evaluator_that_was_run_on_all_ranks_is_not_run_again(tmp_path: Path, rank: int) -> None:
    """Two are due at batch 4, and one rank is asked in the second: the resumed run begins with that one."""
    whole = train(tmp_path / "whole", None, {"evaluators": 2})
    parts = [train(tmp_path / "run", at, {"evaluators": 2}) for at in ((rank, "eval_batch_end", 4, 6), None)]
    assert [[one["code"] for one in ranks] for ranks in parts] == [[143, 143], [0, 0]]
    for one, (first, second) in enumerate(zip(*parts, strict=True)):
        assert first["evaluated"] == [("eval0", 4)]
        assert first["evaluated"] + second["evaluated"] == whole[one]["evaluated"]
        assert first["seen"] + second["seen"] == whole[one]["seen"]
        assert all(torch.equal(second["weights"][name], tensor) for name, tensor in whole[one]["weights"].items())
