"""The training loop: which events happen when, where training ends, and that it computes what a plain loop computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from trainer_parts import At, Events, Net, Seen, Streamed, build, loader, optimizer_state, same, weights

from composerlite import Callback, DataSpec, Evaluator, Event, Logger, State, Time
from composerlite.core import seed_all
from composerlite.errors import ConfigError
from composerlite.loggers import InMemoryLogger
from composerlite.optim import LinearScheduler

# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────
EPOCHS, BATCHES, MICROBATCHES = 2, 10, 20
EVALUATIONS, EVAL_BATCHES, EVAL_MICROBATCHES = 3, 6, 12  # one per epoch and one by hand, of two batches in two parts
COUNTS = {
    Event.INIT: 1,
    Event.BEFORE_LOAD: 1,
    Event.AFTER_LOAD: 1,
    Event.FIT_START: 1,
    Event.ITERATION_START: EPOCHS,
    Event.EPOCH_START: EPOCHS,
    Event.BEFORE_DATALOADER: BATCHES + EPOCHS,  # once more per epoch: the loader says that it has ended
    Event.AFTER_DATALOADER: BATCHES,
    Event.BATCH_START: BATCHES,
    Event.BEFORE_TRAIN_BATCH: BATCHES,
    Event.BEFORE_FORWARD: MICROBATCHES,
    Event.AFTER_FORWARD: MICROBATCHES,
    Event.BEFORE_LOSS: MICROBATCHES,
    Event.AFTER_LOSS: MICROBATCHES,
    Event.BEFORE_BACKWARD: MICROBATCHES,
    Event.AFTER_BACKWARD: MICROBATCHES,
    Event.AFTER_TRAIN_BATCH: BATCHES,
    Event.BATCH_END: BATCHES,
    Event.BATCH_CHECKPOINT: BATCHES,
    Event.EPOCH_END: EPOCHS,
    Event.EPOCH_CHECKPOINT: EPOCHS,
    Event.ITERATION_END: EPOCHS,
    Event.ITERATION_CHECKPOINT: EPOCHS,
    Event.FIT_END: 1,
    Event.EVAL_BEFORE_ALL: EVALUATIONS,
    Event.EVAL_START: EVALUATIONS,
    Event.EVAL_BATCH_START: EVAL_BATCHES,
    Event.EVAL_BEFORE_FORWARD: EVAL_MICROBATCHES,
    Event.EVAL_AFTER_FORWARD: EVAL_MICROBATCHES,
    Event.EVAL_BATCH_END: EVAL_BATCHES,
    Event.EVAL_END: EVALUATIONS,
    Event.EVAL_AFTER_ALL: EVALUATIONS,
    Event.EVAL_STANDALONE_START: 1,
    Event.EVAL_STANDALONE_END: 1,
    Event.PREDICT_START: 1,
    Event.PREDICT_BATCH_START: 3,
    Event.PREDICT_BEFORE_FORWARD: 3,
    Event.PREDICT_AFTER_FORWARD: 3,
    Event.PREDICT_BATCH_END: 3,
    Event.PREDICT_END: 1,
}


def test_every_event_happens_as_often_as_the_table_says() -> None:
    """Two epochs of five batches in two microbatches, an evaluation after each, one by hand, and a prediction."""
    events = Events()
    evaluator = Evaluator(label="eval", dataloader=loader(8), device_eval_microbatch_size=2)
    with build(callbacks=events, eval_dataloader=evaluator, device_train_microbatch_size=2) as trainer:
        trainer.fit()
        trainer.eval()
        trainer.predict(loader(12))
    assert Counter(events.events) == COUNTS
    assert COUNTS.keys() == set(Event)


MICROBATCH = ["before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"]
ONE_BATCH = [
    *("before_dataloader", "after_dataloader", "batch_start", "before_train_batch"),
    *MICROBATCH,
    *MICROBATCH,
    *("after_train_batch", "batch_end"),
]
EVALUATION = [
    *("eval_before_all", "eval_start"),
    *("eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"),
    *("eval_end", "eval_after_all"),
]


def test_events_come_in_the_order_of_the_documentation() -> None:
    """A run of one epoch of one batch: evaluation follows BATCH_END and EPOCH_END, saving follows evaluation."""
    events = Events()
    interval = lambda state, event: event is Event.BATCH_END
    evaluators = [
        Evaluator(label="batchwise", dataloader=loader(4), eval_interval=interval),
        Evaluator(label="epochwise", dataloader=loader(4), eval_interval="1ep"),
    ]
    arguments: dict[str, Any] = {"train_dataloader": loader(4), "max_duration": "1ep"}
    with build(callbacks=events, eval_dataloader=evaluators, device_train_microbatch_size=2, **arguments) as trainer:
        trainer.fit()
    assert events.events == [
        *("init", "before_load", "after_load", "fit_start", "iteration_start", "epoch_start"),
        *ONE_BATCH,
        *EVALUATION,
        *("batch_checkpoint", "before_dataloader", "epoch_end"),
        *EVALUATION,
        *("epoch_checkpoint", "iteration_end", "iteration_checkpoint", "fit_end"),
    ]


class Timeline(Callback):
    """What the timestamp says at each event of training."""

    def __init__(self) -> None:
        self.at: list[tuple[Event, int, int, int]] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        now = state.timestamp
        self.at.append((event, int(now.epoch), int(now.batch), int(now.batch_in_epoch)))


def test_the_timestamp_counts_a_batch_before_its_end_is_told() -> None:
    """At BATCH_END the batch is counted and the optimizer has stepped; at EPOCH_END the epoch is counted."""
    timeline, moved = Timeline(), []
    with build(train_dataloader=loader(8), max_duration="1ep", callbacks=timeline) as trainer:
        before = weights(trainer)
        trainer.state.callbacks += [
            At(Event.AFTER_TRAIN_BATCH, lambda state: moved.append(not same(before, weights(trainer)))),
            At(Event.BATCH_END, lambda state: moved.append(not same(before, weights(trainer)))),
        ]
        trainer.fit()
    assert [step for step in timeline.at if step[0] in (Event.BATCH_START, Event.AFTER_TRAIN_BATCH)] == [
        (Event.BATCH_START, 0, 0, 0),
        (Event.AFTER_TRAIN_BATCH, 0, 0, 0),
        (Event.BATCH_START, 0, 1, 1),
        (Event.AFTER_TRAIN_BATCH, 0, 1, 1),
    ]
    assert [step for step in timeline.at if step[0] in (Event.BATCH_END, Event.EPOCH_END)] == [
        (Event.BATCH_END, 0, 1, 1),
        (Event.BATCH_END, 0, 2, 2),
        (Event.EPOCH_END, 1, 2, 0),
    ]
    assert moved[:2] == [False, True]


def test_samples_tokens_and_clocks_are_counted() -> None:
    """A short last batch counts for what it is; tokens are what the DataSpec says; clocks only move on."""
    spec = DataSpec(loader(18), get_num_tokens_in_batch=lambda batch: 10 * len(batch[0]))
    with build(train_dataloader=spec) as trainer:
        trainer.fit()
    now = trainer.state.timestamp
    assert (now.epoch, now.batch, now.sample, now.token) == ("2ep", "10ba", "36sp", "360tok")
    assert (now.batch_in_epoch, now.sample_in_epoch, now.token_in_epoch) == ("0ba", "0sp", "0tok")
    assert now.total_wct > timedelta(0)
    assert trainer.state.previous_timestamp is not None


# ── where training ends ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("max_duration", "batches", "epochs_ended"),
    [
        (2, 10, 2),
        ("2ep", 10, 2),
        (Time(1, "ep"), 5, 1),
        ("7ba", 7, 1),
        ("10ba", 10, 2),  # the last batch of an epoch ends the epoch as well
        ("26sp", 7, 1),  # reached within the seventh batch
        ("20sp", 5, 1),
        ("81tok", 7, 1),
        ("60tok", 5, 1),
        ("2iter", 10, 2),
        ("1m", 6, 1),
        (timedelta(seconds=45), 5, 1),
        ("100s", 10, 2),
    ],
)
def test_training_ends_where_max_duration_says(max_duration: Any, batches: int, epochs_ended: int) -> None:
    """In every unit, within an epoch and at its edge. A batch has four samples and twelve tokens and takes 10 s."""
    seen, events = Seen(), Events()
    spec = DataSpec(loader(), get_num_tokens_in_batch=lambda batch: 3 * len(batch[0]))

    def ten_seconds_pass(state: State) -> None:
        state.timestamp = state.timestamp.copy(total_wct=timedelta(seconds=10 * int(state.timestamp.batch)))

    callbacks = [seen, events, At(Event.BATCH_END, ten_seconds_pass)]
    with build(train_dataloader=spec, max_duration=max_duration, callbacks=callbacks) as trainer:
        trainer.fit()
    assert len(seen.steps) == batches
    assert events.events.count(Event.EPOCH_END) == events.events.count(Event.EPOCH_CHECKPOINT) == epochs_ended
    assert trainer.state.timestamp.epoch == Time(epochs_ended, "ep")
    assert events.events[-1] is Event.FIT_END


def test_a_loader_without_length_can_be_trained_on() -> None:
    """It is iterated anew each epoch, and an epoch ends when it ends."""
    seen = Seen()
    with build(train_dataloader=Streamed(), max_duration="2ep", callbacks=seen) as trainer:
        trainer.fit()
    assert trainer.state.timestamp.epoch == "2ep"
    assert seen.numbers == [list(range(first, first + 4)) for first in (0, 4, 8, 12, 16)] * 2


@pytest.mark.parametrize(("subset", "per_epoch"), [(3, 3), (5, 5), (99, 5), (-1, 5)])
def test_train_subset_num_batches_limits_an_epoch(subset: int, per_epoch: int) -> None:
    """Each epoch has so many batches of its own shuffle, and the length that handlers see says so."""
    seen, lengths = Seen(), []
    callbacks = [seen, At(Event.EPOCH_START, lambda state: lengths.append(state.dataloader_len))]
    with build(train_subset_num_batches=subset, callbacks=callbacks) as trainer:
        trainer.fit()
    assert len(seen.steps) == 2 * per_epoch
    assert lengths == [f"{per_epoch}ba"] * 2
    assert trainer.state.timestamp.epoch == "2ep"
    assert seen.numbers[:per_epoch] != seen.numbers[per_epoch:]


@pytest.mark.parametrize("length", [Time(2, "ep"), Time(100, "tok")], ids=str)
def test_an_iteration_has_the_length_it_is_given(length: Time) -> None:
    """Four epochs in iterations of two epochs, or of the tokens of two."""
    timeline = Timeline()
    spec = DataSpec(loader(), get_num_tokens_in_batch=lambda batch: 3 * len(batch[0]))
    with build(train_dataloader=spec, max_duration="4ep", callbacks=timeline) as trainer:
        trainer.state.iteration_length = length
        trainer.fit()
    of_iterations = [step[:2] for step in timeline.at if "iteration" in step[0].value]
    assert of_iterations == [
        (Event.ITERATION_START, 0),
        (Event.ITERATION_END, 2),
        (Event.ITERATION_CHECKPOINT, 2),
        (Event.ITERATION_START, 2),
        (Event.ITERATION_END, 4),
        (Event.ITERATION_CHECKPOINT, 4),
    ]
    assert trainer.state.timestamp.iteration == "2iter"


def test_stop_training_ends_it_after_the_batch() -> None:
    """The batch is trained to its end, the epoch is not ended, FIT_END happens."""
    events = Events()

    def stop_at_two(state: State) -> None:
        if state.timestamp.batch == "1ba":
            state.stop_training()

    with build(callbacks=[events, At(Event.BATCH_END, stop_at_two)]) as trainer:
        trainer.fit()
    assert trainer.state.timestamp.batch == "1ba"
    assert Event.EPOCH_END not in events.events
    assert events.events[-2:] == [Event.BATCH_CHECKPOINT, Event.FIT_END]


class Once:
    """Batches that can be iterated once only, as a generator."""

    def __init__(self) -> None:
        self._batches = iter(loader())

    def __iter__(self) -> Iterator[Any]:
        return self._batches


def test_a_loader_that_gives_nothing_is_an_error() -> None:
    """A generator has nothing left for the second epoch: training says so rather than count empty epochs for ever."""
    with (
        build(train_dataloader=Once()) as trainer,
        pytest.raises(ConfigError, match=r"Once gave no batch.*again each"),
    ):
        trainer.fit()
    assert trainer.state.timestamp.batch == "5ba"


def test_an_end_in_tokens_needs_tokens() -> None:
    """Batches without tokens never bring an end in tokens nearer: said after one epoch."""
    with build(max_duration="100tok") as trainer, pytest.raises(ConfigError, match="get_num_tokens_in_batch"):
        trainer.fit()
    assert trainer.state.timestamp.batch == "5ba"


# ── what is computed ─────────────────────────────────────────────────────────────────────────────────────────────────
def plain_loop(epochs: int, schedule: bool = False) -> tuple[Net, list[torch.Tensor], list[float], torch.Tensor]:
    """The loop that everyone writes: model, optimizer state, losses, and the next random number."""
    torch.manual_seed(7)
    model = Net(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    batches, losses = loader(18), []
    seed_all(3)
    for _ in range(epochs):
        for inputs, targets, _ in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model.layers(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if schedule:
            scheduler.step()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return model, state, losses, torch.rand(())


@pytest.mark.parametrize("schedule", [False, True], ids=["", "StepLR"])
def test_training_computes_what_a_plain_loop_computes(schedule: bool) -> None:
    """Shuffled data, dropout, momentum, a schedule: weights, optimizer, losses and generators, bit for bit."""
    model, state, losses, drawn = plain_loop(3, schedule)
    logged = InMemoryLogger()
    torch.manual_seed(7)
    net = Net(dropout=0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedulers = StepLR(optimizer, step_size=1, gamma=0.5) if schedule else None
    arguments: dict[str, Any] = {"train_dataloader": loader(18), "loggers": logged, "max_duration": "3ep"}
    with build(model=net, optimizers=optimizer, schedulers=schedulers, **arguments) as trainer:
        trainer.fit()
        assert torch.rand(()) == drawn
        assert same(weights(trainer), model.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(optimizer_state(trainer), state, strict=True))
    assert [value for _, value in logged.data["loss/train/total"]] == losses


class Rates(Callback):
    """The learning rate that each batch was trained with."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


