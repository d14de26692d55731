"""SWA: average the weights over the last part of training."""

from __future__ import annotations

import logging
import math
from typing import Any, final

from torch.optim.swa_utils import get_swa_multi_avg_fn

from composerlite.algorithms.weight_average import WeightAverage, is_due, read_update_interval
from composerlite.core import Algorithm, Event, Logger, State, Time, read_time, span
from composerlite.errors import ConfigError, checked_arguments, did_you_mean

log = logging.getLogger(__name__)

_STRATEGIES = {"linear": "linear", "lin": "linear", "cos": "cos", "cosine": "cos"}


@final
class SWA(Algorithm):
    """Stochastic weight averaging (`Izmailov et al. 2018 <https://arxiv.org/abs/1803.05407>`_).

    From ``swa_start`` on, the weights are sampled every ``update_interval``. At ``swa_end``, or at an earlier end of
    training, a last sample is taken and the model gets the mean of all samples. After ``swa_end`` the weights do not
    change, and the remaining batches update the statistics of batch norm. The final model is the average.

    Args:
        swa_start: start of sampling.
        swa_end: time at which the model gets the average. With batch norm, leave some batches after ``swa_end``.
        update_interval: time between samples, in batches or epochs.
        schedule_swa_lr: move the learning rate to ``swa_lr`` from the first sample on, overriding the schedulers. Works
            with schedulers that compute the rate from the time, such as ``composerlite.optim`` and ``LambdaLR``.
        anneal_strategy: shape of the change of the learning rate, ``'linear'`` or ``'cos'``.
        anneal_steps: number of samples until the learning rate is ``swa_lr``.
        swa_lr: final learning rate. By default the rate at the first sample, so the rate is constant.

    Raises:
        ConfigError: a time, a number or a strategy is invalid.
    """

    @checked_arguments
    def __init__(
        self,
        swa_start: Time | str = "0.7dur",
        swa_end: Time | str = "0.97dur",
        update_interval: Time | str = "1ep",
        schedule_swa_lr: bool = False,
        anneal_strategy: str = "linear",
        anneal_steps: int = 10,
        swa_lr: float | None = None,
    ) -> None:
        self.swa_start = read_time("swa_start", swa_start)
        self.swa_end = read_time("swa_end", swa_end)
        self.update_interval = read_update_interval("update_interval", update_interval)
        if self.swa_start.unit is not self.swa_end.unit or self.swa_start >= self.swa_end:
            raise ConfigError(
                f"SWA(swa_start={str(swa_start)!r}, swa_end={str(swa_end)!r}): expected a start before the end, both "
                "in the same unit, such as '0.7dur' and '0.97dur'."
            )
        if anneal_strategy not in _STRATEGIES:
            raise ConfigError(
                f"SWA(anneal_strategy={anneal_strategy!r}) is unknown.{did_you_mean(anneal_strategy, _STRATEGIES)}"
            )
        if anneal_steps <= 0:
            raise ConfigError(f"SWA(anneal_steps={anneal_steps}): expected a number above zero.")
        if swa_lr is not None and not schedule_swa_lr:
            log.warning("SWA(swa_lr=%g) has no effect: pass schedule_swa_lr=True as well", swa_lr)
        self.schedule_swa_lr = schedule_swa_lr
        self.anneal_strategy = _STRATEGIES[anneal_strategy]
        self.anneal_steps = anneal_steps
        self.swa_lr = swa_lr
        self._average = WeightAverage(get_swa_multi_avg_fn())
        self._start_lrs: list[float] = []
        self._sampled_at = -1
        self._completed = False

    def match(self, event: Event, state: State) -> bool:
        """Return true at the ends of batches, epochs and training from ``swa_start`` on."""
        if event is Event.AFTER_TRAIN_BATCH:
            return self._completed and span(self.swa_end, state).is_over
        if self._completed:
            return False
        if event is Event.FIT_END:
            return self._average.count > 0
        return event in (Event.BATCH_END, Event.EPOCH_END) and span(self.swa_start, state).is_over

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Sample the weights, copy the average to the model, or keep the weights constant."""
        if event is Event.AFTER_TRAIN_BATCH:
            state.model.zero_grad(set_to_none=True)  # optimizers skip parameters without a gradient
            return
        ends = event is Event.FIT_END or state.training_is_over or span(self.swa_end, state).is_over
        if ends or is_due(self.update_interval, event, state):
            self._sample(state)
        if ends:
            self._average.copy_to(state.model)
            self._completed = True
            log.info("SWA: the model has the average of %d samples of its weights", self._average.count)
        elif self.schedule_swa_lr:
            self._set_learning_rates(state)

    def _sample(self, state: State) -> None:
        batch = int(state.timestamp.batch)
        if batch == self._sampled_at:  # the ends of batch, epoch and training can coincide
            return
        if self._average.count == 0:
            self._start_lrs = [group["lr"] for group in _groups(state)]
        self._average.update(state.model)
        self._sampled_at = batch

    def _set_learning_rates(self, state: State) -> None:
        fraction = min(1.0, self._average.count / self.anneal_steps)
        if self.anneal_strategy == "cos":
            fraction = (1 - math.cos(math.pi * fraction)) / 2
        for group, start in zip(_groups(state), self._start_lrs, strict=False):  # none before the first sample
            end = start if self.swa_lr is None else self.swa_lr
            group["lr"] = start + fraction * (end - start)

    def state_dict(self) -> dict[str, Any]:
        """Return the average, the learning rates at the start of annealing, and the progress."""
        return {
            **self._average.state_dict(),
            "start_lrs": list(self._start_lrs),
            "sampled_at": self._sampled_at,
            "completed": self._completed,
        }

    def state_like(self, state: State) -> dict[str, Any]:
        """Return the weights, for the distribution of the average over ranks."""
        return self._average.state_like(state.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        self._average.load_state_dict(state_dict)
        self._start_lrs = list(state_dict["start_lrs"])
        self._sampled_at = int(state_dict["sampled_at"])
        self._completed = bool(state_dict["completed"])


def _groups(state: State) -> list[dict[str, Any]]:
    return [group for optimizer in state.optimizers for group in optimizer.param_groups]
