"""EarlyStopper."""

from __future__ import annotations

import operator

import pytest
import torch
from torchmetrics import MeanMetric, MetricCollection

from composerlite.callbacks import EarlyStopper
from composerlite.errors import ConfigError


def epochs_until_stopped(run, values, metric="accuracy", label="eval"):
    """Train epochs with these values of the metric; after how many training was over."""
    run.state.eval_metrics = {"eval": {metric: MeanMetric()}}
    run.state.train_metrics = {metric: MeanMetric()}
    run.start()
    for epoch, value in enumerate(values, start=1):
        run.epoch(**({metric: value} if label == "train" else {}))
        if label == "eval":
            run.evaluate(**{metric: value})
        if run.state.training_is_over:
            return epoch
    return None


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("accuracy", [0.5, 0.6, 0.6, 0.55, 0.9]),
        ("CrossEntropyLoss", [0.5, 0.4, 0.4, 0.45, 0.1]),
        ("perplexity", [9.0, 8.0, 8.0, 8.5, 1.0]),
    ],
)
def test_stops_when_patience_is_exceeded(training, metric, values):
    """With patience 1 one bad epoch is tolerated and the second ends training; losses are better when smaller."""
    run = training(EarlyStopper(metric, "eval"), max_duration="10ep")

    assert epochs_until_stopped(run, values, metric) == 4
    assert int(run.state.timestamp.batch) == 20


def test_trains_on_while_it_improves(training):
    """Steady improvement is never stopped."""
    run = training(EarlyStopper("accuracy", "eval", patience=0), max_duration="10ep")

    assert epochs_until_stopped(run, [0.1, 0.2, 0.3, 0.4, 0.5]) is None


def test_training_metric(training):
    """With the label of the training data the metric of each epoch of training counts."""
    run = training(EarlyStopper("accuracy", "train"), max_duration="10ep")

    assert epochs_until_stopped(run, [0.5, 0.4, 0.4, 0.9], label="train") == 3


def test_patience_in_batches(training):
    """Patience may count batches: 12 of them run out at the third epoch of five after the best."""
    run = training(EarlyStopper("accuracy", "eval", patience="12ba"), max_duration="10ep")

    assert epochs_until_stopped(run, [0.5, 0.4, 0.4, 0.4, 0.4]) == 4


def test_min_delta_and_comp(training):
    """A change no larger than min_delta is no improvement, and `comp` decides what is better."""
    stopper = EarlyStopper("accuracy", "eval", comp=operator.lt, min_delta=0.125, patience=0)
    run = training(stopper, max_duration="10ep")

    assert epochs_until_stopped(run, [1.0, 0.75, 0.625]) == 3
    assert stopper.best == 0.75


def test_torch_less_as_comp(training):
    """`torch.less`, as people pass it, works on the values."""
    run = training(EarlyStopper("accuracy", "eval", comp=torch.less, patience=0), max_duration="10ep")

    assert epochs_until_stopped(run, [0.5, 0.4, 0.6]) == 3


def test_a_first_nan_is_not_the_best(training):
    """A metric that begins as NaN can still improve."""
    run = training(EarlyStopper("accuracy", "eval", patience=0), max_duration="10ep")

    assert epochs_until_stopped(run, [float("nan"), 0.4, 0.5, 0.5]) == 4


def test_evaluation_outside_fit_does_not_count(training):
    """Calling `eval` by hand after training neither stops anything nor changes the best."""
    stopper = EarlyStopper("accuracy", "eval", patience=0)
    run = training(stopper, max_duration="10ep")
    epochs_until_stopped(run, [0.5])
    run.engine.run_event("eval_standalone_start")
    run.evaluate(accuracy=0.9)
    run.engine.run_event("eval_standalone_end")

    assert stopper.best == 0.5
    assert not run.state.training_is_over


