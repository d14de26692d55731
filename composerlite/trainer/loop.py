"""The training loop, from top to bottom."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field

import torch

from composerlite.checkpoint import rng
from composerlite.core import DataSpec, Engine, Event, Logger, State, TimeUnit, move_to_device
from composerlite.errors import ConfigError
from composerlite.trainer.dataloading import DataPosition
from composerlite.trainer.evaluate import EvaluationSchedule, log_metrics
from composerlite.trainer.step import TrainStep
from composerlite.types import Batch

__all__ = ["Loop", "run"]

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Loop:
    """What the training loop works with.

    Attributes:
        state, engine, logger: as everywhere.
        spec: the training data. position: where in it training is.
        step: trains on one batch.
        evaluation: runs evaluators when they are due.
        subset_num_batches: batches per epoch; -1 for all.
        step_schedulers_every_batch: when learning rates change; else once per epoch.
        spin_dataloaders: in the first epoch after a resume leave out what was seen of it.
        rng_states: the generators' states to start from, one per rank; ``None`` to go on from where they are.
        moves_batches: whether batches go to another device than the CPU.
    """

    state: State
    engine: Engine
    logger: Logger
    spec: DataSpec
    position: DataPosition
    step: TrainStep
    evaluation: EvaluationSchedule
    subset_num_batches: int = -1
    step_schedulers_every_batch: bool = True
    spin_dataloaders: bool = True
    rng_states: list[dict[str, object]] | None = None
    moves_batches: bool = field(init=False)

    def __post_init__(self) -> None:
        self.moves_batches = self.state.device.type != "cpu"


def run(loop: Loop) -> None:
    """Train until ``state.max_duration``."""
    state, engine = loop.state, loop.engine
    state.model.train()
    engine.run_event(Event.FIT_START)
    if loop.rng_states is not None:
        rng.restore(loop.rng_states, state.rank)

    if int(state.timestamp.batch_in_epoch) == 0:
        _end_iteration_if_due(loop)  # resumed from a checkpoint of the last epoch of an iteration
    while not state.training_is_over:
        if int(state.timestamp.batch_in_epoch) == 0:
            if int(state.timestamp.epoch_in_iteration) == 0:
                engine.run_event(Event.ITERATION_START)
            engine.run_event(Event.EPOCH_START)
            loop.logger.log_metrics({"time/epoch": int(state.timestamp.epoch)})
            for metric in state.train_metrics.values():
                metric.reset()

        finished, exhausted = _epoch(loop)
        if state.train_metrics:
            state.train_metric_values.update(log_metrics(loop.logger, state.train_metrics, "train"))
        if not finished:
            break
        loop.position.finish_epoch(exhausted=exhausted)
        _end_epoch(loop)

    engine.run_event(Event.FIT_END)


def _epoch(loop: Loop) -> tuple[bool, bool]:
    """Train on what is left of the epoch.

    Returns:
        Whether the epoch is over (false: training ended within it), and whether the loader itself ended it.
    """
    state, engine = loop.state, loop.engine
    done = int(state.timestamp.batch_in_epoch)
    batches = loop.position.epoch(int(state.timestamp.epoch), done if loop.spin_dataloaders else 0)
    if loop.subset_num_batches >= 0:
        batches = itertools.islice(batches, max(0, loop.subset_num_batches - done))
    clock = time.perf_counter_ns() // 1000
    while True:
        engine.run_event(Event.BEFORE_DATALOADER)
        try:
            batch = next(batches)
        except StopIteration:
            _check_progress(state, done)
            return True, loop.subset_num_batches < 0 or int(state.timestamp.batch_in_epoch) < loop.subset_num_batches
        clock = _batch(loop, batch, clock)
        done += 1
        if state.training_is_over:
            return _at_end_of_epoch(state), False


def _batch(loop: Loop, batch: Batch, clock: int) -> int:
    """Train on one batch and do what follows it; the time at its end, in microseconds."""
    state, spec, on, logger = loop.state, loop.spec, loop.engine.handlers, loop.logger
    state.batch = batch
    samples, tokens = spec.get_num_samples_in_batch(batch), spec.get_num_tokens_in_batch(batch)
    for handler in on[Event.AFTER_DATALOADER]:
        handler(state, logger)
    if loop.moves_batches:
        state.batch = move_to_device(state.batch, state.device)
    if spec.batch_transforms is not None:
        state.batch = spec.batch_transforms(state.batch)
    for handler in on[Event.BATCH_START]:
        handler(state, logger)

    loop.step.run(samples)

    now = time.perf_counter_ns() // 1000
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.after_batch(samples, tokens, now - clock)
    if loop.step_schedulers_every_batch:  # they look at the timestamp: the rate of the next batch is that of now
        for scheduler in state.schedulers:
            scheduler.step()
    if logger.destinations:
        _log_batch(loop)
    for handler in on[Event.BATCH_END]:
        handler(state, logger)
    if state.evaluators and loop.evaluation.run_due(Event.BATCH_END):
        now = time.perf_counter_ns() // 1000  # evaluation is not training time; saving a checkpoint is
    for handler in on[Event.BATCH_CHECKPOINT]:
        handler(state, logger)
    return now


def _end_epoch(loop: Loop) -> None:
    state, engine = loop.state, loop.engine
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.to_next_epoch()
    if not loop.step_schedulers_every_batch:
        for scheduler in state.schedulers:
            scheduler.step()
    engine.run_event(Event.EPOCH_END)
    loop.evaluation.run_due(Event.EPOCH_END)
    engine.run_event(Event.EPOCH_CHECKPOINT)
    _end_iteration_if_due(loop)


def _end_iteration_if_due(loop: Loop) -> None:
    state, engine = loop.state, loop.engine
    length = state.iteration_length
    done = state.timestamp.epoch_in_iteration if length.unit is TimeUnit.EPOCH else state.timestamp.token_in_iteration
    if done >= length:
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_iteration()
        engine.run_event(Event.ITERATION_END)
        loop.evaluation.run_due(Event.ITERATION_END)
        engine.run_event(Event.ITERATION_CHECKPOINT)


def _at_end_of_epoch(state: State) -> bool:
    """Whether the batch that ended training was the last of its epoch: then the epoch has ended as well."""
    return state.dataloader_len is not None and state.timestamp.batch_in_epoch >= state.dataloader_len


def _check_progress(state: State, done: int) -> None:
    """Refuse to go on for ever: an epoch must have brought the end nearer."""
    if state.max_duration is not None and state.max_duration.unit is TimeUnit.TOKEN and not int(state.timestamp.token):
        raise ConfigError(
            f"max_duration={state.max_duration} counts tokens and the first epoch had none: pass "
            "DataSpec(loader, get_num_tokens_in_batch=lambda batch: …)."
        )
    if done == 0:
        raise ConfigError(
            f"the train_dataloader {type(state.dataloader).__name__} gave no batch: training could not end. A "
            "generator can be iterated once only; pass something that starts anew each epoch, and check drop_last."
        )


def _log_batch(loop: Loop) -> None:
    state = loop.state
    now = state.timestamp
    losses = {
        name: loss.item() if isinstance(loss, torch.Tensor) else loss for name, loss in state.total_loss_dict.items()
    }
    counts = {
        "time/epoch": int(now.epoch),
        "time/batch": int(now.batch),
        "time/batch_in_epoch": int(now.batch_in_epoch),
        "time/sample": int(now.sample),
        "time/token": int(now.token),
    }
    loop.logger.log_metrics({**losses, **counts})
