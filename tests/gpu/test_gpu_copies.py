"""Copies from a GPU: equal bytes, whatever the tensor and however late the copy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_parts import DEVICE, GPU, NEEDS_CUDA, build, tensors_of
from torch import nn

from composerlite.checkpoint import load_state_dict, save_state_dict
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.save.snapshot import StagingMemory
from composerlite.devices import DeviceCopier
from composerlite.devices.copier import MachineDevices
from composerlite.storage import HostMemory

pytestmark = GPU
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
BIG = 16 << 20  # numbers: 64 MiB, two chunks


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def kinds() -> dict[str, torch.Tensor]:
    """A tensor of each type, views, ties, layouts, an empty one and a scalar."""
    numbers = torch.arange(512, device=DEVICE)
    made = {str(dtype).removeprefix("torch."): numbers.to(torch.float32).to(dtype) for dtype in DTYPES}
    base = torch.randn(64, 32, device=DEVICE)
    images = torch.randn(2, 3, 8, 8, device=DEVICE).to(memory_format=torch.channels_last)
    views = {"base": base, "part": base[3:9, ::2], "transposed": base.T, "tied": base, "images": images}
    return {**made, **views, "empty": torch.empty(0, 4, device=DEVICE), "scalar": torch.tensor(2.5, device=DEVICE)}


def test_every_kind_of_tensor_is_saved_byte_for_byte(tmp_path: Path) -> None:
    """In a directory of shards, saved by the function and loaded back into tensors on the device."""
    saved = kinds()
    save_state_dict(tmp_path / "step", saved)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load_state_dict(tmp_path / "step", loaded)
    for name, tensor in saved.items():
        assert torch.equal(bits(loaded[name]), bits(tensor)), name
        assert loaded[name].device == tensor.device


def test_a_file_of_a_gpu_opens_without_one(tmp_path: Path) -> None:
    """Plain ``torch.load`` puts every tensor on the CPU."""
    with build(tmp_path) as trainer:
        trainer.fit()
    saved = torch.load(tmp_path / "ba6.pt", weights_only=True)
    assert {t.device.type for t in saved["state"]["model"].values()} == {"cpu"}
    live = trainer.state.model.state_dict()
    assert all(torch.equal(bits(saved["state"]["model"][name]), bits(tensor)) for name, tensor in live.items())


def test_each_checkpoint_is_that_of_its_batch(tmp_path: Path) -> None:
    """Copied while training continues, or before it does: the same bytes."""
    for lazy in (True, False):
        with build(tmp_path / str(lazy), save_lazy=lazy) as trainer:
            trainer.fit()
    for batch in range(1, 7):
        late, at_once = (tensors_of(torch.load(tmp_path / str(lazy) / f"ba{batch}.pt")) for lazy in (True, False))
        assert late.keys() == at_once.keys()
        assert [name for name, tensor in late.items() if not torch.equal(bits(tensor), bits(at_once[name]))] == []


# ── waits ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Without:
    """The devices of this machine, one of whose waits is left out."""

    def __init__(self, wait: str) -> None:
        self._devices, self._wait, self._calls = MachineDevices(), wait, 0

    def of(self, storage: torch.UntypedStorage) -> DeviceCopier | None:
        """The copier, without the wait."""
        copier: Any = self._devices.of(storage)
        if copier is not None and self._wait:
            setattr(copier, self._wait, lambda *arguments: None)
        return copier

    def current(self) -> torch.device | None:
        """As the machine."""
        return self._devices.current()

    def pin(self, memory: HostMemory, device: torch.device) -> bool:
        """As the machine."""
        return self._devices.pin(memory, device)

    def release(self, memory: HostMemory) -> None:
        """As the machine."""
        self._devices.release(memory)


@pytest.fixture
def weight() -> nn.Parameter:
    """Large enough that its copy takes long."""
    weight = nn.Parameter(torch.zeros(BIG, device=DEVICE))
    weight.grad = torch.ones_like(weight)
    return weight


def saved_value(weight: nn.Parameter, wait: str) -> tuple[float, float]:
    """The least and the largest number of a snapshot of twos that is taken while the device is busy."""
    staging = StagingMemory(devices=Without(wait))
    optimizer = torch.optim.SGD([weight], lr=1.0, maximize=True)
    image = TorchImage({"weight": weight})
    staging.prepare(image.size_bytes)
    assert staging.wait_until_prepared(60)
    for number in range(2):  # after the first one the memory holds ones
        image = TorchImage({"weight": weight})
        offset = image.storages[0].offset
        with torch.no_grad():
            weight.fill_(number)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # training is behind
        optimizer.step()
        snapshot = staging.take(image.storages, image.size_bytes, [optimizer])
        assert snapshot is not None
        memory = snapshot.memory
        assert memory is not None
        optimizer.step()
        snapshot.wait()
        found = torch.frombuffer(memory.view(offset, 4 * BIG), dtype=torch.float32).clone()
        torch.cuda.synchronize()
        staging.give_back(memory)
    staging.close()
    return float(found.min()), float(found.max())


@NEEDS_CUDA
def test_a_late_copy_has_the_bytes_of_the_save(weight: nn.Parameter) -> None:
    """Training is far behind the host, and the next step is queued before the copy has begun."""
    assert saved_value(weight, "") == (2.0, 2.0)


@NEEDS_CUDA
@pytest.mark.parametrize("wait", ["after_training", "before_training", "wait"])
def test_without_a_wait_the_bytes_are_wrong(wait: str, weight: nn.Parameter) -> None:
    """Each one is needed on a real device, too; one of ten tries shows it."""
    assert any(saved_value(weight, wait) != (2.0, 2.0) for _ in range(10))


@NEEDS_CUDA
def test_a_save_does_not_wait_for_the_device() -> None:
    """Taking a snapshot queues work and returns while the device sleeps for a second."""
    weight = nn.Parameter(torch.zeros(BIG, device=DEVICE))
    staging, optimizer = StagingMemory(), torch.optim.SGD([weight], lr=1.0)
    staging.prepare(TorchImage({"weight": weight}).size_bytes)
    assert staging.wait_until_prepared(60)
    for _ in range(2):
        image = TorchImage({"weight": weight})
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        started = time.perf_counter()
        snapshot = staging.take(image.storages, image.size_bytes, [optimizer])
        seconds = time.perf_counter() - started
        assert snapshot is not None
        snapshot.wait()
        optimizer.step()
        snapshot.give_back()
    assert seconds < 0.25
    staging.close()


def test_fifty_saves_take_no_more_memory(tmp_path: Path) -> None:
    """Of the device: what copies need is given back."""
    used: list[int] = []
    with build(tmp_path, save_num_checkpoints_to_keep=1, max_duration="50ba") as trainer:
        for batches in (10, 50):
            trainer.fit(duration=f"{batches - int(trainer.state.timestamp.batch)}ba")
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                used.append(torch.cuda.memory_allocated())
    assert not used or used[1] <= used[0] + (1 << 20)
