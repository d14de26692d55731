"""What each of several ranks does in the tests of metrics that are resumed, or of which a rank has no sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MaxMetric, MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassAveragePrecision
from trainer_parts import At, Points

from composerlite import ComposerModel, Event, State, Trainer, dist
from composerlite.core.measured import metric_values

__all__ = ["evaluate", "resume_metrics", "train"]


class Lengths(Metric):
    """Keeps each sample for itself, as metrics of detection do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx=None)

    def update(self, rows: torch.Tensor) -> None:
        self.rows += list(rows)

    def compute(self) -> torch.Tensor:
        return torch.stack([row.sum() for row in self.rows]).sort().values.sum()


class Counting(ComposerModel):
    """A classifier with metrics of every kind of state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {
            "accuracy": MulticlassAccuracy(3),  # sums
            "precision": MulticlassAveragePrecision(3),  # lists of matrices and of labels
            "auroc": BinaryAUROC(),
            "rows": Lengths(),  # a list that is not made one
            "greatest": MaxMetric(),
            "mean": MeanMetric() + MaxMetric(),  # made of another one
        }

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        if isinstance(metric, MulticlassAccuracy | MulticlassAveragePrecision):
            metric.update(outputs.softmax(1), batch[1])
        elif isinstance(metric, BinaryAUROC):
            metric.update(outputs.softmax(1)[:, 0], batch[1] == 0)
        elif isinstance(metric, Lengths):
            metric.update(outputs)
        else:
            metric.update(batch[2].float())


def _trainer(folder: Path | None = None, **arguments: Any) -> Trainer:
    torch.manual_seed(3)
    model = Counting()
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        save_folder=folder,
        seed=2,
        device="cpu",
        progress_bar=False,
        **arguments,
    )


class OnTheFirst(IterableDataset[Any]):
    """A stream that gives all samples to the first rank."""

    def __init__(self, samples: int) -> None:
        self.points = Points(samples)

    def __iter__(self) -> Iterator[Any]:
        return (self.points[at] for at in range(len(self.points) if dist.get_global_rank() == 0 else 0))


def evaluate(samples: int, fsdp: bool = False, stream: bool = False) -> dict[str, float]:
    """The metrics of so many samples."""
    loader = DataLoader(OnTheFirst(samples) if stream else Points(samples), batch_size=2)
    parallelism = {"fsdp": {}} if fsdp else None
    with _trainer(eval_dataloader=loader, parallelism_config=parallelism) as trainer:
        trainer.eval()
        values = dict(trainer.state.eval_metric_values)
        own = [metric.metric_state for metric in trainer.state.eval_metrics["eval"].values()]
        trainer.eval()  # the states are those of this rank again
        again = [metric.metric_state for metric in trainer.state.eval_metrics["eval"].values()]
        assert _plain(own) == _plain(again)
        assert dict(trainer.state.eval_metric_values) == values
    return values


def train(samples: int, folder: Path | None = None, epochs: int = 2) -> dict[str, float]:
    """The metrics of training, of the last of ``epochs`` with so many samples; go on from what is in ``folder``."""
    with _trainer(
        folder,
        train_dataloader=DataLoader(Points(samples), batch_size=2 // dist.get_world_size()),
        max_duration=f"{epochs}ep",
        save_interval="1ba",
        save_metrics=True,
        run_name="run",
        autoresume=folder is not None,
    ) as trainer:
        trainer.fit()
        return dict(trainer.state.train_metric_values)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def states(state: State) -> Any:
    """What the metrics of this rank have counted."""
    groups = {"train": state.train_metrics, **state.eval_metrics}
    return {
        f"{label}/{name}": [
            (part.update_count, _plain(part.metric_state)) for part in metric.modules() if isinstance(part, Metric)
        ]
        for label, metrics in groups.items()
        for name, metric in metrics.items()
    }


def resume_metrics(folder: Path, leg: str, parallelism: dict[str, Any] | None) -> dict[str, Any]:
    """Train for three batches and tell what was counted (``save``), or what the resumed run begins with and logs."""
    seen: dict[str, Any] = {}
    last = 3 if leg == "save" else 5

    def note(state: State) -> None:
        if int(state.timestamp.batch) == (3 if leg in ("save", "whole") else -1):
            seen["states"] = states(state)

    with _trainer(
        folder if leg != "whole" else None,
        train_dataloader=DataLoader(Points(40), batch_size=8 // dist.get_world_size(), shuffle=True),
        eval_dataloader=DataLoader(Points(5), batch_size=2),
        eval_interval="3ba",
        max_duration=f"{last}ba" if leg == "save" else "5ba",
        callbacks=At(Event.BATCH_CHECKPOINT, note),
        save_interval="3ba",
        save_metrics=True,
        run_name="run",
        autoresume=leg != "whole",
        parallelism_config=parallelism,
    ) as trainer:
        if leg == "resume":
            seen["states"] = states(trainer.state)
            seen["computed"] = metric_values(trainer.state.train_metrics)
            for metric in trainer.state.train_metrics.values():
                for part in metric.modules():
                    part._computed = None  # as if nobody had asked
        trainer.fit()
        if leg == "save":
            seen["computed"] = metric_values(trainer.state.train_metrics)
        seen["values"] = dict(trainer.state.train_metric_values)
    return seen
