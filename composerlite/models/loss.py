"""Cross entropy for labels of either kind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["soft_cross_entropy"]


def soft_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy against class numbers or against probabilities (smoothed or mixed labels).

    Args:
        logits: shape (N, C, …).
        target: class numbers of shape (N, …), or probabilities or one-hot labels of shape (N, C, …).
        weight: weight of each class, shape (C,).
        ignore_index: class number that does not count.
        reduction: ``'mean'``, ``'sum'`` or ``'none'``. The mean is over N and the extra dimensions.
    """
    if target.shape == logits.shape:
        target = target.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
