"""A run by hand: the events of training and what the trainer logs, without a training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from composerlite.core import Engine, Event, Logger, LoggerDestination, State, TimeInput


class Run:
    """A run of five batches an epoch that logs what the trainer logs. The loss of batch n is 1/n."""

    def __init__(
        self,
        *destinations: LoggerDestination,
        max_duration: TimeInput = "3ep",
        resume_at: int = 0,
        run_name: str = "fox",
        loaded: dict[str, Any] | None = None,
    ) -> None:
        self.state = State(
            nn.Linear(1, 1),
            rank_zero_seed=0,
            run_name=run_name,
            device=torch.device("cpu"),
            max_duration=max_duration,
            callbacks=destinations,
        )
        self.state.set_dataloader([0] * 5, "train")
        self.logger = Logger(self.state, destinations)
        self.engine = Engine(self.state, self.logger)
        self.engine.run_event(Event.INIT)
        if loaded is not None:
            destinations[0].load_state_dict(loaded)
        if resume_at:
            now = self.state.timestamp
            self.state.timestamp = now.copy(batch=resume_at, epoch=resume_at // 5, batch_in_epoch=resume_at % 5)
        self.engine.run_event(Event.AFTER_LOAD)

    def batches(self, count: int) -> Run:
        """Some batches of an epoch that has begun or not."""
        for _ in range(count):
            if int(self.state.timestamp.batch_in_epoch) == 0:
                self.engine.run_event(Event.EPOCH_START)
            self.state.previous_timestamp = self.state.timestamp
            self.state.timestamp = self.state.timestamp.to_next_batch(samples=8)
            now = int(self.state.timestamp.batch)
            self.logger.log_metrics({"loss/train/total": torch.tensor(1 / now), "time/batch": now})
            self.engine.run_event(Event.BATCH_END)
        return self

    def epoch(self, **train_metrics: float) -> Run:
        """What is left of the epoch, and its end."""
        self.batches(5 - int(self.state.timestamp.batch_in_epoch))
        if train_metrics:
            self.logger.log_metrics({f"metrics/train/{name}": value for name, value in train_metrics.items()})
        self.state.previous_timestamp = self.state.timestamp
        self.state.timestamp = self.state.timestamp.to_next_epoch()
        self.engine.run_event(Event.EPOCH_END)
        return self

    def evaluate(self, label: str = "eval", batches: int = 2, **metrics: float) -> Run:
        """An evaluation that gives ``metrics``."""
        self.state.set_dataloader([0] * batches, label)
        self.engine.run_event(Event.EVAL_START)
        for _ in range(batches):
            self.engine.run_event(Event.EVAL_BATCH_END)
        self.logger.log_metrics({f"metrics/{label}/{name}": value for name, value in metrics.items()})
        self.engine.run_event(Event.EVAL_END)
        self.state.set_dataloader([0] * 5, "train")
        return self

    def finish(self) -> Run:
        """Training is over and the trainer closes."""
        self.engine.run_event(Event.FIT_END)
        self.engine.close()
        return self

    def run_events(self, events: Sequence[str]) -> Run:
        """These events, one after the other."""
        for event in events:
            self.engine.run_event(event)
        return self


@pytest.fixture
def run() -> type[Run]:
    """Builds a run: ``run(logger, max_duration='3ep', …)``."""
    return Run


@pytest.fixture(scope="module")
def wandb_offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """W&B without a network. Its service process, which all runs of a process share, ends with the module's tests."""
    import wandb

    folder = tmp_path_factory.mktemp("wandb-home")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
            patch.setenv(variable, str(folder))
        for variable, value in (("MODE", "offline"), ("ERROR_REPORTING", "false"), ("SILENT", "true")):
            patch.setenv(f"WANDB_{variable}", value)
        wandb.setup()
        yield
        wandb.teardown()


@pytest.fixture
def mlflow_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow may keep runs in a folder, and tells nobody of it."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture
def tensorboard_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one second are sorted by a counter, as text: the tenth file of a process would be before the second."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
