"""Cross entropy as a metric. Import on demand only: this module imports torchmetrics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric


class CrossEntropy(Metric):
    """Mean cross entropy over all targets, for batches of any size.

    Args:
        ignore_index: class number to ignore.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    sum_loss: Tensor
    count: Tensor

    def __init__(self, ignore_index: int = -100, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self.add_state("sum_loss", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: logits of shape (N, C, …); class numbers (N, …) or probabilities (N, C, …).

        Args:
            preds: logits of shape (N, C, …).
            target: class numbers of shape (N, …), or probabilities of shape (N, C, …).
        """
        is_soft = target.shape == preds.shape
        labels = target.float() if is_soft else target
        self.sum_loss += F.cross_entropy(preds.float(), labels, ignore_index=self.ignore_index, reduction="sum")
        self.count += target.numel() // target.shape[1] if is_soft else (target != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Return the mean so far."""
        return self.sum_loss / self.count
