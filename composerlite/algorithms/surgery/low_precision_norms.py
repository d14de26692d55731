"""LowPrecisionLayerNorm and LowPrecisionGroupNorm: compute norms in the type of autocast."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composerlite.core import Algorithm, Event, Logger, Precision, State
from composerlite.errors import ConfigError, checked_arguments

log = logging.getLogger(__name__)

T = TypeVar("T", Tensor, Tensor | None)
_EVENTS = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)


class LPLayerNorm(nn.LayerNorm):
    """Layer norm (`Ba et al. 2016 <https://arxiv.org/abs/1607.06450>`_) in the type of autocast.

    By default autocast computes norms in float32, and the next layer converts the result.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        """Normalize (N, …, shape), in the type of autocast if enabled."""
        dtype = _autocast_type(input)
        x, weight, bias = _cast(input, dtype), _cast(self.weight, dtype), _cast(self.bias, dtype)
        with torch.autocast(input.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class LPGroupNorm(nn.GroupNorm):
    """Group norm (`Wu & He 2018 <https://arxiv.org/abs/1803.08494>`_) in the type of autocast."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        """Normalize (N, C, …), in the type of autocast if enabled."""
        dtype = _autocast_type(input)
        x, weight, bias = _cast(input, dtype), _cast(self.weight, dtype), _cast(self.bias, dtype)
        with torch.autocast(input.device.type, enabled=False):
            return F.group_norm(x, self.num_groups, weight, bias, self.eps)


def apply_low_precision_layernorm(
    model: nn.Module,
    precision: Precision | str | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> nn.Module:
    """Compute the layer norms of ``model`` in the type of autocast, in place.

    Parameters stay the same objects, so an existing optimizer stays valid.

    Args:
        model: the model.
        precision: precision of training. With ``'fp32'`` there is no effect, and a warning is logged.
        optimizers: ignored; accepted for scripts of Composer.

    Returns:
        ``model``.
    """
    return _replace(model, nn.LayerNorm, LPLayerNorm, precision)


def apply_low_precision_groupnorm(
    model: nn.Module,
    precision: Precision | str | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> nn.Module:
    """Compute the group norms of ``model`` in the type of autocast, in place.

    Parameters stay the same objects, so an existing optimizer stays valid.

    Args:
        model: the model.
        precision: precision of training. With ``'fp32'`` there is no effect, and a warning is logged.
        optimizers: ignored; accepted for scripts of Composer.

    Returns:
        ``model``.
    """
    return _replace(model, nn.GroupNorm, LPGroupNorm, precision)


class LowPrecisionNorm(Algorithm):
    """Base of algorithms that compute norms in the type of autocast."""

    @checked_arguments
    def __init__(self, apply_at: Event | str = Event.INIT) -> None:
        self.apply_at = Event(apply_at)
        if self.apply_at not in _EVENTS:
            raise ConfigError(
                f"{type(self).__name__}(apply_at={str(apply_at)!r}): expected one of {', '.join(_EVENTS)}, events "
                "before training."
            )

    def match(self, event: Event, state: State) -> bool:
        """Return true at ``apply_at``."""
        return event is self.apply_at


@final
class LowPrecisionLayerNorm(LowPrecisionNorm):
    """Computes layer norms (`Ba et al. 2016 <https://arxiv.org/abs/1607.06450>`_) in the type of autocast.

    In mixed precision torch computes norms in float32 and converts the result, at the cost of memory and time. The
    weights stay in float32. Checkpoints fit models with and without this algorithm. No effect in ``fp32``.

    Args:
        apply_at: event of the change: ``'init'``, ``'before_load'`` or ``'after_load'``.

    Raises:
        ConfigError: ``apply_at`` is another event.
    """

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the layer norms."""
        apply_low_precision_layernorm(state.model, state.precision)


@final
class LowPrecisionGroupNorm(LowPrecisionNorm):
    """Computes group norms (`Wu & He 2018 <https://arxiv.org/abs/1803.08494>`_) in the type of autocast.

    In mixed precision torch computes norms in float32 and converts the result, at the cost of memory and time. The
    weights stay in float32. Checkpoints fit models with and without this algorithm. No effect in ``fp32``.

    Args:
        apply_at: event of the change: ``'init'``, ``'before_load'`` or ``'after_load'``.

    Raises:
        ConfigError: ``apply_at`` is another event.
    """

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the group norms."""
        apply_low_precision_groupnorm(state.model, state.precision)


def _replace(
    model: nn.Module, old: type[nn.Module], new: type[nn.Module], precision: Precision | str | None
) -> nn.Module:
    found = [module for module in model.modules() if type(module) is old]
    for module in found:
        module.__class__ = new  # keeps hooks, parameters and names
    if precision is not None and Precision(precision) is Precision.FP32:
        log.warning("%s has no effect in fp32", new.__name__)
    elif not found:
        log.warning("%s has no effect: the model has no %s", new.__name__, old.__name__)
    else:
        log.info("replaced %d norms by %s", len(found), new.__name__)
    return model


def _autocast_type(input: Tensor) -> torch.dtype | None:  # noqa: A002 - as in torch
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(tensor: T, dtype: torch.dtype | None) -> T:
    return tensor if dtype is None or tensor is None else tensor.to(dtype)
