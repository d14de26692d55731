"""A running average of a model's weights, and how to look at the model with it."""

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
"""Adds the second list of tensors to the first, an average of a number of them; see ``torch.optim.swa_utils``."""


def read_update_interval(name: str, value: Time | str) -> Time:
    """The argument ``name`` as a positive number of batches or epochs between two updates of an average.

    Raises:
        ConfigError: it is something else.
    """
    time = Time.from_input(value)
    if time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or time.value <= 0:
        raise ConfigError(f"{name}={str(value)!r}: expected batches or epochs, such as '10ba' or '1ep'.")
    return time


def update_event(interval: Time) -> Event:
    """The event at which what happens every ``interval`` happens."""
    return Event.BATCH_END if interval.unit is TimeUnit.BATCH else Event.EPOCH_END


def is_due(interval: Time, event: Event, state: State) -> bool:
    """Return true if what happens every ``interval`` happens now."""
    return event is update_event(interval) and state.timestamp.count(interval.unit) % interval.value == 0


@final
class WeightAverage:
    """A running average of the parameters of a model, and of its buffers that hold statistics (batch norm).

    Buffers that are not saved with the model, are not floating point or are not finite (masks) are left out. The
    average begins with a copy of the weights at the first :meth:`update`.

    While :meth:`show` has put the average into the model, ``model.state_dict()`` still gives and
    ``model.load_state_dict()`` still changes the model's own weights: no checkpoint ever mixes the two up.

    Args:
        average: how a sample is added.

    Attributes:
        count: samples so far.
    """

    def __init__(self, average: AverageFunction) -> None:
        self.count = 0
        self._average = average
        self._tensors: dict[str, Tensor] = {}  # the average; while it is shown, the model's own weights
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
        """Yield name and average of each parameter, and of each buffer that is averaged. Nothing is copied."""
        yield from self._averages().items()

    def transfer_ema_params(self, model: nn.Module) -> None:
        """Overwrite the weights of ``model`` with the average. Kept for scripts of Composer."""
        self.copy_to(model)

    def show(self, model: nn.Module) -> None:
        """Put the average into ``model`` until :meth:`hide`. Showing twice changes nothing.

        Nothing is copied, except where the model is sharded over ranks.
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
        """Give the model its own weights back, those very tensors. Without :meth:`show` nothing changes."""
        if self._shown_in is None:
            return
        for hook in self._hooks:
            hook.remove()
        self._exchange(self._shown_in)
        self._shown_in = None

    def state_dict(self) -> StateDict:
        """The number of samples and the average by parameter name, shown or not. Tensors are not copied."""
        return {"count": self.count, "tensors": self._averages()}

    def state_like(self, model: nn.Module) -> StateDict:
        """The weights of ``model``, by the keys of their average."""
        return {"tensors": dict(_named_tensors(model))}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take back what :meth:`state_dict` gave. An average that is shown is then that one.

        Raises:
            IncompatibleCheckpointError: it is the state of something else.
        """
        if not {"count", "tensors"} <= state_dict.keys():
            raise IncompatibleCheckpointError(
                f"the checkpoint's averaged weights cannot be read: it holds {', '.join(state_dict) or 'nothing'}. "
                "Leave them out with load_exclude_algorithms=[…]; the average then starts anew."
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
            if dist.is_distributed_tensor(own):  # where its memory is, sharding has noted: the numbers change places
                kept = own.detach().clone()
                own.copy_(tensor)
                tensor.copy_(kept)
            else:
                self._tensors[name], own.data = own.data, tensor

    def _pairs(self, model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, tensor here, tensor of the model), on the device of the model.

        Raises:
            IncompatibleCheckpointError: the average is one of another model.
        """
        own = dict(_named_tensors(model))
        wrong = [name for name, tensor in self._tensors.items() if name not in own or own[name].shape != tensor.shape]
        if wrong:
            raise IncompatibleCheckpointError(
                f"the averaged weights do not fit the model: {', '.join(wrong)}. Build the model of that run, or leave "
                "them out with load_exclude_algorithms=[…]; the average then starts anew."
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
