"""Devices for training: names of torch devices, with the methods of Composer's devices."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import TypeVar, cast, final

import torch
from torch import nn

from composerlite import dist

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def move_to_device(batch: T, device: str | torch.device) -> T:
    """Return ``batch`` with every tensor in nested lists, tuples, mappings and dataclasses on ``device``.

    Copies to a CUDA GPU may still run when this returns: work on the GPU waits for the copies. Other copies are
    complete.
    https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html

    Args:
        batch: tensors in nested lists, tuples, mappings and dataclasses.
        device: the target.

    Returns:
        The batch on the device.
    """
    if isinstance(batch, torch.Tensor):
        is_ordered = str(device).startswith("cuda")  # work on the device waits for copies to the device
        return batch.to(device, non_blocking=is_ordered)  # pyright: ignore[reportReturnType]
    if isinstance(batch, Mapping):
        moved = {key: move_to_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[return-value, call-arg]
    if isinstance(batch, tuple):
        items = [move_to_device(item, device) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)  # type: ignore[return-value]
    if isinstance(batch, list):
        return [move_to_device(item, device) for item in batch]  # type: ignore[return-value]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        new = copy.copy(batch)
        for field in dataclasses.fields(batch):  # object.__setattr__ works for frozen dataclasses, too
            object.__setattr__(new, field.name, move_to_device(getattr(batch, field.name), device))
        return cast("T", new)
    return batch


class Device(str):
    """The device that training runs on, with the methods of Composer's devices.

    A ``Device`` is the name of a device in torch, such as ``'cpu'`` or ``'cuda:0'``, and equals the ``torch.device`` of
    that name. Every function of torch that takes a device takes a ``Device``. ``Device('cpu')`` makes a ``DeviceCPU``.

    Attributes:
        name: ``'cpu'``, ``'gpu'``, or else the value of ``type``.
        dist_backend: backend of ``torch.distributed`` for the device; empty for MPS.
        type: type of the device in torch: ``'cpu'``, ``'cuda'``, ``'mps'`` or ``'xpu'``.
        index: number of the device among the devices of its type; ``None`` for a name without a number.
    """

    name = ""
    dist_backend = ""
    type: str
    index: int | None  # pyright: ignore[reportIncompatibleMethodOverride] - of torch.device, not of str

    def __new__(cls, value: str | torch.device) -> Device:
        device = torch.device(str(value))
        made = str.__new__(_CLASSES.get(device.type, Device), str(device))
        made.type, made.index = device.type, device.index
        if not made.name:  # a type of device without a class in this module
            made.name, made.dist_backend = device.type, dist.env.backend_of(device)
        return made

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, str | torch.device) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self))

    def __getnewargs__(self) -> tuple[str]:
        return (str(self),)

    def module_to_device(self, module: M) -> M:
        """Move ``module`` to this device and return it."""
        return module.to(str(self))

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` on this device."""
        return move_to_device(tensor, self)

    def batch_to_device(self, batch: T) -> T:
        """Return ``batch`` with every tensor in nested lists, tuples, mappings and dataclasses on this device."""
        return move_to_device(batch, self)

    def optimizer_to_device(self, optimizer: Opt) -> Opt:
        """Move the state of ``optimizer`` to this device and return it."""
        for parameter in optimizer.state:
            optimizer.state[parameter] = move_to_device(optimizer.state[parameter], self)
        return optimizer


@final
class DeviceCPU(Device):
    """The CPU."""

    name = "cpu"
    dist_backend = "gloo"

    def __new__(cls, value: str | torch.device = "cpu") -> Device:
        return Device.__new__(cls, value)


@final
class DeviceGPU(Device):
    """A CUDA GPU.

    ``device_id`` is the number of the GPU on this machine, or a name such as ``'cuda:1'``; ``None``: the GPU of the
    local rank. With ``allow_tf32=True``, float32 matrix multiplications use TF32 in the whole process.

    Raises:
        ConfigError: torch can use no such device on this machine.
    """

    name = "gpu"
    dist_backend = "nccl"

    def __new__(cls, device_id: int | str | torch.device | None = None, *, allow_tf32: bool = False) -> Device:
        number = isinstance(device_id, int)
        device = dist.get_device("gpu" if device_id is None else f"cuda:{device_id}" if number else str(device_id))
        if allow_tf32:
            torch.set_float32_matmul_precision("high")
        return Device.__new__(cls, device)


@final
class DeviceMPS(Device):
    """The GPU of an Apple computer.

    Raises:
        ConfigError: torch can use no such device on this machine.
    """

    name = "mps"

    def __new__(cls, value: str | torch.device = "mps") -> Device:
        return Device.__new__(cls, dist.get_device(value))


_CLASSES: dict[str, type[Device]] = {"cpu": DeviceCPU, "cuda": DeviceGPU, "mps": DeviceMPS}


def get_device(device: str | torch.device | None = None) -> Device:
    """Return the device named ``device``: ``'cpu'``, ``'gpu'`` (the GPU of the local rank), ``'mps'`` or ``'xpu'``.

    A number selects another device, as in ``'cuda:1'``. ``None``: the CUDA GPU if there is one, else the CPU.

    Raises:
        ConfigError: the name is unknown, or this machine has no such device.
    """
    if isinstance(device, Device):
        return device
    return Device(dist.get_device(device))
