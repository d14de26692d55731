"""Metrics of several ranks: those of all samples, also where a rank has none, and each rank's own after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import metric_ranks
import pytest
import torch
from torch.utils.data import DataLoader
from trainer_parts import Points

from composerlite.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Average precision"),
    pytest.mark.filterwarnings("ignore:No (negative|positive) samples"),
]
PARALLEL: dict[str, Any] = {"one file": None, "a directory": {"fsdp": {}}}


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize(("ranks", "samples"), [(2, 1), (2, 3), (3, 1), (3, 4)])
def test_a_rank_without_a_sample_does_not_end_the_evaluation(ranks: int, samples: int, fsdp: bool) -> None:
    """With metrics that keep lists the values are those of one process, whatever each rank has seen."""
    expected = metric_ranks.evaluate(samples)
    for values in run_ranks(metric_ranks.evaluate, ranks, samples, fsdp, dist_timeout=None):
        assert values == pytest.approx(expected, nan_ok=True)


def test_a_stream_that_gives_a_rank_nothing_is_evaluated() -> None:
    """A rank without a batch of its own waits for the others; none at all, on any rank, is an error."""
    expected = metric_ranks.evaluate(5)
    for values in run_ranks(metric_ranks.evaluate, 2, 5, False, True, dist_timeout=None):
        assert values == pytest.approx(expected, nan_ok=True)
    with pytest.raises(ExceptionGroup) as failed:
        run_ranks(metric_ranks.evaluate, 2, 0, False, True, dist_timeout=None)
    assert ["gave no batch" in str(one) for one in failed.value.exceptions] == [True, True]


@pytest.mark.parametrize("samples", [1, 3])
def test_a_rank_without_a_sample_does_not_end_training(tmp_path: Path, samples: int) -> None:
    """In an epoch of one sample, or in its last batch: the metrics are those of one process, also after a resume."""
    expected = metric_ranks.train(samples)
    assert {"accuracy", "precision", "rows"} <= {*expected}
    whole = run_ranks(metric_ranks.train, 2, samples, dist_timeout=None)
    run_ranks(metric_ranks.train, 2, samples, tmp_path, 1, dist_timeout=None)
    resumed = run_ranks(metric_ranks.train, 2, samples, tmp_path, dist_timeout=None)
    assert [*whole, *resumed] == [pytest.approx(expected, nan_ok=True)] * 4


def test_the_loss_of_evaluation_is_the_mean_over_the_samples_of_all_ranks() -> None:
    """Each sample counts once, where one rank has a batch of two at last and the other a batch of one."""
    torch.manual_seed(3)
    model, points = metric_ranks.Counting(), Points(7)
    with torch.no_grad():
        each = [model.loss(model(one), one).item() for one in DataLoader(points, batch_size=1)]
    first, second = each[0::2], each[1::2]  # samples of each rank, four and three
    means = [sum(part) / len(part) for part in (first[:2], first[2:], second[:2], second[2:])]
    by_hand = sum(each) / 7
    assert by_hand != pytest.approx(sum(means) / 4, rel=1e-3)  # as if each batch counted alike
    for values in run_ranks(metric_ranks.evaluate, 2, 7, dist_timeout=None):
        assert values["loss"] == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("parallelism", list(PARALLEL.values()), ids=list(PARALLEL))
def test_each_rank_goes_on_with_what_it_has_counted(tmp_path: Path, parallelism: Any) -> None:
    """After a resume in the middle of an epoch each rank's metrics are its own again, bit for bit, and what is logged
    at the end of the epoch is what the whole run logs."""
    before = run_ranks(metric_ranks.resume_metrics, 2, tmp_path, "save", parallelism, dist_timeout=None)
    assert before[0]["states"] != before[1]["states"]
    after = run_ranks(metric_ranks.resume_metrics, 2, tmp_path, "resume", parallelism, dist_timeout=None)
    assert [rank["states"] for rank in after] == [rank["states"] for rank in before]
    whole = run_ranks(metric_ranks.resume_metrics, 2, tmp_path / "whole", "whole", parallelism, dist_timeout=None)
    assert [rank["values"] for rank in after] == [rank["values"] for rank in whole]


@pytest.mark.parametrize(("ranks", "then"), [(2, 1), (1, 2), (2, 3), (3, 2)])
def test_another_number_of_ranks_goes_on_with_what_all_have_counted(tmp_path: Path, ranks: int, then: int) -> None:
    """What the metrics say at the resume is what they said when it was saved."""
    before = run_ranks(metric_ranks.resume_metrics, ranks, tmp_path, "save", {"fsdp": {}}, dist_timeout=None)
    after = run_ranks(metric_ranks.resume_metrics, then, tmp_path, "resume", {"fsdp": {}}, dist_timeout=None)
    for rank in after:
        assert rank["computed"] == pytest.approx(before[0]["computed"])
