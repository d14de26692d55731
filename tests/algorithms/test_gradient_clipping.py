"""GradientClipping."""

from __future__ import annotations

import torch
from short_run import ShortRun
from torch import nn

from composerlite.algorithms import GradientClipping, apply_gradient_clipping
from composerlite.core import Event


def model_with_gradients(*values: float) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(len(values)))
    model.unused = nn.Parameter(torch.zeros(2))
    model.weight.grad = torch.tensor(values)
    return model


def test_norm_scales_gradients_to_the_threshold() -> None:
    """'norm' keeps the direction and limits the length; shorter gradients stay."""
    model = model_with_gradients(3.0, 4.0)
    apply_gradient_clipping(model, clipping_type="norm", clipping_threshold=1.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    apply_gradient_clipping(model, clipping_type="norm", clipping_threshold=10.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


def test_value_clamps_each_element() -> None:
    """'value' limits every element on its own."""
    model = model_with_gradients(-3.0, 0.5)
    apply_gradient_clipping(model, clipping_type="value", clipping_threshold=1.0)
    assert torch.equal(model.weight.grad, torch.tensor([-1.0, 0.5]))  # type: ignore[arg-type, union-attr]


def test_adaptive_limits_each_unit_by_its_own_weights() -> None:
    """Rows of a weight, filters of a convolution, and a bias as a whole; weights near zero count as 0.001."""
    model = nn.ModuleDict({"linear": nn.Linear(2, 3), "conv": nn.Conv2d(1, 2, 2, bias=False)})
    with torch.no_grad():
        model["linear"].weight.copy_(torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]))
        model["linear"].bias.copy_(torch.tensor([0.0, 3.0, 4.0]))
        model["conv"].weight.copy_(torch.stack([torch.ones(1, 2, 2), torch.zeros(1, 2, 2)]))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    apply_gradient_clipping(model, "adaptive", 0.1)
    rows = model["linear"].weight.grad.norm(dim=1)
    torch.testing.assert_close(rows, torch.tensor([0.5, 0.05, 1e-4]))
    torch.testing.assert_close(model["linear"].bias.grad.norm(), torch.tensor(0.5))
    torch.testing.assert_close(model["conv"].weight.grad.flatten(1).norm(dim=1), torch.tensor([0.2, 1e-4]))
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    apply_gradient_clipping(model, "adaptive", 10.0)  # nothing is that long
    assert all(torch.equal(before[name], parameter.grad) for name, parameter in model.named_parameters())


def test_steps_of_training_are_limited() -> None:
    """In training, gradients are clipped when all are there and before the optimizer steps."""
    run = ShortRun([GradientClipping("norm", 1e-3)])
    before = run.weights
    run.train(until=1)
    moved = torch.cat([(run.weights[n] - before[n]).flatten() for n, _ in run.state.model.named_parameters()])
    decay = 0.1 * 0.01 * torch.cat([p.flatten() for p in before.values() if p.is_floating_point()]).nan_to_num().norm()
    assert 0 < moved.norm() <= 0.1 * 1e-3 + decay


def test_acts_at_one_event_only() -> None:
    """Clipping happens once per batch, not once per microbatch."""
    clipping, state = GradientClipping("norm", 1.0), ShortRun([]).state
    assert [event for event in Event if clipping.match(event, state)] == [Event.AFTER_TRAIN_BATCH]
