"""ReduceLROnPlateau: torch's, on a metric that has a name."""

from __future__ import annotations

from typing import Any, final

import torch

from composerlite.types import StateDict


@final
class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Lowers the learning rate when a metric of evaluation has stopped improving.

    torch's own scheduler, which does as well in the Trainer, follows the loss of the first evaluator.

    Args:
        optimizer: whose learning rate it is.
        metric: what to follow, as ``'eval/MulticlassAccuracy'``: the label of an evaluator and the name that its metric
            is logged by. ``None``: the loss of the first evaluator. Of a metric that grows as it gets better say
            ``mode='max'``.
        arguments: those of torch's.

    Raises:
        ValueError: what torch's says of its arguments.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, metric: str | None = None, **arguments: Any) -> None:
        super().__init__(optimizer, **arguments)
        self.metric = metric

    def state_dict(self) -> StateDict:
        """Return the state of torch's scheduler. The name of the metric is an argument of the script, and not in it."""
        return {name: value for name, value in super().state_dict().items() if name != "metric"}
