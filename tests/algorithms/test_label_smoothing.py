"""LabelSmoothing."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from short_run import ShortRun
from torch import Tensor

from composerlite.algorithms import LabelSmoothing, smooth_labels
from composerlite.core import Event, State
from composerlite.errors import TrainingError

Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("extra", [(), (5,), (5, 2)])
def test_loss_is_that_of_torch(extra: tuple[int, ...]) -> None:
    """Cross entropy against smoothed class numbers is torch's with ``label_smoothing``, in any number of dimensions."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 4, *extra, generator=generator)
    target = torch.randint(4, (6, *extra), generator=generator)
    loss = F.cross_entropy(logits, smooth_labels(logits, target, 0.2))
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, label_smoothing=0.2))


def test_probabilities_are_smoothed_too() -> None:
    """Targets that are probabilities already move towards the uniform distribution and still add up to 1."""
    logits, target = torch.zeros(1, 4), torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert smooth_labels(logits, target, 0.4).tolist() == [pytest.approx([0.4, 0.4, 0.1, 0.1])]


def test_ignored_targets_give_no_loss() -> None:
    """A negative class number, which means "ignore", takes no part in the loss."""
    smoothed = smooth_labels(torch.zeros(2, 4), torch.tensor([-100, 1]), 0.4)
    assert smoothed.tolist() == [[0.0] * 4, pytest.approx([0.1, 0.7, 0.1, 0.1])]


def around_the_loss(algorithm: LabelSmoothing, batch: Any) -> tuple[Any, State]:
    """The batch as the loss sees it, and the state after the loss."""
    run = ShortRun([algorithm])
    run.state.batch = batch
    run.state.outputs = torch.zeros(2, 4)
    run.engine.run_event(Event.BEFORE_LOSS)
    seen = run.state.batch
    run.engine.run_event(Event.AFTER_LOSS)
    return seen, run.state


X, Y = torch.ones(2, 3), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ((X, Y), 1),
        ([X, Y], 1),
        ({"x": X, "y": Y}, "y"),
        (Pair(X, Y), 1),
        ({"x": X, "y": Y}, (lambda batch: batch["y"], lambda batch, y: {**batch, "y": y})),
    ],
    ids=["tuple", "list", "dict", "namedtuple", "functions"],
)
def test_the_loss_sees_smoothed_targets_and_nobody_else_does(batch: Any, key: Any) -> None:
    """After the loss the batch is the very object it was, and at no time was that object changed."""
    seen, state = around_the_loss(LabelSmoothing(0.4, target_key=key), batch)
    target = seen["y"] if isinstance(seen, dict) else seen[1]
    assert target.tolist() == [pytest.approx([0.1, 0.7, 0.1, 0.1]), pytest.approx([0.1, 0.1, 0.7, 0.1])]
    assert type(seen) is type(batch)
    assert state.batch is batch
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    assert values[0] is X
    assert values[1] is Y


def test_outputs_that_are_no_tensor_are_refused() -> None:
    """A model that returns a dict cannot be used with label smoothing: the error says what it got."""
    run = ShortRun([LabelSmoothing()])
    run.state.batch, run.state.outputs = (X, Y), {"logits": torch.zeros(2, 4)}
    with pytest.raises(TrainingError, match="got dict and Tensor"):
        run.engine.run_event(Event.BEFORE_LOSS)


def test_training_differs_only_by_the_smoothing() -> None:
    """Smoothing of 0 trains as without the algorithm; 0.1 does not."""

    def head(smoothing: float) -> Tensor:
        return ShortRun([LabelSmoothing(smoothing)]).train(until=3).weights["head.weight"]

    plain = ShortRun([]).train(until=3).weights["head.weight"]
    torch.testing.assert_close(head(0.0), plain)
    assert not torch.allclose(head(0.1), plain)
