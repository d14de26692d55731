"""Evaluation and prediction: when they happen, what they compute, and that training does not notice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from trainer_parts import At, Events, Net, Points, build, loader, same, weights

from composerlite import Callback, DataSpec, Evaluator, Event, Logger, State
from composerlite.errors import ConfigError
from composerlite.loggers import InMemoryLogger


class Measured(Net):
    """A classifier with an accuracy in training and two metrics in evaluation."""

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        accuracy = MulticlassAccuracy(3, average="micro")
        return (
            {"accuracy": accuracy}
            if is_train
            else {"accuracy": accuracy, "top2_accuracy": MulticlassAccuracy(3, top_k=2)}
        )

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        metric.update(outputs, batch[1])


class When(Callback):
    """At which batch count each evaluator ran."""

    def __init__(self) -> None:
        self.at: dict[str, list[int]] = {}

    def eval_end(self, state: State, logger: Logger) -> None:
        assert state.dataloader_label is not None
        self.at.setdefault(state.dataloader_label, []).append(int(state.timestamp.batch))


def held_out(count: int = 8) -> list[Any]:
    """Batches of four points, as a list: iterating over it draws no random number."""
    return list(DataLoader(Points(count), batch_size=4))


def accuracy_of(model: nn.Module, batches: list[Any]) -> float:
    """The accuracy of ``model`` as one would compute it by hand."""
    model.eval()
    right = sum(int((model(batch).argmax(1) == batch[1]).sum()) for batch in batches)
    return right / sum(len(batch[1]) for batch in batches)


# ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("interval", "batches"),
    [
        (1, [5, 10, 12]),
        ("1ep", [5, 10, 12]),
        ("2ep", [10, 12]),
        ("4ba", [4, 8, 12]),
        ("5ba", [5, 10, 12]),
        ("9sp", [3, 5, 7, 9, 12]),
        ("0.5dur", [6, 12]),
        ("1iter", [5, 10, 12]),
        (0, []),
        ("0ba", []),
        (lambda state, event: event is Event.BATCH_END and int(state.timestamp.batch) in (1, 11), [1, 11]),
        (lambda state, event: True, list(range(1, 13))),
        ("100ep", [12]),
    ],
)
def test_evaluation_happens_at_its_interval_and_at_the_end(interval: Any, batches: list[int]) -> None:
    """Twelve batches of four samples, five an epoch: the training ends within the third epoch."""
    when = When()
    with build(max_duration="12ba", eval_dataloader=held_out(), eval_interval=interval, callbacks=when) as trainer:
        trainer.fit()
    assert when.at.get("eval", []) == batches


def test_a_training_that_is_stopped_is_evaluated_at_its_end() -> None:
    """The last thing that is known of a model is how good it is."""
    when = When()

    def stop(state: State) -> None:
        if state.timestamp.batch == "3ba":
            state.stop_training()

    with build(eval_dataloader=held_out(), callbacks=[when, At(Event.BATCH_START, stop)]) as trainer:
        trainer.fit()
    assert when.at == {"eval": [4]}


def test_each_evaluator_has_its_own_interval_data_and_metrics() -> None:
    """What one does not say is as the trainer says."""
    when, logged = When(), InMemoryLogger()
    evaluators = [
        Evaluator(label="often", dataloader=held_out(), eval_interval="2ba", metric_names=["accuracy"]),
        Evaluator(label="seldom", dataloader=held_out(12), metric_names=["top*"]),
        Evaluator(label="short", dataloader=held_out(12), subset_num_batches=1),
    ]
    arguments: dict[str, Any] = {"loggers": logged, "callbacks": when, "eval_interval": "1ep"}
    with build(model=Measured(), eval_dataloader=evaluators, max_duration="5ba", **arguments) as trainer:
        trainer.fit()
        expected = accuracy_of(trainer.state.model, held_out(12)[:1])
    assert when.at == {"often": [2, 4, 5], "seldom": [5], "short": [5]}
    names = {name for name in logged.data if name.startswith("metrics/")} - {"metrics/train/accuracy"}
    assert names == {
        "metrics/often/accuracy",
        "metrics/seldom/top2_accuracy",
        "metrics/short/accuracy",
        "metrics/short/loss",
        "metrics/short/top2_accuracy",
    }
    assert logged.most_recent_values["metrics/short/accuracy"] == pytest.approx(expected)


def test_an_evaluator_may_be_used_by_several_trainers() -> None:
    """A trainer's settings do not stay on the user's object."""
    evaluator, when = Evaluator(label="mine", dataloader=held_out()), When()
    with build(eval_dataloader=evaluator, eval_interval="3ba") as trainer:
        trainer.eval(evaluator)
    with build(eval_dataloader=evaluator, eval_interval="5ba", max_duration="5ba", callbacks=when) as trainer:
        trainer.fit()
    assert when.at == {"mine": [5]}


# ── what ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_metrics_are_those_of_the_data() -> None:
    """Over all samples, a short last batch included; in the state and in the log."""
    logged = InMemoryLogger()
    with build(model=Measured(dropout=0.5), eval_dataloader=held_out(10), loggers=logged) as trainer:
        trainer.fit()
        assert trainer.state.eval_metric_values["accuracy"] == pytest.approx(
            accuracy_of(trainer.state.model, held_out(10))
        )
        assert logged.most_recent_values["metrics/eval/accuracy"] == trainer.state.eval_metric_values["accuracy"]


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_evaluation_in_microbatches_computes_the_same(size: int) -> None:
    """``device_eval_microbatch_size`` bounds the samples of a forward pass and changes nothing else."""
    sizes: list[int] = []
    callbacks = At(Event.EVAL_AFTER_FORWARD, lambda state: sizes.append(len(state.outputs)))
    evaluator = Evaluator(label="eval", dataloader=held_out(10), device_eval_microbatch_size=size)
    with build(model=Measured(), eval_dataloader=evaluator, callbacks=callbacks) as trainer:
        trainer.eval()
        expected = accuracy_of(trainer.state.model, held_out(10))
    assert trainer.state.eval_metric_values["accuracy"] == pytest.approx(expected)
    assert max(sizes) == min(size, 4)
    assert sum(sizes) == 10


def test_the_loss_of_evaluation_needs_no_metric() -> None:
    """It is ``model.loss``, averaged over all samples, those of a short last batch included; training has no part."""
    logged = InMemoryLogger()
    with build(dropout=0.5, eval_dataloader=held_out(10), loggers=logged) as trainer:
        trainer.fit()
        model: Any = trainer.state.model.eval()
        every = [torch.cat(parts) for parts in zip(*held_out(10), strict=True)]
        expected = model.loss(model(every), every).item()
    assert trainer.state.eval_metric_values["loss"] == pytest.approx(expected, rel=1e-6)
    assert [value for _, value in logged.data["metrics/eval/loss"]][-1] == trainer.state.eval_metric_values["loss"]


def test_the_loss_of_evaluation_is_the_sum_that_is_trained_on() -> None:
    """Of several losses it is ``total``, or their sum."""

    class Several(Net):
        def loss(self, outputs: Any, batch: Any) -> Any:
            one = super().loss(outputs, batch)
            return {"a": one, "b": 2 * one}

    model, plain = Several(), Net()
    plain.load_state_dict(model.state_dict())
    with build(model=model, eval_dataloader=held_out(8)) as trainer:
        trainer.eval()
        value = trainer.state.eval_metric_values["loss"]
    with build(model=plain, eval_dataloader=held_out(8)) as trainer:
        trainer.eval()
        assert value == pytest.approx(3 * trainer.state.eval_metric_values["loss"])


def test_a_loss_that_evaluation_cannot_compute_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """With one warning; where an evaluator has asked for it, it is an error."""

    class ForTraining(Measured):
        def loss(self, outputs: Any, batch: Any) -> Any:
            if not self.training:
                raise KeyError("labels")
            return super().loss(outputs, batch)

    with build(model=ForTraining(), eval_dataloader=held_out(8)) as trainer:
        trainer.fit()
        assert "loss" not in trainer.state.eval_metric_values
        assert "accuracy" in trainer.state.eval_metric_values
    warnings = [r.getMessage() for r in caplog.records if "evaluation has no loss" in r.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "evaluation has no loss: model.loss of the result of eval_forward raised KeyError: 'labels'"
    )
    asked = Evaluator(label="eval", dataloader=held_out(8), metric_names=["loss"])
    with build(model=ForTraining(), eval_dataloader=asked) as trainer, pytest.raises(KeyError):
        trainer.eval()


def test_a_model_with_an_eval_forward_of_its_own_has_a_loss_where_it_is_asked_for() -> None:
    """Nobody knows whether ``loss`` takes what that gives: a number that means nothing is worse than none."""

    class Probabilities(Measured):
        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            return super().eval_forward(batch, outputs).softmax(1)

    with build(model=Probabilities(), eval_dataloader=held_out(8)) as trainer:
        trainer.eval()
        assert "loss" not in trainer.state.eval_metric_values
        trainer.eval(Evaluator(label="asked", dataloader=held_out(8), metric_names=["loss"]))
        assert "loss" in trainer.state.eval_metric_values


def test_several_loaders_are_a_plain_list() -> None:
    """Their labels are made: ``eval``, ``eval_1``, …; a label that an evaluator has is not given again."""
    logged = InMemoryLogger()
    named = Evaluator(label="eval_1", dataloader=held_out(12))
    with build(eval_dataloader=[held_out(8), named, held_out(4)], loggers=logged) as trainer:
        trainer.eval()
        assert [evaluator.label for evaluator in trainer.state.evaluators] == ["eval", "eval_1", "eval_2"]
    assert {name for name in logged.data if name.startswith("metrics/")} == {
        "metrics/eval/loss",
        "metrics/eval_1/loss",
        "metrics/eval_2/loss",
    }


def test_train_metrics_are_computed_at_the_end_of_each_epoch() -> None:
    """Over the epoch's samples, with the outputs that training had; they start afresh in the next epoch."""
    logged, right = InMemoryLogger(), list[int]()
    count = At(Event.AFTER_FORWARD, lambda state: right.append(int((state.outputs.argmax(1) == state.batch[1]).sum())))
    with build(model=Measured(), loggers=logged, callbacks=count) as trainer:
        trainer.fit()
    values = [value for _, value in logged.data["metrics/train/accuracy"]]
    assert values == pytest.approx([sum(right[:5]) / 20, sum(right[5:]) / 20])
    assert [int(at.batch) for at, _ in logged.data["metrics/train/accuracy"]] == [5, 10]
    assert trainer.state.train_metric_values["accuracy"] == values[-1]


