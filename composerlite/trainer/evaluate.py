"""Evaluation and prediction."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Generator, Iterator, Sequence
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
from composerlite.devices import rng
from composerlite.errors import ConfigError, TrainingError
from composerlite.trainer.data.dataloading import EvaluationBatches, batches_per_epoch
from composerlite.trainer.data.held import put_back
from composerlite.trainer.ranks.communicator import Ranks
from composerlite.trainer.step import check_loss, total_loss
from composerlite.types import Batch

if TYPE_CHECKING:
    from composerlite.trainer.eval_loss import EvalLoss

log = logging.getLogger(__name__)

__all__ = ["EvaluationLoop", "log_metrics"]


@final
class EvaluationLoop:
    """Evaluates the model and predicts with the model. Afterwards the state of training is as before.

    Args:
        state: training state.
        engine: runs the events.
        logger: gets the metrics.
        ranks: collectives and data share of this rank. Metrics cover the samples of all ranks.
    """

    def __init__(self, state: State, engine: Engine, logger: Logger, ranks: Ranks) -> None:
        self._state = state
        self._engine = engine
        self._logger = logger
        self._ranks = ranks

    def run_due(self, event: Event) -> bool:
        """Run the evaluators whose interval is due at ``event``, each at most once per batch count.

        Random generators are restored afterwards, so evaluations do not change training.

        Returns:
            True if an evaluator was due.
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
        if due:
            self._run_in_training(event, due)
        return bool(due)

    def resume(self, event: Event, labels: Sequence[str]) -> None:
        """Run the evaluators that the interrupted run had not finished.

        Args:
            event: event at which the evaluators were due.
            labels: labels of the evaluators.
        """
        known = [evaluator for evaluator in self._state.evaluators if evaluator.label in labels]
        if len(known) < len(labels):
            log.warning("the interrupted run was evaluating %s: this run has %s", labels, [e.label for e in known])
        if known or not labels:
            self._run_in_training(event, known)

    def _run_in_training(self, event: Event, due: Sequence[Evaluator]) -> None:
        """Run evaluators, and record in the state which remain: an interrupted run resumes with the others."""
        state = self._state
        state.interruption.evaluation = event, tuple(evaluator.label for evaluator in due)
        with rng.preserved() as generators:
            if self.run(due, event=event, generators=generators):
                state.interruption.evaluation = None

    def run(
        self, evaluators: Sequence[Evaluator], *, event: Event | None = None, generators: dict[str, Any] | None = None
    ) -> bool:
        """Evaluate the model. The generators of the loaders are restored afterwards.

        Args:
            evaluators: loaders and metrics.
            event: event of training at which the evaluators were due. With an event, a preempted run stops between two
                batches. ``None`` outside of training.
            generators: states of the random generators that each evaluator begins with, so that the evaluators do not
                depend on each other.

        Returns:
            False if the run is preempted and an evaluator was not finished.
        """
        state = self._state
        self._engine.run_event(Event.EVAL_BEFORE_ALL)
        with self._evaluation_mode(), torch.no_grad():
            self._ranks.parallel.before_evaluation(state.model)
            for number, evaluator in enumerate(evaluators, 1):
                if generators is not None:
                    rng.restore([generators])
                with put_back(evaluator.dataloader.dataloader):
                    if not self._evaluate(evaluator, may_stop=event is not None):
                        return False
                if event is not None:
                    self._step_plateau_schedulers(evaluator.label)
                    state.evaluated_at[evaluator.label] = int(state.timestamp.batch)
                    state.interruption.evaluation = event, tuple(other.label for other in evaluators[number:])
                self._engine.run_event(Event.EVAL_END)
        self._engine.run_event(Event.EVAL_AFTER_ALL)
        return True

    def _step_plateau_schedulers(self, label: str) -> None:
        """Step each ``ReduceLROnPlateau`` that follows a metric of the evaluator ``label``.

        Raises:
            TrainingError: the metric has no value.
        """
        state = self._state
        for scheduler in state.schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                continue
            followed = getattr(scheduler, "metric", None) or f"{state.evaluators[0].label}/loss"
            if not followed.startswith(f"{label}/"):
                continue
            name = followed.removeprefix(f"{label}/")
            if name not in state.eval_metric_values:
                what = "the loss of evaluation" if name == "loss" else repr(followed)
                raise TrainingError(
                    f"ReduceLROnPlateau follows {what}, which could not be computed: see the warning in the log."
                )
            scheduler.step(state.eval_metric_values[name])

    def predict(self, spec: DataSpec, *, subset_num_batches: int, return_outputs: bool) -> list[Any]:
        """Predict with the model.

        Args:
            spec: data.
            subset_num_batches: number of batches; -1 for all.
            return_outputs: collect the outputs.

        Returns:
            Output for each batch of this rank, on the CPU; empty without ``return_outputs``.
        """
        state, engine, parallel = self._state, self._engine, self._ranks.parallel
        outputs: list[Any] = []
        with self._evaluation_mode(), put_back(spec.dataloader), torch.no_grad():
            parallel.before_evaluation(state.model)
            self._set_dataloader(spec, "predict", subset_num_batches)
            state.predict_timestamp = Timestamp()
            engine.run_event(Event.PREDICT_START)
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

    def _evaluate(self, evaluator: Evaluator, *, may_stop: bool) -> bool:
        """Run one evaluator, and log its metrics.

        Args:
            evaluator: loader and metrics.
            may_stop: stop between two batches if the run is preempted.

        Returns:
            False if the evaluator was stopped.

        Raises:
            ConfigError: no rank has a batch.
        """
        state, engine, ranks = self._state, self._engine, self._ranks
        from composerlite.trainer.eval_loss import NAME, EvalLoss  # torchmetrics takes long to import

        model: Any = state.model
        spec = evaluator.dataloader
        metrics = state.eval_metrics.get(evaluator.label, {})
        losses = metric if isinstance(metric := metrics.get(NAME), EvalLoss) else None
        for metric in metrics.values():
            metric.reset()
        limit = -1 if evaluator.subset_num_batches is None else evaluator.subset_num_batches
        self._set_dataloader(spec, evaluator.label, limit)
        state.eval_timestamp = Timestamp()
        engine.run_event(Event.EVAL_START)
        for batch, is_padding, counted in self._batches(spec, limit):
            if may_stop and state.interruption.is_watched and state.interruption.agreed:
                ranks.parallel.after_evaluation(state.model)
                return False
            start = time.perf_counter()
            state.batch = self._prepared(spec, batch)
            whole, samples = state.batch, spec.get_num_samples_in_batch(batch)
            engine.run_event(Event.EVAL_BATCH_START)
            size = evaluator.device_eval_microbatch_size
            parts: Sequence[Batch] = [state.batch]
            if size is not None and size < samples:
                parts = spec.split_batch(state.batch, size)
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
                f"eval_dataloader {evaluator.label!r}: its {type(spec.dataloader).__name__} gave no batch, so there is "
                "no metric. A generator can be iterated only once: pass an iterable that starts again each time. Also "
                "check drop_last."
            )
        state.eval_metric_values.update(log_metrics(self._logger, metrics, evaluator.label))
        return True

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Generator[None]:
        """Put the model into evaluation mode; restore loader, batch and the mode of each module afterwards."""
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
        """Run the forward pass of ``state.batch`` between two events."""
        state = self._state
        model: Any = state.model
        self._engine.run_event(before)
        with get_precision_context(state.precision, state.device):
            state.outputs = model.eval_forward(state.batch)
        self._engine.run_event(after)

    def _loss(self, losses: EvalLoss) -> torch.Tensor | None:
        """Return the loss of ``state.outputs``.

        Args:
            losses: metric of the loss. If the evaluator names this metric, a failure raises an error. Otherwise a
                failure logs a warning and the result is ``None``.
        """
        state = self._state
        model: Any = state.model
        try:
            with get_precision_context(state.precision, state.device):
                total = total_loss(model.loss(state.outputs, state.batch))[0]
            if total.numel() != 1:
                check_loss(total, total)
        except Exception as e:
            if losses.is_required:
                raise
            losses.warn(e)
            return None
        return total.detach().reshape(())

    def _batches(self, spec: DataSpec, limit: int) -> Iterator[tuple[Batch, bool, tuple[int, int]]]:
        """Yield each batch of this rank, whether the batch is padding, and the samples and tokens of all ranks.

        If forward passes are collective, a rank without further batches repeats its last batch as padding.
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
            counted = ranks.communicator.count_evaluation(state, has_batch, samples, tokens)
            if counted is None:
                return
            if has_batch:
                yield batch, own.is_padding, counted
            elif ranks.parallel.forward_is_shared:
                if not began:
                    raise ConfigError(
                        "the evaluation loader gives no batch on this rank, and the other ranks wait for this rank in "
                        "their forward passes: give every rank at least one batch."
                    )
                yield batch, True, counted


def log_metrics(logger: Logger, metrics: dict[str, Any], label: str) -> dict[str, float]:
    """Compute ``metrics``, log each as ``metrics/<label>/<name>`` and return the values by name."""
    values = metric_values(metrics)
    logger.log_metrics({f"metrics/{label}/{name}": value for name, value in values.items()})
    return values
