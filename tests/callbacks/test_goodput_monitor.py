"""GoodputMonitor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

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
    """Replaces the module ``time``."""

    def __init__(self) -> None:
        self.now, self.utc = 1000.0, 5e9

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.utc += seconds

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.utc


class Saver(Callback):
    """A callback whose saves have blocked training for some seconds."""

    blocked_seconds = 0.0


class Run:
    """A training whose parts take the given seconds."""

    def __init__(
        self, training: Any, clock: Clock, *, loaded: dict | None = None, name: str = "run", **arguments: Any
    ) -> None:
        self.saver, self.passes = Saver(), clock.passes
        self.monitor = GoodputMonitor(**arguments)
        self.run = training(self.monitor)
        self.run.state.run_name = name
        self.run.state.callbacks.append(self.saver)
        if loaded is not None:
            self.monitor.load_state_dict(loaded)
        self.event = self.run.engine.run_event
        self.run.start()

    def batch(self, *, data: float = 0.0, step: float = 0.0, stall: float = 0.0) -> Run:
        self.event(Event.BEFORE_DATALOADER)
        self.passes(data)
        self.event(Event.AFTER_DATALOADER)
        self.passes(step)
        self.run.state.previous_timestamp = self.run.state.timestamp
        self.run.batch()
        self.passes(stall)
        self.saver.blocked_seconds += stall
        self.event(Event.BATCH_CHECKPOINT)
        return self

    def evaluate(self, seconds: float) -> None:
        self.event(Event.EVAL_BEFORE_ALL)
        self.passes(seconds)
        self.event(Event.EVAL_AFTER_ALL)

    def seconds(self) -> dict[str, float]:
        """Return the parts that are not 0, and the wall time."""
        report = self.monitor.report()
        return {name: report[f"seconds/{name}"] for name in (*PARTS, "wall") if report[f"seconds/{name}"]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("composerlite.callbacks.goodput_monitor.time", clock)
    return clock


@pytest.fixture
def start(training: Any, clock: Clock) -> Callable[..., Run]:
    """Starts a run: ``start(loaded=…, name=…, log_interval=…)``."""
    return lambda **arguments: Run(training, clock, **arguments)


def test_parts_of_the_wall_time(start):
    """Stalls of saves, evaluation and waiting for data are separate parts; the rest is training; the parts add up."""
    run = start()
    for _ in range(4):
        run.batch(data=0.5, step=3.0, stall=0.25)
    run.evaluate(5.0)
    assert run.seconds() == {"train": 12.0, "save_stall": 1.0, "eval": 5.0, "data": 2.0, "wall": 20.0}
    report = run.monitor.report()
    assert report["fraction/train"] == 0.6
    assert sum(report[f"fraction/{name}"] for name in PARTS) == pytest.approx(1.0)
    assert report["restarts"] == 0
    assert set(GoodputMonitor().report().values()) == {0.0}


def test_an_interrupted_run(start, clock):
    """The time from the checkpoint to the first batch after the resume is lost: lost steps, down time and startup."""
    checkpoint = start().batch(step=10.0).monitor.state_dict()
    clock.passes(7.0 + 60.0)  # trained for 7 seconds, and down for 60
    second = start(loaded=checkpoint)
    clock.passes(2.0)
    second.batch(data=1.0, step=7.0)
    assert second.seconds() == {"train": 17.0, "restart": 70.0, "wall": 87.0}
    assert second.monitor.report()["restarts"] == 1
    second.event(Event.FIT_END)
    second.run.start()
    second.batch(step=1.0)
    assert second.seconds()["restart"] == 70.0  # another call of fit is no interruption


def test_several_interruptions(start, clock):
    """Lost times add up, also if a run is interrupted before the first batch after a resume."""
    checkpoint = start().batch(step=10.0).monitor.state_dict()
    clock.passes(20.0)
    checkpoint = start(loaded=checkpoint).monitor.state_dict()
    clock.passes(30.0)
    checkpoint = start(loaded=checkpoint).batch(step=1.0).monitor.state_dict()
    clock.passes(3.0)
    last = start(loaded=checkpoint).batch(step=4.0)
    assert last.seconds() == {"train": 15.0, "restart": 53.0, "wall": 68.0}
    assert last.monitor.report()["restarts"] == 2


def test_a_clock_that_went_back(start, clock, caplog):
    """The clock of another machine may be earlier than the checkpoint: the restart takes no time, with a warning."""
    checkpoint = start().batch(step=10.0).monitor.state_dict()
    clock.utc -= 500.0
    assert start(loaded=checkpoint).batch(step=5.0).seconds() == {"train": 15.0, "wall": 15.0}
    assert "the clock went back by 500.0 s" in caplog.text


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("finished", {"train": 21.0, "wall": 21.0}),
        ("stopped", {"train": 2.0, "restart": 30.0, "wall": 32.0}),
        ("another run", {"train": 1.0, "wall": 1.0}),
    ],
)
def test_the_time_before_a_launch(start, clock, case, expected):
    """A finished run that is trained further has lost no time; a stopped run has; another run has its own counts."""
    first = start()
    while case == "finished" and not first.run.state.training_is_over:
        first.batch(step=1.0)
        if int(first.run.state.timestamp.batch_in_epoch) == 5:
            first.run.epoch()
    if case != "finished":
        first.batch(step=1.0)
        first.run.state.stop_training()
    checkpoint = first.monitor.state_dict()
    clock.passes(30.0)
    second = start(loaded=checkpoint, name="other" if case == "another run" else "run").batch(step=1.0)
    assert second.seconds() == expected
    assert second.monitor.report()["restarts"] == (1 if case == "stopped" else 0)


def test_time_between_two_calls_of_fit(start, clock):
    """Only saves count, such as the end of the last save."""
    run = start().batch(step=1.0)
    run.event(Event.FIT_END)
    clock.passes(100.0)
    run.evaluate(50.0)
    run.saver.blocked_seconds += 9.0
    assert run.seconds()["wall"] == 10.0
    assert run.monitor.state_dict()["interrupted_at"] is None
    run.run.start()
    assert run.batch(step=1.0).seconds() == {"train": 2.0, "save_stall": 9.0, "wall": 11.0}


def test_when_values_are_logged(start, clock):
    """At the interval, at the end of each epoch and at the end of fit: the report, below goodput/."""
    run = start(log_interval="2ba").batch(step=1.0)
    assert not [name for name in run.run.logged.data if name.startswith("goodput/")]
    run.batch(step=1.0)
    logged = {name for name in run.run.logged.data if name.startswith("goodput/")}
    assert logged == {f"goodput/{name}" for name in run.monitor.report()}
    run.batch(step=1.0)
    assert run.run.last("goodput/seconds/train") == 2.0
    run.run.epoch()
    assert run.run.last("goodput/seconds/train") == 3.0
    clock.passes(4.0)
    run.event(Event.FIT_END)
    assert run.run.last("goodput/seconds/train") == 7.0
    with pytest.raises(ConfigError, match=r"GoodputMonitor\(log_interval='often'"):
        GoodputMonitor(log_interval="often")


class InterruptedRunError(Exception):
    """Ends a run."""


class Interrupt(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 8:
            raise InterruptedRunError


def test_a_real_run_that_is_interrupted_and_resumed(tmp_path):
    """Interrupted in the second epoch and launched again: one restart, and the parts add up to the wall time."""

    def launch(*callbacks: Callback, loggers: Any = ()) -> Trainer:
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
            seed=1,
        )

    began = time.monotonic()
    with launch(GoodputMonitor(), Interrupt()) as trainer, pytest.raises(InterruptedRunError):
        trainer.fit()
    monitor, memory = GoodputMonitor(), InMemoryLogger()
    with launch(monitor, loggers=memory) as trainer:
        trainer.fit()
        trainer.eval()
    report = monitor.report()
    assert report["restarts"] == memory.most_recent_values["goodput/restarts"] == 1
    assert 0 < report["seconds/wall"] <= time.monotonic() - began + 1.0
    assert math.isclose(sum(report[f"seconds/{name}"] for name in PARTS), report["seconds/wall"])
    assert min(report[f"seconds/{name}"] for name in PARTS) > 0
    with launch(again := GoodputMonitor()) as trainer:
        trainer.fit()  # the run has finished
    assert again.report()["restarts"] == 1
