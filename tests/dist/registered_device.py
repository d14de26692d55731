"""Three devices that torch takes for accelerators, and that only have random generators: a backend in Python."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from composerlite import dist
from composerlite.checkpoint.format.torch_file import FileInMemory, TorchImage
from composerlite.core.numerics import seed_context
from composerlite.devices import Device, rng
from composerlite.errors import ConfigError


class Module:
    """What torch asks of ``torch.<name of the backend>``."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(number) for number in range(3)]
        self.current = 0

    def is_available(self) -> bool:
        """There are some."""
        return True

    def is_initialized(self) -> bool:
        """They are used already."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Of them."""
        return len(self.generators)

    def set_device(self, device: torch.device) -> None:
        """It is used where none is named."""
        self.current = device.index

    def current_device(self) -> int:
        """Its number."""
        return self.current

    def manual_seed_all(self, seed: int) -> None:
        """All draw the same now."""
        for generator in self.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: int | None = None) -> torch.Tensor:
        """Of one device; of the current one by default."""
        return self.generators[self.current if device is None else device].get_state()

    def set_rng_state(self, state: torch.Tensor, device: int | None = None) -> None:
        """The same."""
        self.generators[self.current if device is None else device].set_state(state)

    def draw(self) -> list[float]:
        """A number of each."""
        return [float(torch.rand((), generator=generator)) for generator in self.generators]


def register() -> Module:
    """For the rest of the process."""
    module = Module()
    _setup_privateuseone_for_python_backend("sim", module)
    return module


def refusal(device: str) -> str:
    """Why a device is refused."""
    try:
        dist.env.claim_device(dist.get_device(device))
    except ConfigError as e:
        return str(e)
    return ""


def generators(module: Module) -> dict[str, Any]:
    """What comes back of three generators; device 1 is the current one."""
    state = rng.packed(rng.capture())

    def after(*states: Any) -> list[float]:
        """What is drawn when all is as it was, and then as in each of ``states``."""
        for one in (state, *states):
            rng.restore([one])
        return module.draw()

    expected = after()
    module.draw()
    later = rng.capture()
    its_own = {name: value for name, value in later.items() if name != "sim_devices"}  # as one rank of several saves it
    rng.restore([state])
    with seed_context(5):
        seeded = module.draw()
    after_seeds = module.draw()
    return {
        "expected": expected,
        "restored": after(),
        "of its own": after(its_own),
        "later": after(later),
        "seeded": seeded,
        "after seeds": after_seeds,
    }


def main(path: str) -> None:
    """Save a tensor to ``path``, and print what is made of the devices."""
    module = _registered()
    found: dict[str, Any] = {"refused": [refusal(name) for name in ("sim:3", "sim:x", "npu")]}
    os.environ["LOCAL_RANK"] = "2"
    found["of the local rank"] = str(dist.get_device("sim"))
    del os.environ["LOCAL_RANK"]
    device = Device(dist.get_device("sim:1"))
    dist.env.claim_device(dist.get_device("sim:1"))
    found["current"] = module.current_device()
    found["device"] = [str(device), device.name, device.type, device.index, device.dist_backend]
    found["generators"] = generators(module)
    tensor = torch._C._acc.create_empty_tensor((0, 4), torch.float32)
    file = FileInMemory()
    TorchImage({"weight": tensor}).write(file)
    Path(path).write_bytes(file.getvalue())
    found["saved from"] = str(tensor.device)
    sys.stdout.write(json.dumps(found))


def _registered() -> Module:
    module = Module()
    _setup_privateuseone_for_python_backend("sim", module)
    return module
