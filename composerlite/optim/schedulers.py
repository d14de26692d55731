"""The schedules without a warm-up. Each gives the factor for the initial learning rate at time t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, final

from composerlite.core import Time
from composerlite.errors import ConfigError, checked_arguments
from composerlite.optim.scheduler import ComposerScheduler
from composerlite.optim.span import read_time, span

if TYPE_CHECKING:
    from composerlite.core import State

__all__ = [
    "ConstantScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "ExponentialScheduler",
    "LinearScheduler",
    "MultiStepScheduler",
    "PolynomialScheduler",
    "StepScheduler",
    "between",
    "cosine_decay",
]


def between(start: float, end: float, fraction: float) -> float:
    """The point ``fraction`` of the way from ``start`` to ``end``; exactly ``end`` at 1."""
    return end if fraction >= 1.0 else start + fraction * (end - start)


def cosine_decay(alpha_f: float, fraction: float) -> float:
    """Half a cosine wave from 1 down to ``alpha_f`` (`Loshchilov & Hutter 2017 <https://arxiv.org/abs/1608.03983>`_)."""
    return between(1.0, alpha_f, (1 - math.cos(math.pi * fraction)) / 2)


@final
class StepScheduler(ComposerScheduler):
    """Multiplies by ``gamma`` after every ``step_size``.

    Args:
        step_size: time between two steps, e.g. ``'30ep'``.
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
        milestones: times since the start of training, e.g. ``['30ep', '60ep']``.
        gamma: factor of one step.
    """

    @checked_arguments
    def __init__(self, milestones: Sequence[Time | str], gamma: float = 0.1) -> None:
        if isinstance(milestones, str):
            raise ConfigError(f"milestones={milestones!r}: want a list of times, e.g. [{milestones!r}].")
        self.milestones = [read_time("milestones", milestone) for milestone in milestones]
        self.gamma = gamma

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return self.gamma ** sum(span(milestone, state, ssr).is_over for milestone in self.milestones)


@final
class ConstantScheduler(ComposerScheduler):
    """Stays at ``alpha`` until ``t_max``, then at 1.

    Args:
        alpha: the factor.
        t_max: how long.
    """

    @checked_arguments
    def __init__(self, alpha: float = 1.0, t_max: Time | str = "1dur") -> None:
        self.alpha = alpha
        self.t_max = read_time("t_max", t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return 1.0 if span(self.t_max, state, ssr).is_over else self.alpha


@final
class LinearScheduler(ComposerScheduler):
    """Goes from ``alpha_i`` to ``alpha_f`` in a straight line.

    Args:
        alpha_i: factor at the start.
        alpha_f: factor from ``t_max`` on.
        t_max: when ``alpha_f`` is reached.
    """

    @checked_arguments
    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: Time | str = "1dur") -> None:
        self.alpha_i = alpha_i
        self.alpha_f = alpha_f
        self.t_max = read_time("t_max", t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return between(self.alpha_i, self.alpha_f, span(self.t_max, state, ssr).fraction)


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
class CosineAnnealingScheduler(ComposerScheduler):
    """Goes from 1 to ``alpha_f`` along half a cosine wave (`SGDR <https://arxiv.org/abs/1608.03983>`_, no restart).

    Args:
        t_max: when ``alpha_f`` is reached.
        alpha_f: factor from then on.
    """

    @checked_arguments
    def __init__(self, t_max: Time | str = "1dur", alpha_f: float = 0.0) -> None:
        self.t_max = read_time("t_max", t_max)
        self.alpha_f = alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return cosine_decay(self.alpha_f, span(self.t_max, state, ssr).fraction)


@final
class CosineAnnealingWarmRestartsScheduler(ComposerScheduler):
    """Cosine annealing that starts over again and again (`SGDR, Loshchilov & Hutter 2017 <https://arxiv.org/abs/1608.03983>`_).

    Args:
        t_0: length of the first cycle.
        t_mult: each cycle is so many times as long as the one before; at least 1.
        alpha_f: factor at the end of each cycle.
    """

    @checked_arguments
    def __init__(self, t_0: Time | str, t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        if not t_mult >= 1:
            raise ConfigError(f"t_mult={t_mult}: want 1 or more, or the cycles shrink to nothing.")
        self.t_0 = read_time("t_0", t_0, empty=False)
        self.t_mult = t_mult
        self.alpha_f = alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        passed = span(self.t_0, state, ssr).periods
        if self.t_mult == 1:
            return cosine_decay(self.alpha_f, float(passed % 1))
        start, length, growth = Fraction(0), Fraction(1), Fraction(str(self.t_mult))
        while passed >= start + length:
            start += length
            length *= growth
        return cosine_decay(self.alpha_f, float((passed - start) / length))


@final
class PolynomialScheduler(ComposerScheduler):
    """Goes from 1 to ``alpha_f`` as the part of ``t_max`` that is left, raised to ``power``.

    Args:
        power: 1 is a straight line; more falls faster at first.
        t_max: when ``alpha_f`` is reached.
        alpha_f: factor from then on.
    """

    @checked_arguments
    def __init__(self, power: float, t_max: Time | str = "1dur", alpha_f: float = 0.0) -> None:
        self.power = power
        self.t_max = read_time("t_max", t_max)
        self.alpha_f = alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        left = 1.0 - span(self.t_max, state, ssr).fraction
        return between(self.alpha_f, 1.0, left**self.power)
