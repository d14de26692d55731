"""Learning-rate schedules as functions of where training stands."""

from __future__ import annotations

import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composerlite.core import State, Timestamp
from composerlite.errors import ConfigError, UnknownArgumentError
from composerlite.optim import (
    ComposerScheduler,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledSGDW,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    StepScheduler,
    compile_composer_scheduler,
)


def new_state(max_duration: str | None = "10ba", batches_per_epoch: int | None = None) -> State:
    model = nn.Linear(1, 1)
    state = State(
        model,
        rank_zero_seed=0,
        run_name="run",
        device=torch.device("cpu"),
        max_duration=max_duration,
        optimizers=DecoupledSGDW(model.parameters(), lr=0.5),
    )
    if batches_per_epoch is not None:
        state.set_dataloader([None] * batches_per_epoch)
    return state


def at_batch(state: State, batch: int, batches_per_epoch: int = 10**9) -> State:
    """``state``, moved to where ``batch`` batches have been trained, of 2 samples and 3 tokens and 1 second each."""
    state.timestamp = Timestamp(
        epoch=batch // batches_per_epoch,
        batch=batch,
        batch_in_epoch=batch % batches_per_epoch,
        sample=2 * batch,
        token=3 * batch,
        total_wct=batch,
    )
    return state


def curve(scheduler: ComposerScheduler, batches: int, state: State | None = None, **kwargs: int) -> list[float]:
    state = new_state() if state is None else state
    return [scheduler(at_batch(state, batch, **kwargs)) for batch in range(batches)]


def close(values: list[float]) -> object:
    return pytest.approx(values, abs=1e-12)


def test_step() -> None:
    """StepScheduler multiplies by gamma after every step_size."""
    assert curve(StepScheduler("2ba", gamma=0.5), 6) == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_multi_step() -> None:
    """MultiStepScheduler multiplies by gamma at every milestone."""
    assert curve(MultiStepScheduler(["1ba", "4ba"], gamma=0.5), 6) == [1, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_constant() -> None:
    """ConstantScheduler stays at alpha until t_max, then goes to 1."""
    assert curve(ConstantScheduler(0.3, t_max="2ba"), 4) == [0.3, 0.3, 1, 1]
    assert curve(ConstantScheduler(), 4) == [1, 1, 1, 1]


def test_linear() -> None:
    """LinearScheduler is a straight line to exactly alpha_f, and stays there."""
    assert curve(LinearScheduler(1.0, 0.2, t_max="4ba"), 6) == close([1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_exponential() -> None:
    """ExponentialScheduler decays by gamma in a period, smoothly in between."""
    assert curve(ExponentialScheduler(0.25, decay_period="2ba"), 4) == close([1, 0.5, 0.25, 0.125])


def test_cosine() -> None:
    """CosineAnnealingScheduler is half a cosine wave down to alpha_f."""
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * t / 10)) / 2 for t in range(11)] + [0.1]
    assert curve(CosineAnnealingScheduler(alpha_f=0.1), 12) == close(expected)


def test_warm_restarts() -> None:
    """Every cycle of CosineAnnealingWarmRestarts begins at 1 and is t_mult times as long as the one before."""
    values = curve(CosineAnnealingWarmRestartsScheduler("2ba", t_mult=2), 7)
    assert values == close([1, 0.5, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 - math.cos(math.pi / 4)) / 2, 1])
    assert curve(CosineAnnealingWarmRestartsScheduler("2ba"), 5) == close([1, 0.5, 1, 0.5, 1])


def test_polynomial() -> None:
    """PolynomialScheduler falls with the power of the time that is left."""
    assert curve(PolynomialScheduler(power=2, t_max="4ba", alpha_f=0.2), 6) == close(
        [1, 0.2 + 0.8 * 0.75**2, 0.2 + 0.8 * 0.25, 0.2 + 0.8 * 0.0625, 0.2, 0.2]
    )


