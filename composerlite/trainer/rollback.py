"""State that a batch changes, to be put back if the batch is given up or did not fit into memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch.nn.parameter import is_lazy

from composerlite.core import Algorithm, Callback, Event, State, algorithms_of
from composerlite.core.engine import callbacks_of
from composerlite.devices import rng
from composerlite.types import StateDict, Stateful

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["BatchRollback", "DataRollback"]


_TRIED = (
    Event.BEFORE_TRAIN_BATCH,
    Event.BEFORE_FORWARD,
    Event.AFTER_FORWARD,
    Event.BEFORE_LOSS,
    Event.AFTER_LOSS,
    Event.BEFORE_BACKWARD,
    Event.AFTER_BACKWARD,
)
"""The events of a batch that are run again where it is tried again."""
_BEGUN = (
    Event.ITERATION_START,
    Event.EPOCH_START,
    Event.BEFORE_DATALOADER,
    Event.AFTER_DATALOADER,
    Event.BATCH_START,
    *_TRIED,
)
"""The events that a batch has had at most when it is given up."""


@final
class BatchRollback:
    """State that a batch changes, as it is when this is built.

    Random generators, the model's buffers, training metrics, the batch (its dicts and lists, not its tensors), and what
    callbacks and algorithms of the user's that take part in the batch say in their ``state_dict``. With them put back a
    batch does not depend on how often it was tried. Gradients are zeroed anyway.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._batch, self._losses = _with_own_containers(state.batch), state.total_loss_dict
        self._rng = rng.capture()
        self._buffers = {n: b.clone() for n, b in state.model.named_buffers() if not is_lazy(b)}
        self._metrics = [(m, m.update_count, _copies(m.metric_state)) for m in _with_parts(state.train_metrics)]
        self._listeners = [(one, _noted(one)) for one in _listeners(state, _TRIED) if not _is_ours(one)]

    def restore(self) -> None:
        """Put everything back."""
        state = self._state
        state.batch, state.outputs, state.loss = _with_own_containers(self._batch), None, None
        state.total_loss_dict = self._losses
        for listener, noted in self._listeners:
            if noted:
                listener.load_state_dict(copy.deepcopy(noted))
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
class DataRollback:
    """:class:`BatchRollback`, the position in the data, and what callbacks and algorithms of a batch say.

    As they are before a batch is asked of the loader, or before the epoch begins whose first one it is.
    """

    def __init__(self, state: State, position: Stateful) -> None:
        self._state = state
        self._rest = BatchRollback(state)
        self._position = position.state_dict()
        self._noted = {id(one): _noted(one) for one in _listeners(state, _BEGUN)}

    def restore(self) -> None:
        """Put everything back, to be saved: the loader, which may have been stopped anywhere, is of no more use."""
        self._rest.restore()
        self._state.data_position = _Noted(self._position)
        self._state.states_before_batch = self._noted


@final
class _Noted:
    """Stands in for a position that is not asked any more."""

    def __init__(self, state_dict: StateDict) -> None:
        self._state_dict = state_dict

    def state_dict(self) -> StateDict:
        return self._state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        self._state_dict = state_dict


def _listeners(state: State, events: tuple[Event, ...]) -> Iterator[Callback | Algorithm]:
    """The callbacks that do something at one of ``events``, and the user's algorithms."""
    for callback in callbacks_of(state):
        hooks = (event.value for event in events)
        if type(callback).run_event is not Callback.run_event or any(_has(callback, hook) for hook in hooks):
            yield callback
    # What an algorithm matches may depend on a batch that is not there yet. Ours do nothing then that they would save.
    yield from (algorithm for algorithm in algorithms_of(state) if not _is_ours(algorithm))


def _has(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook) or hook in vars(callback)


def _noted(listener: Callback | Algorithm) -> StateDict:
    return copy.deepcopy(listener.state_dict())


def _is_ours(listener: Callback | Algorithm) -> bool:
    """These are made so that an event may come again; what measures time must not be set back."""
    return type(listener).__module__.startswith("composerlite.")


def _with_own_containers(batch: Any) -> Any:
    """``batch`` with dicts and lists of its own: a callback may change those that it is given."""
    if isinstance(batch, Mapping):
        own: Any = copy.copy(cast("Mapping[Any, Any]", batch))
        if type(own) is dict:
            return {key: _with_own_containers(value) for key, value in own.items()}  # pyright: ignore[reportUnknownVariableType]
        return own
    return [_with_own_containers(item) for item in batch] if type(batch) is list else batch  # pyright: ignore[reportUnknownVariableType]


def _with_parts(metrics: Mapping[str, Metric]) -> list[Metric]:
    """``metrics``, and those that they are made of."""
    if not metrics:
        return []
    from torchmetrics import Metric

    return [part for metric in metrics.values() for part in metric.modules() if isinstance(part, Metric)]


def _copies(states: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """Tensors are changed in place, and lists appended to."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else list(value) for name, value in states.items()}
