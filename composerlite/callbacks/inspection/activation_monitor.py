"""ActivationMonitor: statistics of what goes into modules and comes out of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from composerlite.core import Callback, Logger, State, TimeInput, TimeUnit, ensure_time
from composerlite.errors import ConfigError, checked_arguments


@final
class ActivationMonitor(Callback):
    """Logs statistics of the inputs and outputs of every module, at the first microbatch of every ``interval``.

    Each is the mean over all positions of what is computed over the last dimension. ``<module>_input.0`` is the first
    input of a module, ``<module>_output.0`` its first output.

    ====================================  ============================================================================
    ``activations/l2_norm/<…>``           the L2 norm
    ``activations/average/<…>``           the mean
    ``activations/max/<…>``               the largest value
    ``activations/kurtosis/<…>``          the fourth central moment over the squared variance; 3 for normal values
    ====================================  ============================================================================

    Args:
        interval: batches or epochs between two logs, as ``'25ba'``; a number counts batches.
        ignore_module_types: modules with one of these texts in their name are left out.
        only_log_wandb: log to W&B alone, where that is a logger: it is a lot.

    Raises:
        ConfigError: the interval is none.
    """

    @checked_arguments
    def __init__(
        self,
        interval: TimeInput = "25ba",
        ignore_module_types: Sequence[str] | None = None,
        only_log_wandb: bool = True,
    ) -> None:
        self.interval = ensure_time(interval, TimeUnit.BATCH)
        if self.interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or self.interval.value <= 0:
            raise ConfigError(
                f"ActivationMonitor(interval={str(interval)!r}): expected batches or epochs, such as '25ba'."
            )
        self._ignored = tuple(ignore_module_types or ())
        self._only_wandb = only_log_wandb
        self._hooks: list[RemovableHandle] = []
        self._statistics: dict[str, Tensor] = {}
        self._looked_at = -1

    def before_forward(self, state: State, logger: Logger) -> None:
        self._remove_hooks()  # the batch may be tried again, since the forward pass was interrupted
        count = state.timestamp.count(self.interval.unit)
        if count % self.interval.value or count == self._looked_at:
            return
        for name, module in state.model.named_modules():
            if not any(text in name for text in self._ignored):
                self._hooks.append(module.register_forward_hook(functools.partial(self._look, name)))

    def after_forward(self, state: State, logger: Logger) -> None:
        if not self._hooks:
            return
        self._remove_hooks()
        self._looked_at = state.timestamp.count(self.interval.unit)
        statistics, self._statistics = self._statistics, {}
        if not statistics:
            return
        together = torch.stack([value.float() for value in statistics.values()]).tolist()  # one wait for a GPU
        metrics = dict(zip(statistics, together, strict=True))
        # By name: callbacks do not know the loggers.
        wandb = [one for one in logger.destinations if type(one).__name__ == "WandBLogger"]
        if self._only_wandb and wandb:
            for destination in wandb:
                destination.log_metrics(metrics, int(state.timestamp.batch))
        else:
            logger.log_metrics(metrics)

    def close(self, state: State, logger: Logger) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.no_grad()
    def _look(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for kind, values in (("input", inputs), ("output", outputs)):
            values = values if isinstance(values, tuple | list | Mapping) else (values,)
            self._add(f"{name}_{kind}", values)

    def _add(self, name: str, values: Any) -> None:
        """Add the statistics of each tensor in nested ``values``; a number or a key tells which one it is."""
        if isinstance(values, Mapping):
            for key, value in values.items():
                self._add(f"{name}.{key}", value)
        elif isinstance(values, tuple | list):
            for index, value in enumerate(values):
                self._add(f"{name}.{index}", value)
        elif isinstance(values, Tensor) and values.is_floating_point() and values.ndim and values.numel():
            x = values.detach().float()
            centered = x - x.mean(dim=-1, keepdim=True)
            variance = centered.square().mean(dim=-1)
            self._statistics |= {
                f"activations/l2_norm/{name}": torch.linalg.vector_norm(x, dim=-1).mean(),
                f"activations/average/{name}": x.mean(),
                f"activations/kurtosis/{name}": (centered.pow(4).mean(dim=-1) / variance.square()).mean(),
                f"activations/max/{name}": x.amax(dim=-1).mean(),
            }
