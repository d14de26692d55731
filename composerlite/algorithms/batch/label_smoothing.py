"""LabelSmoothing: train on smoothed targets."""

from __future__ import annotations

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor

from composerlite.algorithms.batch.items import BatchItem
from composerlite.core import Algorithm, Event, Logger, State
from composerlite.errors import ConfigError, TrainingError, checked_arguments
from composerlite.types import Batch


def smooth_labels(logits: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
    """Mix ``target`` with the uniform distribution (`Szegedy et al. 2016 <https://arxiv.org/abs/1512.00567>`_).

    Args:
        logits: shape (N, C, …); gives the number of classes and the type of the result.
        target: class indices of shape (N, …), or probabilities of shape (N, C, …). A negative index is ignored: all
            probabilities are zero.
        smoothing: share of the uniform distribution, from 0 to 1.

    Returns:
        Probabilities of shape (N, C, …).

    Raises:
        ConfigError: ``smoothing`` is not from 0 to 1.
        TrainingError: ``logits`` and ``target`` have other shapes, or a class index is too large.
    """
    _check(smoothing)
    if logits.ndim < 2:
        raise TrainingError(
            f"Targets of classes: the outputs have the shape {tuple(logits.shape)}, expected (N, C, …) with C classes."
        )
    classes = logits.shape[1]
    if target.shape == logits.shape:
        return target.to(logits.dtype) * (1 - smoothing) + smoothing / classes
    if target.is_floating_point() or target.shape != logits.shape[:1] + logits.shape[2:]:
        raise TrainingError(
            f"Targets of classes have the shape {tuple(target.shape)} and the type {target.dtype}, and the outputs the "
            f"shape {tuple(logits.shape)}: expected class indices of shape (N, …), or probabilities of the shape of "
            "the outputs."
        )
    known = (target >= 0).unsqueeze(1)
    try:
        one_hot = F.one_hot(target.clamp(min=0).long(), classes).movedim(-1, 1).to(logits.dtype)
    except RuntimeError as error:
        raise TrainingError(f"Targets of classes: the outputs have {classes} classes: {error}") from error
    return (one_hot * (1 - smoothing) + smoothing / classes) * known


@final
class LabelSmoothing(Algorithm):
    """Computes the loss against smoothed targets (`Szegedy et al. 2016 <https://arxiv.org/abs/1512.00567>`_).

    Metrics see the original batch. The loss must accept probabilities, such as ``soft_cross_entropy`` and
    ``torch.nn.functional.cross_entropy``.

    Args:
        smoothing: share of the uniform distribution, from 0 to 1.
        target_key: the targets in a batch: an index, a key, the name of an attribute, or a pair of functions
            ``get(batch)`` and ``set(batch, targets)``; ``set`` returns the new batch.

    Raises:
        ConfigError: ``smoothing`` is not from 0 to 1.
    """

    @checked_arguments
    def __init__(self, smoothing: float = 0.1, target_key: Any = 1) -> None:
        _check(smoothing)
        self.smoothing = smoothing
        self.target_key = target_key
        self._target = BatchItem("target_key", target_key)
        self._original: Batch = None

    def match(self, event: Event, state: State) -> bool:
        """Return true before and after the loss."""
        return event in (Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Smooth the targets before the loss, and restore the batch after the loss.

        Raises:
            TrainingError: the outputs or the targets are not a tensor.
        """
        if event is Event.AFTER_LOSS:
            state.batch, self._original = self._original, None
            return
        target, outputs = self._target.read(state), state.outputs
        if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
            raise TrainingError(
                f"LabelSmoothing: expected tensors as outputs and targets, got {type(outputs).__name__} and "
                f"{type(target).__name__}. The targets are batch[{self.target_key!r}]: pass another target_key."
            )
        self._original = state.batch
        self._target.replace(state, smooth_labels(outputs, target, self.smoothing))


def _check(smoothing: float) -> None:
    if not 0 <= smoothing <= 1:
        raise ConfigError(f"smoothing={smoothing}: expected a number from 0 to 1, such as 0.1.")
