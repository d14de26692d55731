"""A small model, small data, and callbacks that write down what training does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from composerlite import Callback, ComposerModel, Event, Logger, State, Trainer

Step = tuple[int, Any]


class Points(Dataset[Any]):
    """Points of four features, each with a class and its own number."""

    def __init__(self, count: int = 20) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.targets = torch.randint(3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index], torch.tensor(index)


class Net(ComposerModel):
    """A small classifier; with dropout it draws random numbers as it trains."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class Seen(Callback):
    """What training was given: (batch count, every tensor of the batch as a list)."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    @property
    def numbers(self) -> list[list[int]]:
        """The numbers of the points in each batch."""
        return [batch[2] for _, batch in self.steps]

    def batch_end(self, state: State, logger: Logger) -> None:
        self.steps.append((int(state.timestamp.batch), [part.tolist() for part in state.batch]))


class Events(Callback):
    """Every event, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.events.append(event)


class At(Callback):
    """Does ``action(state)`` at each ``event``."""

    def __init__(self, event: Event, action: Callable[[State], object]) -> None:
        self.event = event
        self.action = action

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is self.event:
            self.action(state)


class Streamed:
    """Five batches of four points that can be iterated anew each epoch and have no length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(Points(), batch_size=4))


def loader(count: int = 20, *, batch_size: int = 4, shuffle: bool = True, **arguments: Any) -> DataLoader[Any]:
    """Batches of four points: five an epoch."""
    return DataLoader(Points(count), batch_size=batch_size, shuffle=shuffle, **arguments)


def build(*, model: ComposerModel | None = None, dropout: float = 0.0, **arguments: Any) -> Trainer:
    """A trainer from scratch, as a new process would build it: two epochs of five batches unless told otherwise."""
    torch.manual_seed(7)
    model = Net(dropout) if model is None else model
    if "optimizers" not in arguments:
        arguments["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    defaults: dict[str, Any] = {
        "train_dataloader": loader(),
        "max_duration": "2ep",
        "device": "cpu",
        "seed": 3,
        "progress_bar": False,
    }
    return Trainer(model=model, **{**defaults, **arguments})


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of the model's weights."""
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def optimizer_state(trainer: Trainer) -> list[torch.Tensor]:
    """A copy of the tensors that the optimizer keeps, parameter by parameter."""
    states = trainer.state.optimizers[0].state.values()
    return [value.clone() for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
