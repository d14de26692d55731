"""One training batch: microbatches, gradients, the optimizer step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from composerlite.core import DataSpec, Engine, Event, Precision, State, algorithms_of, get_precision_context
from composerlite.core.data import count_samples, split_batch
from composerlite.core.interruption import BatchAbandonedError
from composerlite.core.state.loss_reading import LossReading
from composerlite.errors import TrainingError
from composerlite.trainer.checks import check_loss
from composerlite.trainer.ranks.communicator import Ranks
from composerlite.trainer.ranks.parallel import Parallel
from composerlite.trainer.rollback import BatchRollback
from composerlite.types import Batch

__all__ = ["TrainStep", "total_loss"]

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class _Padding:
    """A piece that is trained on once more, for nothing, because other ranks have more pieces."""

    batch: Batch


@final
class TrainStep:
    """Trains on ``state.batch`` and steps the optimizer.

    A batch is cut into microbatches of ``state.device_train_microbatch_size`` samples, whose gradients add up to that
    of the whole: each loss is weighted by its share of the samples (or of the tokens).

    Args:
        state: the training state.
        engine: runs the events from ``BEFORE_TRAIN_BATCH`` to ``AFTER_TRAIN_BATCH``.
        spec: how to split and count batches.
        weight_by_tokens: weigh microbatches, and the batches of ranks, by tokens rather than samples.
        ranks: how this rank trains with the others.
        replays_graphs: the model replays CUDA graphs, which use their memory again when a batch begins.
    """

    def __init__(
        self,
        state: State,
        engine: Engine,
        spec: DataSpec,
        *,
        weight_by_tokens: bool = False,
        ranks: Ranks,
        replays_graphs: bool = False,
    ) -> None:
        self._state = state
        self._engine = engine
        self._spec = spec
        self._count = spec.get_num_tokens_in_batch if weight_by_tokens else spec.get_num_samples_in_batch
        self.weight_by_tokens = weight_by_tokens
        self._parallel = ranks.parallel
        self._communicator = ranks.communicator
        self._is_alone = type(self._parallel) is Parallel
        plainly = spec.split_batch is split_batch and spec.get_num_samples_in_batch is count_samples
        self._cuts_by_samples = plainly and spec.batch_transforms is None
        self._cuts_alike = False
        self._replays_graphs = replays_graphs
        self._losses: dict[str, Any] = {}  # of the pieces of the batch so far

    def run(self, samples: int, share: float = 1.0, *, are_even: bool = False) -> None:
        """Train on ``state.batch``, which has ``samples`` samples.

        Args:
            samples: in the batch of this rank.
            share: how much it counts: 1 where the batches of all ranks are equal; over all ranks the mean is 1.
            are_even: the batches of all ranks are known to have as many samples.

        Raises:
            TrainingError: with automatic microbatching, if a single sample does not fit into memory.
        """
        state = self._state
        algorithms = algorithms_of(state)
        self._cuts_alike = are_even and self._cuts_by_samples and not algorithms
        elsewhere: list[contextlib.AbstractContextManager[object]] = []
        if algorithms:
            elsewhere = [there for one in algorithms if (there := one.perturbed(state)) is not None]
        if elsewhere:
            self._train_elsewhere(samples, share, elsewhere)
        else:
            self._compute_gradients(samples, share)
        self._finish_gradients()
        if self._parallel.steps_itself:
            self._parallel.step()
            return
        try:
            for optimizer in state.optimizers:
                if state.scaler is None:
                    optimizer.step()
                else:
                    state.scaler.step(optimizer)
                    state.scaler.update()
        except (RuntimeError, MemoryError) as e:
            if not state.auto_microbatching or not _is_out_of_memory(e):
                raise
            raise TrainingError(
                "out of memory in the optimizer's step: device_train_microbatch_size='auto' makes smaller what a batch "
                "needs, and the optimizer's state is as large as ever. Take an optimizer with less state, or shard it: "
                "parallelism_config={'fsdp': {}}."
            ) from e

    def _train_elsewhere(
        self, samples: int, share: float, elsewhere: Sequence[contextlib.AbstractContextManager[object]]
    ) -> None:
        """Compute the gradients at other weights than those that the model has, which those at its own lead to.

        All else that a batch changes is as after the first pass, at the model's own weights.
        """
        state = self._state
        before = BatchRollback(state)
        self._compute_gradients(samples, share)
        if not self._is_alone:
            self._parallel.reduce(state.model)
        after, seen = BatchRollback(state), (state.batch, state.outputs, state.loss, state.loss_reading)
        before.restore()
        with contextlib.ExitStack() as there:
            for context in elsewhere:
                there.enter_context(context)
            self._compute_gradients(samples, share)
        after.restore()
        state.batch, state.outputs, state.loss, state.loss_reading = seen

    def _compute_gradients(self, samples: int, share: float) -> None:
        if self._state.auto_microbatching:
            self._train_halving(samples, share)
        else:
            self._train(samples, share)

    def _train_halving(self, samples: int, share: float) -> None:
        """Train with the microbatch size found so far; while memory does not suffice, halve it and try again.

        All ranks do so together: the gradients are reduced when all have theirs.
        """
        state = self._state
        if state.device_train_microbatch_size is None:
            state.device_train_microbatch_size = self._communicator.max(samples)
        before = BatchRollback(state)
        while True:
            cause: Exception | None = None
            try:
                self._train(samples, share)
            except (torch.OutOfMemoryError, RuntimeError, MemoryError) as e:
                if not _is_out_of_memory(e):
                    raise
                cause = e.with_traceback(None)  # that held the activations that did not fit
            size = state.device_train_microbatch_size
            if not self._communicator.any(cause is not None):
                return
            size = min(size, self._communicator.max(samples))
            if size <= 1:
                raise TrainingError("out of memory with a microbatch of one sample: the model is too large.") from cause
            state.device_train_microbatch_size = (size + 1) // 2
            log.info("out of memory with microbatches of %d: trying %d", size, state.device_train_microbatch_size)
            before.restore()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()

    def _train(self, samples: int, share: float) -> None:
        state = self._state
        for optimizer in () if self._parallel.steps_itself else state.optimizers:
            if _zeroes_plainly(optimizer):
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            else:
                optimizer.zero_grad()
        for handler in self._engine.handlers[Event.BEFORE_TRAIN_BATCH]:
            handler(state, self._engine.logger)

        if self._replays_graphs:  # not before each microbatch: gradients of those before are in that memory
            torch.compiler.cudagraph_mark_step_begin()
        microbatches = self._microbatches(samples)
        may_stop = state.interruption.may_abandon and state.device_train_microbatch_size is not None
        if may_stop:
            self._stop_if_asked(self._communicator.max(len(microbatches)) - len(microbatches))
        if len(microbatches) == 1 and not may_stop:
            self._microbatch(None if share == 1.0 else share, None, last=True)
        else:
            self._accumulate(microbatches, share, may_stop=may_stop)

    def _stop_if_asked(self, times: int = 1) -> None:
        """Abandon the batch if the run is preempted; every rank asks equally often, ranks with fewer pieces at first.

        Raises:
            BatchAbandonedError: on every rank.
        """
        for _ in range(times):
            if self._communicator.any(self._state.interruption.requested):
                self._parallel.after_evaluation(self._state.model)
                raise BatchAbandonedError

    def _microbatches(self, samples: int) -> Sequence[Batch]:
        """``state.batch`` in pieces; where ranks wait for each other in a pass, as many on each."""
        batch, size = self._state.batch, self._state.device_train_microbatch_size
        if size is None:
            return (batch,)
        pieces = (batch,) if size >= samples else self._spec.split_batch(batch, size)
        if self._parallel.passes_are_shared:
            needed = -(-samples // size) if self._cuts_alike else self._communicator.max(len(pieces))
            if len(pieces) > needed:
                raise TrainingError(
                    f"a batch of {samples} samples became {len(pieces)} microbatches of {size}: a callback has made it "
                    "larger, and other ranks may not. Do that in DataSpec(loader, batch_transforms=…)."
                )
            pieces = [*pieces, *[_Padding(pieces[-1])] * (needed - len(pieces))]
        return pieces

    def _accumulate(self, microbatches: Sequence[Batch], share: float, *, may_stop: bool = False) -> None:
        """Train on each; what it counts is its part of the batch's samples or tokens. ``may_stop`` between two."""
        state = self._state
        whole = state.batch
        counts = [0 if isinstance(piece, _Padding) else self._count(piece) for piece in microbatches]
        total = sum(counts)
        if not total and share:
            raise TrainingError(
                "accumulate_train_batch_on_tokens=True: the batch has no tokens to weigh its microbatches by. Pass "
                "DataSpec(loader, get_num_tokens_in_batch=lambda batch: …)."
            )
        self._losses = {}
        for number, (piece, count) in enumerate(zip(microbatches, counts, strict=True), 1):
            if may_stop:
                self._stop_if_asked()
            state.batch = piece.batch if isinstance(piece, _Padding) else piece
            part = count / total if total else 0.0
            self._microbatch(part * share, part, last=number == len(microbatches))
        state.total_loss_dict = self._losses
        state.batch = whole

    def _finish_gradients(self) -> None:
        state = self._state
        if not self._is_alone:
            self._parallel.reduce(state.model)
        if state.scaler is not None:
            for optimizer in state.optimizers:
                state.scaler.unscale_(optimizer)
        for handler in self._engine.handlers[Event.AFTER_TRAIN_BATCH]:
            handler(state, self._engine.logger)

    def _microbatch(self, weight: float | None, part: float | None, *, last: bool) -> None:
        """Forward, loss and backward on ``state.batch``; ``None`` for a batch that is whole.

        Args:
            weight: what its gradients count. part: what its losses count.
            last: there are no more of the batch.
        """
        state, spec, on, logger = self._state, self._spec, self._engine.handlers, self._engine.logger
        model: Any = state.model
        if spec.microbatch_transforms is not None:
            state.batch = spec.microbatch_transforms(state.batch)

        # Entering a context that does nothing costs as much as an event: without autocast there is none.
        forward, loss = model, model.loss
        if not self._is_alone:
            forward = self._parallel.trained(model)
            self._parallel.before_microbatch(last=last)
        if state.precision is not Precision.FP32:
            forward, loss = _in_precision(state, forward), _in_precision(state, loss)
        for handler in on[Event.BEFORE_FORWARD]:
            handler(state, logger)
        state.outputs = forward(state.batch)
        for handler in on[Event.AFTER_FORWARD]:
            handler(state, logger)

        for handler in on[Event.BEFORE_LOSS]:
            handler(state, logger)
        state.loss = loss(state.outputs, state.batch)
        for handler in on[Event.AFTER_LOSS]:
            handler(state, logger)

        total = state.loss
        if type(total) is torch.Tensor:
            state.total_loss_dict = {"loss/train/total": total.detach()}
        else:
            total, state.total_loss_dict = total_loss(total)
        losses = state.total_loss_dict
        if part is not None:
            for name, value in losses.items():
                self._losses[name] = self._losses.get(name, 0.0) + value * part
            losses = self._losses
        if last and state.devices is not None:
            state.loss_reading = LossReading(losses, state.devices)
        for handler in on[Event.BEFORE_BACKWARD]:
            handler(state, logger)
        if weight is not None:
            total = total * weight
        if state.scaler is not None:
            total = state.scaler.scale(total)
        try:
            if self._is_alone:
                total.backward()
            else:
                self._parallel.backward(total)
        except RuntimeError:
            check_loss(state.loss, total)
            raise
        for handler in on[Event.AFTER_BACKWARD]:
            handler(state, logger)

        if state.train_metrics and weight != 0.0 and self._parallel.counts:
            with torch.no_grad():
                to_metrics = model.eval_forward  # what update_metric is promised, in training as in evaluation
                if state.precision is not Precision.FP32:
                    to_metrics = _in_precision(state, to_metrics)
                outputs = to_metrics(state.batch, state.outputs)
                for metric in state.train_metrics.values():
                    model.update_metric(state.batch, outputs, metric)


