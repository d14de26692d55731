"""MetricWatcher: the base of callbacks that end training by a metric."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from composerlite.core import Callback, Logger, State
from composerlite.core.measured import returns_tensor
from composerlite.errors import ConfigError, did_you_mean

log = logging.getLogger(__name__)

IsBetter: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor | bool]"
"""Returns true if the first value is better than the second."""

_LESS_IS_BETTER = ("loss", "error", "perplexity")


class MetricWatcher(Callback, ABC):
    """Reads a metric after each evaluation on ``dataloader_label`` during ``fit``, or after each epoch of training.

    Args:
        monitor: name of the metric, without ``metrics/<label>/``.
        dataloader_label: label of an evaluator, or of the training data.
        comp: compares two values; by default less is better if ``monitor`` contains loss, error or perplexity.
    """

    def __init__(self, monitor: str, dataloader_label: str, comp: IsBetter | None) -> None:
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        if comp is None:
            comp = torch.less if any(word in monitor.lower() for word in _LESS_IS_BETTER) else torch.greater
        self._comp = comp
        self._standalone = False

    @abstractmethod
    def measured(self, value: float, state: State) -> None:
        """React to a new value of the metric."""

    @property
    def logged_name(self) -> str:
        """Name of the metric in loggers."""
        return f"metrics/{self.dataloader_label}/{self.monitor}"

    def is_better(self, value: float, than: float) -> bool:
        """Return true if ``value`` is better than the value ``than``."""
        return bool(self._comp(torch.tensor(value), torch.tensor(than)))

    def is_of(self, state: State) -> bool:
        """Return true if the data in use now has the label of this callback."""
        return state.dataloader_label == self.dataloader_label

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check the label, and the metric as far as the names are known before the first computation.

        Raises:
            ConfigError: the label or the metric does not exist. The message lists the existing names.
        """
        self._standalone = False
        labels = [evaluator.label for evaluator in state.evaluators]
        if state.dataloader_label is not None:
            labels.append(state.dataloader_label)
        if self.dataloader_label not in labels:
            raise ConfigError(
                f"{type(self).__name__}(dataloader_label={self.dataloader_label!r}): there is no such data."
                f"{did_you_mean(self.dataloader_label, labels)}"
            )
        metrics = state.eval_metrics.get(self.dataloader_label, {})
        if self.is_of(state):
            state.needs_train_metrics = True
            metrics = state.train_metrics
        if all(returns_tensor(metric) for metric in metrics.values()):
            self._check_metric(metrics)

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self._standalone = True

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._standalone = False

    def eval_end(self, state: State, logger: Logger) -> None:
        if self.is_of(state) and not self._standalone:
            self.read(state.eval_metric_values, state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if not self.is_of(state):
            return
        if state.train_metric_values or not state.train_metrics:
            self.read(state.train_metric_values, state)
        elif state.rank == 0:
            log.warning(
                "%s skips this epoch: the checkpoint has no %s of the first part of the epoch, because it was saved "
                "without metrics",
                type(self).__name__,
                self.logged_name,
            )

    def read(self, values: Mapping[str, float], state: State) -> None:
        """Pass the metric among ``values`` to :meth:`measured`."""
        self._check_metric(values)
        self.measured(float(values[self.monitor]), state)

    def _check_metric(self, metrics: Mapping[str, object]) -> None:
        if self.monitor not in metrics:
            known = did_you_mean(self.monitor, metrics) if metrics else " It has none: give the model get_metrics()."
            raise ConfigError(
                f"{type(self).__name__}(monitor={self.monitor!r}): {self.dataloader_label!r} has no such metric.{known}"
            )
