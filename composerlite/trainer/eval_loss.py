"""EvalLoss: the loss of evaluation as a metric. This module imports torchmetrics, so it is imported late."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["NAME", "EvalLoss"]

log = logging.getLogger(__name__)

NAME = "loss"
"""Name of the loss among the metrics of an evaluator."""


class EvalLoss(Metric):
    """Mean of ``model.loss`` over the samples of all ranks.

    Args:
        is_required: the evaluator names this metric, so an error of ``model.loss`` is raised. Otherwise the loss is
            left out with a warning: some models have a loss for training only.
        dtype: type of the sum.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    sum_loss: Tensor
    samples: Tensor
    failed: Tensor

    def __init__(self, *, is_required: bool, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_required = is_required
        self._has_warned = False
        self.add_state("sum_loss", default=torch.tensor(0.0, dtype=dtype), dist_reduce_fx="sum")
        self.add_state("samples", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("failed", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, loss: Tensor | None, samples: int) -> None:
        """Add the mean loss of a batch of ``samples`` samples; ``None`` if the loss cannot be computed."""
        self.samples += samples
        if loss is None:
            self.failed += 1
        else:
            self.sum_loss += loss.to(self.sum_loss.dtype) * samples

    def warn(self, error: Exception) -> None:
        """Warn once that the evaluation has no loss, because ``model.loss`` raised ``error``."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "evaluation has no loss: model.loss of the result of eval_forward raised %s: %s. Metrics are computed. "
                "Evaluator(metric_names=['loss', …]) makes this an error.",
                type(error).__name__,
                error,
            )

    def compute(self) -> Tensor:
        """Return the mean so far; an empty dict, for no value, if any rank could not compute a loss."""
        return {} if int(self.failed) else self.sum_loss / self.samples  # pyright: ignore[reportReturnType]