@pytest.mark.parametrize("interrupted_after", [1, 2, 3])
def test_patience_survives_a_resume(training, interrupted_after):
    """A run that is interrupted after any epoch stops at the epoch at which the uninterrupted run stops."""
    values = [0.5, 0.4, 0.4, 0.4, 0.4]
    whole = training(EarlyStopper("accuracy", "eval", patience=2), max_duration="10ep")
    assert epochs_until_stopped(whole, values) == 4

    first = training(EarlyStopper("accuracy", "eval", patience=2), max_duration="10ep")
    epochs_until_stopped(first, values[:interrupted_after])
    resumed = EarlyStopper("accuracy", "eval", patience=2)
    resumed.load_state_dict(first.state.callbacks[1].state_dict())
    second = training(resumed, max_duration="10ep")
    second.state.timestamp = first.state.timestamp

    assert epochs_until_stopped(second, values[interrupted_after:]) == 4 - interrupted_after


def test_another_fit_after_a_stop_trains(training):
    """Whoever calls `fit` again after training was stopped gets training, until the next look at the metric."""
    run = training(EarlyStopper("accuracy", "eval"), max_duration="10ep")
    epochs_until_stopped(run, [0.5, 0.4, 0.4])
    run.state.max_duration = "20ep"
    run.start()

    assert not run.state.training_is_over


def test_time_set_back_forgets_the_best(training):
    """After `reset_time` the best of the training before is not what the new one is measured by."""
    stopper = EarlyStopper("accuracy", "eval", patience=0)
    run = training(stopper, max_duration="10ep")
    epochs_until_stopped(run, [0.9, 0.95])
    run.state.timestamp = run.state.timestamp.copy(batch=0, epoch=0)

    assert epochs_until_stopped(run, [0.1, 0.2, 0.3]) is None
    assert stopper.best == 0.3


def test_unknown_label_is_an_error_when_fit_begins(training):
    """A label that no data has is an error before the first batch, which lists the labels."""
    run = training(EarlyStopper("accuracy", "evall"))

    with pytest.raises(ConfigError, match=r"dataloader_label='evall'.*Did you mean 'eval'\? Known: eval, train"):
        run.start()


@pytest.mark.parametrize("label", ["eval", "train"])
def test_unknown_metric_is_an_error_when_fit_begins(training, label):
    """A metric that the data does not have is an error before the first batch, which lists the metrics."""
    run = training(EarlyStopper("acuracy", label))
    run.state.eval_metrics = {"eval": {"accuracy": MeanMetric()}}
    run.state.train_metrics = {"accuracy": MeanMetric()}

    with pytest.raises(ConfigError, match=r"monitor='acuracy'.*Did you mean 'accuracy'\? Known: accuracy"):
        run.start()


def test_no_metrics_at_all(training):
    """Where there is no metric, the error says how to get one."""
    run = training(EarlyStopper("accuracy", "train"))

    with pytest.raises(ConfigError, match="get_metrics"):
        run.start()


def test_metric_that_computes_several_values(training):
    """One value of a collection can be monitored; a typo in it is an error at the first evaluation."""
    run = training(EarlyStopper("second", "eval", patience=0))
    run.state.eval_metrics = {"eval": {"all": MetricCollection({"first": MeanMetric(), "second": MeanMetric()})}}
    run.start()
    run.evaluate(first=1.0, second=2.0)
    assert run.state.callbacks[1].best == 2.0

    run = training(EarlyStopper("third", "eval"))
    run.state.eval_metrics = {"eval": {"all": MetricCollection({"first": MeanMetric(), "second": MeanMetric()})}}
    run.start()
    with pytest.raises(ConfigError, match="Known: first, second"):
        run.evaluate(first=1.0, second=2.0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"patience": "10tok"}, "patience='10tok'.*epochs or batches"),
        ({"patience": -1}, "patience='-1'"),
        ({"min_delta": -0.1}, "min_delta=-0.1"),
        ({"patiance": 3}, "Did you mean 'patience'"),
    ],
)
def test_bad_arguments(arguments, says):
    """A bad argument is an error at construction that says what is allowed."""
    with pytest.raises(ConfigError, match=says):
        EarlyStopper("accuracy", "eval", **arguments)
