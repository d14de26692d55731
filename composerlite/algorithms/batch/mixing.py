"""Base of MixUp and CutMix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composerlite.algorithms.batch.items import BatchItem
from composerlite.algorithms.batch.label_smoothing import smooth_labels
from composerlite.core import Algorithm, Event, Logger, State, get_precision_context
from composerlite.errors import ConfigError, TrainingError
from composerlite.types import Batch


def draw_coefficient(alpha: float) -> float:
    """Draw from Beta(alpha, alpha); 0 for ``alpha=0``.

    Raises:
        ConfigError: ``alpha`` is negative.
    """
    if not alpha >= 0:
        raise ConfigError(f"alpha={alpha}: expected a number, 0 or more, such as 0.2.")
    return float(np.random.beta(alpha, alpha)) if alpha else 0.0


def draw_permutation(input: Tensor) -> Tensor:  # noqa: A002 - Composer's name
    """Draw a permutation of the samples of ``input``."""
    return torch.randperm(input.shape[0]).to(input.device)


class Mixing(Algorithm):
    """Trains on mixtures of two samples of a microbatch.

    The inputs are mixed before the forward pass; the targets, or the losses of both targets, at the loss. After the
    loss the batch is restored, so metrics compare the outputs with the targets of the first samples. There is no state
    besides the random generators.
    """

    def __init__(self, interpolate_loss: bool, input_key: Any, target_key: Any) -> None:
        self.interpolate_loss = interpolate_loss
        self.input_key = input_key
        self.target_key = target_key
        self._input = BatchItem("input_key", input_key)
        self._target = BatchItem("target_key", target_key)
        self._original: Batch = None
        self._partners: Tensor = torch.empty(0)
        self._share = 0.0

    @abstractmethod
    def mix_input(self, input: Tensor) -> tuple[Tensor, Tensor, float]:  # noqa: A002
        """Return the mixed inputs, the indices of the second samples and their share."""

    def mix_target(self, state: State, target: Tensor) -> Tensor:
        """Return ``target`` mixed like the inputs."""
        outputs = state.outputs
        if not isinstance(outputs, Tensor) or outputs.ndim < 2:
            shape = f" of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else ""
            raise TrainingError(
                f"{type(self).__name__}: the model returned a {type(outputs).__name__}{shape}, expected a tensor (N, "
                "C, …) with C classes. For other outputs pass interpolate_loss=True, to mix the losses."
            )
        own = smooth_labels(outputs, target, 0.0)
        return (1 - self._share) * own + self._share * own[self._partners]

    def check_interpolation(self, target: Tensor) -> None:
        """Raise ``TrainingError`` if the losses of ``target`` cannot be mixed."""

    def match(self, event: Event, state: State) -> bool:
        """Return true before the forward pass, and before and after the loss."""
        return event in (Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Mix the inputs, mix the targets or the losses, and restore the batch.

        Raises:
            TrainingError: inputs, targets or outputs are not tensors.
        """
        name = type(self).__name__
        if event is Event.BEFORE_FORWARD:
            self._original = state.batch
            mixed, self._partners, self._share = self.mix_input(self._input.tensor(state, owner=name))
            self._input.replace(state, mixed)
        elif event is Event.BEFORE_LOSS:
            if not self.interpolate_loss:
                self._target.replace(state, self.mix_target(state, self._target.tensor(state, owner=name)))
        else:
            if self.interpolate_loss:
                state.loss = _sum(state.loss, 1 - self._share, self._loss_of_partners(state), self._share)
            state.batch, self._original = self._original, None

    def _loss_of_partners(self, state: State) -> Any:
        """Return the loss against the targets of the second samples."""
        target = self._target.tensor(state, owner=type(self).__name__)
        self.check_interpolation(target)
        self._target.replace(state, target[self._partners])
        model: Any = state.model
        with get_precision_context(state.precision, state.device):
            return model.loss(state.outputs, state.batch)


def _sum(one: Any, weight: float, other: Any, other_weight: float) -> Any:
    """Return the weighted sum of two losses with the same structure."""
    if isinstance(one, Mapping):
        return {name: _sum(value, weight, other[name], other_weight) for name, value in one.items()}
    if isinstance(one, Sequence):
        return [_sum(a, weight, b, other_weight) for a, b in zip(one, other, strict=True)]
    return weight * one + other_weight * other
