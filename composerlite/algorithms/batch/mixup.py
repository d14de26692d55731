"""MixUp: train on weighted means of two samples."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from composerlite.algorithms.batch.mixing import Mixing, draw_coefficient, draw_permutation
from composerlite.errors import ConfigError, checked_arguments


def mixup_batch(
    input: Tensor,  # noqa: A002 - Composer's name
    target: Tensor,
    mixing: float | None = None,
    alpha: float = 0.2,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, float]:
    """Mix each sample with another sample of the batch (`Zhang et al. 2018 <https://arxiv.org/abs/1710.09412>`_).

    Args:
        input: shape (N, …).
        target: shape (N, …).
        mixing: weight of the other sample, from 0 to 1. By default a weight is drawn from Beta(alpha, alpha), and the
            other sample gets the smaller weight.
        alpha: parameter of the distribution; larger values give more equal weights.
        indices: index of the other sample, for each sample; drawn by default.

    Returns:
        ``(1 - mixing) * input + mixing * input[indices]``, ``target[indices]`` and ``mixing``.

    Raises:
        ConfigError: ``mixing`` is not from 0 to 1, or ``alpha`` is negative.
    """
    if mixing is None:
        drawn = draw_coefficient(alpha)
        mixing = min(drawn, 1 - drawn)
    if not 0 <= mixing <= 1:
        raise ConfigError(f"mixing={mixing}: expected a number from 0 to 1.")
    if indices is None:
        indices = draw_permutation(input)
    return (1 - mixing) * input + mixing * input[indices], target[indices], mixing


@final
class MixUp(Mixing):
    """Trains on weighted means of two samples (`Zhang et al. 2018 <https://arxiv.org/abs/1710.09412>`_).

    For each microbatch, one weight from Beta(alpha, alpha) and a permutation are drawn. The loss must accept
    probabilities, such as ``soft_cross_entropy`` and ``torch.nn.functional.cross_entropy``, or ``interpolate_loss``
    must be true. Metrics see the targets of the samples with the larger weight.

    Args:
        alpha: parameter of the distribution; larger values give more equal weights. 0 mixes nothing.
        interpolate_loss: mix the losses of both targets instead of the targets. The result is the same for losses
            linear in the targets, such as cross entropy.
        input_key: the inputs in a batch: an index, a key, the name of an attribute, or a pair of functions
            ``get(batch)`` and ``set(batch, inputs)``; ``set`` returns the new batch.
        target_key: the targets in a batch, like ``input_key``.

    Raises:
        ConfigError: ``alpha`` is negative.
    """

    @checked_arguments
    def __init__(
        self, alpha: float = 0.2, interpolate_loss: bool = False, input_key: Any = 0, target_key: Any = 1
    ) -> None:
        if not alpha >= 0:
            raise ConfigError(f"MixUp(alpha={alpha}): expected a number, 0 or more, such as 0.2.")
        super().__init__(interpolate_loss, input_key, target_key)
        self.alpha = alpha

    def mix_input(self, input: Tensor) -> tuple[Tensor, Tensor, float]:  # noqa: A002
        """Return the means, the indices of the second samples and their weight."""
        return mixup_batch(input, torch.arange(len(input), device=input.device), alpha=self.alpha)