def test_subsets_limit_evaluation() -> None:
    """For all evaluators, or for one call."""
    batches: list[int] = []
    count = At(Event.EVAL_BATCH_END, lambda state: batches.append(int(state.eval_timestamp.batch)))
    with build(eval_dataloader=held_out(20), eval_subset_num_batches=2, callbacks=count) as trainer:
        trainer.eval()
        trainer.eval(subset_num_batches=1)
        trainer.eval(held_out(20), subset_num_batches=3)
        trainer.eval(held_out(8))
        trainer.eval()
    assert batches == [1, 2, 1, 1, 2, 3, 1, 2, 1, 2]


def test_eval_works_without_training() -> None:
    """On data of its own, with a label of its own; its values are in the state."""
    events = Events()
    with build(model=Measured(), train_dataloader=None, max_duration=None, callbacks=events) as trainer:
        trainer.eval(Evaluator(label="test", dataloader=held_out(12), metric_names=["accuracy"]))
        assert trainer.state.eval_metric_values["accuracy"] == pytest.approx(
            accuracy_of(trainer.state.model, held_out(12))
        )
    counts = Counter(events.events)
    assert counts[Event.EVAL_STANDALONE_START] == counts[Event.EVAL_STANDALONE_END] == 1
    assert counts[Event.EVAL_BATCH_END] == 3
    assert counts[Event.FIT_START] == 0


