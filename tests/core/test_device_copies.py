"""Copies from devices: pinned memory, devices without streams, and sums over content."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composerlite.devices import MachineDevices, PageableCopier, Pinning
from composerlite.devices.copier import content_sums, cuts, poll
from composerlite.storage import HostMemory

GIB = 1 << 30


class Runtime:
    """The calls of CUDA that pin memory; the one with the number ``fails`` is refused."""

    def __init__(self, fails: int = -1) -> None:
        self.fails = fails
        self.calls = 0
        self.pinned: dict[int, int] = {}
        self.has_error = False

    def register(self, address: int, size: int, flags: int) -> int:
        """As ``cudaHostRegister``: an error stays until somebody takes it."""
        self.calls += 1
        if self.calls - 1 == self.fails:
            self.has_error = True
            return 2
        assert size <= GIB
        assert flags == 1, "pinned for the current device only"
        assert not any(start < address + size and address < start + length for start, length in self.pinned.items())
        self.pinned[address] = size
        return 0

    def unregister(self, address: int) -> int:
        """As ``cudaHostUnregister``."""
        return 0 if self.pinned.pop(address, None) is not None else 713

    def clear(self) -> None:
        """Take the error."""
        self.has_error = False

    def pinning(self) -> Pinning:
        """What calls them."""
        return Pinning(self.register, self.unregister, self.clear)


@pytest.fixture
def memory() -> HostMemory:
    """Two slices and a half, of which nothing is touched."""
    return HostMemory(2 * GIB + GIB // 2)


def test_memory_is_pinned_in_slices_once(memory: HostMemory) -> None:
    """All of it, and in the end none."""
    runtime = Runtime()
    pinning = runtime.pinning()
    go = threading.Event()
    go.set()
    assert pinning.add(memory, go)
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
    for cut in cuts(size, offset):
        assert (cut.start, cut.offset) == (end, offset + end)
        assert 0 < cut.size <= 64 << 20
        assert cut.offset // GIB == (cut.offset + cut.size - 1) // GIB
        end += cut.size
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
    assert copier.fetch(copier.sum_up([storage])) == content_sums([tensor.view(torch.uint8)]).tolist()
    assert not copier.may_run_late
    assert copier.waited_seconds() == 0.0
    memory.close()


def test_this_machines_memory_needs_no_device() -> None:
    """Nor does anything get pinned where there is no GPU."""
    devices, memory = MachineDevices(), HostMemory(1)
    assert devices.of(torch.zeros(3).untyped_storage()) is None
    assert isinstance(devices.of(torch.zeros(3, device="meta").untyped_storage()), PageableCopier)
    if not torch.cuda.is_initialized():
        assert not devices.pinner()(memory, None)
    devices.release(memory)
    memory.close()


# ── sums over content ────────────────────────────────────────────────────────────────────────────────────────────────
@given(st.integers(1, 400_000), st.integers(0, 2**62), st.integers(1, 255))
def test_a_sum_sees_any_byte_that_differs(size: int, where: int, change: int) -> None:
    """At the end, too, which is no whole word."""
    data = (torch.arange(size) * 31 % 251).to(torch.uint8)
    before = content_sums([data]).tolist()
    assert content_sums([data.clone()]).tolist() == before
    data[where % size] ^= change
    assert content_sums([data]).tolist() != before


@given(st.integers(0, 49_999), st.integers(0, 49_999))
def test_a_sum_sees_words_that_changed_places(one: int, other: int) -> None:
    """Such as chunks of two tensors that were written to each other's place."""
    words = torch.arange(50_000, dtype=torch.int64) << 20
    before = content_sums([words.view(torch.uint8)]).tolist()
    words[[one, other]] = words[[other, one]]
    assert (content_sums([words.view(torch.uint8)]).tolist() == before) is (one == other)


def test_small_parts_are_summed_together() -> None:
    """Which ones depends on their sizes alone: a device and this machine group them alike."""
    parts = [torch.full((size,), 7, dtype=torch.uint8) for size in (8, 3, 0, 2 << 20, 5, 5)]
    sums = content_sums(parts)
    assert sums.shape == (3, 2)
    assert torch.equal(sums, content_sums([part.clone() for part in parts]))
    parts[1][0] = 8
    assert (sums != content_sums(parts)).any(1).tolist() == [True, False, False]


def test_a_large_part_has_sums_for_each_64_mib() -> None:
    """A byte that differs is seen in each of them, and so are words that changed places between two."""
    block = 64 << 20
    data = torch.zeros(block + 13, dtype=torch.uint8)
    data[5] = 1
    before = content_sums([data])
    assert before.shape == (2, 2)
    for place in (0, block - 1, block, block + 12):
        data[place] ^= 7
        assert (content_sums([data]) != before).all(1).tolist() == [place < block, place >= block]
        data[place] ^= 7
    data[5], data[block + 5] = 0, 1
    assert (content_sums([data]) != before).all()