def _zeroes_plainly(optimizer: torch.optim.Optimizer) -> bool:
    """Return true if its ``zero_grad`` is torch's own: that releases the gradients, and costs a profiler's record."""
    return type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(optimizer)


def _in_precision(state: State, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run in the precision of ``state``."""

    def run(*arguments: Any) -> Any:
        with get_precision_context(state.precision, state.device):
            return function(*arguments)

    return run


def total_loss(loss: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the loss to call ``backward`` on, and all losses by logged name.

    Raises:
        TrainingError: ``loss`` is neither a tensor nor several.
    """
    if isinstance(loss, torch.Tensor):
        return loss, {"loss/train/total": loss.detach()}
    if isinstance(loss, Mapping):
        named: dict[str, torch.Tensor] = dict(loss)
        total: Any = named.pop("total") if "total" in named else sum(named.values())
    elif isinstance(loss, Sequence) and loss:
        named = {f"loss{index}": value for index, value in enumerate(loss)}
        total = sum(named.values())
    else:
        named, total = {}, loss
    if not isinstance(total, torch.Tensor):
        check_loss(loss, total)
    assert isinstance(total, torch.Tensor)
    logged = {f"loss/train/{name}": value.detach() for name, value in named.items()}
    return total, {"loss/train/total": total.detach(), **logged}


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
"""In the errors of allocators, of cuBLAS and cuDNN, and of cuBLAS where it has no memory for its own start."""


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in text for part in _OUT_OF_MEMORY)
