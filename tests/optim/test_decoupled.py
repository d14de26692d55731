"""DecoupledSGDW and DecoupledAdamW against their formulas, and resumed."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from composerlite.errors import ConfigError, UnknownArgumentError
from composerlite.optim import DecoupledAdamW, DecoupledSGDW

LR, DECAY = 0.1, 1e-4


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(steps)]


def schedule(step: int) -> float:
    return 1.0 - 0.1 * step


def run(optimizer: Optimizer, weight: nn.Parameter, steps: int) -> Tensor:
    scheduler = LambdaLR(optimizer, schedule)
    for gradient in gradients(steps):
        weight.grad = gradient.clone()
        optimizer.step()
        scheduler.step()
    return weight.detach()


def new_weight() -> nn.Parameter:
    return nn.Parameter(torch.arange(12, dtype=torch.float64).reshape(3, 4))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgdw_is_its_formula(momentum: float, nesterov: bool) -> None:
    """SGDW decays weights by weight_decay × lr / initial_lr and moves them along the momentum."""
    weight = new_weight()
    optimizer = DecoupledSGDW([weight], lr=LR, momentum=momentum, weight_decay=DECAY, nesterov=nesterov)
    result = run(optimizer, weight, 6)

    expected, velocity = new_weight().detach(), torch.zeros(3, 4, dtype=torch.float64)
    for step, gradient in enumerate(gradients(6)):
        expected = expected * (1 - DECAY * schedule(step))
        velocity = momentum * velocity + gradient
        direction = gradient + momentum * velocity if nesterov else velocity
        expected = expected - LR * schedule(step) * direction
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_is_its_formula(amsgrad: bool) -> None:
    """AdamW decays weights by weight_decay × lr / initial_lr, outside of the adaptive step."""
    weight = new_weight()
    optimizer = DecoupledAdamW([weight], lr=LR, betas=(0.9, 0.95), weight_decay=DECAY, amsgrad=amsgrad)
    result = run(optimizer, weight, 6)

    expected = new_weight().detach()
    mean, square, largest = (torch.zeros(3, 4, dtype=torch.float64) for _ in range(3))
    for step, gradient in enumerate(gradients(6)):
        expected = expected * (1 - DECAY * schedule(step))
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        largest = torch.maximum(largest, square)
        second = (largest if amsgrad else square) / (1 - 0.95 ** (step + 1))
        expected = expected - LR * schedule(step) * (mean / (1 - 0.9 ** (step + 1))) / (second.sqrt() + 1e-8)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=0)


def test_adamw_agrees_with_torch() -> None:
    """With the decay multiplied by the learning rate, a step is that of torch.optim.AdamW."""
    ours, theirs = new_weight(), new_weight()
    a = run(DecoupledAdamW([ours], lr=LR, weight_decay=LR * 0.01), ours, 5)
    b = run(torch.optim.AdamW([theirs], lr=LR, betas=(0.9, 0.95), weight_decay=0.01), theirs, 5)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("cls", [DecoupledSGDW, DecoupledAdamW])
def test_learning_rate_zero_changes_nothing(cls: type[Optimizer]) -> None:
    """While a schedule is at zero the weights stay, decay included."""
    weight = new_weight()
    optimizer = cls([weight], lr=LR, weight_decay=DECAY)
    optimizer.param_groups[0]["lr"] = 0.0
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weight, new_weight())


@pytest.mark.parametrize("cls", [DecoupledSGDW, DecoupledAdamW])
def test_parameters_without_gradient_stay(cls: type[Optimizer]) -> None:
    """A parameter that took no part in the loss is neither moved nor decayed."""
    used, unused = new_weight(), new_weight()
    optimizer = cls([used, unused], lr=LR, weight_decay=DECAY)
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert torch.equal(unused, new_weight())
    assert not torch.equal(used, new_weight())


def optimizers(weight: nn.Parameter) -> list[Optimizer]:
    return [
        DecoupledSGDW([weight], lr=LR, weight_decay=DECAY),
        DecoupledSGDW([weight], lr=LR, momentum=0.9, weight_decay=DECAY),
        DecoupledAdamW([weight], lr=LR, weight_decay=DECAY),
        DecoupledAdamW([weight], lr=LR, weight_decay=DECAY, amsgrad=True),
    ]


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("at", range(6))
def test_resumes_bit_for_bit(kind: int, at: int) -> None:
    """An optimizer restored from a file in the middle of a schedule goes on as if it had not stopped."""
    whole = new_weight()
    expected = run(optimizers(whole)[kind], whole, 6)

    weight = new_weight()
    optimizer = optimizers(weight)[kind]
    run(optimizer, weight, at)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)

    resumed = nn.Parameter(weight.detach().clone())
    optimizer = optimizers(resumed)[kind]
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    for step, gradient in enumerate(gradients(6)):
        if step >= at:
            optimizer.param_groups[0]["lr"] = LR * schedule(step)
            resumed.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(resumed, expected)


def test_takes_the_state_of_plain_adamw() -> None:
    """A run that began with torch.optim.AdamW can go on with DecoupledAdamW."""
    weight = new_weight()
    plain = torch.optim.AdamW([weight], lr=LR)
    weight.grad = torch.ones_like(weight)
    plain.step()
    ours = DecoupledAdamW([weight], lr=0.5)
    ours.load_state_dict(plain.state_dict())
    ours.step()
    assert ours.param_groups[0]["initial_lr"] == LR
    assert ours.state[weight]["step"] == 2


def test_every_group_has_its_own_initial_lr() -> None:
    """Groups differ in learning rate and decay, also those added later."""
    first, second = new_weight(), new_weight()
    optimizer = DecoupledSGDW([{"params": [first], "lr": 0.5}], lr=LR, weight_decay=DECAY)
    optimizer.add_param_group({"params": [second], "lr": 0.25, "weight_decay": 0.0})
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_closure_is_evaluated_with_gradients() -> None:
    """``step(closure)`` computes the loss anew and returns it."""
    weight = new_weight()
    optimizer = DecoupledSGDW([weight], lr=LR)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    before = (new_weight() ** 2).sum()
    assert torch.equal(optimizer.step(closure), before)
    assert torch.allclose(weight, new_weight() * (1 - 2 * LR))


@pytest.mark.parametrize(
    "arguments",
    [{"lr": -1.0}, {"lr": 0.1, "weight_decay": -1.0}, {"lr": 0.1, "momentum": -0.1}, {"lr": 0.1, "nesterov": True}],
)
def test_sgdw_says_what_is_wrong(arguments: dict[str, float]) -> None:
    """Values that cannot work are refused when the optimizer is built."""
    with pytest.raises(ConfigError, match="DecoupledSGDW"):
        DecoupledSGDW([new_weight()], **arguments)


def test_adamw_says_what_is_wrong() -> None:
    """A beta of 1 and a misspelt argument are refused; the message names the right one."""
    with pytest.raises(ConfigError, match=r"betas=\(0.9, 1.0\)"):
        DecoupledAdamW([new_weight()], betas=(0.9, 1.0))
    with pytest.raises(UnknownArgumentError, match="'weight_decay'"):
        DecoupledAdamW([new_weight()], weight_decy=0.1)  # type: ignore[call-arg]


def test_high_decay_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    """A decay that was meant for torch.optim.AdamW is a thousand times too strong here: a warning says so."""
    DecoupledAdamW([new_weight()], weight_decay=0.01)
    assert "not multiplied by the learning rate" in caplog.text
