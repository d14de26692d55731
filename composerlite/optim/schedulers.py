"""Learning rate schedules: factors for the initial learning rate, as functions of training time."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

import torch
from torch.optim.lr_scheduler import LambdaLR

from composerlite.core import Time, read_time, span
from composerlite.errors import ConfigError, check_takes, checked_arguments, naming

if TYPE_CHECKING:
    from composerlite.core import State


@runtime_checkable
class ComposerScheduler(Protocol):
    """A learning rate schedule: a factor for the initial learning rate.

    The factor depends on ``state.timestamp`` and ``state.max_duration`` only, so a resumed run continues exactly. Any
    function ``(state, ssr=1.0) -> float`` is a schedule.
    """

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the current factor.

        Args:
            state: the training state.
            ssr: scale schedule ratio, a factor for all times except fractions of training.
        """
        ...


def compile_composer_scheduler(scheduler: ComposerScheduler, state: State, ssr: float = 1.0) -> LambdaLR:
    """Make a torch scheduler for the optimizer of ``state``.

    Call ``step()`` after the timestamp has advanced, to set the learning rate. Set the data loader in ``state`` first:
    without a length, schedules in epochs change only once per epoch.

    Args:
        scheduler: a function ``(state, ssr) -> factor``.
        state: the training state.
        ssr: scale schedule ratio.

    Returns:
        The torch scheduler.

    Raises:
        ConfigError: ``state`` has not exactly one optimizer, ``ssr`` is not positive, the schedule is in ``dur`` and
            ``state`` has no ``max_duration``, or the function has other parameters or returns no number.
    """
    if len(state.optimizers) != 1:
        raise ConfigError(f"a scheduler needs exactly one optimizer, found {len(state.optimizers)}.")
    if not ssr > 0:
        raise ConfigError(f"scale_schedule_ratio={ssr}: expected a number above zero; 1.0 does not scale.")

    with naming("schedulers", scheduler):
        check_takes(scheduler, *(("state",) if ssr == 1.0 else ("state", "ssr")))

    def factor(_steps: int) -> float:
        # Without scaling, a function of the state alone is a schedule, too.
        found = scheduler(state) if ssr == 1.0 else scheduler(state, ssr)
        if not isinstance(found, float | numbers.Real | torch.Tensor):
            raise ConfigError(
                f"schedulers={scheduler!r} returned {found!r}: expected a number, the factor of the learning rate."
            )
        return found

    return LambdaLR(state.optimizers[0], factor)


def _between(start: float, end: float, fraction: float) -> float:
    """Interpolate from ``start`` to ``end``; exactly ``end`` at 1."""
    return end if fraction >= 1.0 else start + fraction * (end - start)


def _cosine_decay(alpha_f: float, fraction: float) -> float:
    """Return half a cosine wave from 1 down to ``alpha_f`` (`Loshchilov & Hutter 2017 <https://arxiv.org/abs/1608.03983>`_)."""
    return _between(1.0, alpha_f, (1 - math.cos(math.pi * fraction)) / 2)


def _power_decay(power: float, alpha_f: float, fraction: float) -> float:
    """Return a power of the remaining fraction, scaled to end at ``alpha_f``."""
    return _between(alpha_f, 1.0, (1.0 - fraction) ** power)


@final
class _Warmup:
    """Time of a warmup. ``scale_warmup``: apply the scale schedule ratio."""

    def __init__(self, t_warmup: Time | str, *, scale_warmup: bool) -> None:
        self.time = read_time("t_warmup", t_warmup)
        self._scaled = scale_warmup

    def fraction(self, state: State, ssr: float) -> float:
        """Return the finished fraction of the warmup."""
        return span(self.time, state, self._ratio(ssr)).fraction

    def fraction_from_here_to(self, t_max: Time, state: State, ssr: float) -> float:
        """Return the finished fraction of the time from the end of the warmup to ``t_max``.

        Raises:
            ConfigError: the units of the two times differ.
        """
        start, end = span(self.time, state, self._ratio(ssr)), span(t_max, state, ssr)
        if start.tick is not end.tick:
            raise ConfigError(
                f"t_warmup={str(self.time)!r} is counted in {start.tick.value!r} and t_max={str(t_max)!r} in "
                f"{end.tick.value!r}: pass both in the same unit. (Epochs and batches can be combined if the data "
                "loader has a length; 'dur' has the unit of max_duration.)"
            )
        if end.is_over or end.value <= start.value:
            return 1.0
        return max(0.0, float((end.now - start.value) / (end.value - start.value)))

    def _ratio(self, ssr: float) -> float:
        return ssr if self._scaled else 1.0


