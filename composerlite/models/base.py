"""ComposerModel: the interface between the trainer and a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from composerlite.errors import TrainingError
from composerlite.types import Batch, StateDict

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    from composerlite.core import Logger

Metrics: TypeAlias = "Metric | MetricCollection | Mapping[str, Metric] | Sequence[Metric]"
"""Metrics argument: a metric, several metrics, or metrics by name."""


class ComposerModel(nn.Module, ABC):
    """A module that can train on batches. Subclass and override :meth:`forward` and :meth:`loss`.

    Attributes:
        logger: logger of the trainer; ``None`` without a trainer, and in copies and pickles of the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logger: Logger | None = None

    @abstractmethod
    def forward(self, batch: Batch) -> Any:
        """Return the outputs for ``batch``."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Any:
        """Return the loss of ``outputs``.

        Losses in a sequence or dict are summed. With ``'total'`` in a dict, only this loss is trained on; the other
        losses are logged.

        Args:
            outputs: result of :meth:`forward`.
            batch: the microbatch.

        Returns:
            A scalar tensor, or a sequence or dict of scalar tensors.
        """

    def eval_forward(self, batch: Batch, outputs: Any = None) -> Any:
        """Return the outputs for metrics. By default ``outputs``, or a forward pass without ``outputs``.

        Args:
            batch: an evaluation batch.
            outputs: outputs of the model for ``batch``, if already computed.

        Returns:
            Outputs for :meth:`update_metric`.
        """
        return self(batch) if outputs is None else outputs

    @property
    def has_eval_loss(self) -> bool:
        """True if evaluation may compute :meth:`loss` of the outputs of :meth:`eval_forward`.

        By default true if ``eval_forward`` is not overridden.
        """
        return type(self).eval_forward is ComposerModel.eval_forward

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        """Return metrics by name, for training or evaluation. By default empty; also override :meth:`update_metric`."""
        return {}

    def update_metric(self, batch: Batch, outputs: Any, metric: Metric) -> None:
        """Update ``metric`` with a batch.

        Args:
            batch: an evaluation batch.
            outputs: result of :meth:`eval_forward`.
            metric: metric to update.
        """
        name = type(self).__name__
        raise TrainingError(
            f"{name}.get_metrics returns {type(metric).__name__}, and {name} does not override update_metric. Override "
            "update_metric, e.g. with `metric.update(outputs, batch[1])`."
        )

    def integrations(self) -> StateDict:
        """Return a record for checkpoints: plain values by name of a library. By default empty."""
        return {}

    def integration_problems(self, saved: StateDict, *, source: str) -> list[str]:
        """List the reasons not to load a checkpoint with the record ``saved``. By default empty.

        Log harmless differences.

        Args:
            saved: :meth:`integrations` of the saved model.
            source: path or URI of the checkpoint, for errors.

        Returns:
            One sentence for each reason.
        """
        return []

    def __getstate__(self) -> dict[str, Any]:
        """Drop the logger, since it refers to the whole state of training."""
        return {**self.__dict__, "logger": None}


def by_name(metrics: Metrics | None) -> dict[str, Metric]:
    """Return metrics by name; without names, by class name."""
    from torchmetrics import Metric

    if metrics is None:
        return {}
    if isinstance(metrics, Metric):
        return {type(metrics).__name__: metrics}
    if isinstance(metrics, Mapping):  # a MetricCollection is not a Mapping
        return dict(metrics)
    if isinstance(metrics, nn.Module):
        return {str(name): metric for name, metric in metrics.items()}  # type: ignore[operator]
    return {type(metric).__name__: metric for metric in metrics}
