"""OptimizerMonitor: norms of gradients, parameters and optimizer moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch

from composerlite import dist
from composerlite.core import Callback
from composerlite.errors import ConfigError, checked_arguments

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["OptimizerMonitor"]


@final
class OptimizerMonitor(Callback):
    """Logs L2 norms, every ``batch_log_interval`` batches.

    ====================================  ============================================================================
    ``l2_norm/grad/<parameter>``          the gradient that the optimizer stepped with (clipped, if it was clipped)
    ``l2_norm/grad/global``               all gradients as one vector
    ``l2_norm/param/<parameter>``         the parameter after the step
    ``l2_norm/moment/<parameter>``        the first moment or momentum buffer, where the optimizer keeps one
    ``l2_norm/second_moment_sqrt/<…>``    the square root of the second moment, where it keeps one
    ====================================  ============================================================================

    Args:
        log_optimizer_metrics: log all of them; ``False`` logs the gradients only.
        batch_log_interval: batches between two logs.
    """

    @checked_arguments
    def __init__(self, log_optimizer_metrics: bool = True, batch_log_interval: int = 10) -> None:
        if batch_log_interval < 1:
            raise ConfigError(
                f"OptimizerMonitor(batch_log_interval={batch_log_interval}): want a number of batches, 1 or more."
            )
        self._all = log_optimizer_metrics
        self._interval = batch_log_interval
        self._norms: dict[str, torch.Tensor] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # The only moment at which gradients are complete, and not yet cleared.
        self._norms.clear()
        if (int(state.timestamp.batch) + 1) % self._interval != 0:
            return
        for name, parameter in state.model.named_parameters():
            if parameter.grad is not None:
                self._norms[f"l2_norm/grad/{name}"] = _norm(parameter.grad)
        if self._norms:
            self._norms["l2_norm/grad/global"] = _stack(self._norms).norm()

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) % self._interval != 0:
            return
        if self._all:
            self._add_optimizer_norms(state)
        if self._norms:
            logger.log_metrics(dict(zip(self._norms, _stack(self._norms).tolist(), strict=True)))
            self._norms.clear()

    def _add_optimizer_norms(self, state: State) -> None:
        moments: dict[torch.Tensor, Mapping[str, object]] = {
            parameter: kept for optimizer in state.optimizers for parameter, kept in optimizer.state.items()
        }
        for name, parameter in state.model.named_parameters():
            self._norms[f"l2_norm/param/{name}"] = _norm(parameter)
            kept = moments.get(parameter, {})
            for key in ("exp_avg", "momentum_buffer"):
                if isinstance(first := kept.get(key), torch.Tensor):
                    self._norms[f"l2_norm/moment/{name}"] = _norm(first)
            if isinstance(second := kept.get("exp_avg_sq"), torch.Tensor):
                self._norms[f"l2_norm/second_moment_sqrt/{name}"] = dist.full_tensor(
                    second.detach().sum(dtype=torch.float32)
                ).sqrt()


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return dist.full_tensor(torch.linalg.vector_norm(tensor, dtype=torch.float32))


def _stack(norms: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All ``norms`` in one tensor on one device: waiting for a GPU once is enough."""
    device = next(iter(norms.values())).device
    return torch.stack([norm.to(device) for norm in norms.values()])
