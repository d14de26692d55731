"""LayerFreezing: stop training the first layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from composerlite.core import Algorithm, Event, Logger, State, Time, TimeUnit, clean_name, span
from composerlite.errors import ConfigError, checked_arguments

log = logging.getLogger(__name__)
_TRAINING = Time(1.0, TimeUnit.DURATION)


def freeze_layers(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    current_duration: float,
    freeze_start: float = 0.5,
    freeze_level: float = 1.0,
) -> tuple[int, float]:
    """Freeze the first layers of ``model``, in place (`FreezeOut, Brock et al. 2017 <https://arxiv.org/abs/1706.04983>`_).

    A layer is a module with parameters and without submodules, in the order of ``model.modules()``. The last layer is
    never frozen. Frozen parameters stay in the optimizer, so parameter groups in checkpoints do not change; the
    optimizer skips parameters without gradients.

    Args:
        model: the model.
        optimizers: ignored; accepted for scripts of Composer.
        current_duration: finished fraction of training, from 0 to 1.
        freeze_start: fraction of training before the first layer is frozen.
        freeze_level: fraction of the layers to freeze until the end.

    Returns:
        Number of frozen layers, and their scheduled fraction of all layers but the last.

    Raises:
        ConfigError: a fraction is out of range.
    """
    _check("freeze_layers", freeze_start, freeze_level)
    *layers, last = _layers(model) or [model]
    kept = set(last.parameters())  # do not freeze weights shared with the last layer
    fraction = 0.0
    if current_duration > freeze_start:
        fraction = freeze_level * (current_duration - freeze_start) / (1 - freeze_start)
    depth = int(fraction * len(layers))
    for layer in layers[:depth]:
        for parameter in layer.parameters():
            if parameter not in kept:
                _freeze(parameter)
    return depth, fraction


@final
class LayerFreezing(Algorithm):
    """Freezes more and more of the first layers (`FreezeOut, Brock et al. 2017 <https://arxiv.org/abs/1706.04983>`_).

    Layers are frozen at the end of each epoch, linearly from ``freeze_start`` on. Checkpoints have the names of frozen
    parameters, so a resumed run trains the same parameters. On several ranks, gradients are averaged with
    ``'forced_sync'`` by default. Logs ``layer_freezing/layers_frozen`` and ``layer_freezing/percentage_frozen`` (a
    fraction).

    Args:
        freeze_start: fraction of training before the first layer is frozen.
        freeze_level: fraction of the layers to freeze until the end. The last layer is never frozen.

    Raises:
        ConfigError: a fraction is out of range; at ``INIT``: the model is sharded over ranks.
    """

    @checked_arguments
    def __init__(self, freeze_start: float = 0.5, freeze_level: float = 1.0) -> None:
        _check("LayerFreezing", freeze_start, freeze_level)
        self.freeze_start = freeze_start
        self.freeze_level = freeze_level
        self._frozen: list[str] = []

    @property
    def find_unused_parameters(self) -> bool:
        """True: frozen parameters have no gradients."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """Return true at ``INIT``, at the end of an epoch, and at ``AFTER_LOAD``, to freeze layers again."""
        return event in (Event.INIT, Event.AFTER_LOAD, Event.EPOCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Freeze the next layers.

        Raises:
            ConfigError: the model is sharded over ranks.
        """
        if event is Event.INIT:
            if state.parallelism is not None or state.deepspeed_enabled:
                raise ConfigError(
                    "LayerFreezing does not support models sharded over ranks. Remove LayerFreezing, or "
                    "parallelism_config and deepspeed_config."
                )
        elif event is Event.AFTER_LOAD:
            for name, parameter in state.model.named_parameters():
                if clean_name(name) in self._frozen:
                    _freeze(parameter)
        else:
            done = span(_TRAINING, state).fraction
            trained = [name for name, parameter in state.model.named_parameters() if parameter.requires_grad]
            depth, fraction = freeze_layers(state.model, None, done, self.freeze_start, self.freeze_level)
            own = dict(state.model.named_parameters())
            self._frozen += [clean_name(name) for name in trained if not own[name].requires_grad]
            log.info("LayerFreezing: %d layers are frozen", depth)
            logger.log_metrics(
                {"layer_freezing/layers_frozen": depth, "layer_freezing/percentage_frozen": fraction},
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the frozen parameters."""
        return {"frozen": list(self._frozen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the names of the frozen parameters. ``AFTER_LOAD`` freezes these parameters."""
        self._frozen = list(state_dict.get("frozen", ()))


def _layers(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if next(module.children(), None) is None and next(module.parameters(), None) is not None
    ]


def _freeze(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(False)
    parameter.grad = None


def _check(owner: str, start: float, level: float) -> None:
    if not 0 <= start < 1:
        raise ConfigError(f"{owner}(freeze_start={start}): expected a fraction of training, from 0 to less than 1.")
    if not 0 <= level <= 1:
        raise ConfigError(f"{owner}(freeze_level={level}): expected a fraction of the layers, from 0 to 1.")
