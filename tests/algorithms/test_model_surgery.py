"""ChannelsLast, low-precision norms and StochasticDepth: changes to the model when the trainer is built."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from resumed_training import Bottleneck, image_model, images, new_trainer, trained
from torch import nn
from torch.utils.data import DataLoader

from composerlite.algorithms import (
    ChannelsLast,
    LPGroupNorm,
    LPLayerNorm,
    StochasticDepth,
    apply_channels_last,
    apply_low_precision_groupnorm,
    apply_low_precision_layernorm,
    apply_stochastic_depth,
)
from composerlite.loggers import InMemoryLogger


# ── order of memory ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_channels_lie_last_and_the_numbers_stay() -> None:
    """Convolutions have their channels last in memory; what the model computes is the same."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    x = torch.randn(2, 3, 4, 4)
    before = model(x)
    assert apply_channels_last(model) is model
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), before)


def test_a_checkpoint_with_channels_last_fits_a_model_without(tmp_path: Path) -> None:
    """Names and shapes are the same, and so are the weights."""
    trained(new_trainer([ChannelsLast()], tmp_path))
    plain = new_trainer([], load_path=tmp_path / "ba6.pt", load_weights_only=True)
    assert plain.state.algorithms == []
    again = new_trainer([ChannelsLast()], load_path=tmp_path / "ba6.pt")
    for name, weight in plain.state.model.state_dict().items():
        assert torch.equal(weight, again.state.model.state_dict()[name])
    plain.close()
    again.close()


# ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────────────
NORMS = [
    (apply_low_precision_layernorm, LPLayerNorm, lambda: nn.LayerNorm(8), (4, 8)),
    (apply_low_precision_groupnorm, LPGroupNorm, lambda: nn.GroupNorm(2, 8), (4, 8, 3)),
]


@pytest.mark.parametrize(("apply", "kind", "make", "shape"), NORMS, ids=["layer", "group"])
def test_norms_compute_in_the_type_of_autocast(apply, kind, make, shape) -> None:  # type: ignore[no-untyped-def]
    """In autocast the result has the lower type, near that of torch; without it the result is torch's to the bit."""
    model = nn.Sequential(make())
    parameters, x = list(model.parameters()), torch.randn(shape)
    with torch.no_grad():
        parameters[0].uniform_(0.5, 2)
        parameters[1].normal_()
    exact = model(x)
    assert apply(model, "amp_bf16") is model
    assert type(model[0]) is kind
    assert list(model.parameters()) == parameters
    assert torch.equal(model(x), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, atol=0.05, rtol=0.05)
    low.float().sum().backward()
    assert parameters[0].grad is not None
    assert parameters[0].grad.dtype == torch.float32


def test_norms_without_parameters_are_replaced_too() -> None:
    """``elementwise_affine=False`` has no weight to convert."""
    model = apply_low_precision_layernorm(nn.Sequential(nn.LayerNorm(4, elementwise_affine=False)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(2, 4)).dtype == torch.bfloat16


def test_norms_that_stay_as_they_are_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """A warning is logged in fp32, and for a model without such norms."""
    apply_low_precision_layernorm(nn.Sequential(nn.LayerNorm(4)), "fp32")
    assert "LPLayerNorm has no effect in fp32" in caplog.text
    apply_low_precision_groupnorm(nn.Sequential(nn.Linear(4, 4)), "amp_bf16")
    assert "the model has no GroupNorm" in caplog.text


# ── blocks left out ──────────────────────────────────────────────────────────────────────────────────────────────────
def blocks(method: str, rate: float, distribution: str = "uniform", count: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[Bottleneck() for _ in range(count)])
    apply_stochastic_depth(model, "ResNetBottleneck", method, rate, distribution)
    return model


X = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(1)).abs()  # relu leaves it as it is


@pytest.mark.parametrize("method", ["block", "sample"])
def test_a_rate_of_zero_is_the_block_and_of_one_the_shortcut(method: str) -> None:
    """The two ends, while training."""
    torch.manual_seed(0)
    plain = Bottleneck()
    torch.testing.assert_close(blocks(method, 0.0)(X), plain(X))
    assert torch.equal(blocks(method, 1.0)(X), X)


@pytest.mark.parametrize("method", ["block", "sample"])
def test_in_evaluation_a_block_counts_as_often_as_it_was_there(method: str) -> None:
    """x + (1 - rate) f(x), as in the paper."""
    model = blocks(method, 0.25).eval()
    torch.manual_seed(0)
    plain = Bottleneck().eval()
    plain.relu = nn.Identity()
    inner = X
    for number in (1, 2, 3):
        inner = getattr(plain, f"bn{number}")(getattr(plain, f"conv{number}")(inner))
        inner = inner.relu() if number < 3 else inner
    torch.testing.assert_close(model(X), (X + 0.75 * inner).relu())


def test_by_block_all_samples_lose_it_and_by_sample_each_on_its_own() -> None:
    """As often as the rate says."""
    lost = {method: torch.zeros(6, 300, dtype=torch.bool) for method in ("block", "sample")}
    for method, drawn in lost.items():
        model = blocks(method, 0.3)
        torch.manual_seed(2)
        for n in range(300):
            drawn[:, n] = (model(X) == X).flatten(1).all(dim=1)
        assert drawn.float().mean().item() == pytest.approx(0.3, abs=0.08)
    assert bool((lost["block"].all(0) == lost["block"].any(0)).all())
    assert bool((lost["sample"].all(0) != lost["sample"].any(0)).any())


def test_rates_grow_with_depth() -> None:
    """Linearly up to the rate of the last block, or the same for all."""
    assert [b.drop_rate for b in blocks("block", 0.4, "linear", 4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [b.drop_rate for b in blocks("block", 0.4, "uniform", 4)] == pytest.approx([0.4] * 4)


def test_a_changed_model_can_be_copied_and_pickled() -> None:
    """The copy computes with its own weights."""
    model = blocks("block", 0.0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(X), model(X))
        with torch.no_grad():
            other[0].bn3.weight.zero_()
            other[0].bn3.bias.zero_()
        assert torch.equal(other(X), X)


def test_the_rate_grows_during_the_warmup() -> None:
    """From 0 to the whole rate, which then stays."""
    log = InMemoryLogger()
    algorithm = StochasticDepth("ResNetBottleneck", drop_rate=0.4, drop_warmup="4ba")
    with new_trainer([algorithm], loggers=[log]) as trainer:
        trainer.fit()
        rates = [block.drop_rate for block in trainer.state.model.modules() if isinstance(block, Bottleneck)]
    logged = [value for _, value in log.data["stochastic_depth/drop_rate"]]
    assert logged == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates == pytest.approx([0.2, 0.4])


def test_a_checkpoint_brings_stochastic_depth_along(tmp_path: Path) -> None:
    """A script without the algorithm evaluates as the run that trained with it."""
    with new_trainer([StochasticDepth("ResNetBottleneck", drop_rate=0.5)], tmp_path) as trainer:
        trainer.fit()
        trainer.eval(DataLoader(images(), batch_size=8))
        expected = dict(trainer.state.eval_metric_values)
    with new_trainer([], load_path=tmp_path / "ba6.pt", model=image_model, load_weights_only=True) as plain:
        plain.eval(DataLoader(images(), batch_size=8))
        assert plain.state.eval_metric_values == expected
        assert [type(one).__name__ for one in plain.state.algorithms] == ["StochasticDepth"]
