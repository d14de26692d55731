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
from composerlite.devices.ring import DeviceRing, RingSlots, shared_ring

__all__ = [
    "Device",
    "DeviceCPU",
    "DeviceCopier",
    "DeviceGPU",
    "DeviceMPS",
    "DeviceRing",
    "Devices",
    "MachineDevices",
    "PageableCopier",
    "Pin",
    "Pinning",
    "RingSlots",
    "content_sums",
    "get_device",
    "move_to_device",
    "shared_ring",
    "this_machine",
]
