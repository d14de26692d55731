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
    """Add the weights of ``model`` to the average that ``ema_model`` is, in place.

    Afterwards parameters of ``ema_model`` are ``smoothing`` times themselves plus ``1 - smoothing`` times those of
    ``model``, and so are buffers of floating point; other buffers are those of ``model``.

    Args:
        model: the model that is trained.
        ema_model: a copy of it, which was made before training.
        smoothing: the share of what was there, from 0 to 1.

    Raises:
        ConfigError: another ``smoothing``, or two models with other names.
    """
    if not 0 <= smoothing <= 1:
        raise ConfigError(f"compute_ema(smoothing={smoothing}): expected a number from 0 to 1, such as 0.99.")
    average, own = ema_model.state_dict(), model.state_dict()
    if average.keys() != own.keys():
        raise ConfigError(
            f"compute_ema: the models differ in {', '.join(sorted(average.keys() ^ own.keys()))}: make ema_model with "
            "copy.deepcopy(model)."
        )
    for name, tensor in average.items():
        if tensor.is_floating_point():
            tensor.lerp_(own[name].to(tensor), 1 - smoothing)
        else:
            tensor.copy_(own[name])


@final
class EMA(Algorithm):
    """Keeps an exponential moving average of the weights and evaluates with it.

    At each update ``average = smoothing × average + (1 - smoothing) × weights``. Training continues with the weights
    themselves, and they are what a checkpoint holds as the model; the average is in the state of this algorithm. It
    costs the memory of the weights once more (Polyak & Juditsky 1992; as in `Tarvainen & Valpola 2017
    <https://arxiv.org/abs/1703.01780>`_).

    Args:
        half_life: time after which a weight's share has fallen to a half, in batches or epochs.
        smoothing: the factor itself, in place of ``half_life``; pass ``half_life=None`` with it.
        ema_start: when averaging begins.
        update_interval: time between updates, in batches or epochs; by default one of what ``half_life`` counts.

    Raises:
        ConfigError: both or neither of ``half_life`` and ``smoothing``, or times in units that do not fit.
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
        """Return true at updates, around evaluation, and when training starts: an evaluation may have failed."""
        started = self._average.count > 0
        if event is update_event(self.update_interval):
            return is_due(self.update_interval, event, state) if started else span(self.ema_start, state).is_over
        return started and event in (Event.EVAL_START, Event.EVAL_END, Event.FIT_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the average, or put it into the model for evaluation and out again."""
        if event is Event.EVAL_START:
            self._average.show(state.model)
        elif event in (Event.EVAL_END, Event.FIT_START):
            self._average.hide()
        else:
            self._average.update(state.model)

    @property
    def ema_model(self) -> WeightAverage | None:
        """The average, with ``named_parameters()`` and ``transfer_ema_params(model)``; ``None`` before it begins."""
        return self._average if self._average.count > 0 else None

    def get_training_model(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with the weights that are trained, should the average be in it."""
        self._average.hide()
        return model

    def get_ema_model(self, model: nn.Module) -> nn.Module:
        """``model`` with its weights overwritten by the average, as far as there is one."""
        self._average.copy_to(model)
        return model

    def state_dict(self) -> dict[str, Any]:
        """The average and how many updates are in it, whether or not it is in the model now."""
        return self._average.state_dict()

    def state_like(self, state: State) -> dict[str, Any]:
        """The weights, as which their average is distributed over ranks."""
        return self._average.state_like(state.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._average.load_state_dict(state_dict)


def _smoothing_and_interval(
    half_life: Time | str | None, smoothing: float | None, update_interval: Time | str | None
) -> tuple[float, Time]:
    if half_life is None:
        if smoothing is None:
            raise ConfigError("EMA(half_life=None, smoothing=None): give one of them, e.g. half_life='1000ba'.")
        if not 0 <= smoothing < 1:
            raise ConfigError(f"EMA(smoothing={smoothing}): expected a number in [0, 1), such as 0.999.")
        return smoothing, read_update_interval("update_interval", "1ba" if update_interval is None else update_interval)
    if smoothing is not None:
        raise ConfigError(
            f"EMA(half_life={str(half_life)!r}, smoothing={smoothing}): give one of them; pass half_life=None."
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
