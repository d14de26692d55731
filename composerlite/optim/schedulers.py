"""Learning-rate schedules: the factor for the initial learning rate as a function of where training stands."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

import torch
from torch.optim.lr_scheduler import LambdaLR

from composerlite.core import Time, read_time, span
from composerlite.errors import ConfigError, check_takes, checked_arguments, naming

if TYPE_CHECKING:
    from composerlite.core import State


@runtime_checkable
class ComposerScheduler(Protocol):
    """A learning-rate schedule: the factor that the initial learning rate is multiplied by.

    The factor depends on ``state.timestamp`` and ``state.max_duration`` only, so a resumed run continues exactly. Any
    function ``(state, ssr=1.0) -> float`` is one.
    """

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """The factor now.

        Args:
            state: the training state.
            ssr: scale schedule ratio: all times but fractions of training are multiplied by it.
        """
        ...


def compile_composer_scheduler(scheduler: ComposerScheduler, state: State, ssr: float = 1.0) -> LambdaLR:
    """``scheduler`` as a torch scheduler of the optimizer of ``state``.

    Its ``step()`` sets the learning rate for where ``state`` stands then: call it after the timestamp has advanced. The
    data loader must be set in ``state`` before, or schedules in epochs move once per epoch only.

    Args:
        scheduler: a function ``(state, ssr) -> factor``.
        state: of the run.
        ssr: scale schedule ratio.

    Returns:
        The scheduler.

    Raises:
        ConfigError: ``state`` has not exactly one optimizer, ``ssr`` is not positive, the schedule is in ``dur`` and
            ``state`` has no ``max_duration``, or it is a function that cannot be called so or returns no number.
    """
    if len(state.optimizers) != 1:
        raise ConfigError(f"a scheduler needs exactly one optimizer, and there are {len(state.optimizers)}.")
    if not ssr > 0:
        raise ConfigError(
            f"scale_schedule_ratio={ssr}: expected a number above zero; 1.0 leaves the schedule as it is."
        )

    with naming("schedulers", scheduler):
        check_takes(scheduler, *(("state",) if ssr == 1.0 else ("state", "ssr")))

    def factor(_steps: int) -> float:
        # A function of the state alone is a schedule, too, as long as nothing is scaled.
        found = scheduler(state) if ssr == 1.0 else scheduler(state, ssr)
        if not isinstance(found, float | numbers.Real | torch.Tensor):
            raise ConfigError(
                f"schedulers={scheduler!r} returned {found!r}: expected a number, the factor of the learning rate."
            )
        return found

    return LambdaLR(state.optimizers[0], factor)


def _between(start: float, end: float, fraction: float) -> float:
    """The point ``fraction`` of the way from ``start`` to ``end``; exactly ``end`` at 1."""
    return end if fraction >= 1.0 else start + fraction * (end - start)


def _cosine_decay(alpha_f: float, fraction: float) -> float:
    """Half a cosine wave from 1 down to ``alpha_f`` (`Loshchilov & Hutter 2017 <https://arxiv.org/abs/1608.03983>`_)."""
    return _between(1.0, alpha_f, (1 - math.cos(math.pi * fraction)) / 2)


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
            raise ConfigError(f"milestones={milestones!r}: expected a list of times, such as [{milestones!r}].")
        self.milestones = [read_time("milestones", milestone) for milestone in milestones]
        self.gamma = gamma

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return self.gamma ** sum(span(milestone, state, ssr).is_over for milestone in self.milestones)


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
    """Cosine annealing that starts over again and again (`SGDR, Loshchilov & Hutter 2017 <https://arxiv.org/abs/1608.03983>`_).

    Args:
        t_0: length of the first cycle.
        t_mult: factor by which each cycle is longer than the one before; at least 1.
        alpha_f: factor at the end of each cycle.
    """

    @checked_arguments
    def __init__(self, t_0: Time | str, t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        if not t_mult >= 1:
            raise ConfigError(f"t_mult={t_mult}: expected 1 or more, or the cycles shrink to nothing.")
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


# ── schedules that go somewhere until t_max ─────────────────────────────────────────────────────────────────────────
class _Ramp(ComposerScheduler, ABC):
    """Goes from its beginning to its end until ``t_max``, after a warm-up if there is one."""

    def __init__(self, t_max: Time | str, warmup: _Warmup | None = None) -> None:
        self.t_max = read_time("t_max", t_max)
        self._warmup = warmup

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        if self._warmup is None:
            return self._at(span(self.t_max, state, ssr).fraction)
        warm = self._warmup.fraction(state, ssr)
        if warm < 1:
            return warm * self._at(0.0)
        return self._at(self._warmup.fraction_from_here_to(self.t_max, state, ssr))

    @abstractmethod
    def _at(self, fraction: float) -> float:
        """The factor where ``fraction`` of the way is done, from 0 to 1."""


class _Linear(_Ramp):
    """A straight line between the factors that a subclass sets."""

    alpha_i: float
    alpha_f: float

    def _at(self, fraction: float) -> float:
        return _between(self.alpha_i, self.alpha_f, fraction)


class _Cosine(_Ramp):
    """Half a cosine wave from 1 to the factor that a subclass sets."""

    alpha_f: float

    def _at(self, fraction: float) -> float:
        return _cosine_decay(self.alpha_f, fraction)


class _Polynomial(_Ramp):
    """A power of the time that is left, from 1 to the factor that a subclass sets."""

    power: float
    alpha_f: float

    def _at(self, fraction: float) -> float:
        return _between(self.alpha_f, 1.0, (1.0 - fraction) ** self.power)


@final
class LinearScheduler(_Linear):
    """Goes from ``alpha_i`` to ``alpha_f`` in a straight line.

    Args:
        alpha_i: factor at the start.
        alpha_f: factor from ``t_max`` on.
        t_max: when ``alpha_f`` is reached.
    """

    @checked_arguments
    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: Time | str = "1dur") -> None:
        super().__init__(t_max)
        self.alpha_i = alpha_i
        self.alpha_f = alpha_f


@final
class LinearWithWarmupScheduler(_Linear):
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
        super().__init__(t_max, _Warmup(t_warmup, scale_warmup=scale_warmup))
        self.alpha_i = alpha_i
        self.alpha_f = alpha_f


@final
class CosineAnnealingScheduler(_Cosine):
    """Goes from 1 to ``alpha_f`` along half a cosine wave (`SGDR <https://arxiv.org/abs/1608.03983>`_, no restart).

    Args:
        t_max: when ``alpha_f`` is reached.
        alpha_f: factor from then on.
    """

    @checked_arguments
    def __init__(self, t_max: Time | str = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_max)
        self.alpha_f = alpha_f


@final
class CosineAnnealingWithWarmupScheduler(_Cosine):
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
        super().__init__(t_max, _Warmup(t_warmup, scale_warmup=scale_warmup))
        self.alpha_f = alpha_f


@final
class PolynomialScheduler(_Polynomial):
    """Goes from 1 to ``alpha_f`` as the part of ``t_max`` that is left, raised to ``power``.

    Args:
        power: 1 is a straight line; more falls faster at first.
        t_max: when ``alpha_f`` is reached.
        alpha_f: factor from then on.
    """

    @checked_arguments
    def __init__(self, power: float, t_max: Time | str = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_max)
        self.power = power
        self.alpha_f = alpha_f


@final
class PolynomialWithWarmupScheduler(_Polynomial):
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
        super().__init__(t_max, _Warmup(t_warmup, scale_warmup=scale_warmup))
        self.power = power
        self.alpha_f = alpha_f
