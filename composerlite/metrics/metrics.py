"""Metrics of language models and segmentation. States are sums over batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from composerlite.models.cross_entropy import CrossEntropy


class _Sums(Metric):
    """Base of metrics computed from sums."""

    is_differentiable = False
    full_state_update = False

    def _add_sums(self, *names: str, size: int | None = None) -> None:
        for name in names:
            zero = torch.tensor(0.0) if size is None else torch.zeros(size, dtype=torch.float64)
            self.add_state(name, default=zero, dist_reduce_fx="sum")


class LossMetric(_Sums):
    """Mean of ``loss_function(preds, target)`` over batches.

    Args:
        loss_function: function from (preds, target) to a scalar tensor.
        dist_sync_on_step: as in ``torchmetrics.Metric``.
    """

    higher_is_better = False
    sum_loss: Tensor
    total_batches: Tensor

    def __init__(self, loss_function: Callable[[Any, Any], Tensor], dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.loss_function = loss_function
        self._add_sums("sum_loss", "total_batches")

    def update(self, preds: Any, target: Any) -> None:
        """Add a batch.

        Args:
            preds: first argument of the loss function.
            target: second argument of the loss function.
        """
        self.sum_loss += self.loss_function(preds, target)
        self.total_batches += 1

    def compute(self) -> Tensor:
        """Return the mean so far."""
        return self.sum_loss / self.total_batches


class LanguageCrossEntropy(CrossEntropy):
    """Mean cross entropy over all tokens except ``ignore_index``.

    Args:
        dist_sync_on_step: as in ``torchmetrics.Metric``.
        ignore_index: target to ignore.
    """

    def __init__(self, dist_sync_on_step: bool = False, ignore_index: int = -100) -> None:
        super().__init__(ignore_index, dist_sync_on_step=dist_sync_on_step)

    def update(self, preds: Tensor | Mapping[str, Tensor], target: Tensor) -> None:
        """Add a batch: logits of shape (N, T, V), or a mapping with ``'logits'``; token numbers of shape (N, T).

        Args:
            preds: logits of shape (N, T, V), or a mapping with ``'logits'``.
            target: token numbers of shape (N, T).
        """
        logits = preds["logits"] if isinstance(preds, Mapping) else preds
        super().update(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


class LanguagePerplexity(LanguageCrossEntropy):
    """Exponential of :class:`LanguageCrossEntropy`."""

    def compute(self) -> Tensor:
        """Return the perplexity so far."""
        return torch.exp(super().compute())


class MaskedAccuracy(_Sums):
    """Fraction of correct predictions over all targets except ``ignore_index``.

    Args:
        ignore_index: target to ignore.
        dist_sync_on_step: as in ``torchmetrics.Metric``.
    """

    higher_is_better = True
    correct: Tensor
    total: Tensor

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.ignore_index = ignore_index
        self._add_sums("correct", "total")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: class numbers of shape (N, …), or logits of shape (N, …, C); targets of shape (N, …).

        Args:
            preds: class numbers of shape (N, …), or logits of shape (N, …, C).
            target: class numbers of shape (N, …).
        """
        chosen = preds.argmax(dim=-1) if preds.dim() > target.dim() else preds
        counts = target != self.ignore_index
        self.correct += ((chosen == target) & counts).sum()
        self.total += counts.sum()

    def compute(self) -> Tensor:
        """Return the fraction so far."""
        return self.correct / self.total


class BinaryF1Score(_Sums):
    """Harmonic mean of precision and recall of class 1."""

    higher_is_better = True
    true_positive: Tensor
    false_positive: Tensor
    false_negative: Tensor

    def __init__(self, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self._add_sums("true_positive", "false_positive", "false_negative")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: logits of shape (N, 2), class numbers of shape (N,).

        Args:
            preds: logits of shape (N, 2).
            target: class numbers of shape (N,).
        """
        chosen = preds.argmax(dim=1)
        self.true_positive += ((chosen == 1) & (target == 1)).sum()
        self.false_positive += ((chosen == 1) & (target == 0)).sum()
        self.false_negative += ((chosen == 0) & (target == 1)).sum()

    def compute(self) -> Tensor:
        """Return the score so far."""
        both = 2 * self.true_positive
        return both / (both + self.false_positive + self.false_negative)


class MIoU(_Sums):
    """Intersection over union of predicted and true pixels, as the mean over classes, in percent.

    Args:
        num_classes: C.
        ignore_index: class number of pixels to ignore.
    """

    higher_is_better = True
    total_intersect: Tensor
    total_union: Tensor

    def __init__(self, num_classes: int, ignore_index: int = -1) -> None:
        super().__init__()
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self._add_sums("total_intersect", "total_union", size=num_classes)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: logits of shape (N, C, …), class numbers of shape (N, …).

        Args:
            preds: logits of shape (N, C, …).
            target: class numbers of shape (N, …).
        """
        counts = target != self.ignore_index
        chosen, true = preds.argmax(dim=1)[counts], target[counts]
        both = torch.bincount(true[chosen == true], minlength=self.num_classes)
        self.total_intersect += both
        each = torch.bincount(chosen, minlength=self.num_classes) + torch.bincount(true, minlength=self.num_classes)
        self.total_union += each - both

    def compute(self) -> Tensor:
        """Return the mean over the classes in the data."""
        seen = self.total_union != 0
        return 100 * (self.total_intersect[seen] / self.total_union[seen]).mean()


class Dice(_Sums):
    """Dice coefficient of predicted and true pixels, as the mean over all classes except the first, in percent.

    Args:
        num_classes: C, including the background, the first class.
    """

    higher_is_better = True
    n_updates: Tensor
    dice: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self._add_sums("n_updates")
        self._add_sums("dice", size=num_classes - 1)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: logits of shape (N, C, …), class numbers of shape (N, …).

        Args:
            preds: logits of shape (N, C, …).
            target: class numbers of shape (N, …).
        """
        chosen = preds.argmax(dim=1)
        for number in range(1, len(self.dice) + 1):
            hit, true = chosen == number, target == number
            size = hit.sum() + true.sum()
            self.dice[number - 1] += 1.0 if size == 0 else 2 * (hit & true).sum() / size
        self.n_updates += 1

    def compute(self) -> Tensor:
        """Return the mean over batches and classes."""
        return 100 * (self.dice / self.n_updates).mean()
