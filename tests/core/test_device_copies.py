"""Copies from devices: pinned memory, and devices without streams."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composerlite.devices.copier import MachineDevices, PageableCopier, Pinning, cuts, poll
from composerlite.storage import HostMemory

GIB = 1 << 30


class Runtime:
    """The calls of CUDA that pin memory; the one with the number ``fails`` is refused."""

    def __init__(self, fails: int = -1) -> None:
        self.fails = fails
        self.calls = 0
        self.pinned: dict[int, int] = {}
        self.has_error = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """An error stays until somebody clears it."""
        self.calls += 1
        if self.calls - 1 == self.fails:
            self.has_error = True
            return 2
        assert size <= GIB
        assert flags == 1, "pinned for the current device only"
        assert not any(start < address + size and address < start + length for start, length in self.pinned.items())
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Return the error of CUDA for memory that is not pinned."""
        return 0 if self.pinned.pop(address, None) is not None else 713

    def clear(self) -> None:
        """Take the error."""
        self.has_error = False

    def pinning(self) -> Pinning:
        """What calls them."""
        return Pinning(self, self.clear)


@pytest.fixture
def memory() -> HostMemory:
    """Two slices and a half, of which nothing is touched."""
    return HostMemory(2 * GIB + GIB // 2)


def test_memory_is_pinned_in_slices_once(memory: HostMemory) -> None:
    """All of it, and in the end none."""
    runtime = Runtime()
    pinning = runtime.pinning()
    assert pinning.add(memory)
    assert pinning.add(memory)
    assert sum(runtime.pinned.values()) == memory.size_bytes
    assert len(runtime.pinned) == runtime.calls == 3
    pinning.remove(memory)
    pinning.remove(memory)
    assert not runtime.pinned
    memory.close()


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_memory_that_cannot_be_pinned_is_left_as_it_was(
    fails: int, memory: HostMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """No part of it stays pinned, the error is not left to the next kernel, and it is said once with the way out."""
    runtime = Runtime(fails)
    pinning = runtime.pinning()
    with caplog.at_level(logging.WARNING):
        assert not pinning.add(memory)
        assert not pinning.add(memory)
    assert not runtime.pinned
    assert not runtime.has_error
    assert len([record for record in caplog.records if "CUDA error 2" in record.message]) == 1
    assert "ulimit -l" in caplog.text
    pinning.remove(memory)
    assert pinning.add(memory)  # other memory at this address is tried anew
    memory.close()


@given(st.integers(0, 5 * GIB), st.integers(0, 5 * GIB))
def test_chunks_are_all_of_a_copy_and_none_reaches_over_a_slice(size: int, offset: int) -> None:
    """What CUDA copies is in one piece of pinned memory."""
    end = 0
    for start, to, length in cuts(size, offset):
        assert (start, to) == (end, offset + end)
        assert 0 < length <= 64 << 20
        assert to // GIB == (to + length - 1) // GIB
        end += length
    assert end == size


def test_a_device_that_does_not_get_done_is_waited_for_so_long_and_no_longer() -> None:
    """The host sleeps between its looks at it, says which device is late, and gets the device's own errors."""
    looks: list[bool] = []

    def never() -> bool:
        looks.append(False)
        return False

    with pytest.raises(TimeoutError, match=r"cuda:0 did not finish its copies within 0\.2 s"):
        poll(never, 0.2, "cuda:0 did not finish its copies")
    assert 2 < len(looks) < 200, "a spinning thread looks a million times"
    done = iter([False, False, True])
    poll(lambda: next(done), 60.0, "")
    assert next(done, None) is None

    def broken() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        poll(broken, 60.0, "")


def test_a_device_without_streams_copies_at_once() -> None:
    """MPS and XPU: the bytes are there when the copy returns, and no stream of CUDA is asked for."""
    tensor = torch.arange(100_003, dtype=torch.int16)
    storage, memory = tensor.untyped_storage(), HostMemory(1 << 20)
    copier = PageableCopier()
    copier.after_training()
    copier.copy(storage, memory, 4096)
    copier.before_training(copier.mark())
    copier.wait(copier.mark(), 1.0)
    copier.finish_training(1.0)
    assert bytes(memory.view(4096, storage.nbytes())) == tensor.numpy().tobytes()
    copier.copy(storage, memory, 0, 4, 6)
    assert bytes(memory.view(0, 6)) == tensor[2:5].numpy().tobytes()
    assert copier.fetch(copier.read(tensor[:3])) == [0, 1, 2]
    assert not copier.may_run_late
    assert copier.waited_seconds() == 0.0
    memory.close()


def test_this_machines_memory_needs_no_device() -> None:
    """Nor does anything get pinned where there is no GPU."""
    devices, memory = MachineDevices(), HostMemory(1)
    assert devices.of(torch.zeros(3).untyped_storage()) is None
    assert isinstance(devices.of(torch.zeros(3, device="meta").untyped_storage()), PageableCopier)
    assert not devices.pin(memory, torch.device("cpu"))
    if not torch.cuda.is_initialized():
        assert devices.current() is None
    devices.release(memory)
    memory.close()
