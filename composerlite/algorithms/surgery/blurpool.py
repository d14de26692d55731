"""BlurPool: replace strided layers by anti-aliased layers."""

from __future__ import annotations

import logging
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composerlite.core import Algorithm, Event, Logger, State
from composerlite.errors import ConfigError, checked_arguments

log = logging.getLogger(__name__)


@final
class BlurConv2d(nn.Module):
    """A strided convolution with anti-aliased downsampling (`Zhang 2019 <https://arxiv.org/abs/1904.11486>`_).

    The output has the same shape as the output of ``conv``.

    Args:
        conv: a strided convolution, used with its parameters and hooks.
        blur_first: blur the input of ``conv``, at little cost. Otherwise ``conv`` has no stride and the output is
            blurred while downsampling, as in the paper; ``conv`` then costs more by the square of the stride.
    """

    blur_filter: Tensor

    def __init__(self, conv: nn.Conv2d, *, blur_first: bool = True) -> None:
        super().__init__()
        self.conv = conv
        self.blur_first = blur_first
        self.blur_stride = (1, 1)
        if not blur_first:
            self.blur_stride, conv.stride = _pair(conv.stride), (1, 1)
        channels = conv.in_channels if blur_first else conv.out_channels
        self.register_buffer("blur_filter", _binomial_filter(like=conv.weight).repeat(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C_in, H, W) to (N, C_out, H', W'), or both without N."""
        if self.blur_first:
            return self.conv(_blur(x, self.blur_filter))
        return _blur(self.conv(x), self.blur_filter, stride=self.blur_stride)


@final
class BlurMaxPool2d(nn.Module):
    """Max pooling with anti-aliased downsampling (`Zhang 2019 <https://arxiv.org/abs/1904.11486>`_).

    Pools without stride, and blurs the result while downsampling. The output has the same shape as the output of
    ``pool``.

    Args:
        pool: the layer to replace.
    """

    filt2d: Tensor

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.kernel_size = pool.kernel_size
        self.stride = _pair(pool.stride)
        self.padding = pool.padding
        self.dilation = pool.dilation
        self.register_buffer("filt2d", _binomial_filter(like=torch.empty(0)))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, H', W'), or both without N."""
        maxima = F.max_pool2d(x, self.kernel_size, stride=1, padding=self.padding, dilation=self.dilation)
        return _blur(maxima, self.filt2d.expand(x.shape[-3], 1, 3, 3), stride=self.stride)

    def extra_repr(self) -> str:
        """Return the arguments, for printing."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}"


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
) -> nn.Module:
    """Replace the strided convolutions and max poolings in ``model``, in place.

    Parameters stay the same objects, so an existing optimizer stays valid. A second call replaces nothing. Poolings
    with ``return_indices`` or ``ceil_mode`` are not replaced.

    Args:
        model: the model. The layers are replaced inside the model.
        replace_convs: replace :class:`torch.nn.Conv2d` with a stride above 1.
        replace_maxpools: replace :class:`torch.nn.MaxPool2d` with a stride above 1.
        blur_first: blur the input of convolutions, see :class:`BlurConv2d`.
        min_channels: keep convolutions with fewer input channels, such as the first layer.

    Returns:
        ``model``.
    """
    done = {module.conv for module in model.modules() if isinstance(module, BlurConv2d)}
    new: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if module is model or module in done:
            continue
        if isinstance(module, nn.Conv2d):
            if replace_convs and _is_strided(module) and module.in_channels >= min_channels:
                new[module] = BlurConv2d(module, blur_first=blur_first).train(module.training)
        elif replace_maxpools and isinstance(module, nn.MaxPool2d) and _is_strided(module) and _is_plain(module):
            new[module] = BlurMaxPool2d(module).to(_like_weights(model)).train(module.training)
    # A layer used in two places has two names.
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in new:
            model.set_submodule(name, new[module])
    return model


@final
class BlurPool(Algorithm):
    """Makes downsampling anti-aliased, at the construction of the trainer (`Zhang 2019
    <https://arxiv.org/abs/1904.11486>`_).

    Names of layers change. Loading a checkpoint saved with BlurPool applies BlurPool first if necessary.

    Args:
        replace_convs: replace convolutions with a stride above 1.
        replace_maxpools: replace max poolings with a stride above 1.
        blur_first: blur the input of convolutions, see :class:`BlurConv2d`.
        min_channels: keep convolutions with fewer input channels.

    Raises:
        ConfigError: both ``replace_convs`` and ``replace_maxpools`` are false.
    """

    @checked_arguments
    def __init__(
        self,
        replace_convs: bool = True,
        replace_maxpools: bool = True,
        blur_first: bool = True,
        min_channels: int = 16,
    ) -> None:
        if not (replace_convs or replace_maxpools):
            raise ConfigError(
                "BlurPool(replace_convs=False, replace_maxpools=False) has no effect. Pass one as True, or remove "
                "BlurPool."
            )
        self.replace_convs = replace_convs
        self.replace_maxpools = replace_maxpools
        self.blur_first = blur_first
        self.min_channels = min_channels

    @staticmethod
    def required_on_load() -> bool:
        """Return true: the names of layers change."""
        return True

    def config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return self._arguments()

    def match(self, event: Event, state: State) -> bool:
        """Return true at ``INIT``."""
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers and log their number."""
        apply_blurpool(state.model, **self.config())
        convs = sum(isinstance(module, BlurConv2d) for module in state.model.modules())
        pools = sum(isinstance(module, BlurMaxPool2d) for module in state.model.modules())
        logger.log_hyperparameters({"blurpool/num_blurconv_layers": convs, "blurpool/num_blurpool_layers": pools})
        if convs + pools == 0:
            log.warning("%r has no effect: the model has no such strided layers", self)
        else:
            log.info("%r: the model has %d anti-aliased convolutions and %d poolings", self, convs, pools)


def _binomial_filter(*, like: Tensor) -> Tensor:
    """Return the 3 × 3 filter 1-2-1 with sum 1, of shape (1, 1, 3, 3), with type and device of ``like``."""
    row = torch.tensor([1.0, 2.0, 1.0], device=like.device, dtype=like.dtype) / 4
    return (row[:, None] * row[None, :])[None, None]


def _blur(x: Tensor, weight: Tensor, stride: tuple[int, int] = (1, 1)) -> Tensor:
    return F.conv2d(x, weight, stride=stride, padding=1, groups=weight.shape[0])


def _is_strided(module: nn.Conv2d | nn.MaxPool2d) -> bool:
    return max(_pair(module.stride)) > 1


def _is_plain(pool: nn.MaxPool2d) -> bool:
    return not pool.return_indices and not pool.ceil_mode


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _like_weights(model: nn.Module) -> Tensor:
    """Return a tensor with the type and device of the model's weights."""
    return next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
