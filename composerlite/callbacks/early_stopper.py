"""EarlyStopper: end training when a metric no longer improves."""

from __future__ import annotations

import logging
import math
from typing import Any, final

from composerlite.callbacks.metric_watcher import IsBetter, MetricWatcher
from composerlite.core import Logger, State, TimeInput, TimeUnit, ensure_time
from composerlite.errors import ConfigError, checked_arguments

log = logging.getLogger(__name__)


@final
class EarlyStopper(MetricWatcher):
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
            raise ConfigError(f"EarlyStopper(min_delta={min_delta}): expected 0 or more; `comp` says what is better.")
        self._patience = ensure_time(patience, TimeUnit.EPOCH)
        if self._patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or self._patience.value < 0:
            raise ConfigError(
                f"EarlyStopper(patience={str(patience)!r}): expected epochs or batches, such as '3ep' or '500ba'."
            )
        super().__init__(monitor, dataloader_label, comp)
        self._min_delta = min_delta

        self.best: float | None = None
        self._best_epoch = 0
        self._best_batch = 0
        self._stopped = False
        self._was_stopped = False  # by the run that the checkpoint is of

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
        super().fit_start(state, logger)
        self._stopped = self._was_stopped = False
        if self._best_batch > int(state.timestamp.batch):  # the clock was set back: another training begins
            self.best = None

    def look_at(self, value: float, state: State) -> None:
        """Note an improvement, or end training without one.

        Args:
            value: current value of the metric.
            state: of the run.
        """
        if self._improves(value):
            self.best = value
            self._best_epoch, self._best_batch = int(state.timestamp.epoch), int(state.timestamp.batch)
        elif self._is_out_of_patience(state):
            self._stopped = True
            state.stop_training()
            log.info(
                "EarlyStopper: training ends at batch %d, since %s has not improved on %g since batch %d",
                int(state.timestamp.batch),
                self.logged_name,
                self.best,
                self._best_batch,
            )

    def _improves(self, value: float) -> bool:
        if self.best is None or math.isnan(self.best):
            return True
        return self.is_better(value, self.best) and abs(value - self.best) > self._min_delta

    def _is_out_of_patience(self, state: State) -> bool:
        now, unit = state.timestamp, self._patience.unit
        waited = int(now.epoch) - self._best_epoch if unit is TimeUnit.EPOCH else int(now.batch) - self._best_batch
        return waited > self._patience.value