def test_fit_takes_evaluators_too() -> None:
    """With the constructor's settings, or with others."""
    when = When()
    with build(eval_interval="3ba", callbacks=when) as trainer:
        trainer.fit(duration="5ba", eval_dataloader=held_out())
        trainer.fit(duration="5ba", eval_dataloader=held_out(), eval_interval="4ba")
        trainer.fit(duration="5ba")
    assert when.at == {"eval": [3, 5, 8, 10, 12, 15]}


def test_transforms_apply_in_evaluation_and_prediction() -> None:
    """What a data spec says of batches and microbatches holds wherever its batches go."""
    spec = DataSpec(
        held_out(4),
        batch_transforms=lambda batch: [batch[0] * 0 + 1, *batch[1:]],
        microbatch_transforms=lambda batch: [batch[0] * 3, *batch[1:]],
    )
    seen: list[float] = []
    note = lambda state: seen.append(float(state.batch[0].mean()))
    callbacks = [At(Event.EVAL_AFTER_FORWARD, note), At(Event.PREDICT_AFTER_FORWARD, note)]
    with build(callbacks=callbacks) as trainer:
        trainer.eval(spec)
        trainer.predict(spec)
    assert seen == [3.0, 3.0]


# ── training does not notice ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "data",
    [held_out, lambda: loader(8, generator=torch.Generator().manual_seed(1)), lambda: loader(8)],
    ids=["list", "own generator", "shared generator"],
)
def test_training_does_not_notice_an_evaluation(data: Any) -> None:
    """With dropout, shuffling and momentum: the same weights with evaluation after each batch and without."""
    when = When()
    with build(dropout=0.5) as plain:
        plain.fit()
    with build(dropout=0.5, eval_dataloader=data(), eval_interval="1ba", callbacks=when) as evaluated:
        evaluated.fit()
    assert when.at == {"eval": list(range(1, 11))}
    assert same(weights(evaluated), weights(plain))


