"""NaNMonitor: stop when the loss is not a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from composerlite.core import Callback
from composerlite.errors import TrainingError

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["NaNMonitor"]


@final
class NaNMonitor(Callback):
    """Ends training with an error at the first NaN in the loss, before it reaches the gradients and the weights.

    On a GPU this waits for every forward pass. Infinite losses are let through.

    Raises:
        TrainingError: at ``AFTER_LOSS``. The weights are those after the batch before.
    """

    def after_loss(self, state: State, logger: Logger) -> None:
        for name, loss in _named(state.loss):
            if bool(torch.isnan(loss).any()):
                raise TrainingError(
                    f"{name} is NaN in batch {int(state.timestamp.batch) + 1} (epoch {int(state.timestamp.epoch) + 1}, "
                    f"rank {state.rank}). The weights are those after the batch before. Look for NaN and infinity in "
                    "this batch, or resume from a checkpoint with a lower learning rate or with GradientClipping."
                )


def _named(loss: Any) -> list[tuple[str, torch.Tensor]]:
    """Each loss with the name it is logged under, as near as can be told."""
    if isinstance(loss, Mapping):
        return [(f"loss/train/{key}", torch.as_tensor(value)) for key, value in loss.items()]
    if isinstance(loss, Sequence):
        return [(f"loss/train/loss{index}", torch.as_tensor(value)) for index, value in enumerate(loss)]
    return [("loss/train/total", torch.as_tensor(loss))]
