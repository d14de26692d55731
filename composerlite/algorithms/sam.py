"""SAM: step with the gradients of the worst weights nearby."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import final

import torch
from torch import nn

from composerlite import dist
from composerlite.core import Algorithm, Event, Logger, State
from composerlite.errors import ConfigError, checked_arguments


@final
class SAM(Algorithm):
    """Sharpness-aware minimization (`Foret et al. 2021 <https://arxiv.org/abs/2010.01412>`_).

    The gradients ``g`` of a batch lead to weights with a larger loss, ``w + rho * g / |g|``; the optimizer steps from
    ``w`` with the gradients there. Both passes draw the same random numbers. Losses, metrics and the statistics of
    batch norm are those of the first one, so that ``rho=0`` trains as without the algorithm. A batch takes twice the
    time, and memory for the weights once more.

    The norm is that of all gradients, of all ranks. The scale of ``amp_fp16`` cancels out, and a batch whose gradients
    overflow is skipped as usual. The optimizer is the one that was given, in checkpoints as well.

    Args:
        rho: distance to those weights, as an L2 norm.
        epsilon: added to the norm of the gradients.
        interval: batches from one SAM step to the next; the others take a plain step.

    Raises:
        ConfigError: values that mean nothing; at ``INIT``, DeepSpeed trains, which alone has the gradients.
    """

    @checked_arguments
    def __init__(self, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1) -> None:
        if not rho >= 0:
            raise ConfigError(f"SAM(rho={rho}): expected a distance, 0 or more, such as 0.05.")
        if not epsilon > 0:
            raise ConfigError(f"SAM(epsilon={epsilon}): expected a number above zero, such as 1e-12.")
        if interval < 1:
            raise ConfigError(f"SAM(interval={interval}): expected a number of batches, 1 or more.")
        self.rho = rho
        self.epsilon = epsilon
        self.interval = interval

    def match(self, event: Event, state: State) -> bool:
        """Return true at ``INIT``."""
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Check that the gradients can be had.

        Raises:
            ConfigError: DeepSpeed trains.
        """
        if state.deepspeed_enabled:
            raise ConfigError("SAM needs the gradients, which DeepSpeed alone has: leave out SAM or deepspeed_config.")

    def perturbed(self, state: State) -> contextlib.AbstractContextManager[object] | None:
        """The weights with the larger loss, at every ``interval``-th batch."""
        if (int(state.timestamp.batch) + 1) % self.interval:
            return None
        return _uphill(state.model, self.rho, self.epsilon)


@contextlib.contextmanager
def _uphill(model: nn.Module, rho: float, epsilon: float) -> Generator[None]:
    """Within it the weights of ``model`` are further up along their gradients. After it they are the same to the bit:
    what is added is not subtracted again, which would round.
    """
    gradients = {parameter: parameter.grad for parameter in model.parameters() if parameter.grad is not None}
    own = {parameter: parameter.detach().clone() for parameter in gradients}
    if gradients:
        scale = rho / (dist.shards.total_norm(list(gradients.values())) + epsilon)
        with torch.no_grad():
            for parameter, gradient in gradients.items():
                parameter.add_(gradient * scale.to(gradient.device))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weights in own.items():
                parameter.copy_(weights)
