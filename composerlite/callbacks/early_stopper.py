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

    The metric is read after each evaluation on ``dataloader_label`` during ``fit``, or after each epoch if this is the
    label of the training data. A resumed run continues the count. A stopped run stays stopped when launched again,
    unless with more patience or a later end.

    Args:
        monitor: name of the metric, without ``metrics/<label>/``.
        dataloader_label: label of an evaluator, or of the training data (``'train'``).
        comp: ``(value, best) -> bool``, true if ``value`` is better; gets tensors without dimensions. By default
            ``torch.less`` if ``monitor`` contains loss, error or perplexity, otherwise ``torch.greater``.
        min_delta: a change up to this size is no improvement.
        patience: epochs or batches, as ``3``, ``'3ep'`` or ``'500ba'``; a number counts epochs.

    Raises:
        ConfigError: ``patience`` or ``min_delta`` is invalid; at ``FIT_START`` the label or the metric does not exist.
            The message lists the existing names.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=EarlyStopper("CrossEntropy", "eval", patience="2ep"))
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
            raise ConfigError(f"EarlyStopper(min_delta={min_delta}): expected 0 or more. `comp` decides the direction.")
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
        self._stopped = False  # by this callback

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
        self._stopped = state_dict["stopped"]

    def after_load(self, state: State, logger: Logger) -> None:
        if self._stopped and not self._is_out_of_patience(state):  # launched again with more patience
            self._stopped, state.stopped = False, None

    def fit_start(self, state: State, logger: Logger) -> None:
        super().fit_start(state, logger)
        self._stopped = False
        if self._best_batch > int(state.timestamp.batch):  # time was reset: another training begins
            self.best = None

    def measured(self, value: float, state: State) -> None:
        """Note an improvement, or end training without one for too long.

        Args:
            value: new value of the metric.
            state: state of the run.
        """
        best = self.best
        if best is None or math.isnan(best) or (self.is_better(value, best) and abs(value - best) > self._min_delta):
            self.best = value
            self._best_epoch, self._best_batch = int(state.timestamp.epoch), int(state.timestamp.batch)
        elif self._is_out_of_patience(state):
            self._stopped = True
            state.stop_training()
            log.info(
                "EarlyStopper: training ends at batch %d, because %s has not improved on %g since batch %d",
                int(state.timestamp.batch),
                self.logged_name,
                self.best,
                self._best_batch,
            )

    def _is_out_of_patience(self, state: State) -> bool:
        now, unit = state.timestamp, self._patience.unit
        waited = int(now.epoch) - self._best_epoch if unit is TimeUnit.EPOCH else int(now.batch) - self._best_batch
        return waited > self._patience.value
