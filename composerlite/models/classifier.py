"""ComposerClassifier: a classification module for the trainer. soft_cross_entropy: its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composerlite.errors import ConfigError, checked_arguments
from composerlite.models.base import ComposerModel, Metrics, by_name
from composerlite.types import Batch

if TYPE_CHECKING:
    from torchmetrics import Metric


def soft_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross entropy for class numbers or probabilities (smoothed or mixed labels).

    Args:
        logits: shape (N, C, …).
        target: class numbers of shape (N, …), or probabilities or one-hot labels of shape (N, C, …).
        weight: weight of each class, shape (C,).
        ignore_index: class number to ignore.
        reduction: ``'mean'``, ``'sum'`` or ``'none'``. The mean is over N and the extra dimensions.

    Returns:
        A scalar, or with ``reduction='none'`` a tensor of shape (N, …).
    """
    if target.shape == logits.shape:
        target = target.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, target, weight=weight, ignore_index=ignore_index, reduction=reduction)


class ComposerClassifier(ComposerModel):
    """Train ``module`` as a classifier. A batch is a pair: inputs, and targets of shape (N, …).

    Args:
        module: module from inputs to logits of shape (N, C, …).
        num_classes: C; by default ``module.num_classes``. Needed for the default metrics only.
        train_metrics: metrics of training; by default accuracy.
        val_metrics: metrics of evaluation; by default accuracy and cross entropy.
        loss_fn: function of logits and targets.

    Raises:
        ConfigError: the default metrics need the number of classes, and ``num_classes`` is missing.
    """

    @checked_arguments
    def __init__(
        self,
        module: nn.Module,
        num_classes: int | None = None,
        train_metrics: Metrics | None = None,
        val_metrics: Metrics | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = soft_cross_entropy,
    ) -> None:
        super().__init__()
        self.module = module
        self.num_classes = getattr(module, "num_classes", None) if num_classes is None else num_classes
        if self.num_classes is None and (train_metrics is None or val_metrics is None):
            raise ConfigError(
                f"ComposerClassifier: the default metrics need num_classes, and {type(module).__name__} has none. Pass "
                "num_classes=…, or both train_metrics=… and val_metrics=…."
            )
        # In a dict, so that nn.Module does not register the metrics and save them with the weights.
        self._given_metrics: dict[bool, Metrics | None] = {True: train_metrics, False: val_metrics}
        self._loss_fn = loss_fn

    def forward(self, batch: Batch) -> Tensor:
        """Return logits of shape (N, C, …)."""
        inputs, _ = batch
        return self.module(inputs)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return ``loss_fn`` of the logits and the targets.

        Args:
            outputs: logits of shape (N, C, …).
            batch: pair of inputs and targets.

        Returns:
            The loss, a scalar.
        """
        _, targets = batch
        return self._loss_fn(outputs, targets)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        """Return copies of the metrics by name; without names, by class name."""
        given = self._given_metrics[is_train]
        if given is None:
            return self._default_metrics(is_train=is_train)
        return {name: metric.clone() for name, metric in by_name(given).items()}

    def update_metric(self, batch: Batch, outputs: Any, metric: Metric) -> None:
        """Update ``metric`` with the logits and the targets.

        Args:
            batch: pair of inputs and targets.
            outputs: logits of shape (N, C, …).
            metric: metric to update.
        """
        _, targets = batch
        metric.update(outputs, targets)

    def _default_metrics(self, *, is_train: bool) -> dict[str, Metric]:
        from torchmetrics.classification import MulticlassAccuracy

        from composerlite.models.cross_entropy import CrossEntropy

        assert self.num_classes is not None
        accuracy: dict[str, Metric] = {
            "MulticlassAccuracy": MulticlassAccuracy(num_classes=self.num_classes, average="micro")
        }
        return accuracy if is_train else {**accuracy, "CrossEntropy": CrossEntropy()}
