"""BlurPool: the layers, the surgery, and loading."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composerlite.algorithms import BlurConv2d, BlurMaxPool2d, BlurPool, apply_blurpool
from composerlite.core import Algorithm, Engine, Event, Logger, State
from composerlite.core.state.restoring import rebuilt

BLUR = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]) / 16


def blurred(x: Tensor) -> Tensor:
    """Each channel by itself, zeros around it."""
    return torch.cat([F.conv2d(channel, BLUR[None, None], padding=1) for channel in x.split(1, dim=1)], dim=1)


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(16, 16, 3, stride=(2, 1), padding=1, groups=4, bias=False), nn.BatchNorm2d(16)),
        nn.Conv2d(16, 8, 3, padding=1),
        nn.MaxPool2d(3, stride=1, padding=1),
    )


def new_state(model: nn.Module, algorithms: list[Algorithm] | None = None) -> State:
    state = State(
        model,
        rank_zero_seed=0,
        run_name="run",
        device=torch.device("cpu"),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=algorithms or [],
    )
    Engine(state, Logger(state)).run_event(Event.INIT)
    return state


def test_blur_first_is_blur_then_convolution() -> None:
    """The layer computes what its definition says, with the weights of the convolution."""
    conv = nn.Conv2d(16, 8, 3, stride=2, padding=1)
    x = torch.randn(2, 16, 9, 10)
    torch.testing.assert_close(BlurConv2d(conv)(x), conv(blurred(x)), rtol=1e-4, atol=1e-5)


def test_blur_last_is_convolution_then_blur_and_downsampling() -> None:
    """Without blur_first the convolution runs at full resolution and the blur downsamples."""
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1)
    x = torch.randn(2, 4, 9, 10)
    full = F.conv2d(x, conv.weight, conv.bias, padding=1)
    expected = blurred(full)[:, :, ::2, ::2]
    torch.testing.assert_close(BlurConv2d(conv, blur_first=False)(x), expected, rtol=1e-4, atol=1e-5)


def test_pool_is_maximum_then_blur_and_downsampling() -> None:
    """The maximum is taken everywhere, blurred, and every second one is kept."""
    x = torch.randn(2, 4, 9, 10)
    expected = blurred(F.max_pool2d(x, 3, stride=1, padding=1))[:, :, ::2, ::2]
    torch.testing.assert_close(BlurMaxPool2d(nn.MaxPool2d(3, stride=2, padding=1))(x), expected)


@pytest.mark.parametrize("size", [8, 9, 31, 32])
@pytest.mark.parametrize("blur_first", [True, False])
def test_shapes_stay(size: int, blur_first: bool) -> None:
    """Whatever the size of the image, every layer gives the shape it gave before."""
    x = torch.randn(1, 3, size, size)
    model = network()
    before = model(x).shape
    assert apply_blurpool(model, blur_first=blur_first, min_channels=1)(x).shape == before


def test_images_without_a_batch_dimension() -> None:
    """A single image of shape (C, H, W) gives what a batch of one gives."""
    model = nn.Sequential(nn.Conv2d(16, 4, 3, stride=2), nn.MaxPool2d(2))
    apply_blurpool(model)
    x = torch.randn(16, 9, 9)
    torch.testing.assert_close(model(x), model(x[None])[0])


def test_replaces_strided_layers_only() -> None:
    """Wide strided convolutions and strided poolings are replaced; the first layer and those without stride stay."""
    model = apply_blurpool(network())
    kinds = [type(model.get_submodule(name)) for name in ("0", "1", "2.0", "3", "4")]
    assert kinds == [nn.Conv2d, BlurMaxPool2d, BlurConv2d, nn.Conv2d, nn.MaxPool2d]
    assert type(apply_blurpool(network(), min_channels=3)[0]) is BlurConv2d  # type: ignore[index]
    kinds = [type(module) for module in apply_blurpool(network(), replace_convs=False).modules()]
    assert BlurConv2d not in kinds
    kinds = [type(module) for module in apply_blurpool(network(), replace_maxpools=False).modules()]
    assert BlurMaxPool2d not in kinds


def test_poolings_that_cannot_be_replaced_stay() -> None:
    """Poolings that return indices or round their size up keep doing so."""
    model = nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, return_indices=True))
    assert [type(module) for module in apply_blurpool(model)] == [nn.MaxPool2d, nn.MaxPool2d]  # type: ignore[attr-defined]


@pytest.mark.parametrize("blur_first", [True, False])
def test_twice_is_once(blur_first: bool) -> None:
    """Applying it again changes nothing."""
    model = apply_blurpool(network(), blur_first=blur_first)
    before = repr(model)
    assert repr(apply_blurpool(model, blur_first=blur_first)) == before


@pytest.mark.parametrize("blur_first", [True, False])
def test_shared_layers_stay_shared(blur_first: bool) -> None:
    """A layer that is used in two places is replaced in both, by one layer."""
    conv = nn.Conv2d(16, 16, 3, stride=2)
    model = nn.Sequential(conv, nn.ReLU(), conv)
    apply_blurpool(model, blur_first=blur_first)
    assert type(model[0]) is BlurConv2d
    assert model[0] is model[2]


def test_parametrized_layers_are_replaced() -> None:
    """A convolution with weight normalization keeps it."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 4, 3, stride=2)))
    apply_blurpool(model)
    assert isinstance(model[0], BlurConv2d)
    assert nn.utils.parametrize.is_parametrized(model[0].conv)


def test_mode_and_type_of_the_model_are_kept() -> None:
    """A model in evaluation mode and in double precision stays so, and runs."""
    model = apply_blurpool(network().double().eval())
    assert not any(module.training for module in model.modules())
    assert model(torch.randn(1, 3, 16, 16, dtype=torch.float64)).dtype == torch.float64


def test_optimizer_built_before_trains_the_model() -> None:
    """The weights are the same objects as before: an optimizer that was built first goes on training them."""
    model = network()
    weight = model[2][0].weight  # type: ignore[index]
    state = new_state(model, [BlurPool()])
    assert model[2][0].conv.weight is weight  # type: ignore[index, union-attr]
    before = weight.detach().clone()
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    state.optimizers[0].step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("at_once", [True, False])
def test_loading_a_checkpoint_applies_it_first(at_once: bool) -> None:
    """A checkpoint of such a model loads into a plain one: the layers are replaced, with the settings of the run."""
    saved = new_state(network(), [BlurPool(min_channels=3, blur_first=False)])
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)

    algorithms: list[Algorithm] = [BlurPool(min_channels=3, blur_first=False)] if at_once else []
    fresh = new_state(network(), algorithms)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 3, 16, 16)
    assert [type(algorithm) for algorithm in fresh.algorithms] == [BlurPool]
    assert torch.equal(fresh.model(x), saved.model(x))


def test_is_rebuilt_from_its_config() -> None:
    """What a checkpoint says of the algorithm is enough to build it again."""
    algorithm = BlurPool(replace_maxpools=False, min_channels=7)
    assert repr(rebuilt("BlurPool", algorithm.config())) == repr(algorithm)


def test_nothing_to_replace_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A model without strided layers gives a warning."""
    new_state(nn.Linear(2, 2), [BlurPool()])
    assert "has no effect" in caplog.text