def rates(scheduler: Any, **arguments: Any) -> list[float]:
    """The learning rates of two epochs of five batches; a torch scheduler is given as a function of the optimizer."""
    seen, model = Rates(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = scheduler if isinstance(scheduler, LinearScheduler) else scheduler(optimizer)
    with build(model=model, optimizers=optimizer, schedulers=scheduler, callbacks=seen, **arguments) as trainer:
        trainer.fit()
    return [round(rate, 6) for rate in seen.rates]


@pytest.mark.parametrize(
    ("make", "every_batch", "data", "expected"),
    [
        (LinearScheduler(), None, loader, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (LinearScheduler(), False, loader, [1.0] * 5 + [0.5] * 5),
        (LinearScheduler(), False, Streamed, [1.0] * 5 + [0.5] * 5),
        (lambda optimizer: StepLR(optimizer, 1, 0.5), None, loader, [1.0] * 5 + [0.5] * 5),
        (lambda optimizer: StepLR(optimizer, 4, 0.5), True, loader, [1.0] * 4 + [0.5] * 4 + [0.25] * 2),
    ],
)
def test_schedulers_step_each_batch_or_epoch(make: Any, every_batch: bool | None, data: Any, expected: Any) -> None:
    """Composer's step each batch and torch's each epoch, unless told otherwise."""
    assert rates(make, step_schedulers_every_batch=every_batch, train_dataloader=data()) == expected


class Losses(Net):
    """A model of two losses, given as ``form`` of them."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return self.form(super().loss(outputs, batch), outputs.square().mean())


@pytest.mark.parametrize(
    ("form", "names"),
    [
        (lambda a, b: a + b, []),
        (lambda a, b: [a, b], ["loss0", "loss1"]),
        (lambda a, b: (a, b), ["loss0", "loss1"]),
        (lambda a, b: {"first": a, "second": b}, ["first", "second"]),
        (lambda a, b: {"total": a + b, "first": a}, ["first"]),
    ],
    ids=["tensor", "list", "tuple", "dict", "dict with total"],
)
def test_a_model_may_have_several_losses(form: Any, names: list[str]) -> None:
    """They are added up to train on, whatever they come in, and each is logged by name."""
    torch.manual_seed(7)
    model, logged = Losses(form), InMemoryLogger()
    with build(model=model, loggers=logged, device_train_microbatch_size=3) as trainer:
        trainer.fit()
    torch.manual_seed(7)
    with build(model=Losses(lambda a, b: a + b), device_train_microbatch_size=3) as plain:
        plain.fit()
    assert same(weights(trainer), weights(plain))
    assert {name for name in logged.data if name.startswith("loss/")} == {
        f"loss/train/{name}" for name in ["total", *names]
    }


def test_batch_transforms_change_what_is_trained_on() -> None:
    """Once per batch, and once per microbatch."""
    sizes: list[tuple[str, int]] = []

    def note(kind: str) -> Any:
        def transform(batch: Any) -> Any:
            sizes.append((kind, len(batch[0])))
            return [batch[0] * 0, *batch[1:]]

        return transform

    spec = DataSpec(loader(4), batch_transforms=note("batch"), microbatch_transforms=note("microbatch"))
    seen: list[float] = []
    inputs = At(Event.AFTER_FORWARD, lambda state: seen.append(float(state.batch[0].abs().sum())))
    arguments: dict[str, Any] = {"max_duration": "1ba", "device_train_microbatch_size": 3}
    with build(train_dataloader=spec, callbacks=inputs, **arguments) as trainer:
        trainer.fit()
    assert sizes == [("batch", 4), ("microbatch", 3), ("microbatch", 1)]
    assert seen == [0.0, 0.0]


# ── when something fails ─────────────────────────────────────────────────────────────────────────────────────────────
class Broken(Exception):  # noqa: N818 - a stand-in for any exception
    """What goes wrong in these tests."""


class Closing(Callback):
    """Says when it is closed; fails then, if asked to."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.closed = 0

    def close(self, state: State, logger: Logger) -> None:
        self.closed += 1
        if self.fails:
            raise Broken("closing")


def broken(state: State) -> None:
    """Fails."""
    raise Broken(f"at batch {int(state.timestamp.batch)}")


def test_an_exception_leaves_fit_and_everything_is_closed() -> None:
    """What a callback raises is what the user gets; every callback is closed, once."""
    parts = [Closing(), Closing()]
    with (
        pytest.raises(Broken, match="at batch 0"),
        build(callbacks=[parts[0], At(Event.AFTER_LOSS, broken), parts[1]]) as t,
    ):
        t.fit()
    assert [part.closed for part in parts] == [1, 1]


def test_what_fails_to_close_is_raised_after_all_were_closed() -> None:
    """One failure is raised as it is."""
    parts = [Closing(), Closing(fails=True), Closing()]
    trainer = build(callbacks=parts)
    trainer.fit()
    with pytest.raises(Broken, match="closing"):
        trainer.close()
    assert [part.closed for part in parts] == [1, 1, 1]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_one_callback_closes_leaves_none_open(interrupt: type[BaseException]) -> None:
    """Ctrl-C in the wait of one, such as for an upload: the others are closed, and the interrupt is raised, with
    what failed to close as its context."""
    parts = [Closing(fails=True), Closing(), Closing()]

    def interrupted(*_: object) -> None:
        raise interrupt

    parts[1].close = interrupted  # type: ignore[method-assign]
    trainer = build(callbacks=parts)
    trainer.fit()
    with pytest.raises(interrupt) as caught:
        trainer.close()
    trainer.close()
    assert [part.closed for part in parts] == [1, 0, 1]
    assert isinstance(caught.value.__context__, Broken)


def test_training_can_go_on_after_an_exception() -> None:
    """The batch that failed is trained on by the next call of fit, and the epoch goes on from there."""
    seen, whole, failed = Seen(), Seen(), []

    def fail_once(state: State) -> None:
        if state.timestamp.batch == "2ba" and not failed:
            failed.append(True)
            raise Broken

    with build(callbacks=[seen, At(Event.BATCH_START, fail_once)]) as trainer:
        with pytest.raises(Broken):
            trainer.fit()
        trainer.fit()
    with build(callbacks=whole) as trainer:
        trainer.fit()
    assert seen.numbers == whole.numbers
