"""GoodputMonitor."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite.callbacks import GoodputMonitor
from composerlite.core import Callback, Event
from composerlite.errors import ConfigError
from composerlite.loggers import InMemoryLogger
from composerlite.models import ComposerClassifier
from composerlite.trainer import Trainer

PARTS = ("train", "save_stall", "eval", "data", "restart")


class Clock:
    """Shows what it is set to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Saver(Callback):
    """Says how long its saves have kept training."""

    def __init__(self) -> None:
        self.blocked_seconds = 0.0


class Run:
    """A training in which everything takes as long as it is said to."""

    def __init__(self, training, *, utc: float = 5e9, loaded: dict | None = None, name: str = "run", **arguments):
        self.clock, self.utc, self.saver = Clock(), Clock(utc), Saver()
        self.monitor = GoodputMonitor(clock=self.clock, utc=self.utc, **arguments)
        self.run = training(self.monitor)
        self.run.state.run_name = name
        self.run.state.callbacks.append(self.saver)
        if loaded is not None:
            self.monitor.load_state_dict(loaded)
        self.event = self.run.engine.run_event

    def passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.utc.now += seconds

    def start(self) -> Run:
        self.run.start()
        return self

    def batch(self, *, data: float = 0.0, step: float = 0.0, stall: float = 0.0) -> None:
        self.event(Event.BEFORE_DATALOADER)
        self.passes(data)
        self.event(Event.AFTER_DATALOADER)
        self.passes(step)
        self.run.state.previous_timestamp = self.run.state.timestamp
        self.run.batch()
        self.passes(stall)
        self.saver.blocked_seconds += stall
        self.event(Event.BATCH_CHECKPOINT)

    def evaluate(self, seconds: float) -> None:
        self.event(Event.EVAL_BEFORE_ALL)
        self.passes(seconds)
        self.event(Event.EVAL_AFTER_ALL)

    def seconds(self) -> dict[str, float]:
        report = self.monitor.report()
        return {name: report[f"seconds/{name}"] for name in (*PARTS, "wall")}


def test_where_the_time_goes(training):
    """Stalls of saves, evaluation and waiting for data are told apart; the rest is training; they add up."""
    run = Run(training).start()
    for _ in range(4):
        run.batch(data=0.5, step=3.0, stall=0.25)
    run.evaluate(5.0)

    assert run.seconds() == {"train": 12.0, "save_stall": 1.0, "eval": 5.0, "data": 2.0, "restart": 0.0, "wall": 20.0}
    report = run.monitor.report()
    assert report["fraction/train"] == 0.6
    assert sum(report[f"fraction/{name}"] for name in PARTS) == pytest.approx(1.0)
    assert report["restarts"] == 0


def test_an_interrupted_run(training):
    """From the checkpoint to the first batch after the resume all is lost: what was trained since, and being down."""
    first = Run(training).start()
    first.batch(step=10.0)
    checkpoint = first.monitor.state_dict()
    first.batch(step=7.0)  # lost

    second = Run(training, utc=first.utc.now + 60.0, loaded=checkpoint)
    second.start()
    second.passes(2.0)
    second.batch(data=1.0, step=7.0)  # the data are replayed, then it is trained again
    assert second.seconds() == {
        "train": 17.0, "save_stall": 0.0, "eval": 0.0, "data": 0.0, "restart": 70.0, "wall": 87.0,
    }  # fmt: skip
    assert second.monitor.report()["restarts"] == 1

    second.event(Event.FIT_END)
    second.start()
    second.batch(step=1.0)
    assert second.seconds()["restart"] == 70.0  # another call of fit is no other interruption


def test_interrupted_before_it_trained_again(training):
    """Interrupted while it starts and resumed from what it saved then, a run was down all the time."""
    first = Run(training).start()
    first.batch(step=10.0)
    second = Run(training, utc=first.utc.now + 20.0, loaded=first.monitor.state_dict()).start()
    third = Run(training, utc=first.utc.now + 50.0, loaded=second.monitor.state_dict()).start()
    third.batch(step=1.0)
    assert third.seconds()["restart"] == 50.0


def test_two_interruptions(training):
    """What was lost adds up over any number of resumes."""
    checkpoint, utc = None, 5e9
    for _ in range(3):
        run = Run(training, utc=utc, loaded=checkpoint).start()
        run.batch(step=4.0)
        checkpoint, utc = run.monitor.state_dict(), run.utc.now + 3.0
    assert run.seconds()["wall"] == 3 * 4.0 + 2 * 3.0
    assert run.seconds()["restart"] == 6.0
    assert run.monitor.report()["restarts"] == 2


def test_a_clock_that_went_back(training, caplog):
    """On another machine it may be earlier than when the checkpoint was saved: that is no time, and it is said."""
    first = Run(training).start()
    first.batch(step=10.0)
    second = Run(training, utc=first.utc.now - 500.0, loaded=first.monitor.state_dict()).start()
    second.batch(step=5.0)
    assert second.seconds()["restart"] == 0.0
    assert second.seconds()["wall"] == 15.0
    assert "the clock went back by 500.0 s" in caplog.text


