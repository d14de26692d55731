"""The training loop of one call of ``fit``."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

from torch.optim.lr_scheduler import ReduceLROnPlateau

from composerlite.core import DataSpec, Engine, Event, Logger, State, TimeUnit, move_to_device
from composerlite.core.measured import read_losses, warn_not_finite
from composerlite.devices import rng
from composerlite.errors import ConfigError
from composerlite.trainer.data.dataloading import DataPosition
from composerlite.trainer.evaluate import EvaluationLoop, log_metrics
from composerlite.trainer.ranks.communicator import Counted, Ranks
from composerlite.trainer.step import TrainStep
from composerlite.types import Batch

__all__ = ["Loop", "lacks_epoch_end", "run"]

_NO_BATCH = object()


@dataclass(slots=True, kw_only=True)
class Loop:
    """Parts and settings of the training loop.

    Attributes:
        state: training state.
        engine: runs the events.
        logger: gets losses, metrics and times.
        spec: training data.
        position: position in the training data.
        step: trains on one batch.
        evaluation: runs evaluators when they are due.
        ranks: model, collectives and data share of this rank.
        subset_num_batches: batches per epoch; -1 for all.
        step_schedulers_every_batch: step schedulers after each batch; false for each epoch.
        spin_dataloaders: after a resume, skip the batches of the epoch before the checkpoint.
        logs: any rank has a logger.
        weight: weight of this rank's last batch in the mean over ranks; see :meth:`TrainStep.run`.
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
    logs: bool = field(init=False)
    weight: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        self.logs = self.ranks.communicator.any(bool(self.logger.destinations))


def run(loop: Loop) -> None:
    """Train until ``state.max_duration``."""
    state, engine = loop.state, loop.engine
    state.model.train()
    engine.run_event(Event.FIT_START)
    if state.resumed.generators is not None:
        rng.restore(state.resumed.generators, state.rank)
        state.resumed.generators = None

    if state.interruption.evaluation is not None:
        _finish_interrupted_evaluation(loop)
    elif int(state.timestamp.batch_in_epoch) == 0:
        _finish_iteration_if_due(loop)  # the checkpoint was saved between the end of an epoch and of its iteration
    only_end = int(state.timestamp.batch_in_epoch) > 0 and lacks_epoch_end(state)
    while only_end or not state.training_is_over:
        if int(state.timestamp.batch_in_epoch) == 0:
            if int(state.timestamp.epoch_in_iteration) == 0:
                engine.run_event(Event.ITERATION_START)
            engine.run_event(Event.EPOCH_START)
            loop.logger.log_metrics({"time/epoch": int(state.timestamp.epoch)})
            for metric in state.train_metrics.values():
                metric.reset()

        finished, exhausted = _train_epoch(loop, only_end=only_end)
        only_end = False
        if state.train_metrics:
            state.train_metric_values.update(log_metrics(loop.logger, state.train_metrics, "train"))
        if not finished:
            break
        loop.position.finish_epoch(exhausted=exhausted)
        _finish_epoch(loop)

    state.stop_requested = False
    if not loop.logs and state.total_loss_dict:
        _read_losses(loop)  # without loggers the losses are read only here, for Trainer.result
    engine.run_event(Event.FIT_END)


