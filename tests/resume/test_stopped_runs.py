"""A run that was stopped has ended: whoever launches it again gets the run as it ended, and no further training."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stopping_ranks
import torch
from combinations import covering
from torchmetrics import MeanMetric
from trainer.trainer_parts import At, Events, Net, Seen, build, loader, same, weights

from composerlite import Event, Trainer
from composerlite.callbacks import CheckpointSaver, EarlyStopper
from composerlite.testing import run_ranks

MOMENTS = [
    (Event.FIT_START, 0),
    (Event.EPOCH_START, 5),
    (Event.AFTER_FORWARD, 2),
    (Event.BATCH_END, 3),
    (Event.BATCH_CHECKPOINT, 3),
    (Event.BATCH_END, 5),
    (Event.EVAL_END, 5),
    (Event.EPOCH_END, 5),
    (Event.EPOCH_CHECKPOINT, 5),
    (Event.ITERATION_CHECKPOINT, 5),
]


def stopper(event: Event, batch: int) -> At:
    """Stops at that event when so many batches are done."""
    return At(event, lambda state: state.stop_training() if int(state.timestamp.batch) == batch else None)


def launch(folder: Path, *callbacks: Any, script: Callable[[Trainer], object] = Trainer.fit, **arguments: Any) -> Any:
    """One launch of ten epochs of five batches: the batches it trained on, and the trainer."""
    seen = Seen()
    trainer = build(
        callbacks=[*callbacks, seen],
        run_name="run",
        autoresume=True,
        **{"max_duration": "10ep", "save_folder": folder, "eval_dataloader": loader(shuffle=False)} | arguments,
    )
    with trainer:
        script(trainer)
    return [step[0] for step in seen.steps], trainer


@pytest.mark.parametrize(("moment", "save_interval"), covering(1, MOMENTS, ["1ba", "2ba", "1ep"]))
def test_a_stopped_run_that_is_launched_again_trains_no_further(
    tmp_path: Path, moment: tuple[Event, int], save_interval: str
) -> None:
    """At whatever moment a callback stops it: the relaunch has the weights of the end, and trains on no batch."""
    event, batch = moment
    steps, first = launch(tmp_path, stopper(event, batch), save_interval=save_interval)
    assert len(steps) in (batch, batch + 1)
    again, second = launch(tmp_path, save_interval=save_interval)
    assert again == []
    assert second.state.timestamp.batch == first.state.timestamp.batch
    assert same(weights(second), weights(first))


@pytest.mark.parametrize("event", [Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT])
def test_a_stop_behind_the_last_save_is_saved_too(tmp_path: Path, event: Event) -> None:
    """A callback that comes after the saver stops the run: the checkpoint is saved again, and the relaunch ends."""
    saver = CheckpointSaver(folder=tmp_path, save_interval="1ba")
    steps, _ = launch(tmp_path, saver, stopper(event, 5), save_folder=None)
    assert len(steps) == 5
    again, second = launch(tmp_path, CheckpointSaver(folder=tmp_path, save_interval="1ba"), save_folder=None)
    assert (again, second.state.timestamp.batch) == ([], 5)


def test_whoever_asks_for_more_gets_more(tmp_path: Path) -> None:
    """A later end, or another call of fit with a duration, trains a stopped run on, as it would have in one process."""

    def more(trainer: Trainer) -> None:
        trainer.fit()
        trainer.fit(duration="2ba")

    whole, alone = launch(tmp_path / "whole", stopper(Event.BATCH_END, 3), script=more)
    assert whole == [1, 2, 3, 4, 5]
    steps, _ = launch(tmp_path / "run", stopper(Event.BATCH_END, 3))
    again, second = launch(tmp_path / "run", script=more)
    assert steps + again == whole
    assert same(weights(second), weights(alone))

    launch(tmp_path / "longer", stopper(Event.BATCH_END, 3), max_duration="2ep")
    assert launch(tmp_path / "longer", max_duration="1ep")[0] == []
    assert launch(tmp_path / "longer", max_duration="3ep")[0] == list(range(4, 16))


def test_a_relaunch_of_a_stopped_run_runs_no_event_of_training(tmp_path: Path) -> None:
    """It is as a run that has come to its max_duration."""
    launch(tmp_path, stopper(Event.BATCH_END, 3))
    events = Events()

    def watched(trainer: Trainer) -> None:
        trainer.state.callbacks.append(events)
        trainer.fit()

    launch(tmp_path, script=watched)
    assert events.events == []


def test_an_early_stopper_with_more_patience_trains_a_stopped_run_on(tmp_path: Path) -> None:
    """With the same patience the run stays stopped."""

    class Measured(Net):
        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {} if is_train else {"accuracy": MeanMetric()}

        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            return 0.0

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(0.5)

    def run(patience: int) -> list[int]:
        torch.manual_seed(7)
        return launch(tmp_path, EarlyStopper("accuracy", "eval", patience=patience), model=Measured())[0]

    assert run(1) == list(range(1, 16))
    assert run(1) == []
    assert run(3) == list(range(16, 26))
    assert run(3) == []


@pytest.mark.parametrize("event", ["batch_start", "batch_end", "epoch_end", "epoch_start"])
def test_one_of_several_ranks_stops_the_run_for_good(tmp_path: Path, event: str) -> None:
    """One rank that asks is enough, in the middle of an epoch or at its end; nobody trains on in the relaunch."""
    first = run_ranks(stopping_ranks.train, 2, tmp_path, event, "5ep", dist_timeout=None)
    assert first[0] == first[1]
    assert len(first[0]) in (4, 5, 6)  # at whose end they could agree
    assert run_ranks(stopping_ranks.train, 2, tmp_path, "", "5ep", dist_timeout=None) == [[], []]
    longer = run_ranks(stopping_ranks.train, 2, tmp_path, "", "6ep", dist_timeout=None)
    assert longer == [list(range(len(first[0]) + 1, 25))] * 2


class Numbered(Net):
    """Its training metric is the mean number of the points: 9.5 in a whole epoch, and another one in a part of it."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"number": MeanMetric()} if is_train else {}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(batch[2])


