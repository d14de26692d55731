"""EarlyStopper."""

from __future__ import annotations

import operator

import pytest
import torch
from torchmetrics import MeanMetric, MetricCollection

from composerlite.callbacks import EarlyStopper
from composerlite.errors import ConfigError

NAN = float("nan")


def epochs_until_stopped(run, values, metric="accuracy", label="eval"):
    """Train epochs with these values of the metric. Return the number of epochs until training was over."""
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
    ("metric", "label", "arguments", "values", "expected"),
    [
        pytest.param("accuracy", "eval", {}, [0.5, 0.6, 0.6, 0.55, 0.9], 4, id="patience-of-one-epoch"),
        pytest.param("CrossEntropyLoss", "eval", {}, [0.5, 0.4, 0.4, 0.45, 0.1], 4, id="a-loss-is-better-when-smaller"),
        pytest.param("perplexity", "eval", {}, [9.0, 8.0, 8.0, 8.5, 1.0], 4, id="a-perplexity-too"),
        pytest.param("accuracy", "eval", {"patience": 0}, [0.1, 0.2, 0.3, 0.4, 0.5], None, id="steady-improvement"),
        pytest.param("accuracy", "train", {}, [0.5, 0.4, 0.4, 0.9], 3, id="training-data"),
        pytest.param("accuracy", "eval", {"patience": "12ba"}, [0.5, 0.4, 0.4, 0.4, 0.4], 4, id="patience-in-batches"),
        pytest.param(
            "accuracy",
            "eval",
            {"comp": operator.lt, "min_delta": 0.125, "patience": 0},
            [1.0, 0.75, 0.625],
            3,
            id="delta",
        ),
        pytest.param("accuracy", "eval", {"comp": torch.less, "patience": 0}, [0.5, 0.4, 0.6], 3, id="torch-function"),
        pytest.param("accuracy", "eval", {"patience": 0}, [NAN, 0.4, 0.5, 0.5], 4, id="a-first-nan-is-not-the-best"),
    ],
)
def test_when_training_ends(training, metric, label, arguments, values, expected):
    """When the metric has not improved for longer than ``patience``."""
    run = training(EarlyStopper(metric, label, **arguments), max_duration="10ep")
    assert epochs_until_stopped(run, values, metric, label) == expected


def test_evaluation_outside_fit_does_not_count(training):
    """``Trainer.eval`` neither ends training nor changes the best value."""
    run = training(stopper := EarlyStopper("accuracy", "eval", patience=0), max_duration="10ep")
    epochs_until_stopped(run, [0.5])
    run.engine.run_event("eval_standalone_start")
    run.evaluate(accuracy=0.9)
    run.engine.run_event("eval_standalone_end")
    assert stopper.best == 0.5
    assert not run.state.training_is_over


@pytest.mark.parametrize("interrupted_after", [1, 2, 3])
def test_patience_survives_a_resume(training, interrupted_after):
    """A run that is interrupted after any epoch ends at the same epoch."""
    values = [0.5, 0.4, 0.4, 0.4, 0.4]
    first = training(EarlyStopper("accuracy", "eval", patience=2), max_duration="10ep")
    epochs_until_stopped(first, values[:interrupted_after])
    resumed = EarlyStopper("accuracy", "eval", patience=2)
    resumed.load_state_dict(first.state.callbacks[1].state_dict())
    second = training(resumed, max_duration="10ep")
    second.state.timestamp = first.state.timestamp
    assert epochs_until_stopped(second, values[interrupted_after:]) == 4 - interrupted_after


def test_another_fit(training):
    """``fit`` after a stop trains. After ``reset_time`` the best value of the earlier training does not count."""
    run = training(stopper := EarlyStopper("accuracy", "eval"), max_duration="10ep")
    assert epochs_until_stopped(run, [0.9, 0.4, 0.4]) == 3
    run.state.max_duration = "20ep"
    run.start()
    assert not run.state.training_is_over
    run.state.timestamp = run.state.timestamp.copy(batch=0, epoch=0)
    assert epochs_until_stopped(run, [0.1, 0.2, 0.3]) is None
    assert stopper.best == 0.3


@pytest.mark.parametrize(
    ("monitor", "label", "metrics", "message"),
    [
        ("accuracy", "evall", {}, r"dataloader_label='evall'.*Did you mean 'eval'\? Known: eval, train"),
        (
            "acuracy",
            "eval",
            {"accuracy": MeanMetric()},
            r"monitor='acuracy'.*Did you mean 'accuracy'\? Known: accuracy",
        ),
        ("acuracy", "train", {"accuracy": MeanMetric()}, "Did you mean 'accuracy'"),
        ("accuracy", "train", {}, "get_metrics"),
    ],
)
def test_unknown_names_are_errors_when_fit_begins(training, monitor, label, metrics, message):
    """The error is raised before the first batch and lists the known names."""
    run = training(EarlyStopper(monitor, label))
    run.state.eval_metrics, run.state.train_metrics = {"eval": metrics}, metrics
    with pytest.raises(ConfigError, match=message):
        run.start()


def test_a_metric_with_several_values(training):
    """A value of a collection can be monitored; an unknown name is an error at the first evaluation."""
    for monitor in ("second", "third"):
        run = training(EarlyStopper(monitor, "eval", patience=0))
        run.state.eval_metrics = {"eval": {"all": MetricCollection({"first": MeanMetric(), "second": MeanMetric()})}}
        run.start()
        if monitor == "second":
            run.evaluate(first=1.0, second=2.0)
            assert run.state.callbacks[1].best == 2.0
        else:
            with pytest.raises(ConfigError, match="Known: first, second"):
                run.evaluate(first=1.0, second=2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": "10tok"}, "patience='10tok'.*epochs or batches"),
        ({"patience": -1}, "patience='-1'"),
        ({"min_delta": -0.1}, "min_delta=-0.1"),
        ({"patiance": 3}, "Did you mean 'patience'"),
    ],
)
def test_bad_arguments(arguments, message):
    """An invalid argument is an error at construction with the rule."""
    with pytest.raises(ConfigError, match=message):
        EarlyStopper("accuracy", "eval", **arguments)
