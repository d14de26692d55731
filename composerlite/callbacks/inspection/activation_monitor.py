"""ActivationMonitor: statistics of the inputs and outputs of modules."""

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

    Statistics are computed over the last dimension and averaged over all positions. ``<module>_input.0`` is the first
    input of a module, ``<module>_output.0`` the first output.

    ====================================  ============================================================================
    ``activations/l2_norm/<…>``           the L2 norm
    ``activations/average/<…>``           the mean
    ``activations/max/<…>``               the largest value
    ``activations/kurtosis/<…>``          the fourth central moment over the squared variance; 3 for normal values
    ====================================  ============================================================================

    Args:
        interval: batches or epochs between two logs, as ``'25ba'``; a number counts batches.
        ignore_module_types: leave out modules with a text of this list in the name.
        only_log_wandb: if a ``WandBLogger`` is among the loggers, log to W&B only, since the values are many.

    Raises:
        ConfigError: the interval is invalid.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=ActivationMonitor("100ba"))
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
        self._logged_at = -1

    def before_forward(self, state: State, logger: Logger) -> None:
        self._remove_hooks()  # left by an interrupted forward pass
        count = state.timestamp.count(self.interval.unit)
        if count % self.interval.value or count == self._logged_at:
            return
        for name, module in state.model.named_modules():
            if not any(text in name for text in self._ignored):
                self._hooks.append(module.register_forward_hook(functools.partial(self._measure, name)))

    def after_forward(self, state: State, logger: Logger) -> None:
        if not self._hooks:
            return
        self._remove_hooks()
        self._logged_at = state.timestamp.count(self.interval.unit)
        statistics, self._statistics = self._statistics, {}
        if not statistics:
            return
        together = torch.stack([value.float() for value in statistics.values()]).tolist()  # waits for a GPU once
        metrics = dict(zip(statistics, together, strict=True))
        # By name: callbacks do not import loggers.
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
    def _measure(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Hook after the forward pass of a module."""
        for kind, values in (("input", inputs), ("output", outputs)):
            self._add(f"{name}_{kind}", values if isinstance(values, tuple | list | Mapping) else (values,))

    def _add(self, name: str, values: Any) -> None:
        """Add the statistics of each tensor in nested ``values``, with indices and keys in the names."""
        if isinstance(values, tuple | list | Mapping):
            for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
                self._add(f"{name}.{key}", value)
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
