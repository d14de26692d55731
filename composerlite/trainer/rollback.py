"""BatchRollback: undo the part of a batch that ran before the batch is tried again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch.nn.parameter import is_lazy

from composerlite.core import State
from composerlite.core.engine import algorithms_of, callbacks_of
from composerlite.devices import rng

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["BatchRollback"]


@final
class BatchRollback:
    """Copy of all state that a batch changes before the optimizer's step.

    The copy holds random generators, the buffers of the model, training metrics, the dicts and lists of the batch (not
    the tensors), and ``state_dict()`` of the user's callbacks and algorithms. Gradients are not copied: each try zeroes
    the gradients.

    Args:
        state: training state at the start of the batch.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._batch, self._losses = _copy_containers(state.batch), state.total_loss_dict
        self._rng = rng.capture()
        self._buffers = {n: b.clone() for n, b in state.model.named_buffers() if not is_lazy(b)}
        self._metrics = [(m, m.update_count, _copies(m.metric_state)) for m in _with_parts(state.train_metrics)]
        # composerlite's own parts work when an event runs twice, and a timer must not be set back.
        own = [p for p in (*callbacks_of(state), *algorithms_of(state)) if not _is_of_composerlite(p)]
        self._parts = [(part, copy.deepcopy(part.state_dict())) for part in own]

    def restore(self) -> None:
        """Restore the copied state. May be called more than once."""
        state = self._state
        state.batch, state.outputs, state.loss = _copy_containers(self._batch), None, None
        state.total_loss_dict = self._losses
        for part, state_dict in self._parts:
            if state_dict:
                part.load_state_dict(copy.deepcopy(state_dict))
        rng.restore([self._rng])
        for name, buffer in state.model.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])
        for metric, update_count, values in self._metrics:
            metric._update_count = update_count  # pyright: ignore[reportPrivateUsage] - torchmetrics has no setter
            metric._computed = None  # pyright: ignore[reportPrivateUsage]
            for name, value in _copies(values).items():
                setattr(metric, name, value)


def _is_of_composerlite(part: object) -> bool:
    return type(part).__module__.startswith("composerlite.")


def _copy_containers(batch: Any) -> Any:
    """Copy the dicts and lists of ``batch``, which callbacks may change in place; tensors are shared."""
    if isinstance(batch, Mapping):
        own: Any = copy.copy(cast("Mapping[Any, Any]", batch))
        if type(own) is dict:
            return {key: _copy_containers(value) for key, value in own.items()}  # pyright: ignore[reportUnknownVariableType]
        return own
    return [_copy_containers(item) for item in batch] if type(batch) is list else batch  # pyright: ignore[reportUnknownVariableType]


def _with_parts(metrics: Mapping[str, Metric]) -> list[Metric]:
    """Return ``metrics`` and the metrics inside them."""
    if not metrics:
        return []
    from torchmetrics import Metric

    return [part for metric in metrics.values() for part in metric.modules() if isinstance(part, Metric)]


def _copies(states: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """Copy the states of a metric: an update changes tensors in place and appends to lists."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else list(value) for name, value in states.items()}
