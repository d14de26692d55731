"""Evaluation and prediction."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from composerlite.core import (
    DataSpec,
    Engine,
    Evaluator,
    Event,
    Logger,
    State,
    Timestamp,
    get_precision_context,
    metric_values,
    move_to_device,
)
from composerlite.core.interruption import EvaluationAbandonedError
from composerlite.devices import rng
from composerlite.errors import ConfigError, TrainingError
from composerlite.trainer.checks import check_loss
from composerlite.trainer.data.dataloading import EvaluationBatches, batches_per_epoch
from composerlite.trainer.data.held import put_back
from composerlite.trainer.ranks.communicator import Ranks
from composerlite.trainer.step import total_loss
from composerlite.types import Batch

if TYPE_CHECKING:
    from composerlite.trainer.eval_loss import EvalLoss

log = logging.getLogger(__name__)

__all__ = ["EvaluationLoop", "log_metrics"]


@final
class EvaluationLoop:
    """Evaluates the model and predicts with it. What training uses of the state is as before afterwards.

    Args:
        state, engine, logger: as everywhere.
        ranks: the metrics are those of the samples of all.
    """

    def __init__(self, state: State, engine: Engine, logger: Logger, ranks: Ranks) -> None:
        self._state = state
        self._engine = engine
        self._logger = logger
        self._ranks = ranks

    def run_due(self, event: Event) -> bool:
        """Run the evaluators whose interval says so at ``event``, each once per batch count; whether any was.

        The generators of training stand afterwards as before: training is the same however often it is interrupted.
        """
        state = self._state
        if not state.evaluators:
            return False
        batch = int(state.timestamp.batch)
        due = [
            evaluator
            for evaluator in state.evaluators
            if evaluator.eval_interval is not None
            and evaluator.eval_interval(state, event)
            and state.evaluated_at.get(evaluator.label) != batch
        ]
        if not due:
            return False
        self._run_within_training(event, due)
        return True

    def resume(self, event: Event, labels: Sequence[str]) -> None:
        """Run the evaluators of those ``labels``, which were due at ``event`` when the run was interrupted."""
        known = [evaluator for evaluator in self._state.evaluators if evaluator.label in labels]
        if len(known) < len(labels):
            log.warning("the interrupted run was evaluating %s: this one has %s", labels, [e.label for e in known])
        if known or not labels:
            self._run_within_training(event, known)

    def _run_within_training(self, event: Event, due: Sequence[Evaluator]) -> None:
        """Run them. Whatever is saved meanwhile says which have not been run to their end."""
        state = self._state
        batch = int(state.timestamp.batch)
        left = [evaluator.label for evaluator in due]
        state.interruption.evaluation = event, tuple(left)

        def done(evaluator: Evaluator) -> None:
            self._step_plateau_schedulers(evaluator.label)
            left.remove(evaluator.label)
            state.evaluated_at[evaluator.label] = batch
            state.interruption.evaluation = event, tuple(left)

        with rng.preserved() as generators:
            try:
                self.run(due, done=done, generators=generators, may_stop=True)
            except EvaluationAbandonedError:
                return
        state.interruption.evaluation = None

    def _step_plateau_schedulers(self, label: str) -> None:
        """Step the schedulers that follow a metric of the evaluator ``label``, which was measured now."""
        state = self._state
        for scheduler in state.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                followed = getattr(scheduler, "metric", None) or f"{state.evaluators[0].label}/loss"
                name = followed.removeprefix(f"{label}/")
                if name == followed:
                    continue
                if name not in state.eval_metric_values:
                    what = "the loss of evaluation" if name == "loss" else repr(followed)
                    raise TrainingError(
                        f"ReduceLROnPlateau follows {what}, which could not be computed: see the warning in the log."
                    )
                scheduler.step(state.eval_metric_values[name])

    def run(
        self,
        evaluators: Sequence[Evaluator],
        *,
        done: Callable[[Evaluator], None] = lambda evaluator: None,
        generators: dict[str, Any] | None = None,
        may_stop: bool = False,
    ) -> None:
        """Evaluate the model on ``evaluators``. The generators of their loaders stand afterwards as before.

        Args:
            evaluators: on what.
            done: called when the values of an evaluator are there, before ``EVAL_END``.
            generators: as each evaluator finds them, so that none depends on which ones ran before it.
            may_stop: give up as soon as the run is to end.

        Raises:
            EvaluationAbandonedError: it was given up, on every rank.
        """
        self._engine.run_event(Event.EVAL_BEFORE_ALL)
        with self._evaluation_mode(), torch.no_grad():
            self._ranks.parallel.before_evaluation(self._state.model)
            for evaluator in evaluators:
                if generators is not None:
                    rng.restore([generators])
                with put_back(evaluator.dataloader.dataloader):
                    self._evaluate(evaluator, may_stop=may_stop)
                done(evaluator)
                self._engine.run_event(Event.EVAL_END)
        self._engine.run_event(Event.EVAL_AFTER_ALL)

    def predict(self, spec: DataSpec, *, subset_num_batches: int, return_outputs: bool) -> list[Any]:
        """The model's outputs for each batch of this rank, on the CPU, in order; none without ``return_outputs``."""
        state, engine, parallel = self._state, self._engine, self._ranks.parallel
        outputs: list[Any] = []
        with self._evaluation_mode(), put_back(spec.dataloader):
            parallel.before_evaluation(state.model)
            self._set_dataloader(spec, "predict", subset_num_batches)
            state.predict_timestamp = Timestamp()
            engine.run_event(Event.PREDICT_START)
            with torch.no_grad():
                for batch, is_padding, counted in self._batches(spec, subset_num_batches):
                    start = time.perf_counter()
                    state.batch = self._prepared(spec, batch)
                    if spec.microbatch_transforms is not None:
                        state.batch = spec.microbatch_transforms(state.batch)
                    engine.run_event(Event.PREDICT_BATCH_START)
                    self._forward(Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD)
                    if return_outputs and not is_padding:
                        outputs.append(move_to_device(state.outputs, torch.device("cpu")))
                    elapsed = timedelta(seconds=time.perf_counter() - start)
                    state.predict_timestamp = state.predict_timestamp.to_next_batch(*counted, elapsed)
                    engine.run_event(Event.PREDICT_BATCH_END)
            parallel.after_evaluation(state.model)
            engine.run_event(Event.PREDICT_END)
        return outputs

    def _evaluate(self, evaluator: Evaluator, *, may_stop: bool) -> None:
        state, engine, ranks = self._state, self._engine, self._ranks
        from composerlite.trainer.eval_loss import NAME, EvalLoss  # torchmetrics takes long to import

        model: Any = state.model
        spec = evaluator.dataloader
        metrics = state.eval_metrics.get(evaluator.label, {})
        losses = one if isinstance(one := metrics.get(NAME), EvalLoss) else None
        for metric in metrics.values():
            metric.reset()
        limit = -1 if evaluator.subset_num_batches is None else evaluator.subset_num_batches
        self._set_dataloader(spec, evaluator.label, limit)
        state.eval_timestamp = Timestamp()
        engine.run_event(Event.EVAL_START)
        for batch, is_padding, counted in self._batches(spec, limit):
            if may_stop and state.interruption.is_watched and state.interruption.agreed:
                ranks.parallel.after_evaluation(state.model)
                raise EvaluationAbandonedError
            start = time.perf_counter()
            state.batch = self._prepared(spec, batch)
            whole, samples = state.batch, spec.get_num_samples_in_batch(batch)
            engine.run_event(Event.EVAL_BATCH_START)
            size = evaluator.device_eval_microbatch_size
            parts: Sequence[Batch] = (
                [state.batch] if size is None or size >= samples else spec.split_batch(state.batch, size)
            )
            count = ranks.communicator.max(len(parts)) if ranks.parallel.forward_is_shared else len(parts)
            for number in range(count):
                part = parts[min(number, len(parts) - 1)]
                state.batch = part if spec.microbatch_transforms is None else spec.microbatch_transforms(part)
                self._forward(Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD)
                if is_padding or number >= len(parts) or not ranks.parallel.counts:
                    continue
                for metric in metrics.values():
                    if losses is not None and metric is losses:
                        metric.update(self._loss(losses), spec.get_num_samples_in_batch(part))
                    else:
                        model.update_metric(state.batch, state.outputs, metric)
            state.batch = whole
            elapsed = timedelta(seconds=time.perf_counter() - start)
            state.eval_timestamp = state.eval_timestamp.to_next_batch(*counted, elapsed)
            engine.run_event(Event.EVAL_BATCH_END)
        ranks.parallel.after_evaluation(state.model)
        if ranks.communicator.max(int(state.eval_timestamp.batch)) == 0:
            raise ConfigError(
                f"eval_dataloader {evaluator.label!r}: its {type(spec.dataloader).__name__} gave no batch, and without "
                "one there is no metric. A generator can be iterated once only; pass something that starts anew each "
                "time, and check drop_last."
            )
        state.eval_metric_values.update(log_metrics(self._logger, metrics, evaluator.label))

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Generator[None]:
        """Put the model in evaluation mode; afterwards all is as before that training uses, frozen parts included."""
        state = self._state
        length = None if state.dataloader_len is None else int(state.dataloader_len)
        saved = state.dataloader, state.dataloader_label, length, state.batch, state.outputs
        modes = [(module, module.training) for module in state.model.modules()]
        try:
            state.model.eval()
            yield
        finally:
            state.model.train(modes[0][1])
            for module, training in modes:
                module.training = training
            dataloader, label, length, state.batch, state.outputs = saved
            state.set_dataloader(dataloader, label, length)

    def _set_dataloader(self, spec: DataSpec, label: str, limit: int) -> None:
        batches = batches_per_epoch(spec, self._ranks.share, subset=limit)
        self._state.set_dataloader(spec.dataloader, label, batches)

    def _prepared(self, spec: DataSpec, batch: Batch) -> Batch:
        batch = move_to_device(batch, self._state.device)
        return batch if spec.batch_transforms is None else spec.batch_transforms(batch)

    def _forward(self, before: Event, after: Event) -> None:
        """Pass ``state.batch`` through the model, between these two events."""
        state = self._state
        model: Any = state.model
        self._engine.run_event(before)
        with get_precision_context(state.precision, state.device):
            state.outputs = model.eval_forward(state.batch)
        self._engine.run_event(after)

    def _loss(self, losses: EvalLoss) -> torch.Tensor | None:
        """Return the loss of ``state.outputs``; ``None`` where it cannot be computed and nobody has asked for it."""
        state = self._state
        model: Any = state.model
        try:
            with get_precision_context(state.precision, state.device):
                total = total_loss(model.loss(state.outputs, state.batch))[0]
            if total.numel() != 1:
                check_loss(total, total)
        except Exception as e:
            if losses.is_asked_for:
                raise
            losses.give_up(e)
            return None
        return total.detach().reshape(())

    def _batches(self, spec: DataSpec, limit: int) -> Iterator[tuple[Batch, bool, tuple[int, int]]]:
        """Yield each batch of this rank, a flag for padding, and the samples and tokens of all ranks in it.

        Where a forward pass waits for other ranks, one whose batches have ended gives its last one again until all end.
        """
        state, ranks = self._state, self._ranks
        with state.interruption.shielding_workers(spec.dataloader):
            own = EvaluationBatches(spec, ranks.share, is_trained_on=spec.dataloader is state.train_dataloader)
        batches = iter(own) if limit < 0 else itertools.islice(own, limit)
        batch: Batch = None
        began = False
        while True:
            try:
                batch, has_batch, began = next(batches), True, True
            except StopIteration:
                has_batch = False
            counts = has_batch and not own.is_padding
            samples = spec.get_num_samples_in_batch(batch) if counts else 0
            tokens = spec.get_num_tokens_in_batch(batch) if counts else 0
            counted = ranks.communicator.step(state, has_batch, samples, tokens)
            if counted is None:
                return
            if has_batch:
                yield batch, own.is_padding, counted
            elif ranks.parallel.forward_is_shared:
                if not began:
                    raise ConfigError(
                        "the loader to evaluate on gives no batch on this rank, and others wait for it in their "
                        "forward passes: give every rank one at least."
                    )
                yield batch, True, counted


def log_metrics(logger: Logger, metrics: dict[str, Any], label: str) -> dict[str, float]:
    """Compute ``metrics``, log them as ``metrics/<label>/<name>`` and return them by name."""
    values = metric_values(metrics)
    logger.log_metrics({f"metrics/{label}/{name}": value for name, value in values.items()})
    return values