def _train_epoch(loop: Loop, *, only_end: bool) -> tuple[bool, bool]:
    """Train on the remaining batches of the epoch.

    Args:
        loop: parts of the loop.
        only_end: no batch of the epoch remains; start the epoch's data and return.

    Returns:
        Whether the epoch is over, and whether the loader has no more batches. The epoch is not over if training ended
        before the last batch.
    """
    state, engine, spec = loop.state, loop.engine, loop.spec
    done = int(state.timestamp.batch_in_epoch)
    with state.interruption.shielding_workers(spec.dataloader):
        batches = loop.position.epoch(int(state.timestamp.epoch), done if loop.spin_dataloaders else 0)
    if only_end:
        return _is_end_of_epoch(loop), False
    if loop.subset_num_batches >= 0:
        batches = itertools.islice(batches, max(0, loop.subset_num_batches - done))
    clock = time.perf_counter_ns() // 1000
    while True:
        engine.run_event(Event.BEFORE_DATALOADER)
        batch = next(batches, _NO_BATCH)
        has_batch, samples, tokens = batch is not _NO_BATCH, 0, 0
        if has_batch and not loop.position.is_padding:
            samples, tokens = spec.get_num_samples_in_batch(batch), spec.get_num_tokens_in_batch(batch)
        counted = loop.ranks.communicator.count(state, samples, tokens, has_batch=has_batch)
        if counted is None:
            _check_progress(state, done)
            is_whole = loop.subset_num_batches < 0 or int(state.timestamp.batch_in_epoch) < loop.subset_num_batches
            return True, not has_batch and is_whole
        clock = _train_batch(loop, batch, clock, samples, tokens, counted)
        state.interruption.poll()
        done += 1
        if state.training_is_over:
            return _is_end_of_epoch(loop), False


def _train_batch(loop: Loop, batch: Batch, clock: int, samples: int, tokens: int, counted: Counted) -> int:
    """Train on one batch, advance the timestamp, evaluate and save.

    Args:
        loop: parts of the loop.
        batch: batch of this rank.
        clock: time at the end of the previous batch, in microseconds.
        samples: samples in ``batch``; 0 for a padding batch.
        tokens: tokens in ``batch``.
        counted: counts over all ranks.

    Returns:
        Time at the end of the batch, in microseconds.
    """
    state, spec, on, logger = loop.state, loop.spec, loop.engine.handlers, loop.logger
    state.batch = batch
    for handler in on[Event.AFTER_DATALOADER]:
        handler(state, logger)
    if state.device.type != "cpu":
        state.batch = move_to_device(state.batch, state.device)
    if spec.batch_transforms is not None:
        state.batch = spec.batch_transforms(state.batch)
    for handler in on[Event.BATCH_START]:
        handler(state, logger)

    # Gradients are averaged over ranks with equal weights, so a larger batch gets a larger weight here.
    own, total = (tokens, counted.tokens) if loop.step.weight_by_tokens else (samples, counted.samples)
    shares = loop.ranks.share.world_size
    loop.weight = own * shares / total if shares > 1 and total else 1.0
    loop.step.run(samples, loop.weight)

    now = time.perf_counter_ns() // 1000
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.after_batch(counted.samples, counted.tokens, now - clock)
    if loop.step_schedulers_every_batch:  # after the timestamp: a schedule computes the rate from the timestamp
        _step_schedulers(state)
    if loop.logs:
        _read_losses(loop)
        times = state.timestamp
        counts = {
            "time/epoch": int(times.epoch),
            "time/batch": int(times.batch),
            "time/batch_in_epoch": int(times.batch_in_epoch),
            "time/sample": int(times.sample),
            "time/token": int(times.token),
        }
        logger.log_metrics({**state.total_loss_dict, **counts})
        state.not_finite = warn_not_finite(state, state.total_loss_dict)
    for handler in on[Event.BATCH_END]:
        handler(state, logger)
    evaluated = bool(state.evaluators) and loop.evaluation.run_due(Event.BATCH_END)
    if evaluated:
        now = time.perf_counter_ns() // 1000  # evaluation is not training time; saving a checkpoint is
    if counted.stops:
        state.apply_stop()
    # A stop flag is exchanged with the next batch's counts. A time limit needs an exchange of its own: there may be no
    # next batch. An evaluation has taken time, and its callbacks may have stopped training.
    has_time_limit = state.max_duration is not None and state.max_duration.unit is TimeUnit.SECOND
    if evaluated or has_time_limit:
        loop.ranks.communicator.sync_stop(state)
    for handler in on[Event.BATCH_CHECKPOINT]:
        handler(state, logger)
    return now