DECIDING: dict[str, Callable[[], dict[str, Any]]] = {
    "a stopper": lambda: {"callbacks": [EarlyStopper("number", "train", comp=operator.ne)]},
    "retention": lambda: {"save_best_k": 1, "save_best_metric": "train/number", "save_keep_every": "1ba"},
}


@pytest.mark.parametrize("who", DECIDING)
@pytest.mark.parametrize("batch", [7, 10])
def test_who_decides_by_the_metrics_of_training_gets_those_of_whole_epochs(
    tmp_path: Path, who: str, batch: int
) -> None:
    """A run that is resumed within an epoch, or behind its last batch, sees what the uninterrupted run saw, and stops
    after the same epoch; ``save_metrics`` need not be given."""

    def train(**arguments: Any) -> tuple[list[float], int]:
        values: list[float] = []
        seen = At(Event.EPOCH_END, lambda state: values.append(state.train_metric_values["number"]))
        own = DECIDING[who]()
        callbacks = [*own.pop("callbacks", []), seen]
        with build(model=Numbered(), callbacks=callbacks, max_duration="6ep", **own, **arguments) as trainer:
            trainer.fit()
        return values, int(trainer.state.timestamp.epoch)

    epochs = 3 if who == "a stopper" else 6
    assert train(save_folder=tmp_path, save_interval=f"{batch}ba", run_name="run") == ([9.5] * epochs, epochs)
    checkpoint = tmp_path / f"ep1-ba{batch}-rank0.pt"
    values, ended = train(load_path=checkpoint, run_name="run", save_folder=tmp_path / "resumed")
    assert (values, ended) == ([9.5] * (epochs - 1), epochs)


def test_a_stopper_passes_over_an_epoch_of_which_nothing_was_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint without the metrics of training, as of an older version, is resumed; the log says what is lost."""
    with build(model=Numbered(), save_folder=tmp_path, save_interval="5ba", run_name="run") as trainer:
        trainer.fit()
    checkpoint = tmp_path / "ep0-ba5-rank0.pt"
    stopper = EarlyStopper("number", "train", comp=operator.ne)
    with build(model=Numbered(), callbacks=stopper, load_path=checkpoint, run_name="run") as trainer:
        trainer.fit()
    assert stopper.best == 9.5
    assert "EarlyStopper skips this epoch: the checkpoint has no metrics/train/number" in caplog.text
