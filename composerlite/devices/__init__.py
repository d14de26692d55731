"""Devices that training runs on (``device``), their random generators (``rng``), and copies from them.

``copier`` copies from a device to memory of this machine, ``ring`` through a small pinned buffer.
"""

from composerlite.devices.copier import (
    DeviceCopier,
    Devices,
    this_machine,
)
from composerlite.devices.device import Device, DeviceCPU, DeviceGPU, DeviceMPS, get_device, move_to_device
from composerlite.devices.ring import DeviceRing, RingSlots, shared_ring

__all__ = [
    "Device",
    "DeviceCPU",
    "DeviceCopier",
    "DeviceGPU",
    "DeviceMPS",
    "DeviceRing",
    "Devices",
    "RingSlots",
    "get_device",
    "move_to_device",
    "shared_ring",
    "this_machine",
]
