"""The schedules that begin with a linear warm-up, from zero to where the schedule itself begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from composerlite.core import Time
from composerlite.errors import ConfigError, checked_arguments
from composerlite.optim.scheduler import ComposerScheduler
from composerlite.optim.schedulers import ConstantScheduler, MultiStepScheduler, between, cosine_decay
from composerlite.optim.span import read_time, span

if TYPE_CHECKING:
    from composerlite.core import State

__all__ = [
    "ConstantWithWarmupScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepWithWarmupScheduler",
    "PolynomialWithWarmupScheduler",
]


@final
class _Warmup:
    """The time of a warm-up. ``scale_warmup``: whether the scale schedule ratio applies to it."""

    def __init__(self, t_warmup: Time | str, *, scale_warmup: bool) -> None:
        self.time = read_time("t_warmup", t_warmup)
        self._scaled = scale_warmup

    def fraction(self, state: State, ssr: float) -> float:
        """The part of the warm-up that has passed; 1 when it is over."""
        return span(self.time, state, self._ratio(ssr)).fraction

    def fraction_from_here_to(self, t_max: Time, state: State, ssr: float) -> float:
        """The part of the way from the end of the warm-up to ``t_max`` that has passed.

        Raises:
            ConfigError: the two times count different things.
        """
        start, end = span(self.time, state, self._ratio(ssr)), span(t_max, state, ssr)
        if start.tick is not end.tick:
            raise ConfigError(
                f"t_warmup={str(self.time)!r} is counted in {start.tick.value!r} and t_max={str(t_max)!r} in "
                f"{end.tick.value!r}: give both in one unit. (Epochs and batches go together where the data loader has "
                "a length; 'dur' is in the unit of max_duration.)"
            )
        if end.is_over or end.value <= start.value:
            return 1.0
        return max(0.0, float((end.now - start.value) / (end.value - start.value)))

    def _ratio(self, ssr: float) -> float:
        return ssr if self._scaled else 1.0


@final
class MultiStepWithWarmupScheduler(ComposerScheduler):
    """Warms up to 1, then multiplies by ``gamma`` at every milestone.

    Args:
        t_warmup: length of the warm-up.
        milestones: times since the start of training, e.g. ``['30ep', '60ep']``.
        gamma: factor of one step.
        scale_warmup: whether the scale schedule ratio applies to the warm-up too.
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
class ConstantWithWarmupScheduler(ComposerScheduler):
    """Warms up to ``alpha`` and stays there until ``t_max``, then at 1.

    Args:
        t_warmup: length of the warm-up.
        alpha: factor after it.
        t_max: how long, from the start of training.
        scale_warmup: whether the scale schedule ratio applies to the warm-up too.
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
class LinearWithWarmupScheduler(ComposerScheduler):
    """Warms up to ``alpha_i``, then goes to ``alpha_f`` in a straight line.

    Args:
        t_warmup: length of the warm-up.
        alpha_i: factor after it.
        alpha_f: factor from ``t_max`` on.
        t_max: when ``alpha_f`` is reached, from the start of training.
        scale_warmup: whether the scale schedule ratio applies to the warm-up too.
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
        self.alpha_i = alpha_i
        self.alpha_f = alpha_f
        self.t_max = read_time("t_max", t_max)
        self._warmup = _Warmup(t_warmup, scale_warmup=scale_warmup)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        warm = self._warmup.fraction(state, ssr)
        if warm < 1:
            return warm * self.alpha_i
        return between(self.alpha_i, self.alpha_f, self._warmup.fraction_from_here_to(self.t_max, state, ssr))


@final
class CosineAnnealingWithWarmupScheduler(ComposerScheduler):
    """Warms up to 1, then goes to ``alpha_f`` along half a cosine wave (`SGDR <https://arxiv.org/abs/1608.03983>`_).

    Args:
        t_warmup: length of the warm-up.
        t_max: when ``alpha_f`` is reached, from the start of training.
        alpha_f: factor from then on.
        scale_warmup: whether the scale schedule ratio applies to the warm-up too.
    """

    @checked_arguments
    def __init__(
        self, t_warmup: Time | str, t_max: Time | str = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
    ) -> None:
        self.t_max = read_time("t_max", t_max)
        self.alpha_f = alpha_f
        self._warmup = _Warmup(t_warmup, scale_warmup=scale_warmup)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        warm = self._warmup.fraction(state, ssr)
        if warm < 1:
            return warm
        return cosine_decay(self.alpha_f, self._warmup.fraction_from_here_to(self.t_max, state, ssr))


@final
class PolynomialWithWarmupScheduler(ComposerScheduler):
    """Warms up to 1, then goes to ``alpha_f`` as the part of the time that is left, raised to ``power``.

    Args:
        t_warmup: length of the warm-up.
        power: 1 is a straight line; more falls faster at first.
        t_max: when ``alpha_f`` is reached, from the start of training.
        alpha_f: factor from then on.
        scale_warmup: whether the scale schedule ratio applies to the warm-up too.
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
        self.power = power
        self.t_max = read_time("t_max", t_max)
        self.alpha_f = alpha_f
        self._warmup = _Warmup(t_warmup, scale_warmup=scale_warmup)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        warm = self._warmup.fraction(state, ssr)
        if warm < 1:
            return warm
        left = 1.0 - self._warmup.fraction_from_here_to(self.t_max, state, ssr)
        return between(self.alpha_f, 1.0, left**self.power)
