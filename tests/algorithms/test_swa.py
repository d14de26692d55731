"""SWA: the average, the end of training with it, learning rates, and resume."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from short_run import BATCHES, BATCHES_PER_EPOCH, ShortRun, assert_same
from torch import Tensor

from composerlite.algorithms import SWA
from composerlite.core import Event


def train(swa: SWA) -> tuple[ShortRun, list[dict[str, Tensor]]]:
    """A finished run and its weights after each batch."""
    run, history = ShortRun([swa]), []
    run.train(at_batch_end=lambda _: history.append(run.weights))
    return run, history


def mean(history: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([weights[name].double() for weights in history]).mean(0)


@pytest.mark.parametrize("name", ["head.weight", "body.1.running_var"])
def test_model_ends_as_the_mean_of_its_samples(name: str) -> None:
    """At the end of training the model has the mean of the weights at each interval from swa_start on."""
    plain: list[dict[str, Tensor]] = []
    run = ShortRun([])
    run.train(at_batch_end=lambda _: plain.append(run.weights))
    done, _ = train(SWA(swa_start="0.5dur", swa_end="1dur", update_interval="2ba"))
    torch.testing.assert_close(done.weights[name].double(), mean([plain[i] for i in (5, 7, 9, 11)], name))


def test_sample_at_the_end_of_training_counts_once() -> None:
    """Where the last batch ends the last epoch, its weights are one sample, not two."""
    plain: list[dict[str, Tensor]] = []
    run = ShortRun([])
    run.train(at_batch_end=lambda _: plain.append(run.weights))
    done, _ = train(SWA(swa_start="1ep", swa_end="3ep"))
    expected = mean([plain[i] for i in (3, 7, 11)], "head.weight")
    torch.testing.assert_close(done.weights["head.weight"].double(), expected)


def test_weights_stay_after_swa_end_and_batch_norm_goes_on() -> None:
    """From swa_end on only the statistics of batch norm move: the model at the end is the average."""
    _, history = train(SWA(swa_start="0.25dur", swa_end="0.6dur", update_interval="1ba"))
    swapped = math.ceil(0.6 * BATCHES)
    assert torch.equal(history[-1]["head.weight"], history[swapped - 1]["head.weight"])
    assert not torch.equal(history[-1]["body.1.running_mean"], history[swapped - 1]["body.1.running_mean"])
    assert not torch.equal(history[swapped - 1]["head.weight"], history[swapped - 2]["head.weight"])


def test_average_is_in_the_last_checkpoint() -> None:
    """The checkpoint of the last batch holds the averaged weights."""
    run = ShortRun([SWA(swa_start="0.5dur", swa_end="1dur", update_interval="1ba")])
    last: list[dict[str, Tensor]] = []
    run.train(at_batch_end=lambda _: last.append(run.weights))
    assert_same(run.weights, last[-1])


def test_training_that_is_stopped_early_ends_with_the_average() -> None:
    """If something stops training between start and end, the model still gets the average."""
    run = ShortRun([SWA(swa_start="1ep", swa_end="3ep", update_interval="1ba")])
    history: list[dict[str, Tensor]] = []

    def stop(batch: int) -> None:
        history.append(run.weights)
        if batch == 7:
            run.state.stop_training()

    run.train(at_batch_end=stop)
    torch.testing.assert_close(run.weights["head.weight"].double(), mean(history[3:], "head.weight"))


def test_before_swa_start_nothing_changes() -> None:
    """A run that ends before swa_start is as without SWA."""
    assert_same(ShortRun([SWA(swa_start="50ep", swa_end="60ep")]).train().weights, ShortRun([]).train().weights)


def learning_rates(swa: SWA) -> list[float]:
    """The learning rate after each batch."""
    rates: list[float] = []
    run = ShortRun([swa])
    run.train(at_batch_end=lambda _: rates.append(run.state.optimizers[0].param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize(
    ("strategy", "way"), [("linear", [0.25, 0.5, 0.75, 1, 1]), ("cos", [0.146447, 0.5, 0.853553, 1, 1])]
)
def test_learning_rate_goes_to_swa_lr(strategy: str, way: list[float]) -> None:
    """With schedule_swa_lr the learning rate leaves its schedule at the first sample and goes to swa_lr."""
    swa = SWA("1ep", "9ep", "1ba", schedule_swa_lr=True, anneal_strategy=strategy, anneal_steps=4, swa_lr=0.02)
    rates = learning_rates(swa)
    start = 0.1 * 0.95**BATCHES_PER_EPOCH
    assert rates[:3] == pytest.approx([0.1 * 0.95**n for n in (1, 2, 3)])
    assert rates[3:8] == pytest.approx([start + part * (0.02 - start) for part in way], rel=1e-4)


def test_learning_rate_without_swa_lr_stays() -> None:
    """By default the learning rate at the first sample is kept."""
    rates = learning_rates(SWA("1ep", "9ep", "1ba", schedule_swa_lr=True))
    assert rates[3:] == pytest.approx([0.1 * 0.95**BATCHES_PER_EPOCH] * 9)


def test_longer_training_after_the_end_trains_again() -> None:
    """A finished run that is given more time does not stay frozen."""
    run, _ = train(SWA(swa_start="0.5dur", swa_end="1dur"))
    before = copy.deepcopy(run.weights)
    run.state.max_duration = "6ep"
    run.train(until=BATCHES + 2)
    assert not torch.equal(run.weights["head.weight"], before["head.weight"])


def test_swa_lr_without_its_switch_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    """A learning rate that will not be used is said so."""
    SWA(swa_lr=0.1)
    assert "schedule_swa_lr=True" in caplog.text


def test_weights_are_held_by_leaving_gradients_out() -> None:
    """After swa_end weight decay and momentum do not move the weights either."""
    run = ShortRun([SWA(swa_start="1ep", swa_end="2ep")]).train(until=10)
    run.state.batch = None
    run.engine.run_event(Event.AFTER_TRAIN_BATCH)
    assert all(parameter.grad is None for parameter in run.state.model.parameters())