@final
class StepScheduler(ComposerScheduler):
    """Multiplies by ``gamma`` after every ``step_size``.

    Args:
        step_size: time between two steps, such as ``'30ep'``.
        gamma: factor of one step.
    """

    @checked_arguments
    def __init__(self, step_size: Time | str, gamma: float = 0.1) -> None:
        self.step_size = read_time("step_size", step_size, empty=False)
        self.gamma = gamma

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return self.gamma ** int(span(self.step_size, state, ssr).periods)


@final
class MultiStepScheduler(ComposerScheduler):
    """Multiplies by ``gamma`` at every milestone.

    Args:
        milestones: times since the start of training, such as ``['30ep', '60ep']``.
        gamma: factor of one step.
    """

    @checked_arguments
    def __init__(self, milestones: Sequence[Time | str], gamma: float = 0.1) -> None:
        if isinstance(milestones, str):
            raise ConfigError(f"milestones={milestones!r}: expected a list of times, such as [{milestones!r}].")
        self.milestones = [read_time("milestones", milestone) for milestone in milestones]
        self.gamma = gamma

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return self.gamma ** sum(span(milestone, state, ssr).is_over for milestone in self.milestones)


@final
class MultiStepWithWarmupScheduler(ComposerScheduler):
    """Warms up to 1, then multiplies by ``gamma`` at every milestone.

    Args:
        t_warmup: length of the warmup.
        milestones: times since the start of training, such as ``['30ep', '60ep']``.
        gamma: factor of one step.
        scale_warmup: apply the scale schedule ratio to the warmup, too.
    """

    @checked_arguments
    def __init__(
        self, t_warmup: Time | str, milestones: Sequence[Time | str], gamma: float = 0.1, scale_warmup: bool = False
    ) -> None:
        self._warmup = _Warmup(t_warmup, scale_warmup=scale_warmup)
        self._steps = MultiStepScheduler(milestones, gamma)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        warm = self._warmup.fraction(state, ssr)
        return warm if warm < 1 else self._steps(state, ssr)


