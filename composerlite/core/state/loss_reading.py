"""Reading losses from a device without keeping it from its work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from composerlite.devices import DeviceCopier, Devices, this_machine

__all__ = ["LossReading"]


@final
class LossReading:
    """Losses of a batch on their way from a device, from before the backward pass on.

    A reader waits until the forward pass is done there. The device has the backward pass and the optimizer's
    step to do meanwhile: it does not run out of work, as it does where the host waits for all that is queued.

    Args:
        losses: by name, as the forward pass has just given them.
        devices: that they are on.
    """

    def __init__(self, losses: Mapping[str, Any] | None = None, devices: Devices = this_machine) -> None:
        self._reads: list[tuple[Any, DeviceCopier, Any]] = []
        for loss in (losses or {}).values():
            if type(loss) is torch.Tensor and loss.numel() == 1:
                copier = devices.of(loss.untyped_storage())
                if copier is not None:
                    self._reads.append((loss, copier, copier.read(loss.reshape(()))))

    def value(self, loss: Any) -> Any:
        """Return ``loss`` as a number. One that is not on its way is read now."""
        for known, copier, read in self._reads:
            if known is loss:
                return copier.fetch(read)
        return loss.item() if isinstance(loss, torch.Tensor) else loss
