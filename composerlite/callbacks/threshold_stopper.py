"""ThresholdStopper: end training when a metric reaches a threshold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import final

import torch

from composerlite.callbacks.metric_watcher import IsBetter, MetricWatcher
from composerlite.core import Logger, State, metric_values
from composerlite.errors import ConfigError, checked_arguments, did_you_mean

log = logging.getLogger(__name__)

_COMPARISONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "greater": torch.greater,
    "gt": torch.greater,
    "less": torch.less,
    "lt": torch.less,
}


@final
class ThresholdStopper(MetricWatcher):
    """Ends training when ``monitor`` is better than ``threshold``.

    The metric is read after each evaluation on ``dataloader_label`` during ``fit``. With the label of the training
    data, the metric is read after each epoch, and after each batch with ``stop_on_batch``. A stopped run stays stopped
    when launched again, unless with a later end.

    Args:
        monitor: name of the metric, without ``metrics/<label>/``.
        dataloader_label: label of an evaluator, or of the training data (``'train'``).
        threshold: value to reach.
        comp: ``(value, threshold) -> bool``, true if ``value`` is better; or ``'greater'``, ``'gt'``, ``'less'``,
            ``'lt'``. By default less if ``monitor`` contains loss, error or perplexity, otherwise greater.
        stop_on_batch: also read the metric of the training data after each batch. All ranks compute the metric.

    Raises:
        ConfigError: ``comp`` does not exist; at ``FIT_START`` the label or the metric does not exist. The message lists
            the existing names.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=ThresholdStopper("MulticlassAccuracy", "eval", 0.9))
    """

    @checked_arguments
    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        threshold: float,
        *,
        comp: str | IsBetter | None = None,
        stop_on_batch: bool = False,
    ) -> None:
        if isinstance(comp, str):
            if comp.lower() not in _COMPARISONS:
                raise ConfigError(
                    f"ThresholdStopper(comp={comp!r}) does not exist.{did_you_mean(comp.lower(), _COMPARISONS)}"
                )
            comp = _COMPARISONS[comp.lower()]
        self.threshold = float(threshold)
        self.stop_on_batch = stop_on_batch
        super().__init__(monitor, dataloader_label, comp)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.stop_on_batch and self.is_of(state):
            self.read(metric_values(state.train_metrics), state)

    def measured(self, value: float, state: State) -> None:
        """End training if the value is better than the threshold.

        Args:
            value: new value of the metric.
            state: state of the run.
        """
        if not self.is_better(value, self.threshold):
            return
        state.stop_training()
        log.info(
            "ThresholdStopper: training ends at batch %d, because %s is %g (threshold %g)",
            int(state.timestamp.batch),
            self.logged_name,
            value,
            self.threshold,
        )