def test_a_run_that_had_ended_was_not_interrupted(training):
    """A run that is trained further a week after it had reached its end has lost no week."""
    first = Run(training).start()
    while not first.run.state.training_is_over:
        first.batch(step=1.0)
        if int(first.run.state.timestamp.batch_in_epoch) == 5:
            first.run.epoch()
    second = Run(training, utc=first.utc.now + 7 * 86400, loaded=first.monitor.state_dict()).start()
    second.batch(step=1.0)
    assert second.seconds()["wall"] == 21.0
    assert second.monitor.report()["restarts"] == 0


def test_a_run_that_was_told_to_stop_was_interrupted(training):
    """Stopped before its end and launched again, as on a machine that is taken away, it was down in between."""
    first = Run(training).start()
    first.batch(step=1.0)
    first.run.state.stop_training()
    second = Run(training, utc=first.utc.now + 30.0, loaded=first.monitor.state_dict()).start()
    second.batch(step=1.0)
    assert second.seconds()["restart"] == 30.0


def test_a_checkpoint_of_another_run(training):
    """Begun with the weights of a run of last year, a run counts its own time only."""
    first = Run(training).start()
    first.batch(step=10.0)
    second = Run(training, utc=first.utc.now + 3e7, loaded=first.monitor.state_dict(), name="other").start()
    second.batch(data=1.0, step=2.0)
    assert second.seconds()["wall"] == 3.0
    assert second.seconds()["data"] == 1.0
    assert second.monitor.report()["restarts"] == 0


def test_time_between_two_calls_of_fit(training):
    """It does not count, nor does what is evaluated then; what saves take does, such as the end of the last one."""
    run = Run(training).start()
    run.batch(step=1.0)
    run.event(Event.FIT_END)
    run.passes(100.0)
    run.evaluate(50.0)
    run.saver.blocked_seconds += 9.0
    assert run.seconds()["wall"] == 10.0
    assert run.monitor.state_dict()["interrupted_at"] is None

    run.start()
    run.batch(step=1.0)
    assert run.seconds() == {"train": 2.0, "save_stall": 9.0, "eval": 0.0, "data": 0.0, "restart": 0.0, "wall": 11.0}


def test_when_it_logs(training):
    """At the interval, at the end of each epoch and at the end of fit: the whole report, below goodput/."""
    run = Run(training, log_interval="2ba").start()
    logged = run.run.logged.data
    run.batch(step=1.0)
    assert not [name for name in logged if name.startswith("goodput/")]
    run.batch(step=1.0)
    assert {name for name in logged if name.startswith("goodput/")} == {
        f"goodput/{name}" for name in run.monitor.report()
    }
    assert run.run.last("goodput/seconds/train") == 2.0
    run.batch(step=1.0)
    assert run.run.last("goodput/seconds/train") == 2.0

    run = Run(training, log_interval="1000ba").start()
    run.batch(step=1.0)
    run.run.epoch()
    assert run.run.last("goodput/seconds/train") == 1.0
    run.passes(4.0)
    run.event(Event.FIT_END)
    assert run.run.last("goodput/seconds/train") == 5.0


def test_nothing_measured():
    """Before training there is a report of zeros."""
    assert set(GoodputMonitor().report().values()) == {0.0}


def test_bad_arguments():
    """A bad interval is an error at construction that names it."""
    with pytest.raises(ConfigError, match=r"GoodputMonitor\(log_interval='often'"):
        GoodputMonitor(log_interval="often")


def test_a_real_run_that_is_interrupted_and_resumed(tmp_path):
    """In a trainer, killed in the second epoch and launched again: one restart, and all time is accounted for."""

    class InterruptedRunError(Exception):
        pass

    class Interrupt(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 8:
                raise InterruptedRunError

    def launch(*callbacks: Callback, loggers: InMemoryLogger) -> Trainer:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(40, 6), torch.randint(4, (40,)))
        return Trainer(
            model=ComposerClassifier(nn.Linear(6, 4), num_classes=4),
            train_dataloader=DataLoader(data, batch_size=8),
            eval_dataloader=DataLoader(data, batch_size=20),
            max_duration="3ep",
            callbacks=callbacks,
            loggers=loggers,
            run_name="fox",
            save_folder=tmp_path,
            save_interval="3ba",
            autoresume=True,
            progress_bar=False,
            device="cpu",
        )

    began = time.monotonic()
    with launch(GoodputMonitor(), Interrupt(), loggers=InMemoryLogger()) as trainer, pytest.raises(InterruptedRunError):
        trainer.fit()
    monitor, memory = GoodputMonitor(), InMemoryLogger()
    with launch(monitor, loggers=memory) as trainer:
        trainer.fit()
        trainer.eval()
    report = monitor.report()

    assert report["restarts"] == 1
    assert 0 < report["seconds/wall"] <= time.monotonic() - began + 1.0
    assert math.isclose(sum(report[f"seconds/{name}"] for name in PARTS), report["seconds/wall"])
    assert min(report[f"seconds/{name}"] for name in PARTS) > 0
    assert memory.most_recent_values["goodput/restarts"] == 1
    assert memory.most_recent_values["goodput/seconds/wall"] <= report["seconds/wall"]

    with launch(again := GoodputMonitor(), loggers=InMemoryLogger()) as trainer:
        trainer.fit()  # it has finished: nothing to do, and nothing is lost by asking
    assert again.report()["restarts"] == 1
