"""Who writes to memory that is watched is seen, and who only reads is not."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from composerlite.storage import PageWatch, whole_pages

SIZE = 3 << 20


def watch_of(tensor: torch.Tensor) -> PageWatch:
    """Of the whole pages of ``tensor``; skips the test where the kernel has none."""
    watch = PageWatch.begin([whole_pages(tensor.data_ptr(), tensor.nbytes)])
    if watch is None:
        pytest.skip("the kernel cannot watch pages (Linux 6.7), or may not here")
    return watch


@pytest.fixture
def memory() -> torch.Tensor:
    """Bytes, each of them touched."""
    return torch.ones(SIZE, dtype=torch.uint8)


def by_the_kernel(memory: torch.Tensor) -> None:
    """As a data loader reads a file into a tensor."""
    reading, writing = os.pipe()
    os.write(writing, b"new")
    os.readv(reading, [memoryview(memory.numpy())[SIZE // 2 : SIZE // 2 + 3]])
    os.close(reading)
    os.close(writing)


def by_a_thread(memory: torch.Tensor) -> None:
    thread = threading.Thread(target=memory.zero_)
    thread.start()
    thread.join()


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "all": lambda memory: memory.zero_(),
    "one byte": lambda memory: memory.data[SIZE // 2].zero_(),
    "numpy": lambda memory: memory.numpy().fill(2),
    "what it was": lambda memory: memory.data[SIZE // 2].fill_(1),
    "a thread": by_a_thread,
    "the kernel": by_the_kernel,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_seen(memory: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
    """Whoever writes, and also the same value; the next watch begins anew."""
    watch = watch_of(memory)
    write(memory)
    assert watch.stop()
    assert watch.stop()
    assert not watch_of(memory).stop()


def test_reads_are_none(memory: torch.Tensor) -> None:
    """Nor is what is written beside it, before the watch or after it."""
    beside = torch.ones(SIZE, dtype=torch.uint8)
    memory.fill_(2)
    watch = watch_of(memory)
    assert int(memory.sum()) == 2 * SIZE
    assert memory.clone().numpy().tobytes() == b"\2" * SIZE
    beside.zero_()
    assert not watch.stop()
    memory.zero_()
    assert not watch.stop()


def test_memory_that_was_never_touched_is_watched() -> None:
    """Zeros that the system has not provided yet, as the state of a new optimizer is."""
    untouched = torch.zeros(64 << 20, dtype=torch.uint8)
    watch = watch_of(untouched)
    untouched.data[40 << 20] = 1
    assert watch.stop()
    untouched = torch.zeros(64 << 20, dtype=torch.uint8)
    watch = watch_of(untouched)
    assert not int(untouched.max())
    assert not watch.stop()


def test_memory_that_others_write_to_counts_as_written(tmp_path: Path) -> None:
    """A file's, and what processes share: nobody could see what they do."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file:
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), SIZE), dtype=torch.uint8)
    shared = torch.ones(SIZE, dtype=torch.uint8).share_memory_()
    for memory in (mapped, shared):
        watch = watch_of(memory)
        assert int(memory.sum()) >= 0  # it is there
        assert watch.stop()


def test_two_watches_of_the_same_memory(memory: torch.Tensor) -> None:
    """Two savers at one batch: the second cannot watch, and the first one's answer is right."""
    watch = watch_of(memory)
    assert PageWatch.begin([whole_pages(memory.data_ptr(), memory.nbytes)]) is None
    assert not watch.stop()
    assert not watch_of(memory).stop()


def test_a_forked_process_is_another(memory: torch.Tensor) -> None:
    """The workers of a data loader: what they write is theirs, and nothing of the watch is left with them."""
    watch = watch_of(memory)
    child = os.fork()
    if not child:
        memory.zero_()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not watch.stop()
    assert int(memory.sum()) == SIZE


def test_nothing_stays_protected(memory: torch.Tensor) -> None:
    """After the end, and where the watch could not begin, the kernel watches nothing of this process."""
    watch_of(memory).stop()
    assert PageWatch.begin([whole_pages(memory.data_ptr(), memory.nbytes), (1 << 20, mmap.PAGESIZE)]) is None
    flags = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("VmFlags")]
    assert not [line for line in flags if "uw" in line]


@pytest.mark.parametrize("shift", [0, 1, 64, mmap.PAGESIZE - 1])
@pytest.mark.parametrize("size", [0, 1, mmap.PAGESIZE, 3 * mmap.PAGESIZE])
def test_whole_pages_are_inside(shift: int, size: int) -> None:
    """Nothing of what is beside it, and less than a page is left at each end."""
    address = 10 * mmap.PAGESIZE + shift
    start, watched = whole_pages(address, size)
    assert start % mmap.PAGESIZE == watched % mmap.PAGESIZE == 0
    if watched:
        assert address <= start < address + mmap.PAGESIZE
        assert address + size - mmap.PAGESIZE < start + watched <= address + size
    else:
        assert size < 2 * mmap.PAGESIZE


@pytest.mark.soak
def test_a_page_that_the_kernel_moves_is_not_written_to() -> None:
    """As it does on a machine that runs short of large pages, and between NUMA nodes."""
    compact, over = Path("/proc/sys/vm/compact_memory"), threading.Event()
    if not os.access(compact, os.W_OK):
        pytest.skip("only root can let the kernel move pages")

    def move() -> None:
        while not over.is_set():
            compact.write_text("1")

    thread = threading.Thread(target=move)
    thread.start()
    try:
        found = []
        for _ in range(40):
            memories = [torch.ones(1 << 18) for _ in range(800)]
            del memories[::2]  # holes that the rest is moved to
            watch = PageWatch.begin([whole_pages(memory.data_ptr(), memory.nbytes) for memory in memories])
            assert watch is not None
            found.append(watch.stop())
    finally:
        over.set()
        thread.join()
    assert found.count(True) == 0
