"""SAM: sharpness-aware minimization."""

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

    From weights ``w`` with gradients ``g``, a second forward and backward pass computes gradients at
    ``w + rho * g / |g|``. The optimizer steps from ``w`` with these gradients. Both passes draw the same random
    numbers. Losses, metrics and batch norm statistics come from the first pass, so ``rho=0`` trains as without the
    algorithm. A step takes twice the time, and memory for another copy of the weights.

    The norm includes the gradients of all ranks. The loss scale of ``amp_fp16`` cancels out, and batches with an
    overflow are skipped as usual. Checkpoints have the plain optimizer.

    Args:
        rho: distance to the perturbed weights, as an L2 norm.
        epsilon: number added to the norm of the gradients.
        interval: number of batches from one SAM step to the next; the batches between take a plain step.

    Raises:
        ConfigError: an argument is out of range; at ``INIT``: the run uses DeepSpeed.
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
        """Check that the run does not use DeepSpeed.

        Raises:
            ConfigError: the run uses DeepSpeed.
        """
        if state.deepspeed_enabled:
            raise ConfigError(
                "SAM needs the gradients, and DeepSpeed does not provide these. Remove SAM or deepspeed_config."
            )

    def perturbed(self, state: State) -> contextlib.AbstractContextManager[object] | None:
        """Return a context in which the weights are perturbed; ``None`` for a batch with a plain step."""
        if (int(state.timestamp.batch) + 1) % self.interval:
            return None
        return _uphill(state.model, self.rho, self.epsilon)


@contextlib.contextmanager
def _uphill(model: nn.Module, rho: float, epsilon: float) -> Generator[None]:
    """Move the weights of ``model`` along the gradients, and restore copies at the end. Subtracting would round."""
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