def test_a_plain_loader_draws_one_number_as_it_always_does() -> None:
    """torch's DataLoader draws a seed for its workers each time it is iterated over; an evaluation that is asked for
    adds nothing to it."""
    with build(eval_dataloader=loader(8, shuffle=False), dropout=0.5) as trainer:
        torch.manual_seed(5)
        trainer.eval()
        drawn = torch.rand(())
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.rand(()) == drawn


def test_state_and_modes_are_restored() -> None:
    """What training uses of the state is as before, parts of the model that the user froze included."""
    model = Net(dropout=0.5)
    inside: list[bool] = []
    callbacks = [
        At(Event.FIT_START, lambda state: state.model.layers[2].eval()),  # type: ignore[operator, union-attr]
        At(Event.EVAL_BATCH_START, lambda state: inside.append(state.model.training or torch.is_grad_enabled())),
        At(Event.PREDICT_BATCH_START, lambda state: inside.append(state.model.training or torch.is_grad_enabled())),
    ]
    with build(model=model, callbacks=callbacks, eval_dataloader=held_out(), max_duration="3ba") as trainer:
        trainer.fit()
        state = trainer.state

        def picture() -> list[Any]:
            modes = [module.training for module in state.model.modules()]
            return [id(state.batch), id(state.outputs), state.dataloader_label, state.dataloader_len, *modes]

        before = picture()
        trainer.eval()
        trainer.predict(held_out())
        assert picture() == before
    assert state.model.training
    assert not model.layers[2].training
    assert inside
    assert not any(inside)


def test_the_model_is_back_in_training_after_a_failure() -> None:
    """An evaluation that fails leaves nothing behind either."""

    def fail(state: State) -> None:
        raise KeyError("a broken evaluation")

    with build(eval_dataloader=held_out(), callbacks=At(Event.EVAL_AFTER_FORWARD, fail)) as trainer:
        trainer.state.model.train()
        with pytest.raises(KeyError, match="a broken evaluation"):
            trainer.eval()
        assert trainer.state.model.training
        assert trainer.state.dataloader_label == "train"


