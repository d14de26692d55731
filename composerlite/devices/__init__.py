"""Devices that training runs on (``device``), random generators (``rng``), and copies from and to devices.

``copier`` copies between a device and memory of this machine; ``ring`` copies through a small pinned buffer.
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