@pytest.mark.parametrize(
    ("scheduler", "after"),
    [
        (MultiStepWithWarmupScheduler("4ba", ["6ba"], gamma=0.5), [1, 1, 0.5, 0.5, 0.5]),
        (ConstantWithWarmupScheduler("4ba", t_max="6ba"), [1, 1, 1, 1, 1]),
        (LinearWithWarmupScheduler("4ba", t_max="8ba"), [1, 0.75, 0.5, 0.25, 0]),
        (CosineAnnealingWithWarmupScheduler("4ba", t_max="6ba"), [1, 0.5, 0, 0, 0]),
        (PolynomialWithWarmupScheduler("4ba", t_max="8ba"), [1, 0.75**2, 0.25, 0.0625, 0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_warmup_is_linear_and_then_the_schedule_begins(scheduler: ComposerScheduler, after: list[float]) -> None:
    """A warm-up rises from 0 in a straight line; the schedule runs from its end to t_max."""
    assert curve(scheduler, 9) == close([0, 0.25, 0.5, 0.75, *after])


def test_warmup_rises_to_where_the_schedule_begins() -> None:
    """A schedule that begins at another factor than 1 is warmed up to that factor: there is no jump."""
    assert curve(LinearWithWarmupScheduler("2ba", alpha_i=0.5, t_max="4ba"), 5) == close([0, 0.25, 0.5, 0.25, 0])
    assert curve(ConstantWithWarmupScheduler("2ba", alpha=0.5), 4) == close([0, 0.25, 0.5, 0.5])


fractions = st.floats(0, 1)
batches = st.integers(1, 40)


@given(alpha_f=fractions, power=st.floats(0.1, 4), t_warmup=batches, length=batches, now=st.integers(0, 100))
def test_factors_stay_in_range(alpha_f: float, power: float, t_warmup: int, length: int, now: int) -> None:
    """Whatever the arguments, decaying factors stay between alpha_f and 1 and end at exactly alpha_f."""
    t_max = f"{t_warmup + length}ba"
    state = at_batch(new_state("1000ba"), now)
    plain: list[ComposerScheduler] = [
        LinearScheduler(alpha_f=alpha_f, t_max=t_max),
        CosineAnnealingScheduler(t_max, alpha_f),
        PolynomialScheduler(power, t_max, alpha_f),
    ]
    warm: list[ComposerScheduler] = [
        LinearWithWarmupScheduler(f"{t_warmup}ba", alpha_f=alpha_f, t_max=t_max),
        CosineAnnealingWithWarmupScheduler(f"{t_warmup}ba", t_max, alpha_f),
        PolynomialWithWarmupScheduler(f"{t_warmup}ba", power, t_max, alpha_f),
    ]
    for scheduler in plain + warm:
        factor = scheduler(state)
        if scheduler in warm and now < t_warmup:
            assert factor == now / t_warmup
        elif now >= t_warmup + length:
            assert factor == alpha_f
        else:
            assert alpha_f - 1e-12 <= factor <= 1


@given(t_mult=st.floats(1, 3), t_0=batches, alpha_f=fractions, now=st.integers(0, 200))
def test_restarts_stay_in_range(t_mult: float, t_0: int, alpha_f: float, now: int) -> None:
    """Warm restarts stay between alpha_f and 1 in every cycle."""
    scheduler = CosineAnnealingWarmRestartsScheduler(f"{t_0}ba", t_mult, alpha_f)
    assert alpha_f - 1e-12 <= scheduler(at_batch(new_state(), now)) <= 1


@pytest.mark.parametrize(
    ("t_max", "max_duration"),
    [
        ("10ba", "20ba"),
        ("20sp", "20ba"),
        ("30tok", "20ba"),
        ("10s", "20ba"),
        ("2ep", "20ba"),
        ("2iter", "20ba"),
        ("0.5dur", "20ba"),
        ("0.5dur", "40sp"),
        ("0.5dur", "60tok"),
        ("0.5dur", "20s"),
        ("0.5dur", "4ep"),
        ("0.5dur", "4iter"),
    ],
)
def test_every_unit_moves_at_every_batch(t_max: str, max_duration: str) -> None:
    """One schedule in any unit gives the same factors, batch by batch, also in the middle of an epoch."""
    state = new_state(max_duration, batches_per_epoch=5)
    factors: list[float] = []
    for batch in range(12):
        at_batch(state, batch, batches_per_epoch=5)
        state.timestamp = state.timestamp.copy(iteration=batch // 5)
        factors.append(LinearScheduler(t_max=t_max)(state))
    assert factors == close([*(1 - batch / 10 for batch in range(10)), 0, 0])


def test_fractions_of_training_are_exact() -> None:
    """'0.07dur' of 100 batches is 7 batches: rounding does not move a milestone by one."""
    assert MultiStepScheduler(["0.07dur"])(at_batch(new_state("100ba"), 7)) == 0.1
    assert StepScheduler("0.1dur", gamma=0.5)(at_batch(new_state("7ba"), 7)) == 0.5**10


def test_epochs_without_a_length_move_per_epoch() -> None:
    """With a loader of unknown length a schedule in epochs changes between epochs only."""
    state = new_state("4ep")
    assert curve(LinearScheduler(), 8, state, batches_per_epoch=4) == [1, 1, 1, 1, 0.75, 0.75, 0.75, 0.75]


def test_epochs_and_batches_go_together() -> None:
    """A warm-up in batches fits a schedule in epochs where the loader has a length."""
    state = new_state("2ep", batches_per_epoch=4)
    values = curve(LinearWithWarmupScheduler("2ba"), 9, state, batches_per_epoch=4)
    assert values == close([0, 0.5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


def test_units_that_do_not_go_together_are_refused() -> None:
    """A warm-up in batches and an end in tokens have no common axis: the error says so."""
    state = at_batch(new_state("1000tok"), 3)
    with pytest.raises(ConfigError, match="pass both in the same unit"):
        LinearWithWarmupScheduler("2ba")(state)


def test_scale_schedule_ratio() -> None:
    """The ratio scales every time but fractions of training; a warm-up only with scale_warmup."""
    state = at_batch(new_state("10ba"), 4)
    assert StepScheduler("4ba", gamma=0.5)(state, ssr=0.5) == 0.25
    assert LinearScheduler()(state, ssr=0.5) == pytest.approx(0.6)
    assert CosineAnnealingWithWarmupScheduler("8ba")(state, ssr=0.5) == 0.5
    assert CosineAnnealingWithWarmupScheduler("8ba", scale_warmup=True)(state, ssr=0.5) == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: StepScheduler("0ba"), "step_size='0ba'"),
        (lambda: StepScheduler(3), "time 3"),  # type: ignore[arg-type]
        (lambda: LinearScheduler(t_max="-1ba"), "t_max='-1ba'"),
        (lambda: MultiStepScheduler("3ep"), r"\['3ep'\]"),
        (lambda: CosineAnnealingWarmRestartsScheduler("1ep", t_mult=0.5), "t_mult=0.5"),
        (lambda: CosineAnnealingWithWarmupScheduler("1epoch"), "1epoch"),
    ],
)
def test_bad_arguments_are_refused(build: object, message: str) -> None:
    """A schedule that cannot work is refused when it is built."""
    with pytest.raises(ConfigError, match=message):
        build()  # type: ignore[operator]


def test_misspelt_argument_is_named() -> None:
    """A misspelt argument raises an error that names the right one."""
    with pytest.raises(UnknownArgumentError, match="Did you mean 't_warmup'"):
        LinearWithWarmupScheduler(t_warmpu="1ep")  # type: ignore[call-arg]


def test_fraction_needs_max_duration() -> None:
    """A schedule in fractions of training says that it needs a max_duration."""
    with pytest.raises(ConfigError, match="max_duration"):
        LinearScheduler()(new_state(None))


# ── compiled ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def train(state: State, scheduler: torch.optim.lr_scheduler.LRScheduler, until: int) -> list[float]:
    """The learning rate of each batch."""
    rates: list[float] = []
    for batch in range(int(state.timestamp.batch), until):
        rates.append(state.optimizers[0].param_groups[0]["lr"])
        state.optimizers[0].step()
        at_batch(state, batch + 1, batches_per_epoch=5)
        scheduler.step()
    return rates


def test_compiled_scheduler_sets_the_learning_rate_of_each_batch() -> None:
    """The learning rate of batch n is the initial one times the factor at n."""
    state = new_state("2ep", batches_per_epoch=5)
    rates = train(state, compile_composer_scheduler(LinearScheduler(), state), until=10)
    assert rates == close([0.5 * (1 - n / 10) for n in range(10)])


@pytest.mark.parametrize("at", range(11))
def test_compiled_scheduler_resumes(at: int) -> None:
    """Saved at any batch and loaded into a new run, the learning rates go on as if it had not stopped."""
    schedule = CosineAnnealingWithWarmupScheduler("3ba", t_max="2ep")
    whole = new_state("2ep", batches_per_epoch=5)
    expected = train(whole, compile_composer_scheduler(schedule, whole), until=10)

    first = new_state("2ep", batches_per_epoch=5)
    scheduler = compile_composer_scheduler(schedule, first)
    rates = train(first, scheduler, until=at)
    file = io.BytesIO()
    torch.save({"optimizer": first.optimizers[0].state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second = new_state("2ep", batches_per_epoch=5)
    resumed = compile_composer_scheduler(schedule, second)
    second.optimizers[0].load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["scheduler"])
    at_batch(second, at, batches_per_epoch=5)
    assert rates + train(second, resumed, until=10) == expected
    assert resumed.get_last_lr() == [group["lr"] for group in second.optimizers[0].param_groups]


def test_a_function_is_a_scheduler() -> None:
    """Any function of the state is a schedule."""

    def half(state: State, ssr: float = 1.0) -> float:
        return 0.5

    assert isinstance(half, ComposerScheduler)
    assert compile_composer_scheduler(half, new_state()).get_last_lr() == [0.25]


def test_compile_needs_one_optimizer_and_a_positive_ratio() -> None:
    """Without an optimizer there is no learning rate to set; a ratio of zero would end every schedule at once."""
    state = new_state()
    with pytest.raises(ConfigError, match="scale_schedule_ratio=0"):
        compile_composer_scheduler(LinearScheduler(), state, ssr=0)
    state.optimizers = ()
    with pytest.raises(ConfigError, match="exactly one optimizer"):
        compile_composer_scheduler(LinearScheduler(), state)
