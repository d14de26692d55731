"""A batch that is given up, or tried again, leaves nothing behind: neither in metrics nor in what callbacks count."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import SumMetric
from trainer_parts import Net, build, loader, same, weights

from composerlite import Algorithm, Callback, Event, Logger, State, Trainer
from composerlite.callbacks import PreemptionHandler
from composerlite.errors import Preempted

OF_PROCESSES = ("init", "before_load", "after_load", "fit_start", "fit_end")


class Model(Net):
    """Runs out of memory with more than so many samples; draws random numbers; takes dicts."""

    def __init__(self, fits: int = 100, where: str = "forward") -> None:
        super().__init__(dropout=0.3)
        self.fits, self.where = fits, where

    def _check(self, batch: Any, where: str) -> None:
        if where == self.where and len(batch["x"]) > self.fits:
            raise torch.OutOfMemoryError("out of memory, as a GPU says it")

    def forward(self, batch: Any) -> torch.Tensor:
        self._check(batch, "forward")
        return self.layers(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        self._check(batch, "loss")
        return torch.nn.functional.cross_entropy(outputs, batch["y"])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"samples": SumMetric()} if is_train else {}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(len(batch["x"]))


class Counts(Callback):
    """Counts events in its state, and changes the batch in its place."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event.value not in OF_PROCESSES and not event.value.endswith("_checkpoint"):
            self.counts[event.value] += 1
        if event is Event.BEFORE_TRAIN_BATCH:
            state.batch["x"] = state.batch["x"] * 2

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = Counter(state_dict["counts"])


class Adds(Algorithm):
    """An algorithm that adds up what it has seen."""

    def __init__(self) -> None:
        self.seen = torch.zeros(())

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_FORWARD and len(state.batch["x"]) > 0

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen += len(state.batch["x"])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"].clone()


def as_dict(items: Any) -> dict[str, torch.Tensor]:
    """A collator."""
    x, y, _ = torch.utils.data.default_collate(items)
    return {"x": x, "y": y}


def trainer_of(model: Model, *callbacks: Callback, **arguments: Any) -> tuple[Trainer, Counts, Adds]:
    counts, adds = Counts(), Adds()
    data = loader(batch_size=8, count=32, collate_fn=as_dict)
    trainer = build(model=model, train_dataloader=data, callbacks=[counts, *callbacks], algorithms=[adds], **arguments)
    return trainer, counts, adds


@pytest.mark.parametrize("where", ["forward", "loss"])
@pytest.mark.parametrize("fits", [1, 2, 4])
def test_a_batch_that_did_not_fit_counts_once(fits: int, where: str) -> None:
    """With 'auto' the run is that of the size which fits, for callbacks and algorithms with a state, metrics, random
    numbers, weights, and a callback that changes the batch."""

    def run(model: Model, size: int | str) -> Any:
        trainer, counts, adds = trainer_of(model, device_train_microbatch_size=size, max_duration="1ep")
        with trainer:
            trainer.fit()
        return counts.counts, adds.seen, trainer.state.train_metric_values, weights(trainer)

    torch.manual_seed(7)
    tried = run(Model(fits, where), "auto")
    torch.manual_seed(7)
    alone = run(Model(), fits)
    assert tried[:3] == alone[:3]
    assert tried[2] == {"samples": 32.0}
    assert same(tried[3], alone[3])


class Asks(Callback):
    """Batches take over a second; the run is asked to end in the second microbatch of a batch."""

    def __init__(self, handler: PreemptionHandler, at: int) -> None:
        self.handler, self.at, self.times = handler, at, 0

    def after_forward(self, state: State, logger: Logger) -> None:
        time.sleep(0.55)
        if int(state.timestamp.batch) == self.at:
            self.handler.preempt()


@pytest.mark.parametrize("at", [2, 4])
def test_a_batch_that_was_given_up_counts_when_it_is_done(tmp_path: Path, at: int) -> None:
    """In the middle of an epoch and at its begin: the checkpoint knows nothing of the batch, nor of the epoch that it
    began, and in the end each event was counted as often as in a run that nobody interrupted."""

    def launch(folder: Path, asked_at: int) -> Any:
        handler = PreemptionHandler()
        torch.manual_seed(7)
        trainer, counts, adds = trainer_of(
            Model(),
            handler,
            *([Asks(handler, asked_at)] if asked_at >= 0 else []),
            device_train_microbatch_size=4,
            max_duration="6ba",
            save_folder=folder,
            save_interval="100ba",
            save_metrics=True,
            run_name="run",
            autoresume=True,
        )
        with trainer:
            try:
                trainer.fit()
            except Preempted:
                assert int(trainer.state.timestamp.batch) == asked_at
            else:
                assert asked_at < 0
        return counts.counts, adds.seen, trainer.state.train_metric_values, weights(trainer)

    whole = launch(tmp_path / "whole", -1)
    launch(tmp_path / "run", at)
    resumed = launch(tmp_path / "run", -1)
    assert resumed[:3] == whole[:3]
    assert same(resumed[3], whole[3])
