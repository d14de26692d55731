"""A batch that did not fit into memory and is tried again counts once, in metrics and in callbacks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torchmetrics import SumMetric
from trainer_parts import Net, build, loader, same, weights

from composerlite import Algorithm, Callback, Event, Logger, State, Trainer

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
