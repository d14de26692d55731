"""One training batch: microbatches, gradients, the optimizer step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from composerlite.core import DataSpec, Engine, Event, State, get_precision_context
from composerlite.core.engine import algorithms_of
from composerlite.core.state.loss_reading import LossReading
from composerlite.errors import TrainingError
from composerlite.trainer.ranks.communicator import Ranks
from composerlite.trainer.rollback import BatchRollback
from composerlite.types import Batch

__all__ = ["TrainStep", "check_loss", "total_loss"]

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
"""Parts of error messages of allocators, cuBLAS and cuDNN when memory is exhausted."""


@final
class TrainStep:
    """Trains on ``state.batch`` and steps the optimizer.

    A batch is split into microbatches of ``state.device_train_microbatch_size`` samples. Each loss is weighted by the
    microbatch's share of the samples (or tokens), so the gradients add up to the gradient of the whole batch.

    Args:
        state: training state.
        engine: runs the events from ``BEFORE_TRAIN_BATCH`` to ``AFTER_TRAIN_BATCH``.
        spec: splits and counts batches.
        weight_by_tokens: weight microbatches, and the batches of ranks, by tokens instead of samples.
        ranks: model and collectives of this rank.
        replays_graphs: the model replays CUDA graphs, whose memory is used again in the next batch.
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
        self._replays_graphs = replays_graphs

    def run(self, samples: int, weight: float = 1.0) -> None:
        """Train on ``state.batch``.

        Args:
            samples: number of samples in the batch of this rank.
            weight: weight of this rank's gradients; the mean over all ranks is 1.

        Raises:
            TrainingError: with automatic microbatching, a single sample or the optimizer's state does not fit into
                memory.
        """
        state = self._state
        perturbed = [p for algorithm in algorithms_of(state) if (p := algorithm.perturbed(state)) is not None]
        if perturbed:
            self._train_perturbed(samples, weight, perturbed)
        else:
            self._compute_gradients(samples, weight)
        self._parallel.reduce(state.model)
        if state.scaler is not None:
            for optimizer in state.optimizers:
                state.scaler.unscale_(optimizer)
        for handler in self._engine.handlers[Event.AFTER_TRAIN_BATCH]:
            handler(state, self._engine.logger)
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
                "out of memory in the optimizer's step: device_train_microbatch_size='auto' reduces the memory of a "
                "batch, and the optimizer's state does not shrink. Use an optimizer with less state, or shard it: "
                "parallelism_config={'fsdp': {}}."
            ) from e

    def _train_perturbed(
        self, samples: int, weight: float, perturbed: Sequence[contextlib.AbstractContextManager[object]]
    ) -> None:
        """Compute gradients twice: at the model's weights, then at the weights of the ``perturbed`` contexts.

        The second gradients remain. Buffers, metrics, random numbers and outputs are those of the first pass.
        """
        state = self._state
        before = BatchRollback(state)
        self._compute_gradients(samples, weight)
        self._parallel.reduce(state.model)
        after, results = BatchRollback(state), (state.batch, state.outputs, state.loss, state.loss_reading)
        before.restore()
        with contextlib.ExitStack() as stack:
            for context in perturbed:
                stack.enter_context(context)
            self._compute_gradients(samples, weight)
        after.restore()
        state.batch, state.outputs, state.loss, state.loss_reading = results

    def _compute_gradients(self, samples: int, weight: float) -> None:
        """Compute the gradients. With automatic microbatching, halve the size on all ranks until the batch fits."""
        state = self._state
        if not state.auto_microbatching:
            self._train_microbatches(samples, weight)
            return
        if state.device_train_microbatch_size is None:
            state.device_train_microbatch_size = self._communicator.max(samples)
        before = BatchRollback(state)
        while True:
            cause: Exception | None = None
            try:
                self._train_microbatches(samples, weight)
            except (torch.OutOfMemoryError, RuntimeError, MemoryError) as e:
                if not _is_out_of_memory(e):
                    raise
                cause = e.with_traceback(None)  # the traceback holds the activations that did not fit
            if not self._communicator.any(cause is not None):
                return
            size = min(state.device_train_microbatch_size, self._communicator.max(samples))
            if size <= 1:
                raise TrainingError("out of memory with a microbatch of one sample: the model is too large.") from cause
            log.info("out of memory with microbatches of %d samples: trying %d", size, (size + 1) // 2)
            state.device_train_microbatch_size = (size + 1) // 2
            before.restore()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()

    def _train_microbatches(self, samples: int, weight: float) -> None:
        """Zero the gradients, then run the forward and backward pass of each microbatch."""
        state = self._state
        if not self._parallel.steps_itself:
            for optimizer in state.optimizers:
                optimizer.zero_grad()
        for handler in self._engine.handlers[Event.BEFORE_TRAIN_BATCH]:
            handler(state, self._engine.logger)
        if self._replays_graphs:  # once per batch: the graphs' memory holds the gradients of earlier microbatches
            torch.compiler.cudagraph_mark_step_begin()

        whole, size = state.batch, state.device_train_microbatch_size
        pieces: list[Batch] = [whole]
        if size is not None and size < samples:
            pieces = list(self._spec.split_batch(whole, size))
        passes = len(pieces)
        if self._parallel.passes_are_shared and size is not None:
            passes = self._communicator.max(passes)
        counts = [self._count(piece) for piece in pieces] if len(pieces) > 1 else [1]
        total = sum(counts)
        if not total and weight:
            raise TrainingError(
                "accumulate_train_batch_on_tokens=True: the batch has no tokens to weight its microbatches by. Pass "
                "DataSpec(loader, get_num_tokens_in_batch=lambda batch: …)."
            )
        losses: dict[str, Any] = {}
        for number in range(passes):
            # A rank with fewer microbatches repeats the last one with weight 0: the other ranks wait for the pass.
            is_padding = number >= len(pieces)
            state.batch = pieces[-1] if is_padding else pieces[number]
            part = 0.0 if is_padding or not total else counts[number] / total
            self._microbatch(part * weight, part, losses, last=number == passes - 1)
        state.total_loss_dict = losses
        if passes > 1:
            state.batch = whole

    def _microbatch(self, weight: float, part: float, losses: dict[str, Any], *, last: bool) -> None:
        """Run forward, loss and backward on ``state.batch``.

        Args:
            weight: weight of the gradients.
            part: share of this microbatch in the losses of the batch.
            losses: losses of the batch so far; this method adds those of the microbatch.
            last: the batch has no further microbatch.
        """
        state, spec, on, logger = self._state, self._spec, self._engine.handlers, self._engine.logger
        model: Any = state.model
        if spec.microbatch_transforms is not None:
            state.batch = spec.microbatch_transforms(state.batch)

        forward = self._parallel.training_module(model)
        self._parallel.before_microbatch(last=last)
        for handler in on[Event.BEFORE_FORWARD]:
            handler(state, logger)
        with get_precision_context(state.precision, state.device):
            state.outputs = forward(state.batch)
        for handler in on[Event.AFTER_FORWARD]:
            handler(state, logger)

        for handler in on[Event.BEFORE_LOSS]:
            handler(state, logger)
        with get_precision_context(state.precision, state.device):
            state.loss = model.loss(state.outputs, state.batch)
        for handler in on[Event.AFTER_LOSS]:
            handler(state, logger)

        total, state.total_loss_dict = total_loss(state.loss)
        for name, value in state.total_loss_dict.items():
            share = value if part == 1.0 else value * part
            losses[name] = losses[name] + share if name in losses else share
        if last and state.devices is not None:
            state.loss_reading = LossReading(losses, state.devices)
        for handler in on[Event.BEFORE_BACKWARD]:
            handler(state, logger)
        if weight != 1.0:
            total = total * weight
        if state.scaler is not None:
            total = state.scaler.scale(total)
        try:
            self._parallel.backward(total)
        except RuntimeError:
            check_loss(state.loss, total)
            raise
        for handler in on[Event.AFTER_BACKWARD]:
            handler(state, logger)

        if state.train_metrics and weight != 0.0 and self._parallel.counts:
            with torch.no_grad():
                with get_precision_context(state.precision, state.device):
                    outputs = model.eval_forward(state.batch, state.outputs)
                for metric in state.train_metrics.values():
                    model.update_metric(state.batch, outputs, metric)


def total_loss(loss: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the loss to call ``backward`` on, and all losses by logged name.

    Args:
        loss: result of ``model.loss``: a tensor, a sequence of tensors or a dict of tensors.

    Raises:
        TrainingError: ``loss`` is none of these.
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
    logged = {f"loss/train/{name}": value.detach() for name, value in named.items()}
    return total, {"loss/train/total": total.detach(), **logged}


def check_loss(loss: object, total: object) -> None:
    """Explain why ``backward`` failed on a loss.

    Args:
        loss: result of ``model.loss``.
        total: sum of the losses.

    Raises:
        TrainingError: ``total`` is not a scalar tensor, or has no gradient.
    """
    if not isinstance(total, torch.Tensor):
        hint = " .item() takes a number out of the graph." if isinstance(total, int | float) else ""
        raise TrainingError(
            f"model.loss returned {type(loss).__name__}: expected a tensor, a sequence of tensors, or a dict of "
            f"tensors.{hint}"
        )
    if total.numel() != 1:
        raise TrainingError(
            f"model.loss returned a tensor of shape {list(total.shape)}: expected a scalar. Take the mean over the "
            "samples: loss.mean(), or reduction='mean' of the loss function."
        )
    if not total.requires_grad:
        raise TrainingError(
            "model.loss returned a tensor that has no gradient, so nothing can be trained. Look in forward and loss "
            "for detach(), item(), argmax() or torch.no_grad(), and for parameters that all have requires_grad=False."
        )


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in text for part in _OUT_OF_MEMORY)
