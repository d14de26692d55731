"""A small run, written out: a model with batch norm, dropout and momentum, four batches per epoch, three epochs."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composerlite.core import Algorithm, Engine, Event, Logger, State

BATCHES_PER_EPOCH, EPOCHS = 4, 3
BATCHES = BATCHES_PER_EPOCH * EPOCHS


class SmallModel(nn.Module):
    """One linear layer, batch norm and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.head(self.body(batch[0]))

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, batch[1])


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


class ShortRun:
    """The loop of the trainer, reduced to the events that algorithms listen to."""

    def __init__(self, algorithms: Sequence[Algorithm], max_duration: str = f"{EPOCHS}ep") -> None:
        torch.manual_seed(11)
        model = SmallModel()
        self.state = State(
            model,
            rank_zero_seed=11,
            run_name="run",
            device=torch.device("cpu"),
            max_duration=max_duration,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
            algorithms=algorithms,
        )
        self.state.set_dataloader([None] * BATCHES_PER_EPOCH, "train")
        self.state.schedulers = [torch.optim.lr_scheduler.LambdaLR(self.state.optimizers[0], lambda n: 0.95**n)]
        self.engine = Engine(self.state, Logger(self.state))
        self.engine.run_event(Event.INIT)

    @property
    def weights(self) -> dict[str, Tensor]:
        """A copy of the model's weights and buffers."""
        return {name: tensor.clone() for name, tensor in self.state.model.state_dict().items()}

    def save(self) -> dict[str, Any]:
        """The state, written to a file and read back as a resume reads it."""
        file = io.BytesIO()
        torch.save(self.state.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def train(self, until: int = BATCHES, at_batch_end: Callable[[int], object] | None = None) -> ShortRun:
        """Train until so many batches; ``at_batch_end`` is called after each, where checkpoints are saved."""
        state, engine, model = self.state, self.engine, self.state.model
        model.train()
        engine.run_event(Event.FIT_START)
        while int(state.timestamp.batch) < until and not state.training_is_over:
            state.batch = batch_of(int(state.timestamp.batch))
            state.optimizers[0].zero_grad()
            state.outputs = model(state.batch)
            engine.run_event(Event.BEFORE_LOSS)
            state.loss = model.loss(state.outputs, state.batch)  # type: ignore[operator]
            engine.run_event(Event.AFTER_LOSS)
            state.loss.backward()
            engine.run_event(Event.AFTER_TRAIN_BATCH)
            state.optimizers[0].step()
            state.schedulers[0].step()
            state.timestamp = state.timestamp.to_next_batch(samples=8)
            engine.run_event(Event.BATCH_END)
            if int(state.timestamp.batch_in_epoch) == BATCHES_PER_EPOCH:
                state.timestamp = state.timestamp.to_next_epoch()
                engine.run_event(Event.EPOCH_END)
            if at_batch_end is not None:
                at_batch_end(int(state.timestamp.batch))
        if state.training_is_over:
            engine.run_event(Event.FIT_END)
        return self


def assert_same(a: Any, b: Any) -> None:
    """Nested states are equal to the last bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    else:
        assert a == b


def assert_resumes_exactly(make: Callable[[], list[Algorithm]], at: int) -> None:
    """A run that is interrupted after ``at`` batches and resumed ends as the one that was not, to the last bit."""
    expected = ShortRun(make()).train().save()
    saved = ShortRun(make()).train(until=at).save()
    resumed = ShortRun(make())
    resumed.state.load_state_dict(saved)
    result = resumed.train().save()
    del expected["timestamp"], result["timestamp"]  # the clock differs
    assert_same(result, expected)
