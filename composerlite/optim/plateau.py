"""ReduceLROnPlateau with a named metric."""

from __future__ import annotations

from typing import Any, final

import torch

from composerlite.types import StateDict


@final
class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Lowers the learning rate when an evaluation metric stops improving.

    The Trainer also accepts the scheduler of torch, with the loss of the first evaluator.

    Args:
        optimizer: the optimizer.
        metric: label of an evaluator and name of a metric, such as ``'eval/MulticlassAccuracy'``; ``None``: the loss of
            the first evaluator. For metrics with larger values better, pass ``mode='max'``.
        arguments: arguments of ``torch.optim.lr_scheduler.ReduceLROnPlateau``.

    Raises:
        ValueError: torch rejects an argument.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, metric: str | None = None, **arguments: Any) -> None:
        super().__init__(optimizer, **arguments)
        self.metric = metric

    def state_dict(self) -> StateDict:
        """Return the state, without the name of the metric."""
        return {name: value for name, value in super().state_dict().items() if name != "metric"}
