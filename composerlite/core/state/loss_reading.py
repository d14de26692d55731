"""Reading losses from a device without a stall of the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from composerlite.devices import DeviceCopier, Devices, this_machine

__all__ = ["LossReading"]


@final
class LossReading:
    """Copies of the losses of a batch from a device, started before the backward pass.

    Reading a value waits for the forward pass only. Meanwhile the device runs the backward pass and the optimizer step.
    A plain ``loss.item()`` waits for all queued work, and leaves the device idle.

    Args:
        losses: losses by name, right after the forward pass.
        devices: devices of the losses.
    """

    def __init__(self, losses: Mapping[str, Any] | None = None, devices: Devices = this_machine) -> None:
        self._reads: list[tuple[Any, DeviceCopier, Any]] = []
        for loss in (losses or {}).values():
            if type(loss) is torch.Tensor and loss.numel() == 1:
                copier = devices.of(loss.untyped_storage())
                if copier is not None:
                    self._reads.append((loss, copier, copier.read(loss.reshape(()))))

    def value(self, loss: Any) -> Any:
        """Return ``loss`` as a number. A loss without a started copy is read now."""
        for known, copier, read in self._reads:
            if known is loss:
                return copier.fetch(read)
        return loss.item() if isinstance(loss, torch.Tensor) else loss
