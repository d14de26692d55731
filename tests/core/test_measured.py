"""Metric values by name: what a checkpoint is judged by is what was measured of that very model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from composerlite.core import Evaluator, State, metric_values
from composerlite.core.measured import MeasuredMetrics, check_metric_exists
from composerlite.errors import ConfigError


class Several(Metric):
    """Computes a dict, and does not say so."""

    def update(self) -> None: ...

    def compute(self):
        return {"precision": torch.tensor(0.25), "recall": 0.5}


class NamedMean(MeanMetric):
    """Says that it computes one value."""

    def compute(self) -> torch.Tensor:
        return super().compute()


def mean(*values: float) -> Metric:
    metric = NamedMean()
    for value in values:
        metric.update(value)
    return metric


@pytest.fixture
def training() -> State:
    """A state with two evaluators that measure metrics of the same name."""
    state = State(
        nn.Identity(),
        rank_zero_seed=0,
        run_name="run",
        device=torch.device("cpu"),
        evaluators=[Evaluator(label=label, dataloader=[0]) for label in ("eval", "hard")],
    )
    state.eval_metrics = {"eval": {"Accuracy": mean(0.9)}, "hard": {"Accuracy": mean(0.2)}}
    state.train_metrics = {"Accuracy": mean(0.95)}
    return state


def evaluate(state: State, label: str) -> None:
    """As the trainer leaves the state at EVAL_END."""
    state.set_dataloader([0], label)


def test_values_by_name() -> None:
    """Numbers, dicts and vectors alike; a metric without data has no value rather than a warning or a zero."""
    several = Several()
    several.update()
    classes = MulticlassAccuracy(num_classes=2, average=None)
    classes.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    values = metric_values({"loss": mean(1.0, 2.0), "of": several, "class": classes, "none": mean()})
    assert values == {"loss": 1.5, "precision": 0.25, "recall": 0.5, "class/0": 0.5, "class/1": 1.0}


def test_each_evaluator_has_its_own_values(training: State) -> None:
    """Two evaluators with a metric of the same name do not overwrite each other."""
    measured = MeasuredMetrics()
    for label in ("eval", "hard"):
        evaluate(training, label)
        measured.after_evaluation(training)
    measured.after_epoch(training)
    assert measured.now(training) == {
        "eval/Accuracy": pytest.approx(0.9),
        "hard/Accuracy": pytest.approx(0.2),
        "train/Accuracy": pytest.approx(0.95),
    }


def test_values_of_an_earlier_model_do_not_count(training: State) -> None:
    """A checkpoint two batches after an evaluation has no metrics: nobody has measured that model."""
    measured = MeasuredMetrics()
    assert measured.now(training) == {}
    evaluate(training, "eval")
    measured.after_evaluation(training)
    training.timestamp = training.timestamp.to_next_epoch()  # an epoch ends without another optimizer step
    assert set(measured.now(training)) == {"eval/Accuracy"}
    training.timestamp = training.timestamp.to_next_batch(1)
    assert measured.now(training) == {}
    evaluate(training, "hard")
    measured.after_evaluation(training)
    assert set(measured.now(training)) == {"hard/Accuracy"}


@pytest.mark.parametrize("name", ["eval/Accuracy", "hard/Accuracy", "train/Accuracy", "eval/Accuracy/3"])
def test_a_metric_that_will_be_measured(training: State, name: str) -> None:
    """That of an evaluator, that of training, and one value of a vector: taken, and refused once nothing has it."""
    check_metric_exists(name, training, argument="save_best_metric")
    label, metric = name.split("/")[:2]
    del (training.train_metrics if label == "train" else training.eval_metrics[label])[metric]
    with pytest.raises(ConfigError, match=f"save_best_metric='{name}': there is no such metric"):
        check_metric_exists(name, training, argument="save_best_metric")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("eval/Acuracy", "save_best_metric='eval/Acuracy': there is no such metric. Did you mean 'eval/Accuracy'"),
        ("metrics/eval/Accuracy", "Did you mean 'eval/Accuracy'"),
        ("Accuracy", "Known: eval/Accuracy, hard/Accuracy, train/Accuracy"),
        ("test/Accuracy", "Known: eval/Accuracy, hard/Accuracy, train/Accuracy"),
    ],
)
def test_a_metric_that_nothing_measures(training: State, name: str, says: str) -> None:
    """Refused before training, with the nearest name and all there are."""
    with pytest.raises(ConfigError, match=says):
        check_metric_exists(name, training, argument="save_best_metric")


def test_a_metric_of_a_run_without_metrics() -> None:
    """The message says what to give."""
    state = State(nn.Identity(), rank_zero_seed=0, run_name="run", device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"there is no such metric. There is none: give an eval_dataloader"):
        check_metric_exists("eval/Accuracy", state, argument="save_best_metric")


def test_keys_of_a_dict_are_not_known_before(training: State) -> None:
    """Where a metric may compute a dict, any name under its label is accepted; under other labels none."""
    training.eval_metrics["eval"]["of"] = Several()
    check_metric_exists("eval/recall", training, argument="save_best_metric")
    with pytest.raises(ConfigError, match="there is no such metric"):
        check_metric_exists("hard/recall", training, argument="save_best_metric")
