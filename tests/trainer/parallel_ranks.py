"""What one rank of several does in the tests of training on many ranks, and what one process does in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from trainer_parts import At, Points

from composerlite import ComposerModel, DataSpec, Event, State, Trainer, dist
from composerlite.algorithms import EMA, SWA, GradientClipping
from composerlite.callbacks import OptimizerMonitor
from composerlite.dist import Group
from composerlite.loggers import InMemoryLogger

SAMPLES = 22  # the last global batch of 8 is of 6
PLAN = {"up": "colwise", "blocks.0.0": "rowwise"}
TP = {"tensor_parallel_degree": 2, "layer_plan": PLAN}

CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "DDP": {},
        "DDP, accumulated": {"device_train_microbatch_size": 3},
        "DDP, forced": {"ddp_sync_strategy": "forced_sync", "device_train_microbatch_size": 2},
        "DDP, each microbatch": {"ddp_sync_strategy": "multi_auto_sync", "device_train_microbatch_size": 3},
        "FSDP, accumulated, EMA": {
            "parallelism_config": {"fsdp": {}},
            "device_train_microbatch_size": 3,
            "algorithm": functools.partial(EMA, half_life="2ba"),
        },
        "FSDP, SWA": {"parallelism_config": {"fsdp": {}}, "algorithm": functools.partial(SWA, swa_start="0.4dur")},
        "FSDP, saving memory": {
            "parallelism_config": {"fsdp": {"activation_checkpointing": True, "cpu_offload": True}}
        },
        "TP": {"parallelism_config": {"tp": TP}},
    },
    4: {
        "HSDP": {"parallelism_config": {"fsdp": {"data_parallel_replicate_degree": 2}}},
        "FSDP and TP": {"parallelism_config": {"fsdp": {}, "tp": TP}},
    },
}


class Blocks(ComposerModel):
    """A small classifier made of blocks, which counts how often it is right."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)])
        self.down = nn.Linear(width, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.up(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        return self.down(torch.relu(hidden))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"accuracy": MulticlassAccuracy(3, average="micro")}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch[1])


def train(batch_size: int, *, algorithm: Any = None, **arguments: Any) -> dict[str, Any]:
    """Train for two epochs; everything that should not depend on the number of ranks."""
    torch.manual_seed(3 + dist.get_global_rank())  # each rank begins with other weights: those of rank 0 count
    model, log = Blocks(), InMemoryLogger()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(Points(SAMPLES), batch_size=batch_size, shuffle=True),
        eval_dataloader=DataLoader(Points(13), batch_size=batch_size),
        max_duration="2ep",
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.1),
        algorithms=[GradientClipping("norm", 0.1), *([] if algorithm is None else [algorithm()])],
        callbacks=[OptimizerMonitor(batch_log_interval=1)],
        loggers=[log],
        seed=1,
        device="cpu",
        progress_bar=False,
        **arguments,
    ) as trainer:
        trainer.fit()
        now = trainer.state.timestamp
        return {
            "time": (int(now.epoch), int(now.batch), int(now.sample)),
            "weights": {name: dist.shards.full_tensor(tensor).clone() for name, tensor in model.state_dict().items()},
            "measured": {**trainer.state.eval_metric_values, **trainer.state.train_metric_values},
            "logged": {k: [v for _, v in values] for k, values in log.data.items() if not k.startswith("time")},
        }


class Counting(Blocks):
    """Its blocks have running means, and count their calls in training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)])


def train_counting(activation_checkpointing: bool) -> dict[str, torch.Tensor]:
    """Weights and buffers after two batches."""
    torch.manual_seed(3)
    config = {"fsdp": {"activation_checkpointing": activation_checkpointing}}
    with small(Counting(), parallelism_config=config) as trainer:
        trainer.fit()
        return {
            name: dist.shards.full_tensor(tensor).clone() for name, tensor in trainer.state.model.state_dict().items()
        }


def train_all(world_size: int) -> dict[str, dict[str, Any]]:
    """Every case of so many ranks."""
    results: dict[str, dict[str, Any]] = {}
    for name, case in CASES[world_size].items():
        shares = world_size // (2 if "tp" in case.get("parallelism_config", {}) else 1)
        results[name] = train(8 // shares, **case)
    return results


@final
class Batches:
    """A loader of one's own: so many batches of two points."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        points = Points(2)
        for _ in range(self.count):
            yield [points.inputs, points.targets]


