"""A small run with three evaluators, that is asked to end, or killed, in one of them.

Run as ``evaluated_run.py <folder> <order>``, with the order in JSON: see :class:`Order`. Each batch and each evaluation
that was done is a line of output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from small_run import BATCH_SIZE, Net, Noisy, Say, final_state
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric

from composerlite import Callback, Evaluator, Event, Logger, State, Trainer
from composerlite.callbacks import LoadCheckpoint, PreemptionHandler
from composerlite.optim import DecoupledAdamW

__all__ = ["main"]


@dataclass
class Order:
    """What happens in one launch.

    Attributes:
        at: ``[event, batch, label, count]``: at that event of that evaluator, when so many batches are done, the so
            many-th time, the process gets ``signal``. save: it saves before.
        interval: between evaluations. other: between those of the third evaluator. saves: between saves.
        load: how it goes on: by ``autoresume``, from a ``load_path``, or by the ``callback`` LoadCheckpoint.
        name: of the run. by_duration: ``fit`` is told how long to train, and not the trainer.
    """

    at: list[Any] = field(default_factory=list[Any])
    signal: str = "SIGTERM"
    save: bool = False
    interval: str = "4ba"
    other: str = "4ba"
    saves: str = "5ba"
    load: str = "autoresume"
    name: str | None = "run"
    by_duration: bool = False


class _Measured(Net):
    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {} if is_train else {"mean": MeanMetric()}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        metric.update(outputs.sum())


class _Asked(Callback):
    def __init__(self, order: Order) -> None:
        self.order, self.times = order, 0
        self.trainer: Trainer | None = None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.EVAL_END:
            value = float(state.eval_metric_values["mean"]).hex()
            print("evaluated", state.dataloader_label, int(state.timestamp.batch), value, flush=True)
        if self.order.at[:3] != [event.value, int(state.timestamp.batch), state.dataloader_label]:
            return
        self.times += 1
        if self.times == self.order.at[3]:
            if self.order.save:
                assert self.trainer is not None
                self.trainer.save_checkpoint_to_save_folder()
            os.kill(os.getpid(), signal.Signals[self.order.signal])


def main(folder: str, given: str) -> None:
    """Train as a relaunched job does."""
    order = Order(**json.loads(given))
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = _Measured(dropout=0.5)

    def evaluator(label: str, interval: str) -> Evaluator:
        # Its points have noise from the generators of training, and an order, too.
        return Evaluator(
            label=label, dataloader=DataLoader(Noisy(), batch_size=16, shuffle=True), eval_interval=interval
        )

    asked = _Asked(order)
    latest = Path(folder) / "latest-rank0.pt"
    loading: list[Callback] = [LoadCheckpoint(latest)] if order.load == "callback" and latest.exists() else []
    loading += [] if order.load == "autoresume" else [PreemptionHandler()]
    with Trainer(
        model=model,
        train_dataloader=DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True),
        train_subset_num_batches=4,
        eval_dataloader=[
            evaluator("a", order.interval),
            evaluator("b", order.interval),
            evaluator("c", order.other),
        ],
        eval_subset_num_batches=3,
        optimizers=DecoupledAdamW(model.parameters(), lr=0.01),
        max_duration=None if order.by_duration else "3ep",
        callbacks=[Say(), asked, *loading],
        run_name=order.name,
        load_path=latest if order.load == "load_path" and latest.exists() else None,
        save_folder=folder,
        save_interval=order.saves,
        save_best_k=1,
        save_best_metric="a/mean",
        save_overwrite=True,
        autoresume=order.load == "autoresume",
        seed=11,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        asked.trainer = trainer
        trainer.fit(duration="3ep" if order.by_duration else None)
    torch.save(final_state(trainer), Path(folder) / "final.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
