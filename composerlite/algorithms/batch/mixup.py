"""MixUp: train on weighted means of two samples each."""

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
    """Mix each sample with another one of the batch (`Zhang et al. 2018 <https://arxiv.org/abs/1710.09412>`_).

    Args:
        input: shape (N, …).
        target: shape (N, …).
        mixing: weight of the other sample, from 0 to 1. By default it is drawn from Beta(alpha, alpha), and the smaller
            one of the two weights taken, so that the first sample is the main one.
        alpha: of that distribution; the larger, the more alike are the weights.
        indices: number of the other sample, of each; drawn by default.

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
    """Trains on weighted means of two samples each (`Zhang et al. 2018 <https://arxiv.org/abs/1710.09412>`_).

    Every microbatch draws one weight from Beta(alpha, alpha) and an order of its samples. The model's loss must take
    probabilities, as ``soft_cross_entropy`` and ``torch.nn.functional.cross_entropy`` do, or be interpolated. Metrics
    see the targets of the sample with the larger weight.

    Args:
        alpha: of the distribution; the larger, the more alike are the weights. 0 mixes nothing.
        interpolate_loss: mix the losses against the targets of both rather than the targets. It is the same where the
            loss is linear in the targets, as cross entropy is.
        input_key: where the inputs are in a batch: an index, a key, an attribute's name, or a pair of functions, of
            which the first gets a batch and the second a batch and new inputs and returns the new batch.
        target_key: where the targets are.

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
        """Return the means, the numbers of the second samples and their weight."""
        return mixup_batch(input, torch.arange(len(input), device=input.device), alpha=self.alpha)
