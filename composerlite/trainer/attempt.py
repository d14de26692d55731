"""What training changes while it tries a batch, to be put back if the batch is given up or did not fit into memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch
from torch.nn.parameter import is_lazy

from composerlite.checkpoint import rng
from composerlite.core import State
from composerlite.types import StateDict, Stateful

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["BeforeBatch", "BeforeLoading"]


@final
class BeforeBatch:
    """Random generators, the model's buffers and the training metrics, as they are when this is built.

    With them put back a batch does not depend on how often it was tried. Gradients are zeroed anyway.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._batch = state.batch
        self._rng = rng.capture()
        self._buffers = {n: b.clone() for n, b in state.model.named_buffers() if not is_lazy(b)}
        self._metrics = [(m, m.update_count, _copies(m.metric_state)) for m in _with_parts(state.train_metrics)]

    def restore(self) -> None:
        """Put everything back."""
        state = self._state
        state.batch, state.outputs, state.loss = self._batch, None, None
        rng.restore([self._rng])
        for name, buffer in state.model.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])
        for metric, update_count, values in self._metrics:
            metric._update_count = update_count  # pyright: ignore[reportPrivateUsage] - torchmetrics has no other way
            metric._computed = None  # pyright: ignore[reportPrivateUsage]
            for name, value in _copies(values).items():
                setattr(metric, name, value)


@final
class BeforeLoading:
    """:class:`BeforeBatch`, and the position in the data: as they are before a batch is asked of the loader."""

    def __init__(self, state: State, position: Stateful) -> None:
        self._state = state
        self._rest = BeforeBatch(state)
        self._position = position.state_dict()

    def restore(self) -> None:
        """Put everything back, to be saved: the loader, which may have been stopped anywhere, is of no more use."""
        self._rest.restore()
        self._state.data_position = _Noted(self._position)


@final
class _Noted:
    """Stands in for a position that is not asked any more."""

    def __init__(self, state_dict: StateDict) -> None:
        self._state_dict = state_dict

    def state_dict(self) -> StateDict:
        return self._state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        self._state_dict = state_dict


def _with_parts(metrics: Mapping[str, Metric]) -> list[Metric]:
    """``metrics``, and those that they are made of."""
    if not metrics:
        return []
    from torchmetrics import Metric

    return [part for metric in metrics.values() for part in metric.modules() if isinstance(part, Metric)]


def _copies(states: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """Tensors are changed in place, and lists appended to."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else list(value) for name, value in states.items()}
