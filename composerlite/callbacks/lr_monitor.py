"""LRMonitor: learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from composerlite.core import Callback

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["LRMonitor"]


@final
class LRMonitor(Callback):
    """Logs ``lr-<Optimizer>/group<i>`` for each parameter group: the rate that the batch was trained with.

    A second optimizer of one class is called ``<Optimizer>:1``, and so on.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # At BATCH_END the schedulers have already set the rates of the next batch.
        classes: list[str] = []
        for optimizer in state.optimizers:
            name = type(optimizer).__qualname__
            number = classes.count(name)
            classes.append(name)
            for index, group in enumerate(optimizer.param_groups):
                self._rates[f"lr-{name}{f':{number}' if number else ''}/group{index}"] = float(group["lr"])

    def batch_end(self, state: State, logger: Logger) -> None:
        logger.log_metrics(self._rates)
