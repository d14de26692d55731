"""Running average of the weights of a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from composerlite import dist
from composerlite.core import Event, State, Time, TimeUnit, clean_name
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.types import StateDict

AverageFunction: TypeAlias = "Callable[[Any, Any, int], None]"
"""Adds samples to averages: ``function(averages, samples, count)``, as in ``torch.optim.swa_utils``."""


def read_update_interval(name: str, value: Time | str) -> Time:
    """Parse the argument ``name``, a positive number of batches or epochs between two updates.

    Raises:
        ConfigError: the value is not positive, or has another unit.
    """
    time = Time.from_input(value)
    if time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or time.value <= 0:
        raise ConfigError(f"{name}={str(value)!r}: expected batches or epochs, such as '10ba' or '1ep'.")
    return time


def update_event(interval: Time) -> Event:
    """Return the event at which an update every ``interval`` can happen."""
    return Event.BATCH_END if interval.unit is TimeUnit.BATCH else Event.EPOCH_END


def is_due(interval: Time, event: Event, state: State) -> bool:
    """Return true if an update every ``interval`` is due at this event."""
    return event is update_event(interval) and state.timestamp.count(interval.unit) % interval.value == 0


@final
class WeightAverage:
    """Running average of the parameters and statistics (batch norm) of a model.

    Buffers are left out if they are not saved with the model, not floating point or not finite (masks). The first
    :meth:`update` copies the weights.

    Between :meth:`show` and :meth:`hide` the model has the average, but ``model.state_dict()`` and
    ``model.load_state_dict()`` still use the trained weights, so checkpoints are always right.

    Args:
        average: function to add a sample.

    Attributes:
        count: number of samples.
    """

    def __init__(self, average: AverageFunction) -> None:
        self.count = 0
        self._average = average
        self._tensors: dict[str, Tensor] = {}  # the average; between show and hide the trained weights
        self._shown_in: nn.Module | None = None
        self._hooks: list[RemovableHandle] = []

    def update(self, model: nn.Module) -> None:
        """Add the weights of ``model``."""
        if self.count == 0:
            self._tensors = {name: tensor.detach().clone() for name, tensor in _worth_averaging(model)}
        else:
            pairs = list(self._pairs(model))
            self._average([average for _, average, _ in pairs], [own.detach() for _, _, own in pairs], self.count)
        self.count += 1

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrite the weights of ``model`` with the average."""
        averages = self._averages()
        for name, _, own in self._pairs(model):
            own.copy_(averages[name])

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and average of each parameter and averaged buffer, without copies."""
        yield from self._averages().items()

    def transfer_ema_params(self, model: nn.Module) -> None:
        """Overwrite the weights of ``model`` with the average. For scripts of Composer."""
        self.copy_to(model)

    def show(self, model: nn.Module) -> None:
        """Exchange the weights of ``model`` and the average until :meth:`hide`. A second call changes nothing.

        Only weights of sharded models are copied.
        """
        if self._shown_in is not None:
            return
        self._exchange(model)
        self._shown_in = model

        def exchange(*_: Any) -> None:
            self._exchange(model)

        self._hooks = [
            model.register_state_dict_pre_hook(exchange),
            model.register_state_dict_post_hook(exchange),
            model.register_load_state_dict_pre_hook(exchange),
            model.register_load_state_dict_post_hook(exchange),
        ]

    def hide(self) -> None:
        """Return the trained weights to the model, as the same tensors. Without :meth:`show` nothing changes."""
        if self._shown_in is None:
            return
        for hook in self._hooks:
            hook.remove()
        self._exchange(self._shown_in)
        self._shown_in = None

    def state_dict(self) -> StateDict:
        """Return the number of samples and the average by parameter name. Tensors are not copied."""
        return {"count": self.count, "tensors": self._averages()}

    def state_like(self, model: nn.Module) -> StateDict:
        """Return the weights of ``model``, by the keys of the average."""
        return {"tensors": dict(_named_tensors(model))}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a state of :meth:`state_dict`. Between show and hide the model gets the restored average.

        Raises:
            IncompatibleCheckpointError: the state has other keys.
        """
        if not {"count", "tensors"} <= state_dict.keys():
            raise IncompatibleCheckpointError(
                f"the averaged weights cannot be read: found {', '.join(state_dict) or 'nothing'}, expected count and "
                "tensors. To start a new average pass load_exclude_algorithms=[…]."
            )
        model = self._shown_in
        self.hide()
        self.count = int(state_dict["count"])
        self._tensors = {name: tensor.detach().clone() for name, tensor in state_dict["tensors"].items()}
        if model is not None:
            self.show(model)

    def _averages(self) -> dict[str, Tensor]:
        if self._shown_in is None:
            return dict(self._tensors)
        return {name: shown.detach() for name, _, shown in self._pairs(self._shown_in)}

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        for name, tensor, own in self._pairs(model):
            if dist.is_distributed_tensor(own):  # FSDP keeps references to the memory: exchange values
                kept = own.detach().clone()
                own.copy_(tensor)
                tensor.copy_(kept)
            else:
                self._tensors[name], own.data = own.data, tensor

    def _pairs(self, model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, averaged tensor and tensor of the model, both on the device of the model.

        Raises:
            IncompatibleCheckpointError: the average is from another model.
        """
        own = dict(_named_tensors(model))
        wrong = [name for name, tensor in self._tensors.items() if name not in own or own[name].shape != tensor.shape]
        if wrong:
            raise IncompatibleCheckpointError(
                f"the averaged weights do not fit the model: {', '.join(wrong)}. Build the model of the saved run, or "
                "start a new average with load_exclude_algorithms=[…]."
            )
        for name, tensor in list(self._tensors.items()):
            if tensor.device != own[name].device:  # loaded from a checkpoint
                tensor = self._tensors[name] = tensor.to(own[name].device)
            if dist.is_distributed_tensor(own[name]) and not dist.is_distributed_tensor(tensor):
                tensor = self._tensors[name] = dist.shards.distributed_like(tensor, own[name])
            yield name, tensor, own[name]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        yield clean_name(name), tensor


def _worth_averaging(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = {clean_name(name) for name in model.state_dict()}
    for name, tensor in _named_tensors(model):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if isinstance(tensor, nn.Parameter) or (name in saved and bool(tensor.isfinite().all())):
            yield name, tensor
