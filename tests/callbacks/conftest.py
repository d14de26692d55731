"""A small training by hand, with the events that monitors listen to."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import nn

from composerlite.core import Callback, Engine, Evaluator, Event, Logger, State, TimeInput
from composerlite.loggers import InMemoryLogger


class Training:
    """Regression of 8 samples a batch, five batches an epoch; each batch is said to take half a second."""

    def __init__(
        self,
        callback: Callback,
        *,
        max_duration: TimeInput = "4ep",
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        model: nn.Module | None = None,
        tokens: int = 0,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2) if model is None else model
        self.tokens = tokens
        self.logged = InMemoryLogger()
        self.state = State(
            self.model,
            rank_zero_seed=0,
            run_name="run",
            device=torch.device("cpu"),
            max_duration=max_duration,
            optimizers=optimizer(self.model.parameters(), lr=0.1),
            callbacks=[self.logged, callback],
            evaluators=[Evaluator(label="eval", dataloader=[torch.ones(8, 4)] * 2)],
        )
        self.state.set_dataloader([torch.ones(8, 4)] * 5, "train")
        self.engine = Engine(self.state, Logger(self.state, self.logged))
        self.engine.run_event(Event.INIT)
        self.engine.run_event(Event.AFTER_LOAD)

    def start(self) -> Training:
        """``fit`` is called."""
        self.engine.run_event(Event.FIT_START)
        return self

    def batch(self, *, seconds: float = 0.5, scale: float = 1.0) -> None:
        """One batch of training; ``scale`` multiplies the inputs."""
        self.state.batch = torch.full((8, 4), scale)
        self.engine.run_event(Event.BATCH_START)
        self.model.zero_grad()
        self.state.loss = self.model(self.state.batch).square().mean()
        self.engine.run_event(Event.AFTER_LOSS)
        self.state.loss.backward()
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        self.state.optimizers[0].step()
        for scheduler in self.state.schedulers:
            scheduler.step()
        self.state.timestamp = self.state.timestamp.to_next_batch(8, self.tokens, timedelta(seconds=seconds))
        self.engine.run_event(Event.BATCH_END)

    def epoch(self, **train_metrics: float) -> None:
        """What is left of an epoch, whose metrics are ``train_metrics``."""
        for _ in range(5 - int(self.state.timestamp.batch_in_epoch)):
            self.batch()
        self.state.train_metric_values.update(train_metrics)
        self.state.timestamp = self.state.timestamp.to_next_epoch()
        self.engine.run_event(Event.EPOCH_END)

    def evaluate(self, label: str = "eval", during: Callable[[], None] | None = None, **metrics: float) -> None:
        """An evaluation that gives ``metrics``."""
        self.state.set_dataloader([torch.ones(8, 4)] * 2, label)
        self.engine.run_event(Event.EVAL_START)
        if during is not None:
            during()
        self.state.eval_metric_values.update(metrics)
        self.engine.run_event(Event.EVAL_END)
        self.state.set_dataloader([torch.ones(8, 4)] * 5, "train")

    def last(self, name: str) -> float:
        """The value that was logged last under ``name``."""
        return self.logged.most_recent_values[name]


@pytest.fixture
def training() -> type[Training]:
    """Builds a training: ``training(callback, max_duration='4ep', …)``."""
    return Training