# ── prediction ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_predict_returns_the_outputs_in_order() -> None:
    """One per batch, without gradients, in evaluation mode."""
    with build(dropout=0.5) as trainer:
        outputs = trainer.predict(held_out(10))
        trainer.state.model.eval()
        assert [len(output) for output in outputs] == [4, 4, 2]
        for output, batch in zip(outputs, held_out(10), strict=True):
            assert torch.equal(output, trainer.state.model(batch))
            assert not output.requires_grad


def test_predict_can_leave_the_outputs_to_callbacks() -> None:
    """``return_outputs=False`` keeps nothing; each is in the state when its batch ends."""
    seen: list[int] = []
    note = At(Event.PREDICT_BATCH_END, lambda state: seen.append(len(state.outputs)))
    with build(callbacks=note) as trainer:
        assert trainer.predict(held_out(10), return_outputs=False) == []
    assert seen == [4, 4, 2]


def test_predict_can_be_limited() -> None:
    """To a number of batches; training data may be among what is predicted on."""
    with build() as trainer:
        assert len(trainer.predict(loader(), subset_num_batches=2)) == 2
        assert len(trainer.predict({"dataloader": loader()})) == 5


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_doubled_labels_are_an_error() -> None:
    """Their metrics would be told apart by nothing."""
    twice = [Evaluator(label="a", dataloader=held_out()), Evaluator(label="a", dataloader=held_out())]
    with pytest.raises(ConfigError, match="several evaluators have the label a"):
        build(eval_dataloader=twice)


def test_a_metric_that_does_not_exist_is_an_error() -> None:
    """The message lists those that do; a name is a glob."""
    with pytest.raises(ConfigError, match=r"metric_names=\['acuracy'\].*accuracy, top2_accuracy"):
        build(model=Measured(), eval_dataloader=Evaluator(label="a", dataloader=held_out(), metric_names=["acuracy"]))


def test_eval_needs_data() -> None:
    """Nothing to evaluate on, or a limit that allows nothing."""
    with build(eval_dataloader=None) as trainer:
        with pytest.raises(ConfigError, match="there is no eval_dataloader"):
            trainer.eval()
        with pytest.raises(ConfigError, match="subset_num_batches=0"):
            trainer.eval(held_out(), subset_num_batches=0)
        with pytest.raises(ConfigError, match="subset_num_batches=0"):
            trainer.predict(held_out(), subset_num_batches=0)


# ── nothing to evaluate on ───────────────────────────────────────────────────────────────────────────────────────────
class Nothing(IterableDataset[Any]):
    """No points, which nobody knows before asking for one."""

    def __iter__(self) -> Any:
        return iter(())


def once() -> Any:
    """Batches that are there once."""
    yield from loader()


@pytest.mark.parametrize(
    ("make", "name"), [(lambda: DataLoader(Nothing(), batch_size=4), "DataLoader"), (once, "generator")]
)
def test_an_evaluation_of_nothing_is_an_error(make: Any, name: str) -> None:
    """Where it turns out, as with the training data: the metrics would be made up, or those of the last time."""
    with build(eval_dataloader=make(), eval_interval="1ba") as trainer:
        with pytest.raises(ConfigError, match=rf"eval_dataloader 'eval': its {name} gave no batch.*iterated only once"):
            trainer.fit()
        assert trainer.state.timestamp.batch == ("1ba" if name == "DataLoader" else "2ba")
        with pytest.raises(ConfigError, match="gave no batch"):
            trainer.eval(DataLoader(Nothing(), batch_size=4))
        assert trainer.predict(DataLoader(Nothing(), batch_size=4)) == []


class Empty:
    """An iterable that knows that it has nothing."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize("data", [Empty(), []])
def test_a_loader_of_no_length_is_an_error_before_training(data: Any) -> None:
    """For evaluation and for training."""
    with pytest.raises(ConfigError, match=rf"'eval': this {type(data).__name__} has no batch: its length is 0"):
        build(eval_dataloader=Evaluator(label="eval", dataloader=data))
    with pytest.raises(ConfigError, match=rf"train_dataloader: this {type(data).__name__} has no batch"):
        build(train_dataloader=data)
