"""Evaluation and prediction."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, final

import torch

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
from composerlite.types import Batch

__all__ = ["EvaluationSchedule", "evaluate", "log_metrics", "predict"]


@final
class EvaluationSchedule:
    """Runs each evaluator when its interval says so, at most once per batch count."""

    def __init__(self, state: State, engine: Engine, logger: Logger) -> None:
        self._state = state
        self._engine = engine
        self._logger = logger
        self._last: dict[str, int] = {}

    def run_due(self, event: Event) -> bool:
        """Run the evaluators that are due at ``event``; whether any was."""
        state = self._state
        if not state.evaluators:
            return False
        batch = int(state.timestamp.batch)
        due = [
            evaluator
            for evaluator in state.evaluators
            if evaluator.eval_interval is not None
            and evaluator.eval_interval(state, event)
            and self._last.get(evaluator.label) != batch
        ]
        if not due:
            return False
        self._last.update({evaluator.label: batch for evaluator in due})
        evaluate(state, self._engine, self._logger, due)
        return True


def evaluate(state: State, engine: Engine, logger: Logger, evaluators: Sequence[Evaluator]) -> None:
    """Evaluate the model. What training uses of the state is as before afterwards."""
    engine.run_event(Event.EVAL_BEFORE_ALL)
    with _set_aside(state), torch.no_grad():
        for evaluator in evaluators:
            _evaluate_one(state, engine, logger, evaluator)
    engine.run_event(Event.EVAL_AFTER_ALL)


@contextlib.contextmanager
def _set_aside(state: State) -> Generator[None]:
    """The model in evaluation mode; afterwards what training uses of the state is as before, frozen parts included."""
    saved = state.dataloader, state.dataloader_label, _length(state), state.batch, state.outputs
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


def _length(state: State) -> int | None:
    return None if state.dataloader_len is None else int(state.dataloader_len)


def _evaluate_one(state: State, engine: Engine, logger: Logger, evaluator: Evaluator) -> None:
    model: Any = state.model
    spec = evaluator.dataloader
    metrics = state.eval_metrics.get(evaluator.label, {})
    for metric in metrics.values():
        metric.reset()
    state.set_dataloader(spec.dataloader, evaluator.label, evaluator.subset_num_batches)
    state.eval_timestamp = Timestamp()
    engine.run_event(Event.EVAL_START)
    for batch in _batches(spec.dataloader, evaluator.subset_num_batches):
        start = time.perf_counter()
        state.batch = _prepare(state, spec, batch)
        whole, samples, tokens = state.batch, spec.get_num_samples_in_batch(batch), spec.get_num_tokens_in_batch(batch)
        engine.run_event(Event.EVAL_BATCH_START)
        size = evaluator.device_eval_microbatch_size
        parts: Iterable[Batch] = (
            [state.batch] if size is None or size >= samples else spec.split_batch(state.batch, size)
        )
        for part in parts:
            state.batch = part if spec.microbatch_transforms is None else spec.microbatch_transforms(part)
            engine.run_event(Event.EVAL_BEFORE_FORWARD)
            with get_precision_context(state.precision, state.device):
                state.outputs = model.eval_forward(state.batch)
            engine.run_event(Event.EVAL_AFTER_FORWARD)
            for metric in metrics.values():
                model.update_metric(state.batch, state.outputs, metric)
        state.batch = whole
        elapsed = timedelta(seconds=time.perf_counter() - start)
        state.eval_timestamp = state.eval_timestamp.to_next_batch(samples, tokens, elapsed)
        engine.run_event(Event.EVAL_BATCH_END)
    values = log_metrics(logger, metrics, evaluator.label)
    state.eval_metric_values.update(values)
    engine.run_event(Event.EVAL_END)


def log_metrics(logger: Logger, metrics: dict[str, Any], label: str) -> dict[str, float]:
    """Compute ``metrics``, log them as ``metrics/<label>/<name>`` and return them by name."""
    values = metric_values(metrics)
    logger.log_metrics({f"metrics/{label}/{name}": value for name, value in values.items()})
    return values


def predict(
    state: State, engine: Engine, spec: DataSpec, *, subset_num_batches: int, return_outputs: bool
) -> list[Any]:
    """The model's outputs for each batch, on the CPU, in order; an empty list without ``return_outputs``."""
    outputs: list[Any] = []
    model: Any = state.model
    with _set_aside(state):
        state.set_dataloader(spec.dataloader, "predict", subset_num_batches)
        state.predict_timestamp = Timestamp()
        engine.run_event(Event.PREDICT_START)
        with torch.no_grad():
            for batch in _batches(spec.dataloader, subset_num_batches):
                start = time.perf_counter()
                samples, tokens = spec.get_num_samples_in_batch(batch), spec.get_num_tokens_in_batch(batch)
                state.batch = _prepare(state, spec, batch)
                if spec.microbatch_transforms is not None:
                    state.batch = spec.microbatch_transforms(state.batch)
                engine.run_event(Event.PREDICT_BATCH_START)
                engine.run_event(Event.PREDICT_BEFORE_FORWARD)
                with get_precision_context(state.precision, state.device):
                    state.outputs = model.eval_forward(state.batch)
                engine.run_event(Event.PREDICT_AFTER_FORWARD)
                if return_outputs:
                    outputs.append(move_to_device(state.outputs, torch.device("cpu")))
                elapsed = timedelta(seconds=time.perf_counter() - start)
                state.predict_timestamp = state.predict_timestamp.to_next_batch(samples, tokens, elapsed)
                engine.run_event(Event.PREDICT_BATCH_END)
        engine.run_event(Event.PREDICT_END)
    return outputs


def _batches(dataloader: Iterable[Batch], subset_num_batches: int | None) -> Iterator[Batch]:
    if subset_num_batches is None or subset_num_batches < 0:
        return iter(dataloader)
    return itertools.islice(dataloader, subset_num_batches)


def _prepare(state: State, spec: DataSpec, batch: Batch) -> Batch:
    batch = move_to_device(batch, state.device)
    return batch if spec.batch_transforms is None else spec.batch_transforms(batch)
