"""The training loop, from top to bottom."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import NoReturn

from torch.optim.lr_scheduler import ReduceLROnPlateau

from composerlite.core import DataSpec, Engine, Event, Logger, State, TimeUnit, move_to_device
from composerlite.core.data import count_samples
from composerlite.core.interruption import BatchAbandonedError
from composerlite.core.measured import note_not_finite, read_losses
from composerlite.devices import rng
from composerlite.errors import ConfigError, TrainingError
from composerlite.trainer.data.dataloading import DataPosition
from composerlite.trainer.evaluate import EvaluationLoop, log_metrics
from composerlite.trainer.ranks.communicator import Counted, Ranks
from composerlite.trainer.rollback import DataRollback
from composerlite.trainer.step import TrainStep
from composerlite.types import Batch

__all__ = ["Loop", "has_open_end", "run"]

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Loop:
    """The parts that the training loop works with.

    Attributes:
        state, engine, logger: as everywhere.
        spec: the training data. position: where in it training is.
        step: trains on one batch.
        evaluation: runs evaluators when they are due.
        subset_num_batches: batches per epoch; -1 for all.
        step_schedulers_every_batch: when learning rates change; else once per epoch.
        spin_dataloaders: in the first epoch after a resume leave out what was seen of it.
        ranks: the other ones. data_ranks: into how many shares the data are divided.
        asks: before each batch the ranks tell each other how much data they have. They do without where all know the
            samples of all, from the first batch on if that has no tokens. may_stop_asking: whether they know.
        logs: whether any rank logs.
        moves_batches: whether batches go to another device than the CPU.
        is_alone: whether there is no other rank.
        share: how much the last batch of this rank counts, see :meth:`TrainStep.run`.
    """

    state: State
    engine: Engine
    logger: Logger
    spec: DataSpec
    position: DataPosition
    step: TrainStep
    evaluation: EvaluationLoop
    ranks: Ranks
    subset_num_batches: int
    step_schedulers_every_batch: bool
    spin_dataloaders: bool
    data_ranks: int = field(init=False)
    is_alone: bool = field(init=False)
    moves_batches: bool = field(init=False)
    logs: bool = field(init=False)
    asks: bool = field(init=False, default=True)
    may_stop_asking: bool = field(init=False, default=False)
    share: float = field(init=False, default=1.0)

    @property
    def agrees_at_end(self) -> bool:
        """True if ranks tell each other at the end of a batch who has asked for the end of training.

        Else they do so when they count the next batch. Whom a clock stops does not get as far as that.
        """
        end = self.state.max_duration
        return not self.asks or (end is not None and end.unit is TimeUnit.SECOND)

    def __post_init__(self) -> None:
        self.moves_batches = self.state.device.type != "cpu"
        self.data_ranks = self.ranks.share.world_size
        self.is_alone = self.state.world_size == 1
        communicator = self.ranks.communicator
        self.logs = communicator.any(bool(self.logger.destinations))
        knows = self.position.knows_samples() and self.spec.get_num_samples_in_batch is count_samples
        self.may_stop_asking = communicator.same(self.subset_num_batches) and not communicator.any(not knows)


def run(loop: Loop) -> None:
    """Train until ``state.max_duration``."""
    state, engine = loop.state, loop.engine
    state.model.train()
    engine.run_event(Event.FIT_START)
    if state.resumed.generators is not None:
        rng.restore(state.resumed.generators, state.rank)
        state.resumed.generators = None

    if state.interruption.evaluation is not None:
        _evaluate_what_was_interrupted(loop)
    elif int(state.timestamp.batch_in_epoch) == 0:
        _finish_iteration_if_due(loop)  # resumed from a checkpoint of the last epoch of an iteration
    ends = int(state.timestamp.batch_in_epoch) > 0 and has_open_end(state)
    while ends or not state.training_is_over:
        # The first batch counts as slow: workers start. The loader draws its order when the epoch begins.
        before = _before_slow_batch(loop, is_first=True)
        if int(state.timestamp.batch_in_epoch) == 0:
            if int(state.timestamp.epoch_in_iteration) == 0:
                engine.run_event(Event.ITERATION_START)
            engine.run_event(Event.EPOCH_START)
            loop.logger.log_metrics({"time/epoch": int(state.timestamp.epoch)})
            for metric in state.train_metrics.values():
                metric.reset()

        finished, exhausted = _epoch(loop, before, only_ends=ends)
        ends = False
        if state.train_metrics:
            state.train_metric_values.update(log_metrics(loop.logger, state.train_metrics, "train"))
        if not finished:
            break
        loop.position.finish_epoch(exhausted=exhausted)
        _finish_epoch(loop)

    state.stop_requested = False  # it has ended, whatever asked for it
    if not loop.logs and state.total_loss_dict:
        _read_losses(loop)  # once: for who asks how the run ended
    engine.run_event(Event.FIT_END)


def _epoch(loop: Loop, before: DataRollback | None, *, only_ends: bool = False) -> tuple[bool, bool]:
    """Train on what is left of the epoch.

    Args:
        loop: what it works with.
        before: what to go back to where the first batch is given up. only_ends: all batches have been trained on.

    Returns:
        Whether the epoch is over (false: training ended within it), and whether the loader itself ended it.
    """
    state, engine = loop.state, loop.engine
    interruption = state.interruption
    done = int(state.timestamp.batch_in_epoch)
    with interruption.shielding_workers(loop.spec.dataloader):
        batches = loop.position.epoch(int(state.timestamp.epoch), done if loop.spin_dataloaders else 0)
    if only_ends:
        return _at_end_of_epoch(loop), False
    if loop.subset_num_batches >= 0:
        batches = itertools.islice(batches, max(0, loop.subset_num_batches - done))
    communicator = loop.ranks.communicator
    clock = time.perf_counter_ns() // 1000
    while True:
        engine.run_event(Event.BEFORE_DATALOADER)
        try:
            if before is None:
                batch = next(batches)
            else:
                with interruption.breaking():
                    batch = next(batches)
        except BatchAbandonedError:
            communicator.abandon(state)
            _give_up(loop, before)
        except StopIteration:
            if loop.asks:
                communicator.end_of_data(state)
            _check_progress(state, done)
            return True, loop.subset_num_batches < 0 or int(state.timestamp.batch_in_epoch) < loop.subset_num_batches
        samples, tokens = loop.spec.get_num_samples_in_batch(batch), loop.spec.get_num_tokens_in_batch(batch)
        if loop.position.is_padding:
            samples = tokens = 0
        counted = communicator.count(state, samples, tokens) if loop.asks else _known(loop, tokens)
        if counted is None:
            _check_progress(state, done)
            return True, False
        if before is not None and interruption.agreed:
            _give_up(loop, before)
        if loop.may_stop_asking and not counted.tokens and before is None:
            loop.asks = False
        ended = clock
        try:
            clock = _batch(loop, batch, clock, (samples, tokens), counted)
        except BatchAbandonedError:
            _give_up(loop, before)
        if interruption.is_watched:
            interruption.look()
            interruption.batch_took(clock - ended)
            before = _before_slow_batch(loop)
        done += 1
        if state.training_is_over:
            return _at_end_of_epoch(loop), False


def _before_slow_batch(loop: Loop, *, is_first: bool = False) -> DataRollback | None:
    """Rollback point of the data for a batch that may be abandoned for being slow; ``None`` where none is abandoned."""
    state, interruption = loop.state, loop.state.interruption
    interruption.may_abandon = interruption.is_watched and interruption.batches_are_slow
    if interruption.may_abandon:
        loop.asks = True
    if not interruption.may_abandon and not (is_first and interruption.is_watched):
        return None
    return DataRollback(state, loop.position) if loop.asks or state.world_size == 1 else None  # else they cannot agree


def _give_up(loop: Loop, before: DataRollback | None) -> NoReturn:
    """End the run as it was before the batch that it has begun."""
    leave = loop.state.interruption.leave
    assert before is not None
    assert leave is not None
    before.restore()
    leave()
    raise AssertionError("who leaves does not come back")


def _known(loop: Loop, tokens: int) -> Counted:
    """Samples and tokens of all ranks, where none needs to ask."""
    if tokens:
        raise TrainingError(
            f"this batch has {tokens} tokens and the first one had none: the ranks do not count tokens any more. Pass "
            "DataSpec(loader, get_num_samples_in_batch=…) of your own, and they count before every batch."
        )
    samples = loop.position.samples
    return Counted(samples, 0, are_even=samples % loop.data_ranks == 0)


def _batch(loop: Loop, batch: Batch, clock: int, own: tuple[int, int], counted: Counted) -> int:
    """Train on one batch and do what follows it; the time at its end, in microseconds.

    Args:
        loop: what it works with.
        batch: of this rank. clock: the time at the end of the one before.
        own: its samples and tokens. counted: those of all ranks.
    """
    state, spec, on, logger = loop.state, loop.spec, loop.engine.handlers, loop.logger
    state.batch = batch
    for handler in on[Event.AFTER_DATALOADER]:
        handler(state, logger)
    if loop.moves_batches:
        state.batch = move_to_device(state.batch, state.device)
    if spec.batch_transforms is not None:
        state.batch = spec.batch_transforms(state.batch)
    for handler in on[Event.BATCH_START]:
        handler(state, logger)

    loop.share = 1.0 if loop.data_ranks == 1 else _share(loop, own, counted)
    loop.step.run(own[0], loop.share, are_even=counted.are_even)

    now = time.perf_counter_ns() // 1000
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.after_batch(counted.samples, counted.tokens, now - clock)
    if loop.step_schedulers_every_batch:  # they look at the timestamp: the rate of the next batch is that of now
        _step_schedulers(state)
    if loop.logs:
        _log_batch(loop)
    for handler in on[Event.BATCH_END]:
        handler(state, logger)
    evaluated = bool(state.evaluators) and loop.evaluation.run_due(Event.BATCH_END)
    if evaluated:
        now = time.perf_counter_ns() // 1000  # evaluation is not training time; saving a checkpoint is
    if counted.stops:
        state.apply_stop()
    if not loop.is_alone and (evaluated or loop.agrees_at_end):
        loop.ranks.communicator.sync_stop(state)  # before a checkpoint, which all save together
    for handler in on[Event.BATCH_CHECKPOINT]:
        handler(state, logger)
    return now


def _finish_epoch(loop: Loop) -> None:
    state, engine = loop.state, loop.engine
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.to_next_epoch()
    if not loop.step_schedulers_every_batch:
        _step_schedulers(state)
    engine.run_event(Event.EPOCH_END)
    loop.evaluation.run_due(Event.EPOCH_END)
    _checkpoint(loop, Event.EPOCH_CHECKPOINT)
    _finish_iteration_if_due(loop)


def _step_schedulers(state: State) -> None:
    """Step all but those that follow a metric, which step when it was measured."""
    for scheduler in state.schedulers:
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()


def _is_end_of_iteration(state: State) -> bool:
    length = state.iteration_length
    done = state.timestamp.epoch_in_iteration if length.unit is TimeUnit.EPOCH else state.timestamp.token_in_iteration
    return done >= length


def _finish_iteration_if_due(loop: Loop) -> None:
    state, engine = loop.state, loop.engine
    if _is_end_of_iteration(state):
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_iteration()
        engine.run_event(Event.ITERATION_END)
        loop.evaluation.run_due(Event.ITERATION_END)
        _checkpoint(loop, Event.ITERATION_CHECKPOINT)


def _checkpoint(loop: Loop, event: Event) -> None:
    loop.ranks.communicator.sync_stop(loop.state)
    loop.engine.run_event(event)
    loop.state.interruption.look()


_CHECKPOINT_AFTER = {
    Event.BATCH_END: Event.BATCH_CHECKPOINT,
    Event.EPOCH_END: Event.EPOCH_CHECKPOINT,
    Event.ITERATION_END: Event.ITERATION_CHECKPOINT,
}


def _evaluate_what_was_interrupted(loop: Loop) -> None:
    """Make up for the evaluation that the interrupted run gave up, and for what would have followed it."""
    state = loop.state
    assert state.interruption.evaluation is not None
    (event, labels), state.interruption.evaluation = state.interruption.evaluation, None
    loop.evaluation.resume(event, labels)
    _checkpoint(loop, _CHECKPOINT_AFTER[event])
    if int(state.timestamp.batch_in_epoch) == 0 and event is not Event.ITERATION_END:
        _finish_iteration_if_due(loop)


def has_open_end(state: State) -> bool:
    """Return true if training is over and its last epoch, or iteration, has not ended: it was interrupted before."""
    done, batches = state.timestamp.batch_in_epoch, state.dataloader_len
    is_whole = batches is not None and done >= batches if int(done) else _is_end_of_iteration(state)
    return state.training_is_over and is_whole


def _at_end_of_epoch(loop: Loop) -> bool:
    """Return true if the batch that ended training was the last of its epoch: then the epoch has ended as well."""
    state, batches = loop.state, loop.position.batches_in_epoch()
    if batches is None:
        return state.dataloader_len is not None and state.timestamp.batch_in_epoch >= state.dataloader_len
    if loop.subset_num_batches >= 0:
        batches = min(batches, loop.subset_num_batches)
    return int(state.timestamp.batch_in_epoch) >= batches


def _check_progress(state: State, done: int) -> None:
    """Refuse to continue for ever: an epoch must have brought the end nearer."""
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


def _share(loop: Loop, own: tuple[int, int], counted: Counted) -> float:
    """Weight of this rank's batch: gradients are averaged over ranks as if all had equal batches."""
    place = 1 if loop.step.weight_by_tokens else 0
    return own[place] * loop.data_ranks / counted[place] if counted[place] else 1.0


def _log_batch(loop: Loop) -> None:
    state, now = loop.state, loop.state.timestamp
    _read_losses(loop)
    counts = {
        "time/epoch": int(now.epoch),
        "time/batch": int(now.batch),
        "time/batch_in_epoch": int(now.batch_in_epoch),
        "time/sample": int(now.sample),
        "time/token": int(now.token),
    }
    loop.logger.log_metrics({**state.total_loss_dict, **counts})
    state.not_finite = note_not_finite(state, state.total_loss_dict)


def _read_losses(loop: Loop) -> None:
    """Make the losses of the last batch plain numbers, those of all ranks."""
    loop.state.total_loss_dict = loop.ranks.communicator.mean(read_losses(loop.state), loop.share)
