"""ComposerModel: what the trainer asks of a model."""

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
"""What may be given as the metrics of a model."""


class ComposerModel(nn.Module, ABC):
    """A module that knows what to do with a batch: subclass it and write :meth:`forward` and :meth:`loss`.

    Attributes:
        logger: the trainer's logger; ``None`` without a trainer. Copies and pickles of the model leave it out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logger: Logger | None = None

    @abstractmethod
    def forward(self, batch: Batch) -> Any:
        """The outputs for ``batch``."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Any:
        """The loss of ``outputs``: a scalar tensor, or several in a sequence or dict, which are added up.

        In a dict ``'total'``, if it is there, is what is trained on, and the others are only logged.

        Args:
            outputs: result of :meth:`forward`.
            batch: the microbatch.

        Returns:
            The loss.
        """

    def eval_forward(self, batch: Batch, outputs: Any = None) -> Any:
        """The outputs that metrics are computed from; ``outputs``, where there are some already, are used again.

        Args:
            batch: an evaluation batch.
            outputs: outputs of the model for ``batch``, if they exist already.

        Returns:
            Outputs for :meth:`update_metric`.
        """
        return self(batch) if outputs is None else outputs

    @property
    def has_eval_loss(self) -> bool:
        """Tell if :meth:`loss` takes what :meth:`eval_forward` gives, so that evaluation has a loss unasked.

        By default if ``eval_forward`` is not overridden: nobody knows what else it gives.
        """
        return type(self).eval_forward is ComposerModel.eval_forward

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        """Metrics by name, for training or for evaluation. By default none; override :meth:`update_metric` as well."""
        return {}

    def update_metric(self, batch: Batch, outputs: Any, metric: Metric) -> None:
        """Add ``outputs``, as :meth:`eval_forward` gave them for ``batch``, to ``metric``.

        Args:
            batch: an evaluation batch.
            outputs: result of :meth:`eval_forward`.
            metric: to be updated.
        """
        name = type(self).__name__
        raise TrainingError(
            f"{name}.get_metrics gives {type(metric).__name__} and {name} does not say how to update it: override "
            "update_metric, e.g. `metric.update(outputs, batch[1])`."
        )

    def integrations(self) -> StateDict:
        """Record of the model in checkpoints beside its weights, under the name of each library. By default empty."""
        return {}

    def integration_problems(self, saved: StateDict, *, source: str) -> list[str]:
        """List reasons why a checkpoint with ``saved`` integrations cannot be loaded into this model; by default none.

        Harmless differences are logged.

        Args:
            saved: :meth:`integrations` of the saved model.
            source: path or URI of the checkpoint, for errors.

        Returns:
            One sentence for each reason.
        """
        return []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the logger, which refers to the whole state of training."""
        return {**self.__dict__, "logger": None}


def by_name(metrics: Metrics | None) -> dict[str, Metric]:
    """Metrics by the names that they were given under, else by class."""
    from torchmetrics import Metric

    if metrics is None:
        return {}
    if isinstance(metrics, Metric):
        return {type(metrics).__name__: metrics}
    if isinstance(metrics, Mapping):  # a MetricCollection is none
        return dict(metrics)
    if isinstance(metrics, nn.Module):
        return {str(name): metric for name, metric in metrics.items()}  # type: ignore[operator]
    return {type(metric).__name__: metric for metric in metrics}
