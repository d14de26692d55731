"""Devices: what training runs on, as a name that torch takes, with what Composer's devices offer.

``rng`` holds the state of the random generators there, ``copier`` how checkpoints are copied from there.
"""

from composerlite.devices.copier import (
    DeviceCopier,
    Devices,
    MachineDevices,
    PageableCopier,
    Pin,
    Pinning,
    content_sums,
    this_machine,
)
from composerlite.devices.device import Device, DeviceCPU, DeviceGPU, DeviceMPS, get_device, move_to_device

__all__ = [
    "Device",
    "DeviceCPU",
    "DeviceCopier",
    "DeviceGPU",
    "DeviceMPS",
    "Devices",
    "MachineDevices",
    "PageableCopier",
    "Pin",
    "Pinning",
    "content_sums",
    "get_device",
    "move_to_device",
    "this_machine",
]