@final
class ConstantScheduler(ComposerScheduler):
    """Is ``alpha`` until ``t_max``, then 1.

    Args:
        alpha: the factor.
        t_max: end of this factor.
    """

    @checked_arguments
    def __init__(self, alpha: float = 1.0, t_max: Time | str = "1dur") -> None:
        self.alpha = alpha
        self.t_max = read_time("t_max", t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return 1.0 if span(self.t_max, state, ssr).is_over else self.alpha


@final
class ConstantWithWarmupScheduler(ComposerScheduler):
    """Warms up to ``alpha``, stays there until ``t_max``, then is 1.

    Args:
        t_warmup: length of the warmup.
        alpha: factor after the warmup.
        t_max: end of this factor, from the start of training.
        scale_warmup: apply the scale schedule ratio to the warmup, too.
    """

    @checked_arguments
    def __init__(
        self, t_warmup: Time | str, alpha: float = 1.0, t_max: Time | str = "1dur", scale_warmup: bool = False
    ) -> None:
        self.alpha = alpha
        self._warmup = _Warmup(t_warmup, scale_warmup=scale_warmup)
        self._constant = ConstantScheduler(alpha, t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        warm = self._warmup.fraction(state, ssr)
        return warm * self.alpha if warm < 1 else self._constant(state, ssr)


@final
class ExponentialScheduler(ComposerScheduler):
    """Decays smoothly, by ``gamma`` in every ``decay_period``.

    Args:
        gamma: factor of one period.
        decay_period: the period.
    """

    @checked_arguments
    def __init__(self, gamma: float, decay_period: Time | str = "1ep") -> None:
        self.gamma = gamma
        self.decay_period = read_time("decay_period", decay_period, empty=False)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return self.gamma ** float(span(self.decay_period, state, ssr).periods)


@final
class CosineAnnealingWarmRestartsScheduler(ComposerScheduler):
    """Cosine annealing with restarts (`SGDR, Loshchilov & Hutter 2017 <https://arxiv.org/abs/1608.03983>`_).

    Args:
        t_0: length of the first cycle.
        t_mult: length of a cycle relative to the cycle before; at least 1.
        alpha_f: factor at the end of each cycle.
    """

    @checked_arguments
    def __init__(self, t_0: Time | str, t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        if not t_mult >= 1:
            raise ConfigError(f"t_mult={t_mult}: expected 1 or more.")
        self.t_0 = read_time("t_0", t_0, empty=False)
        self.t_mult = t_mult
        self.alpha_f = alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        passed = span(self.t_0, state, ssr).periods
        if self.t_mult == 1:
            return _cosine_decay(self.alpha_f, float(passed % 1))
        start, length, growth = Fraction(0), Fraction(1), Fraction(str(self.t_mult))
        while passed >= start + length:
            start += length
            length *= growth
        return _cosine_decay(self.alpha_f, float((passed - start) / length))


class _Ramp(ComposerScheduler):
    """Base of schedules that end at ``t_max``, with an optional warmup. ``curve``: factor at a finished fraction."""

    def __init__(self, t_max: Time | str, curve: Callable[[float], float], warmup: _Warmup | None = None) -> None:
        self.t_max = read_time("t_max", t_max)
        self._curve = curve
        self._warmup = warmup

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        if self._warmup is None:
            return self._curve(span(self.t_max, state, ssr).fraction)
        warm = self._warmup.fraction(state, ssr)
        if warm < 1:
            return warm * self._curve(0.0)
        return self._curve(self._warmup.fraction_from_here_to(self.t_max, state, ssr))


@final
class LinearScheduler(_Ramp):
    """Changes linearly from ``alpha_i`` to ``alpha_f``.

    Args:
        alpha_i: factor at the start.
        alpha_f: factor from ``t_max`` on.
        t_max: time at which ``alpha_f`` is reached.
    """

    @checked_arguments
    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: Time | str = "1dur") -> None:
        super().__init__(t_max, partial(_between, alpha_i, alpha_f))
        self.alpha_i = alpha_i
        self.alpha_f = alpha_f


@final
class LinearWithWarmupScheduler(_Ramp):
    """Warms up to ``alpha_i``, then changes linearly to ``alpha_f``.

    Args:
        t_warmup: length of the warmup.
        alpha_i: factor after the warmup.
        alpha_f: factor from ``t_max`` on.
        t_max: time at which ``alpha_f`` is reached, from the start of training.
        scale_warmup: apply the scale schedule ratio to the warmup, too.
    """

    @checked_arguments
    def __init__(
        self,
        t_warmup: Time | str,
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: Time | str = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_max, partial(_between, alpha_i, alpha_f), _Warmup(t_warmup, scale_warmup=scale_warmup))
        self.alpha_i = alpha_i
        self.alpha_f = alpha_f


@final
class CosineAnnealingScheduler(_Ramp):
    """Decays from 1 to ``alpha_f`` along half a cosine wave (`SGDR <https://arxiv.org/abs/1608.03983>`_, no restart).

    Args:
        t_max: time at which ``alpha_f`` is reached.
        alpha_f: factor from ``t_max`` on.
    """

    @checked_arguments
    def __init__(self, t_max: Time | str = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_max, partial(_cosine_decay, alpha_f))
        self.alpha_f = alpha_f


@final
class CosineAnnealingWithWarmupScheduler(_Ramp):
    """Warms up to 1, then decays to ``alpha_f`` along half a cosine wave (`SGDR <https://arxiv.org/abs/1608.03983>`_).

    Args:
        t_warmup: length of the warmup.
        t_max: time at which ``alpha_f`` is reached, from the start of training.
        alpha_f: factor from ``t_max`` on.
        scale_warmup: apply the scale schedule ratio to the warmup, too.
    """

    @checked_arguments
    def __init__(
        self, t_warmup: Time | str, t_max: Time | str = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
    ) -> None:
        super().__init__(t_max, partial(_cosine_decay, alpha_f), _Warmup(t_warmup, scale_warmup=scale_warmup))
        self.alpha_f = alpha_f


@final
class PolynomialScheduler(_Ramp):
    """Decays from 1 to ``alpha_f`` with a power of the remaining fraction of ``t_max``.

    Args:
        power: exponent; 1 is linear, larger values decay faster at first.
        t_max: time at which ``alpha_f`` is reached.
        alpha_f: factor from ``t_max`` on.
    """

    @checked_arguments
    def __init__(self, power: float, t_max: Time | str = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_max, partial(_power_decay, power, alpha_f))
        self.power = power
        self.alpha_f = alpha_f


@final
class PolynomialWithWarmupScheduler(_Ramp):
    """Warms up to 1, then decays to ``alpha_f`` with a power of the remaining fraction of time.

    Args:
        t_warmup: length of the warmup.
        power: exponent; 1 is linear, larger values decay faster at first.
        t_max: time at which ``alpha_f`` is reached, from the start of training.
        alpha_f: factor from ``t_max`` on.
        scale_warmup: apply the scale schedule ratio to the warmup, too.
    """

    @checked_arguments
    def __init__(
        self,
        t_warmup: Time | str,
        power: float = 2.0,
        t_max: Time | str = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_max, partial(_power_decay, power, alpha_f), _Warmup(t_warmup, scale_warmup=scale_warmup))
        self.power = power
        self.alpha_f = alpha_f
