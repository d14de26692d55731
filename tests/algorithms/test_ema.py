"""EMA: the average, evaluation with it, checkpoints without it, and resume."""

from __future__ import annotations

import pytest
import torch
from short_run import BATCHES, ShortRun, assert_same
from torch import Tensor, nn

from composerlite.algorithms import EMA
from composerlite.core import Event
from composerlite.errors import IncompatibleCheckpointError

AVERAGED = ("body.0.weight", "body.0.bias", "body.1.weight", "body.1.running_mean", "body.1.running_var", "head.weight")


def train(ema: EMA, **arguments: str) -> tuple[ShortRun, list[dict[str, Tensor]]]:
    """A finished run and its weights after each batch."""
    run, history = ShortRun([ema], **arguments), []
    run.train(at_batch_end=lambda _: history.append(run.weights))
    return run, history


def averaged(ema: EMA) -> dict[str, Tensor]:
    return dict(ema.get_ema_model(ShortRun([]).state.model).state_dict())


def test_average_is_its_formula() -> None:
    """The average begins at the first weights and halves the share of the past in every half-life."""
    ema = EMA(half_life="2ba")
    _, history = train(ema)
    smoothing = 2**-0.5
    for name in AVERAGED:
        expected = history[0][name].double()
        for weights in history[1:]:
            expected = smoothing * expected + (1 - smoothing) * weights[name].double()
        torch.testing.assert_close(averaged(ema)[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_updates_in_epochs_and_from_ema_start_on() -> None:
    """``update_interval`` and ``half_life`` in epochs look at the weights at the end of epochs only."""
    ema = EMA(half_life="1ep", ema_start="0.5dur")
    _, history = train(ema)
    expected = 0.5 * history[7]["head.weight"] + 0.5 * history[11]["head.weight"]
    torch.testing.assert_close(averaged(ema)["head.weight"], expected)


def test_start_counts_batches_within_an_epoch() -> None:
    """``ema_start`` is met to the batch, also where ``max_duration`` counts epochs."""
    ema = EMA(smoothing=0.0, half_life=None, ema_start="0.5dur", update_interval="100ba")
    _, history = train(ema)
    assert torch.equal(averaged(ema)["head.weight"], history[5]["head.weight"])


def test_buffers_that_are_no_statistics_stay() -> None:
    """Counters and masks with infinities are those of the model."""
    ema = EMA(half_life="1ba")
    run, _ = train(ema)
    run.engine.run_event(Event.EVAL_START)
    model = run.state.model
    assert torch.equal(model.mask, torch.tensor([0.0, float("-inf")]))  # type: ignore[arg-type]
    assert int(model.body[1].num_batches_tracked) == BATCHES  # type: ignore[index, union-attr]


def test_evaluation_sees_the_average_and_training_does_not() -> None:
    """Between EVAL_START and EVAL_END the model computes with the average; then it has its own weights again."""
    plain = ShortRun([]).train()
    ema = EMA(half_life="4ba")
    run = ShortRun([ema])
    model = run.state.model
    seen: list[bool] = []

    def evaluate(_: int) -> None:
        run.engine.run_event(Event.EVAL_START)
        seen.append(torch.equal(model.head.weight, averaged(ema)["head.weight"]))  # type: ignore[union-attr, arg-type]
        run.engine.run_event(Event.EVAL_END)

    run.train(at_batch_end=evaluate)
    assert seen == [True] * BATCHES
    assert_same(run.weights, plain.weights)


def test_checkpoint_during_evaluation_is_right() -> None:
    """Saved while the average is in the model, a checkpoint is the same as saved before."""
    run = ShortRun([EMA(half_life="2ba")]).train(until=5)
    before = run.save()
    run.engine.run_event(Event.EVAL_START)
    assert_same(run.save(), before)
    assert not torch.equal(run.state.model.head.weight, before["model"]["head.weight"])  # type: ignore[arg-type, union-attr]
    run.engine.run_event(Event.EVAL_END)
    assert_same(run.save(), before)


def test_checkpoint_loaded_during_evaluation_is_right() -> None:
    """Loading while the average is in the model replaces the weights and the average, not one by the other."""
    early = ShortRun([EMA(half_life="2ba")]).train(until=3).save()
    run = ShortRun([EMA(half_life="2ba")]).train(until=9)
    run.engine.run_event(Event.EVAL_START)
    run.state.load_state_dict(early)
    run.engine.run_event(Event.EVAL_END)
    assert_same(run.save(), early)


def test_evaluation_that_broke_off_leaves_no_trace() -> None:
    """If an evaluation raised an error, training goes on with the weights of training."""
    plain = ShortRun([]).train()
    run = ShortRun([EMA(half_life="2ba")]).train(until=5)
    run.engine.run_event(Event.EVAL_START)
    assert_same(run.train().weights, plain.weights)


def test_tied_weights_stay_tied() -> None:
    """A parameter that has two names is averaged once and comes back as one."""
    ema = EMA(half_life="1ba")
    run = ShortRun([ema])
    model = run.state.model
    model.twin = nn.Linear(6, 3)
    model.twin.weight = model.head.weight  # type: ignore[union-attr, assignment]
    run.train(until=4)
    before = run.weights
    run.engine.run_event(Event.EVAL_START)
    assert model.twin.weight is model.head.weight  # type: ignore[union-attr]
    assert_same(run.weights, before)
    run.engine.run_event(Event.EVAL_END)
    assert_same(run.weights, before)


def test_average_of_another_model_is_refused() -> None:
    """An average that does not fit the model raises an error that names what does not fit."""
    ema = EMA()
    ema.load_state_dict({"count": 1, "tensors": {"nowhere": torch.ones(1)}})
    with pytest.raises(IncompatibleCheckpointError, match="nowhere"):
        ShortRun([ema]).train(until=1)


def test_foreign_state_is_refused() -> None:
    """The state of another library's EMA raises an error that says how to go on."""
    with pytest.raises(IncompatibleCheckpointError, match=r"ema_model.*load_exclude_algorithms"):
        EMA().load_state_dict({"ema_model": {}})
