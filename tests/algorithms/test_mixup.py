"""MixUp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from short_run import ShortRun

from composerlite.algorithms import LabelSmoothing, MixUp, mixup_batch
from composerlite.core import Event
from composerlite.errors import TrainingError

X = torch.arange(12.0).reshape(4, 3)
Y = torch.tensor([0, 1, 2, 1])


def test_samples_are_weighted_means_of_two() -> None:
    """The weight of the second sample is the one that is given, and its target comes along."""
    mixed, others, mixing = mixup_batch(X, Y, mixing=0.25, indices=torch.tensor([1, 2, 3, 0]))
    assert torch.equal(mixed, 0.75 * X + 0.25 * X[[1, 2, 3, 0]])
    assert torch.equal(others, Y[[1, 2, 3, 0]])
    assert mixing == 0.25


def test_the_first_sample_is_the_main_one() -> None:
    """A weight that is drawn is that of Beta(α, α), folded to at most a half: its mean is that of min(λ, 1 - λ)."""
    drawn = torch.tensor([mixup_batch(X, Y, alpha=1.0)[2] for _ in range(2000)])
    assert 0 <= drawn.min() <= drawn.max() <= 0.5
    assert drawn.mean() == pytest.approx(0.25, abs=0.01)  # Beta(1, 1) is uniform


def at_the_loss(algorithm: MixUp, *, labels: torch.Tensor = Y) -> tuple[torch.Tensor, torch.Tensor, ShortRun]:
    """The loss, what the formula of the paper gives with the same draws, and the run after it."""
    run = ShortRun([algorithm])
    state, logits = run.state, torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    state.batch = (X, labels)
    torch.manual_seed(1)
    run.engine.run_event(Event.BEFORE_FORWARD)
    mixed, mixing, others = state.batch[0], algorithm._share, algorithm._partners
    torch.testing.assert_close(mixed, (1 - mixing) * X + mixing * X[others])
    assert mixing > 0
    state.outputs = logits
    run.engine.run_event(Event.BEFORE_LOSS)
    state.loss = F.cross_entropy(logits, state.batch[1])
    run.engine.run_event(Event.AFTER_LOSS)
    own, other = F.cross_entropy(logits, labels), F.cross_entropy(logits, labels[others])
    return state.loss, (1 - mixing) * own + mixing * other, run


@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_the_loss_is_that_of_the_paper(interpolate_loss: bool) -> None:
    """λ times the loss against one target and 1 - λ times that against the other, whichever is interpolated."""
    loss, expected, _ = at_the_loss(MixUp(alpha=1.0, interpolate_loss=interpolate_loss))
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_nobody_but_the_loss_sees_mixed_targets(interpolate_loss: bool) -> None:
    """After the loss the batch holds the very tensors that it held before."""
    _, _, run = at_the_loss(MixUp(alpha=1.0, interpolate_loss=interpolate_loss))
    assert run.state.batch[0] is X
    assert run.state.batch[1] is Y


def test_losses_in_a_dict_are_mixed_one_by_one() -> None:
    """A model may return several losses."""
    run = ShortRun([algorithm := MixUp(alpha=1.0, interpolate_loss=True)])
    state = run.state
    state.batch, state.outputs = (X, Y), torch.zeros(4)
    state.model.loss = lambda outputs, batch: {"a": batch[1].float(), "b": [2.0 * batch[1]]}  # type: ignore[method-assign, assignment]
    run.engine.run_event(Event.BEFORE_FORWARD)
    run.engine.run_event(Event.BEFORE_LOSS)
    mixing, others = algorithm._share, algorithm._partners
    state.loss = state.model.loss(state.outputs, state.batch)
    run.engine.run_event(Event.AFTER_LOSS)
    mean = (1 - mixing) * Y + mixing * Y[others]
    torch.testing.assert_close(state.loss["a"], mean)
    torch.testing.assert_close(state.loss["b"][0], 2 * mean)


@pytest.mark.parametrize("key", ["dict", "functions"])
def test_inputs_and_targets_may_be_anywhere_in_a_batch(key: str) -> None:
    """Keys are names or functions; the batch of the loader, which may give it again, is not changed."""
    keys: dict[str, Any] = {"input_key": "x", "target_key": "y"}
    if key == "functions":
        keys = {
            f"{name}_key": (lambda b, k=k: b[k], lambda b, v, k=k: {**b, k: v})
            for name, k in (("input", "x"), ("target", "y"))
        }
    run = ShortRun([MixUp(alpha=1.0, **keys)])
    batch = run.state.batch = {"x": X, "y": Y}
    run.engine.run_event(Event.BEFORE_FORWARD)
    assert run.state.batch["x"] is not X
    assert batch == {"x": X, "y": Y}


def test_smoothing_and_mixing_add_up() -> None:
    """Smoothed targets of mixed samples are mixed smoothed targets, in either order of the algorithms."""
    targets = []
    for algorithms in ([MixUp(1.0), LabelSmoothing(0.3)], [LabelSmoothing(0.3), MixUp(1.0)]):
        run = ShortRun(algorithms)
        torch.manual_seed(1)
        run.state.batch, run.state.outputs = (X, Y), torch.zeros(4, 3)
        run.engine.run_event(Event.BEFORE_FORWARD)
        run.engine.run_event(Event.BEFORE_LOSS)
        targets.append((run.state.batch[1], next(a for a in algorithms if isinstance(a, MixUp))))
        run.engine.run_event(Event.AFTER_LOSS)
        assert run.state.batch[1] is Y
    for target, mixup in targets:
        smooth = F.one_hot(Y, 3) * 0.7 + 0.1
        torch.testing.assert_close(target, (1 - mixup._share) * smooth + mixup._share * smooth[mixup._partners])


def test_what_is_no_tensor_is_refused() -> None:
    """The error names the item, and the argument that says where it is."""
    run = ShortRun([MixUp(input_key=1)])
    run.state.batch = (X, "text")
    with pytest.raises(TrainingError, match=r"MixUp: batch\[1\] is a str, expected a tensor.* input_key"):
        run.engine.run_event(Event.BEFORE_FORWARD)
    run = ShortRun([MixUp()])
    run.state.batch = (X, Y)
    run.engine.run_event(Event.BEFORE_FORWARD)
    run.state.outputs = {"logits": X}
    with pytest.raises(TrainingError, match=r"expected a tensor .N, C"):
        run.engine.run_event(Event.BEFORE_LOSS)
