"""Devices: what training runs on, as a name that torch takes, with what Composer's devices offer.

``rng`` holds the state of the random generators there.
"""

from composerlite.devices.device import Device, DeviceCPU, DeviceGPU, DeviceMPS, get_device, move_to_device

__all__ = ["Device", "DeviceCPU", "DeviceGPU", "DeviceMPS", "get_device", "move_to_device"]
