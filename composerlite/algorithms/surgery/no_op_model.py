"""NoOpModel: replace the model to measure the speed of data loading."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from composerlite.core import Algorithm, Event, Logger, State
from composerlite.types import Batch

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composerlite.devices import Device

log = logging.getLogger(__name__)


@final
class _TrivialModel(nn.Module):
    """Accepts any batch. Has one weight with zero gradient, and no metrics."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=device))
        self.logger: Logger | None = None

    def forward(self, batch: Batch) -> Tensor:
        return self.weight * 0.0

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.sum()

    def eval_forward(self, batch: Batch, outputs: Any = None) -> Any:
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {}

    def update_metric(self, batch: Batch, outputs: Any, metric: Metric) -> None: ...


@final
class NoOpModel(Algorithm):
    """Replaces the model by a trivial model without cost, at the construction of the trainer.

    The remaining time of a step is the time of the data loader and the trainer. There are no metrics. Optimizers keep
    their settings and get the single weight of the new model.
    """

    def match(self, event: Event, state: State) -> bool:
        """Return true at ``INIT``."""
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the model, and the parameters in the optimizers."""
        model = _TrivialModel(state.device)
        for optimizer in state.optimizers:
            optimizer.state.clear()
            for index, group in enumerate(optimizer.param_groups):
                group["params"] = list(model.parameters()) if index == 0 else []
        state.model = model
        log.info("NoOpModel: replaced the model")
