"""A batch cut into microbatches trains as the whole batch does, whatever the pieces, the precision and the memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy
from trainer_parts import At, Events, Net, Points, build, loader, optimizer_state, same, weights

from composerlite import ComposerModel, DataSpec, Event, State, Trainer
from composerlite.core import Precision
from composerlite.errors import ConfigError, TrainingError
from composerlite.loggers import InMemoryLogger


def gradients_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradients that the optimizer gets, while training for one batch."""
    found: dict[str, torch.Tensor] = {}

    def note(state: State) -> None:
        for name, parameter in state.model.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad.clone()

    trainer.state.callbacks.append(At(Event.AFTER_TRAIN_BATCH, note))
    with trainer:
        trainer.fit(duration="1ba")
    return found


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 100])
def test_gradients_of_microbatches_add_up_to_that_of_the_batch(size: int) -> None:
    """A batch of seven: also where the last microbatch is smaller, and where all fit into one."""
    data = lambda: loader(7, batch_size=7)
    whole = gradients_of(build(train_dataloader=data()))
    parts = gradients_of(build(train_dataloader=data(), device_train_microbatch_size=size))
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        assert torch.allclose(parts[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [None, 2, 3])
def test_the_loss_is_that_of_the_batch(size: int | None) -> None:
    """What is logged is the mean over the samples, uneven microbatches or not."""
    logged, logged_whole = InMemoryLogger(), InMemoryLogger()
    with build(train_dataloader=loader(18), loggers=logged, device_train_microbatch_size=size) as trainer:
        trainer.fit()
    with build(train_dataloader=loader(18), loggers=logged_whole) as trainer:
        trainer.fit()
    losses = [value for _, value in logged.data["loss/train/total"]]
    assert losses == pytest.approx([value for _, value in logged_whole.data["loss/train/total"]], rel=1e-4)


class Words(ComposerModel):
    """The mean of a squared number per token, over the tokens that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.arange(1.0, 9.0)[:, None], freeze=False)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.table(batch["input_ids"]).squeeze(-1)

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        used = batch["input_ids"] != 0
        return outputs[used].square().sum() / used.sum()


def sentences() -> DataSpec:
    """One batch of four sentences of 6, 1, 2 and 3 words, padded with zeros."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 0, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0], [3, 3, 3, 0, 0, 0]])
    return DataSpec([{"input_ids": ids}], get_num_tokens_in_batch=lambda batch: int((batch["input_ids"] != 0).sum()))


def test_microbatches_are_weighed_by_tokens_if_asked_to() -> None:
    """A loss per token is that of the batch with ``accumulate_train_batch_on_tokens``, and only with it."""

    def gradient(**arguments: Any) -> torch.Tensor:
        return gradients_of(build(model=Words(), train_dataloader=sentences(), **arguments))["table.weight"]

    whole = gradient()
    by_samples = gradient(device_train_microbatch_size=2)
    by_tokens = gradient(device_train_microbatch_size=2, accumulate_train_batch_on_tokens=True)
    assert torch.allclose(by_tokens, whole, rtol=1e-6)
    assert not torch.allclose(by_samples, whole, rtol=1e-2)


def test_weighing_by_tokens_needs_tokens() -> None:
    """A batch in which none are found says how to count them."""
    arguments: dict[str, Any] = {"accumulate_train_batch_on_tokens": True, "device_train_microbatch_size": 2}
    with build(**arguments) as trainer, pytest.raises(TrainingError, match="get_num_tokens_in_batch"):
        trainer.fit()


def test_a_data_spec_may_split_batches_its_own_way() -> None:
    """``split_batch`` decides what a microbatch is."""
    seen: list[list[int]] = []

    def every_other(batch: Any, microbatch_size: int) -> list[Any]:
        return [[part[start::2] for part in batch] for start in range(2)]

    spec = DataSpec(loader(4, shuffle=False), split_batch=every_other)
    note = At(Event.BEFORE_FORWARD, lambda state: seen.append(state.batch[2].tolist()))
    arguments: dict[str, Any] = {"max_duration": "1ba", "device_train_microbatch_size": 3}
    with build(train_dataloader=spec, callbacks=note, **arguments) as trainer:
        trainer.fit()
    assert seen == [[0, 2], [1, 3]]


def test_the_batch_is_whole_again_after_its_microbatches() -> None:
    """Handlers see the microbatch while it is trained on, and the batch before and after."""
    sizes: list[int] = []
    note = lambda state: sizes.append(len(state.batch[0]))
    events = [Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END]
    callbacks = [At(event, note) for event in events]
    arguments: dict[str, Any] = {"max_duration": "1ba", "device_train_microbatch_size": 3}
    with build(callbacks=callbacks, **arguments) as trainer:
        trainer.fit()
    assert sizes == [4, 3, 1, 4, 4]


# ── automatic size ───────────────────────────────────────────────────────────────────────────────────────────────────
class Hungry(Net):
    """A model with batch norm, dropout and metrics, too large for more than ``limit`` samples at a time.

    It notices in its forward pass, in its loss, or only in the loss of the second microbatch.
    """

    def __init__(
        self, limit: int = 10**6, at: str = "forward", error: type[Exception] = torch.OutOfMemoryError
    ) -> None:
        super().__init__(dropout=0.5)
        self.norm = nn.BatchNorm1d(4)
        self.limit = limit
        self.at = at
        self.error = error
        self.fitted = 0

    def _allocate(self, samples: int) -> None:
        self.fitted += 1
        if samples > self.limit and (self.at != "second loss" or samples == 8 or self.fitted == 2):
            self.fitted = 0
            raise self.error(f"{samples} samples do not fit")

    def forward(self, batch: Any) -> torch.Tensor:
        if self.at == "forward":
            self._allocate(len(batch[0]))
        return self.layers(self.norm(batch[0]))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        if self.at != "forward":
            self._allocate(len(outputs))
        return super().loss(outputs, batch)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {"accuracy": MulticlassAccuracy(3, average="micro"), "mean": MeanMetric()}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        metric.update(outputs, *([batch[1]] if isinstance(metric, MulticlassAccuracy) else []))


def trained(model: Hungry, size: int | str, **arguments: Any) -> tuple[Trainer, torch.Tensor]:
    """A trainer that has trained ``model``, and the random number that comes next."""
    torch.manual_seed(7)
    model.apply(lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None)  # type: ignore[union-attr]
    data = loader(16, batch_size=8)
    with build(model=model, train_dataloader=data, device_train_microbatch_size=size, **arguments) as trainer:
        trainer.fit()
        return trainer, torch.rand(())


@pytest.mark.parametrize("at", ["forward", "loss", "second loss"])
def test_auto_equals_the_size_it_finds(at: str) -> None:
    """Eight do not fit, four do not fit, two do: then all is as with two from the start, bit for bit.

    Weights, optimizer, the statistics of batch norm, metrics and random numbers: of what was tried, nothing is left.
    """
    auto, next_of_auto = trained(Hungry(limit=3, at=at), "auto", max_duration="1ep")
    fixed, next_of_fixed = trained(Hungry(), 2, max_duration="1ep")
    assert auto.state.device_train_microbatch_size == 2
    assert same(weights(auto), weights(fixed))
    assert all(torch.equal(a, b) for a, b in zip(optimizer_state(auto), optimizer_state(fixed), strict=True))
    assert auto.state.train_metric_values == fixed.state.train_metric_values
    assert next_of_auto == next_of_fixed


def test_auto_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    """Each step down is logged, once: the size that was found is kept."""
    caplog.set_level(logging.INFO, "composerlite.trainer")
    trained(Hungry(limit=3), "auto")
    said = [record.message for record in caplog.records if "out of memory" in record.message]
    assert said == [
        "out of memory with microbatches of 8 samples: trying 4",
        "out of memory with microbatches of 4 samples: trying 2",
    ]


class Library(Net):
    """Raises ``error`` for more than two samples."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, batch: Any) -> torch.Tensor:
        if len(batch[0]) > 2:
            raise self.error
        return super().forward(batch)


def allocation_error() -> Exception:
    """The error of torch for more memory than the host has."""
    try:
        torch.empty(1 << 50)
    except RuntimeError as e:
        return e
    raise AssertionError


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
        allocation_error(),
        MemoryError(),
    ],
    ids=str,
)
def test_errors_of_libraries_and_of_the_host_are_out_of_memory(error: Exception) -> None:
    """With 'auto' the batch is halved."""
    trainer, _ = trained(Library(error), "auto")
    assert trainer.state.device_train_microbatch_size == 2


class Greedy(torch.optim.SGD):
    """Has no memory for its state."""

    def step(self, closure: Any = None) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_an_optimizer_out_of_memory_is_told_as_that() -> None:
    """Smaller pieces of a batch would not help: the error says what does."""
    model = Net()
    optimizer = Greedy(model.parameters(), lr=0.1)
    trainer = build(model=model, optimizers=optimizer, device_train_microbatch_size="auto")
    with trainer, pytest.raises(TrainingError, match=r"out of memory in the optimizer's step.*shard it") as raised:
        trainer.fit()
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_a_sample_that_does_not_fit_is_an_error() -> None:
    """There is nothing left to halve: the error says so and names its cause."""
    events = Events()
    with build(model=Hungry(limit=0), device_train_microbatch_size="auto", callbacks=events) as trainer:
        with pytest.raises(TrainingError, match="one sample") as raised:
            trainer.fit()
        assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
        assert trainer.state.timestamp.batch == "0ba"
    assert events.events.count(Event.BEFORE_TRAIN_BATCH) == 3  # four, two, one


@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyError])
def test_other_errors_are_not_swallowed(error: type[Exception]) -> None:
    """Only running out of memory is tried again."""
    events = Events()
    model = Hungry(limit=0, error=error)
    trainer = build(model=model, device_train_microbatch_size="auto", callbacks=events)
    with trainer, pytest.raises(error, match="4 samples do not fit"):
        trainer.fit()
    assert events.events.count(Event.BEFORE_TRAIN_BATCH) == 1


def test_a_fixed_size_does_not_give_way() -> None:
    """Without 'auto' the user's size stands, and running out of memory is what it is."""
    trainer = build(model=Hungry(limit=1), device_train_microbatch_size=2)
    with trainer, pytest.raises(torch.OutOfMemoryError):
        trainer.fit()


# ── metrics, precision ───────────────────────────────────────────────────────────────────────────────────────────────
def test_train_metrics_count_every_sample_once() -> None:
    """Over microbatches as over batches."""
    parts, _ = trained(Hungry(), 3)
    state = parts.state
    assert state.train_metrics["mean"].update_count == 6  # three microbatches in each of the two batches of an epoch
    assert state.train_metric_values["accuracy"] in [n / 16 for n in range(17)]


def test_bf16_trains_on_a_cpu() -> None:
    """Forward in bfloat16, parameters and optimizer in float32, the loss goes down."""
    kinds, logged = set[torch.dtype](), InMemoryLogger()
    callbacks = At(Event.AFTER_FORWARD, lambda state: kinds.add(state.outputs.dtype))
    arguments: dict[str, Any] = {"loggers": logged, "callbacks": callbacks, "max_duration": "40ep"}
    with build(precision="amp_bf16", train_dataloader=DataLoader(Points(), batch_size=20), **arguments) as trainer:
        trainer.fit()
    losses = [value for _, value in logged.data["loss/train/total"]]
    assert kinds == {torch.bfloat16}
    assert {parameter.dtype for parameter in trainer.state.model.parameters()} == {torch.float32}
    assert losses[-1] < 0.8 * losses[0]


def test_fp16_is_refused_on_a_cpu() -> None:
    """It needs a GPU: said when the trainer is built, or when fit is asked for it."""
    with pytest.raises(ConfigError, match=r"precision='amp_fp16' needs a CUDA GPU, not 'cpu': use 'amp_bf16'"):
        build(precision="amp_fp16")
    with build() as trainer:
        with pytest.raises(ConfigError, match="amp_fp16"):
            trainer.fit(precision="amp_fp16")
        assert trainer.state.precision is Precision.FP32
