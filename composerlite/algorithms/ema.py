"""EMA: evaluate with an exponential moving average of the weights."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from composerlite.algorithms.weight_average import WeightAverage, is_due, read_update_interval, update_event
from composerlite.core import Algorithm, Event, Logger, State, Time, read_time, span
from composerlite.errors import ConfigError, checked_arguments


@torch.no_grad()
def compute_ema(model: nn.Module, ema_model: nn.Module, smoothing: float = 0.99) -> None:
    """Add the weights of ``model`` to the average in ``ema_model``, in place.

    Parameters and floating-point buffers become ``smoothing × average + (1 - smoothing) × weights``. Other buffers are
    copied from ``model``.

    Args:
        model: the trained model.
        ema_model: a copy of ``model``, made before training.
        smoothing: share of the old average, from 0 to 1.

    Raises:
        ConfigError: ``smoothing`` is not from 0 to 1, or names in the models differ.
    """
    if not 0 <= smoothing <= 1:
        raise ConfigError(f"compute_ema(smoothing={smoothing}): expected a number from 0 to 1, such as 0.99.")
    average, own = ema_model.state_dict(), model.state_dict()
    if average.keys() != own.keys():
        raise ConfigError(
            f"compute_ema: the models differ in {', '.join(sorted(average.keys() ^ own.keys()))}. Create ema_model "
            "with copy.deepcopy(model)."
        )
    for name, tensor in average.items():
        if tensor.is_floating_point():
            tensor.lerp_(own[name].to(tensor), 1 - smoothing)
        else:
            tensor.copy_(own[name])


@final
class EMA(Algorithm):
    """Evaluates with an exponential moving average of the weights.

    At each update ``average = smoothing × average + (1 - smoothing) × weights``. Training and the model in checkpoints
    use the plain weights; the average is saved as the state of this algorithm, and needs as much memory as the weights
    (Polyak & Juditsky 1992; as in `Tarvainen & Valpola 2017 <https://arxiv.org/abs/1703.01780>`_).

    Args:
        half_life: time until the share of a weight has fallen to a half, in batches or epochs.
        smoothing: the factor, instead of ``half_life``; pass ``half_life=None``, too.
        ema_start: start of averaging.
        update_interval: time between updates, in batches or epochs; by default one unit of ``half_life``.

    Raises:
        ConfigError: both or neither of ``half_life`` and ``smoothing`` are given, or the units of times differ.
    """

    @checked_arguments
    def __init__(
        self,
        half_life: Time | str | None = "1000ba",
        smoothing: float | None = None,
        ema_start: Time | str = "0.0dur",
        update_interval: Time | str | None = None,
    ) -> None:
        self.ema_start = read_time("ema_start", ema_start)
        self.smoothing, self.update_interval = _smoothing_and_interval(half_life, smoothing, update_interval)
        self._average = WeightAverage(get_ema_multi_avg_fn(self.smoothing))

    def match(self, event: Event, state: State) -> bool:
        """Return true at updates, around evaluation, and at the start of training, after a failed evaluation."""
        started = self._average.count > 0
        if event is update_event(self.update_interval):
            return is_due(self.update_interval, event, state) if started else span(self.ema_start, state).is_over
        return started and event in (Event.EVAL_START, Event.EVAL_END, Event.FIT_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the average, or exchange the weights of the model and the average around evaluation."""
        if event is Event.EVAL_START:
            self._average.show(state.model)
        elif event in (Event.EVAL_END, Event.FIT_START):
            self._average.hide()
        else:
            self._average.update(state.model)

    @property
    def ema_model(self) -> WeightAverage | None:
        """The average, with ``named_parameters()`` and ``transfer_ema_params(model)``; ``None`` before the start."""
        return self._average if self._average.count > 0 else None

    def get_training_model(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with the trained weights, also during evaluation."""
        self._average.hide()
        return model

    def get_ema_model(self, model: nn.Module) -> nn.Module:
        """Overwrite the weights of ``model`` with the average (if already started), and return ``model``."""
        self._average.copy_to(model)
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of updates, also during evaluation."""
        return self._average.state_dict()

    def state_like(self, state: State) -> dict[str, Any]:
        """Return the weights, for the distribution of the average over ranks."""
        return self._average.state_like(state.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        self._average.load_state_dict(state_dict)


def _smoothing_and_interval(
    half_life: Time | str | None, smoothing: float | None, update_interval: Time | str | None
) -> tuple[float, Time]:
    if half_life is None:
        if smoothing is None:
            raise ConfigError("EMA(half_life=None, smoothing=None): pass one of them, such as half_life='1000ba'.")
        if not 0 <= smoothing < 1:
            raise ConfigError(f"EMA(smoothing={smoothing}): expected a number in [0, 1), such as 0.999.")
        return smoothing, read_update_interval("update_interval", "1ba" if update_interval is None else update_interval)
    if smoothing is not None:
        raise ConfigError(
            f"EMA(half_life={str(half_life)!r}, smoothing={smoothing}): pass one of them. With smoothing, "
            "pass half_life=None."
        )
    life = read_update_interval("half_life", half_life)
    every = Time(1, life.unit) if update_interval is None else update_interval
    interval = read_update_interval("update_interval", every)
    if life.unit is not interval.unit:
        raise ConfigError(
            f"EMA(half_life={str(half_life)!r}, update_interval={str(update_interval)!r}): both must count batches, or "
            "both epochs."
        )
    return 2 ** -(interval.value / life.value), interval
