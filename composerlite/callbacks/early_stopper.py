"""EarlyStopper: end training when a metric no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from composerlite.core import Callback, TimeInput, TimeUnit, ensure_time, gives_one_value
from composerlite.errors import ConfigError, checked_arguments, did_you_mean

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["EarlyStopper", "IsBetter", "WatchedMetric"]

log = logging.getLogger(__name__)

IsBetter: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor | bool]"
"""Tells whether the first value is better than the second."""

_LESS_IS_BETTER = ("loss", "error", "perplexity")


@final
class WatchedMetric:
    """A metric that a callback watches, of an evaluator or of training.

    Args:
        owner: the callback's class, for messages.
        monitor: name of the metric, without ``metrics/<label>/``.
        label: of an evaluator, or of the training data.
        comp: tells what is better; by default less where ``monitor`` has loss, error or perplexity in its name.
    """

    def __init__(self, owner: str, monitor: str, label: str, comp: IsBetter | None) -> None:
        self.monitor = monitor
        self.label = label
        self._owner = owner
        if comp is None:
            comp = torch.less if any(word in monitor.lower() for word in _LESS_IS_BETTER) else torch.greater
        self._comp = comp

    @property
    def name(self) -> str:
        """The name under which loggers get it."""
        return f"metrics/{self.label}/{self.monitor}"

    def is_of(self, state: State) -> bool:
        """Tell whether it is one of the data in use now."""
        return state.dataloader_label == self.label

    def is_better(self, value: float, than: float) -> bool:
        """Tell whether ``value`` is better ``than`` the other one."""
        return bool(self._comp(torch.tensor(value), torch.tensor(than)))

    def value(self, values: Mapping[str, float]) -> float:
        """Return its value among ``values``.

        Raises:
            ConfigError: it is not there.
        """
        self._check_metric(values)
        return float(values[self.monitor])

    def check(self, state: State) -> None:
        """Check that there is such data and, as far as that is known before it is computed, such a metric.

        Raises:
            ConfigError: there is not. The message lists what there is.
        """
        labels = [evaluator.label for evaluator in state.evaluators]
        if state.dataloader_label is not None:
            labels.append(state.dataloader_label)
        if self.label not in labels:
            raise ConfigError(
                f"{self._owner}(dataloader_label={self.label!r}): there is no such data."
                f"{did_you_mean(self.label, labels)}"
            )
        metrics = state.train_metrics if self.is_of(state) else state.eval_metrics.get(self.label, {})
        if all(gives_one_value(metric) for metric in metrics.values()):
            self._check_metric(metrics)

    def _check_metric(self, metrics: Mapping[str, object]) -> None:
        if self.monitor not in metrics:
            known = did_you_mean(self.monitor, metrics) if metrics else " It has none: give the model get_metrics()."
            raise ConfigError(f"{self._owner}(monitor={self.monitor!r}): {self.label!r} has no such metric.{known}")


@final
class EarlyStopper(Callback):
    """Ends training when ``monitor`` has not improved for longer than ``patience``.

    The metric is looked at after each evaluation on ``dataloader_label`` during ``fit``, or after each epoch if that is
    the training data. A resumed run continues as if it had not been interrupted, and a run that was stopped stays
    stopped when it is started again (unless with more patience, or a later end).

    Args:
        monitor: name of the metric, without ``metrics/<label>/``.
        dataloader_label: label of an evaluator, or of the training data (``'train'``).
        comp: ``(value, best) -> bool``, whether ``value`` is better; gets tensors without dimensions. By default
            ``torch.less`` where ``monitor`` has loss, error or perplexity in its name, else ``torch.greater``.
        min_delta: a smaller change, or one just as large, is no improvement.
        patience: epochs or batches, as ``3``, ``'3ep'`` or ``'500ba'``; a number counts epochs.

    Raises:
        ConfigError: at construction ``patience`` or ``min_delta`` cannot be used; at ``FIT_START`` there is no such
            label or metric. The message lists those that exist.
    """

    @checked_arguments
    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        comp: IsBetter | None = None,
        min_delta: float = 0.0,
        patience: TimeInput = 1,
    ) -> None:
        if min_delta < 0:
            raise ConfigError(f"EarlyStopper(min_delta={min_delta}): want 0 or more; `comp` says what is better.")
        self._patience = ensure_time(patience, TimeUnit.EPOCH)
        if self._patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or self._patience.value < 0:
            raise ConfigError(f"EarlyStopper(patience={str(patience)!r}): want epochs or batches, as '3ep' or '500ba'.")
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        self._metric = WatchedMetric("EarlyStopper", monitor, dataloader_label, comp)
        self._min_delta = min_delta

        self.best: float | None = None
        self._best_epoch = 0
        self._best_batch = 0
        self._stopped = False
        self._was_stopped = False  # by the run that the checkpoint is of
        self._standalone = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_epoch": self._best_epoch,
            "best_batch": self._best_batch,
            "stopped": self._stopped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        self._best_epoch = state_dict["best_epoch"]
        self._best_batch = state_dict["best_batch"]
        self._was_stopped = state_dict["stopped"]

    def after_load(self, state: State, logger: Logger) -> None:
        if not self._was_stopped or not state.fit_starts:  # another run has loaded it, and is not stopped
            return
        self._stopped = self._is_out_of_patience(state)
        if not self._stopped:
            state.stopped = None
        elif state.stopped is None:  # a checkpoint from before this was part of the state
            state.stopped = state.max_duration

    def fit_start(self, state: State, logger: Logger) -> None:
        self._metric.check(state)
        self._standalone = self._stopped = self._was_stopped = False
        if self._best_batch > int(state.timestamp.batch):  # the clock was set back: another training begins
            self.best = None

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self._standalone = True

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._standalone = False

    def eval_end(self, state: State, logger: Logger) -> None:
        if self._metric.is_of(state) and not self._standalone:
            self._look_at(state.eval_metric_values, state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self._metric.is_of(state):
            self._look_at(state.train_metric_values, state)

    def _look_at(self, values: Mapping[str, float], state: State) -> None:
        value = self._metric.value(values)
        if self._improves(value):
            self.best = value
            self._best_epoch, self._best_batch = int(state.timestamp.epoch), int(state.timestamp.batch)
        elif self._is_out_of_patience(state):
            self._stopped = True
            state.stop_training()
            log.info(
                "EarlyStopper: training ends at batch %d, since %s has not improved on %g since batch %d",
                int(state.timestamp.batch),
                self._metric.name,
                self.best,
                self._best_batch,
            )

    def _improves(self, value: float) -> bool:
        if self.best is None or math.isnan(self.best):
            return True
        return self._metric.is_better(value, self.best) and abs(value - self.best) > self._min_delta

    def _is_out_of_patience(self, state: State) -> bool:
        now, unit = state.timestamp, self._patience.unit
        waited = int(now.epoch) - self._best_epoch if unit is TimeUnit.EPOCH else int(now.batch) - self._best_batch
        return waited > self._patience.value
