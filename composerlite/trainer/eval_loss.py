"""Loss of evaluation as a metric. Imports torchmetrics: imported when a model is evaluated."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["NAME", "EvalLoss"]

log = logging.getLogger(__name__)

NAME = "loss"
"""The name of the loss among the metrics of an evaluator."""


class EvalLoss(Metric):
    """Mean of ``model.loss`` over the samples of all ranks: the loss of each batch counts as its samples do.

    Args:
        is_asked_for: it was requested by name: an error is raised where it cannot be computed. Else it is left out
            there, with a warning: evaluation works for models whose loss is for training only.
        dtype: of the sum.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    sum_loss: Tensor
    samples: Tensor
    failed: Tensor

    def __init__(self, *, is_asked_for: bool, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_asked_for = is_asked_for
        self._has_warned = False
        self.add_state("sum_loss", default=torch.tensor(0.0, dtype=dtype), dist_reduce_fx="sum")
        self.add_state("samples", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("failed", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, loss: Tensor | None, samples: int) -> None:
        """Add the mean loss of a batch of ``samples`` samples; ``None`` where it cannot be computed."""
        self.samples += samples
        if loss is None:
            self.failed += 1
        else:
            self.sum_loss += loss.to(self.sum_loss.dtype) * samples

    def give_up(self, error: Exception) -> None:
        """Warn once that there is no loss of evaluation."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "evaluation has no loss: model.loss of what eval_forward gave raised %s: %s. The metrics are computed. "
                "Evaluator(metric_names=['loss', …]) makes this an error.",
                type(error).__name__,
                error,
            )

    def compute(self) -> Tensor:
        """Return the mean so far; an empty dict, which is no value, where some rank could not compute it."""
        return {} if int(self.failed) else self.sum_loss / self.samples  # pyright: ignore[reportReturnType]
