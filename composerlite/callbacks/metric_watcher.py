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
"""Tells whether the first value is better than the second."""

_LESS_IS_BETTER = ("loss", "error", "perplexity")


class MetricWatcher(Callback, ABC):
    """Looks at a metric after each evaluation on ``dataloader_label`` during ``fit``.

    If that is the training data, after each epoch.

    Args:
        monitor: name of the metric, without ``metrics/<label>/``.
        dataloader_label: label of an evaluator, or of the training data.
        comp: tells what is better; by default less where ``monitor`` has loss, error or perplexity in its name.
    """

    def __init__(self, monitor: str, dataloader_label: str, comp: IsBetter | None) -> None:
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        if comp is None:
            comp = torch.less if any(word in monitor.lower() for word in _LESS_IS_BETTER) else torch.greater
        self._comp = comp
        self._standalone = False

    @abstractmethod
    def look_at(self, value: float, state: State) -> None:
        """React to the metric's current ``value``."""

    @property
    def logged_name(self) -> str:
        """The name under which loggers get the metric."""
        return f"metrics/{self.dataloader_label}/{self.monitor}"

    def is_better(self, value: float, than: float) -> bool:
        """Return true if ``value`` is better ``than`` the other one."""
        return bool(self._comp(torch.tensor(value), torch.tensor(than)))

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that there is such data and, as far as that is known before it is computed, such a metric.

        Raises:
            ConfigError: there is not. The message lists what there is.
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
        if self.is_of(state):
            state.needs_train_metrics = True
        metrics = state.train_metrics if self.is_of(state) else state.eval_metrics.get(self.dataloader_label, {})
        if all(returns_tensor(metric) for metric in metrics.values()):
            self._check_metric(metrics)

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self._standalone = True

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._standalone = False

    def eval_end(self, state: State, logger: Logger) -> None:
        if self.is_of(state) and not self._standalone:
            self.look_among(state.eval_metric_values, state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if not self.is_of(state):
            return
        if state.train_metric_values or not state.train_metrics:
            self.look_among(state.train_metric_values, state)
        elif state.rank == 0:
            log.warning(
                "%s looks at %s of whole epochs, and the checkpoint that was loaded has none of this one: it is older, "
                "or was saved without metrics. The next epoch counts again.",
                type(self).__name__,
                self.logged_name,
            )

    def is_of(self, state: State) -> bool:
        """Return true if the metric is one of the data in use now."""
        return state.dataloader_label == self.dataloader_label

    def look_among(self, values: Mapping[str, float], state: State) -> None:
        """Look at the metric, which is among ``values``."""
        self._check_metric(values)
        self.look_at(float(values[self.monitor]), state)

    def _check_metric(self, metrics: Mapping[str, object]) -> None:
        if self.monitor not in metrics:
            known = did_you_mean(self.monitor, metrics) if metrics else " It has none: give the model get_metrics()."
            raise ConfigError(
                f"{type(self).__name__}(monitor={self.monitor!r}): {self.dataloader_label!r} has no such metric.{known}"
            )
