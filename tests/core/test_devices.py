"""Devices: names that torch takes, with what Composer's devices offer; and what Composer's state tells beside."""

from __future__ import annotations

import copy
import pickle
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from composerlite.core import State
from composerlite.core.data import batch_get, batch_set
from composerlite.devices import Device, DeviceCPU, DeviceGPU, get_device, move_to_device
from composerlite.errors import ConfigError


def test_a_state_tells_its_device_as_composer_does(state: State) -> None:
    """``state.device`` has a name, moves modules, tensors, batches and optimizers, and says what kind it is."""
    assert state.device.name == "cpu"
    assert isinstance(state.device, DeviceCPU)
    batch = {"x": torch.ones(1), "y": [torch.zeros(2), "text"]}
    moved = state.device.batch_to_device(batch)
    assert moved["x"].device == state.device
    assert moved["y"][1] == "text"
    module = nn.Linear(1, 1)
    assert state.device.module_to_device(module) is module
    assert state.device.tensor_to_device(torch.ones(1)).device.type == "cpu"
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    assert state.device.optimizer_to_device(optimizer) is optimizer


def test_a_device_is_taken_wherever_torch_takes_one(state: State) -> None:
    """``tensor.to(state.device)`` works as with a ``torch.device``, which it equals; so do its type and index."""
    device = state.device
    assert torch.ones(1, device=device).to(device).device == device
    assert torch.device(device) == device
    assert device == torch.device("cpu")
    assert device != torch.device("meta")
    assert (device.type, device.index) == ("cpu", None)
    assert {device: 1}[Device("cpu")] == 1
    for copied in (copy.deepcopy(device), cast("Device", pickle.loads(pickle.dumps(device)))):
        assert (copied, copied.name, copied.type) == (device, "cpu", "cpu")


def test_devices_of_every_type_have_composers_names() -> None:
    """The class tells the type, whether or not this machine has such a device; one to train on has to exist."""
    gpu = Device("cuda:1")
    assert isinstance(gpu, DeviceGPU)
    assert (gpu.name, gpu.type, gpu.index, gpu.dist_backend) == ("gpu", "cuda", 1, "nccl")
    assert get_device("cpu") == get_device(DeviceCPU()) == DeviceCPU()
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device='gpu': this machine has no CUDA device"):
            DeviceGPU()


class Moves(TorchFunctionMode):
    """Notes which moves of tensors the host does not wait for, and moves nothing."""

    def __init__(self) -> None:
        self.of: dict[str, bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.to:
            return func(*args, **(kwargs or {}))
        self.of[str(args[1])] = kwargs["non_blocking"]
        return args[0]


def test_what_is_moved_to_this_machine_is_waited_for() -> None:
    """Outputs of ``predict`` are read at once. Only CUDA orders what comes after a move to it."""
    with Moves() as moves:
        for device in ("cpu", "cuda:1", "mps", "xpu:0"):
            move_to_device([torch.ones(1)], device)
    assert moves.of == {"cpu": False, "cuda:1": True, "mps": False, "xpu:0": False}


@pytest.mark.parametrize("name", ["optimizers", "schedulers", "algorithms", "callbacks", "evaluators"])
def test_a_list_of_the_state_accepts_a_single_item(state: State, name: str) -> None:
    """A sequence becomes a list, and ``None`` an empty list."""
    item = object()
    for given, expected in [(item, [item]), ((item, item), [item, item]), (None, [])]:
        setattr(state, name, given)
        assert getattr(state, name) == expected


def test_a_state_without_fsdp_says_so_in_composers_words(state: State) -> None:
    """Nothing is sharded, no wrapper is around the model, and the state dicts are those of a checkpoint."""
    assert (state.fsdp_enabled, state.fsdp_config, state.fsdp_config_version) == (False, None, 0)
    assert (state.fsdp_state_dict_type, state.fsdp_sharded_state_dict_enabled) == (None, False)
    assert (state.is_model_ddp, state.load_monolith_rank0_only, state.tp_config) == (False, False, None)
    assert list(state.get_model_state_dict()) == ["weight", "bias"]
    state.optimizers = [torch.optim.SGD(state.model.parameters(), lr=0.1)]
    assert list(state.get_optim_state_dict()) == ["SGD"]


def test_a_pair_of_functions_gets_and_sets_an_item_of_a_batch() -> None:
    """As Composer's algorithms take it: the first gets, the second sets."""

    def get(batch: list[int]) -> int:
        return batch[-1]

    def put(batch: list[int], value: int) -> list[int]:
        return [*batch[:-1], value]

    assert batch_get([1, 2], (get, put)) == 2
    assert batch_set([1, 2], (get, put), 3) == [1, 3]