def _of_tokens() -> dict[str, Any]:
    """Samples of three tokens each."""
    return {
        "dataloader": DataLoader(Points(64), batch_size=4),
        "get_num_tokens_in_batch": lambda batch: 3 * len(batch[0]),
    }


class Hungry(Blocks):
    """Runs out of memory with more than ``limit`` samples at once."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, batch: Any) -> torch.Tensor:
        if len(batch[0]) > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(batch)


def small(model: ComposerModel | None = None, **arguments: Any) -> Trainer:
    torch.manual_seed(3)
    model = Blocks() if model is None else model
    given: dict[str, Any] = {
        "train_dataloader": DataLoader(Points(16), batch_size=4),
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "max_duration": "3ep",
        "progress_bar": False,
        "device": "cpu",
        "seed": 1,
    }
    return Trainer(model=model, **{**given, **arguments})


def freeze_and_unfreeze() -> dict[str, list[torch.Tensor]]:
    """The weights that a run ends with in which a callback exchanges, after three batches, what is frozen."""

    def exchange(state: State) -> None:
        if int(state.timestamp.batch) == 3:
            for name in ("up", "blocks.1"):
                part = state.model.get_submodule(name)
                part.requires_grad_(not next(part.parameters()).requires_grad)

    ends: dict[str, list[torch.Tensor]] = {}
    for strategy in ("single_auto_sync", "multi_auto_sync", "forced_sync"):
        torch.manual_seed(3)
        model = Blocks()
        model.up.requires_grad_(False)
        with Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=DataLoader(Points(48), batch_size=8 // dist.get_world_size()),
            ddp_sync_strategy=strategy if dist.get_world_size() > 1 else None,
            callbacks=At(Event.BATCH_END, exchange),
            max_duration="6ba",
            device="cpu",
            progress_bar=False,
        ) as trainer:
            trainer.fit()
        ends[strategy] = [parameter.detach().clone() for parameter in model.parameters()]
    return ends


def agree(rank_of_event: int, folder: Path) -> dict[str, Any]:
    """What happens on one rank and concerns all."""
    rank = dist.get_global_rank()
    here = rank == rank_of_event

    def stop(state: State) -> None:
        if here:
            state.stop_training()

    found: dict[str, Any] = {}
    for event in (Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END):
        with small(callbacks=[At(event, stop)]) as trainer:
            trainer.fit()
            found[f"stopped at {event.value}"] = int(trainer.state.timestamp.batch)
    with small(train_dataloader=Batches(3 if here else 5), max_duration="2ep") as trainer:
        trainer.fit()
        found["short loader"] = int(trainer.state.timestamp.epoch), int(trainer.state.timestamp.batch)
    with small(callbacks=[At(Event.EVAL_END, stop)], eval_interval="1ba", eval_dataloader=Batches(1)) as trainer:
        trainer.fit()
        found["stopped at eval_end"] = int(trainer.state.timestamp.batch)
    dealt: dict[str, Any] = {"train_dataloader": DataLoader(Points(64), batch_size=4)}
    kinds: dict[str, dict[str, Any]] = {
        "dealt": dealt,
        "own loader": {"train_dataloader": Batches(8)},
        "tokens": {"train_dataloader": DataSpec(**_of_tokens())},
        "shards": {**dealt, "parallelism_config": {"fsdp": {}}, "device_train_microbatch_size": 3},
    }
    found["words"] = {name: _words_per_batch(**kind) for name, kind in kinds.items()}
    found["words while saving"] = [
        _words_per_batch(**dealt, save_folder=folder / str(behind), save_interval="1ba", save_async=behind)
        for behind in (False, True)
    ]
    weights: list[Any] = []
    for make, size in ((lambda: Hungry(2 if here else 4), "auto"), (Blocks, None)):
        torch.manual_seed(3)
        with small(make(), device_train_microbatch_size=size, train_dataloader=DataLoader(Points(15), 4)) as trainer:
            trainer.fit()
            weights.append(trainer.state.model.state_dict())
            found.setdefault("microbatch", trainer.state.device_train_microbatch_size)
    found["difference"] = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    return found


def _words_per_batch(**arguments: Any) -> float:
    """How often the ranks tell each other something in a batch besides gradients, in the middle of an epoch."""
    numbers: list[int] = []
    calls = 0

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return method(*given, **named)

        return call

    with (
        mock.patch.object(Group, "run", counting(Group.run)),
        mock.patch.object(Group, "meet", counting(Group.meet)),
        small(
            callbacks=[At(Event.BATCH_END, lambda _: numbers.append(calls))], max_duration="5ba", **arguments
        ) as trainer,
    ):
        trainer.fit()
    return (numbers[4] - numbers[1]) / 3


def refuse() -> dict[str, str]:
    """What the ranks raise for what cannot be done, one after the other in one process."""
    rank = dist.get_global_rank()
    wrong: dict[str, dict[str, Any]] = {
        "model": {"model": Blocks(8 + 8 * rank)},
        "mesh": {"parallelism_config": {"fsdp": {"data_parallel_replicate_degree": 3}}},
        "product": {
            "parallelism_config": {"fsdp": {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}}
        },
        "tp": {"parallelism_config": {"tp": {"tensor_parallel_degree": 3, "layer_plan": PLAN}}},
        "plan": {"parallelism_config": {"tp": {"tensor_parallel_degree": 2, "layer_plan": {"upp": "colwise"}}}},
        "auto": {"parallelism_config": {"fsdp": {}}, "device_train_microbatch_size": "auto"},
        "key": {"parallelism_config": {"fsdp": {"cpu_ofload": True}}},
        "one rank": {"precision": "amp_bf17" if rank == 1 else "fp32"},
    }
    raised: dict[str, str] = {}
    for name, arguments in wrong.items():
        try:
            small(**arguments)
        except Exception as e:  # noqa: BLE001 - the test looks at what it is
            raised[name] = f"{type(e).__name__}: {e}"
    return raised


class Fragile(Points):
    """Cannot be read on rank 1 in the third batch."""

    def __getitem__(self, index: int) -> Any:
        if dist.get_global_rank() == 1 and index >= 20:
            raise OSError("the disk of this rank is gone")
        return super().__getitem__(index)


def fail(where: str) -> str:
    """An exception in a callback of rank 1 or in its data, and what each rank raises."""

    def act(state: State) -> None:
        if dist.get_global_rank() == 1 and int(state.timestamp.batch) == 1:
            raise OSError("the disk of this rank is gone")

    if where == "data":
        trainer = small(train_dataloader=DataLoader(Fragile(32), batch_size=4))
    else:
        trainer = small(callbacks=[At(Event(where), act)])
    trainer.fit()
    return "trained"


def last_losses() -> list[dict[str, float]]:
    """The losses that training ends with, with a logger and without one."""
    found: list[dict[str, float]] = []
    for loggers in (None, InMemoryLogger()):
        torch.manual_seed(0)
        loader = DataLoader(Points(6), batch_size=3 if dist.get_world_size() == 2 else 6)
        with Trainer(
            model=Blocks(), train_dataloader=loader, max_duration="1ba", loggers=loggers, progress_bar=False, seed=1
        ) as trainer:
            trainer.fit()
        found.append(trainer.state.total_loss_dict)
    return found


def close_and_hold() -> list[str]:
    """Close a trainer that somebody goes on to hold; the threads of torch's connections that live after it."""
    import torch.distributed.nn.functional  # noqa: F401 - they hold the group that there is when they are imported

    held = small(Blocks(), train_dataloader=DataLoader(Points(6), batch_size=3), max_duration="1ba")
    held.fit()
    held.close()
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]
