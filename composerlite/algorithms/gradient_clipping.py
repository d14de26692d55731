"""GradientClipping: limit the size of gradients."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from composerlite import dist
from composerlite.core import Algorithm, Event, Logger, State
from composerlite.errors import ConfigError, checked_arguments, did_you_mean

_TYPES = ("adaptive", "norm", "value")
_EPSILON = 1e-6  # as in torch
_LEAST_WEIGHT_NORM = 1e-3  # from the paper: units with zero weights can grow


def apply_gradient_clipping(
    model: nn.Module, clipping_type: str, clipping_threshold: float, fsdp_enabled: bool = False
) -> None:
    """Clip the gradients of ``model`` in place.

    Args:
        model: a model with gradients, which may be sharded over ranks: the norm is that of the whole gradient.
            Parameters without a gradient are skipped.
        clipping_type: ``'norm'`` scales all gradients so that their common L2 norm is at most the threshold (`Pascanu
            et al. 2013 <https://arxiv.org/abs/1211.5063>`_); ``'value'`` clamps each element to ± the threshold;
            ``'adaptive'`` scales the gradient of each output unit (each row of a weight, or a whole bias) so that the
            norm is at most the threshold times the norm of the unit's weights (`Brock et al. 2021
            <https://arxiv.org/abs/2102.06171>`_).
        clipping_threshold: a number above zero.
        fsdp_enabled: ignored; accepted for scripts of Composer.

    Raises:
        ConfigError: the type is unknown, or the threshold is not positive.
    """
    _check(clipping_type, clipping_threshold)
    if clipping_type == "adaptive":
        _clip_units(model, clipping_threshold)
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if clipping_type == "norm" and any(map(dist.is_distributed_tensor, gradients)):
        norm = dist.shards.total_norm(gradients)
        for gradient in gradients:
            gradient.mul_(torch.clamp(clipping_threshold / (norm + _EPSILON), max=1.0).to(gradient.device))
    elif clipping_type == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), clipping_threshold)
    elif any(map(dist.is_distributed_tensor, gradients)):
        for gradient in gradients:
            gradient.clamp_(-clipping_threshold, clipping_threshold)
    else:
        nn.utils.clip_grad_value_(model.parameters(), clipping_threshold)


@final
class GradientClipping(Algorithm):
    """Clips the gradients of the whole batch, before the optimizer steps.

    Args:
        clipping_type: ``'norm'``, ``'value'`` or ``'adaptive'``; see :func:`apply_gradient_clipping`.
        clipping_threshold: a number above zero.

    Raises:
        ConfigError: the type is unknown, or the threshold is not positive.
    """

    @checked_arguments
    def __init__(self, clipping_type: str, clipping_threshold: float) -> None:
        _check(clipping_type, clipping_threshold)
        self.clipping_type = clipping_type
        self.clipping_threshold = clipping_threshold

    def match(self, event: Event, state: State) -> bool:
        """Return true at ``AFTER_TRAIN_BATCH``. DeepSpeed has its own clipping."""
        return event is Event.AFTER_TRAIN_BATCH and not state.deepspeed_enabled

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Clip the gradients."""
        apply_gradient_clipping(state.model, self.clipping_type, self.clipping_threshold)


@torch.no_grad()
def _clip_units(model: nn.Module, threshold: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        most = _norm_of_units(parameter).clamp(min=_LEAST_WEIGHT_NORM) * threshold
        norm = _norm_of_units(parameter.grad)
        parameter.grad.mul_(torch.where(norm > most, most / norm.clamp(min=_EPSILON), torch.ones_like(norm)))


def _norm_of_units(tensor: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm over all dimensions but the first; of a bias, the norm of all elements."""
    if tensor.ndim < 2:
        return torch.linalg.vector_norm(tensor)
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)


def _check(clipping_type: str, clipping_threshold: float) -> None:
    if clipping_type not in _TYPES:
        raise ConfigError(f"clipping_type={clipping_type!r} is unknown.{did_you_mean(clipping_type, _TYPES)}")
    if not clipping_threshold > 0:
        raise ConfigError(f"clipping_threshold={clipping_threshold}: expected a number above zero, such as 1.0.")