def _finish_epoch(loop: Loop) -> None:
    """Advance the timestamp to the next epoch, run the events of the epoch's end, evaluate and save."""
    state = loop.state
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.to_next_epoch()
    if not loop.step_schedulers_every_batch:
        _step_schedulers(state)
    loop.engine.run_event(Event.EPOCH_END)
    loop.evaluation.run_due(Event.EPOCH_END)
    _checkpoint(loop, Event.EPOCH_CHECKPOINT)
    _finish_iteration_if_due(loop)


def _step_schedulers(state: State) -> None:
    """Step all schedulers except ``ReduceLROnPlateau``, which an evaluation steps."""
    for scheduler in state.schedulers:
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()


def _is_end_of_iteration(state: State) -> bool:
    length = state.iteration_length
    done = state.timestamp.epoch_in_iteration if length.unit is TimeUnit.EPOCH else state.timestamp.token_in_iteration
    return done >= length


def _finish_iteration_if_due(loop: Loop) -> None:
    state = loop.state
    if _is_end_of_iteration(state):
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_iteration()
        loop.engine.run_event(Event.ITERATION_END)
        loop.evaluation.run_due(Event.ITERATION_END)
        _checkpoint(loop, Event.ITERATION_CHECKPOINT)


def _checkpoint(loop: Loop, event: Event) -> None:
    """Run a checkpoint event on all ranks together."""
    loop.ranks.communicator.sync_stop(loop.state)
    loop.engine.run_event(event)
    loop.state.interruption.poll()


def _finish_interrupted_evaluation(loop: Loop) -> None:
    """Run the evaluators that the interrupted run had not finished, and the checkpoint events after them."""
    state = loop.state
    assert state.interruption.evaluation is not None
    (event, labels), state.interruption.evaluation = state.interruption.evaluation, None
    loop.evaluation.resume(event, labels)
    _checkpoint(loop, Event(event.value.replace("_end", "_checkpoint")))
    if int(state.timestamp.batch_in_epoch) == 0 and event is not Event.ITERATION_END:
        _finish_iteration_if_due(loop)


def lacks_epoch_end(state: State) -> bool:
    """Return true if training is over, but the end of the last epoch or iteration has not run.

    A run that is interrupted after its last batch, and before the events of the epoch's end, resumes like this.
    """
    done, batches = state.timestamp.batch_in_epoch, state.dataloader_len
    is_whole = batches is not None and done >= batches if int(done) else _is_end_of_iteration(state)
    return state.training_is_over and is_whole


def _is_end_of_epoch(loop: Loop) -> bool:
    """Return true if the batch that ended training was also the last batch of the epoch."""
    state, batches = loop.state, loop.position.batches_in_epoch()
    if batches is None:
        return state.dataloader_len is not None and state.timestamp.batch_in_epoch >= state.dataloader_len
    if loop.subset_num_batches >= 0:
        batches = min(batches, loop.subset_num_batches)
    return int(state.timestamp.batch_in_epoch) >= batches


def _check_progress(state: State, done: int) -> None:
    """Raise an error if an epoch of ``done`` batches has not brought training closer to its end."""
    if state.max_duration is not None and state.max_duration.unit is TimeUnit.TOKEN and not int(state.timestamp.token):
        raise ConfigError(
            f"max_duration={state.max_duration} counts tokens and the first epoch had none: pass "
            "DataSpec(loader, get_num_tokens_in_batch=lambda batch: …)."
        )
    if done == 0:
        raise ConfigError(
            f"the train_dataloader {type(state.dataloader).__name__} gave no batch, so training would never end. A "
            "generator can be iterated only once: pass an iterable that starts again each epoch. Also check drop_last."
        )


def _read_losses(loop: Loop) -> None:
    """Replace the losses of the last batch by plain numbers, the means over all ranks."""
    loop.state.total_loss_dict = loop.ranks.communicator.mean(read_losses(loop.state), loop.weight)
