"""Memory for copies of the state: prepared in the background, lent to one save at a time, and bounded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.save.snapshot import StagingMemory
from composerlite.storage import HostMemory
from composerlite.storage.disk.memory import available_memory

MIB = 1 << 20
SIZE = 40 * MIB


@pytest.fixture
def staging() -> Iterator[StagingMemory]:
    """Closed at the end."""
    staging = StagingMemory()
    yield staging
    staging.close()


def prepared(staging: StagingMemory, size: int = SIZE) -> HostMemory:
    """Memory for a copy of ``size`` bytes, lent."""
    staging.prepare(size)
    assert staging.wait_until_prepared(60)
    memory = staging.reserve(size)
    assert memory is not None
    return memory


def test_a_copy_has_the_bytes_of_the_call(staging: StagingMemory) -> None:
    """What is changed after the call is not in the copy, whoever changes it and however."""
    tensors = {"weight": torch.zeros(SIZE // 4), "small": torch.zeros(3), "empty": torch.zeros(0)}
    image = TorchImage(tensors)
    places = [(offset, storage.nbytes()) for storage, offset in image.storages]
    staging.prepare(image.size_bytes)
    assert staging.wait_until_prepared(60)
    snapshot = staging.take(image.storages, image.size_bytes)
    assert snapshot is not None
    memory = snapshot.memory
    assert memory is not None
    for tensor in tensors.values():
        tensor.data.fill_(1.0)
    snapshot.wait()
    for place in places:
        assert not any(memory.view(*place)[:: 1 << 10])
    staging.give_back(memory)


def test_there_is_no_memory_before_it_is_prepared(staging: StagingMemory) -> None:
    """The first touch would take longer than writing the state. Little memory costs nothing."""
    assert staging.reserve(SIZE) is None
    memory = staging.reserve(MIB)
    assert memory is not None
    staging.give_back(memory)
    staging.prepare(SIZE)
    assert staging.reserve(SIZE) is None
    assert staging.wait_until_prepared(60)
    assert staging.reserve(SIZE) is not None


def test_memory_is_lent_to_one_save_and_kept(staging: StagingMemory) -> None:
    """The next save has the same memory, which grows with the checkpoint."""
    memory = prepared(staging)
    assert staging.reserve(SIZE) is None
    staging.prepare(2 * SIZE)  # nothing happens: the memory is lent
    assert staging.reserve(MIB) is None
    staging.give_back(memory)
    assert staging.reserve(SIZE) is memory
    staging.give_back(memory)
    assert staging.reserve(2 * SIZE) is None
    larger = prepared(staging, 2 * SIZE)
    assert larger.size_bytes < 2 * SIZE + 9 * MIB


def test_closing_ends_the_preparation(staging: StagingMemory) -> None:
    """A run that ends does not wait for gigabytes; the memory may be prepared again."""
    staging.prepare(2000 * MIB)
    started = time.perf_counter()
    staging.close()
    assert time.perf_counter() - started < 5
    assert not any(thread.name == "checkpoint-memory" for thread in threading.enumerate())
    staging.give_back(prepared(staging))


def test_memory_that_is_lent_survives_closing(staging: StagingMemory) -> None:
    """A device that does not finish may still write there."""
    memory = prepared(staging)
    staging.close()
    memory.view(0, 1)[0] = 1
    staging.give_back(memory)
    assert staging.reserve(SIZE) is None


def test_a_preparing_thread_rests_most_of_the_time(staging: StagingMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 5 % of a core, in pieces of 2 MiB, so that no step of training is slowed by more."""
    pauses: list[float] = []
    pieces: list[tuple[int, int]] = []

    def fault_in(self: HostMemory, offset: int, size: int) -> None:
        pieces.append((offset, size))
        busy_until = time.perf_counter() + 0.001
        while time.perf_counter() < busy_until:
            pass

    monkeypatch.setattr(HostMemory, "fault_in", fault_in)
    monkeypatch.setattr("composerlite.checkpoint.save.snapshot.time.sleep", pauses.append)
    memory = prepared(staging)
    assert [offset for offset, _ in pieces] == list(range(0, memory.size_bytes, 2 * MIB))
    assert sum(size for _, size in pieces) == memory.size_bytes
    assert len(pauses) == len(pieces)
    assert min(pauses) >= 0.019


def test_a_limit_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """No memory beyond it, and no warning: the user has chosen it."""
    staging = StagingMemory(MIB)
    with caplog.at_level(logging.WARNING):
        staging.prepare(SIZE)
        assert staging.reserve(SIZE) is None
        assert staging.reserve(2 * MIB) is None
    assert staging.reserve(MIB) is not None
    assert caplog.text == ""


def test_processes_of_a_machine_share_what_is_free(staging: StagingMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes half of its share at most: eight of them do not ask for four times the memory that there is."""
    third = available_memory() // 3
    assert staging.fits(third)
    for name, value in {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert not staging.fits(third)
    assert staging.fits(available_memory() // 20)


def test_too_little_memory_is_said_once(staging: StagingMemory, caplog: pytest.LogCaptureFixture) -> None:
    """With the way to choose another size."""
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            staging.prepare(available_memory())
            assert staging.reserve(available_memory()) is None
    assert caplog.text.count("save_staging_bytes limits the size of the copy") == 1
