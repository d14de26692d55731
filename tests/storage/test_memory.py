"""Memory that is used again, how much is free, and copies by several threads."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from composerlite.storage import HostMemory
from composerlite.storage.disk import memory as memory_module
from composerlite.storage.disk.memory import address_of, available_memory, copy_memory, memory_at

MiB = 1 << 20


# ── HostMemory ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 5 * MiB])
def test_memory_is_whole_pages_of_zeros(size: int) -> None:
    """As large as asked for or larger, at a page's beginning, so that it can be written past the page cache."""
    with closing(HostMemory(size)) as memory:
        assert memory.size_bytes >= size
        assert memory.size_bytes % mmap.PAGESIZE == memory.address % mmap.PAGESIZE == 0
        assert not any(memory.view(0, memory.size_bytes))


def test_a_view_is_the_memory_at_the_address() -> None:
    """What is written through the one is read through the other."""
    with closing(HostMemory(MiB)) as memory:
        memory.view(5000, 3)[:] = b"abc"
        assert bytes(memory_at(memory.address + 5000, 3)) == b"abc"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_is_taken_when_it_is_faulted_in_and_given_back_when_it_is_closed() -> None:
    """Nothing is taken for what is not used, and only the range that is asked for."""
    before = resident_bytes()
    memory = HostMemory(200 * MiB)
    assert resident_bytes() < before + 20 * MiB
    memory.fault_in(0, 100 * MiB)
    assert before + 80 * MiB < resident_bytes() < before + 120 * MiB
    memory.fault_in(100 * MiB, 100 * MiB)
    assert resident_bytes() > before + 180 * MiB
    memory.close()
    memory.close()
    assert resident_bytes() < before + 20 * MiB


def test_forked_processes_do_not_inherit_it() -> None:
    """A worker that a data loader forks finds zeros; the pages stay this process's own and are not copied again."""
    with closing(HostMemory(4 * MiB)) as memory:
        memory.view(0, 3)[:] = b"abc"
        child = os.fork()
        if child == 0:
            os._exit(any(memory.view(0, 3)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bytes(memory.view(0, 3)) == b"abc"


# ── available_memory ─────────────────────────────────────────────────────────────────────────────────────────────────
def system(root: Path, **files: str) -> Path:
    """A folder with the files of a system: ``a__b`` stands for the path ``a/b``."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


def test_what_is_free_here_is_a_number_that_can_be_believed() -> None:
    """More than nothing, less than all of the machine."""
    assert 0 < available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_machine_decides_where_there_are_no_groups(tmp_path: Path) -> None:
    """Outside of containers it is what the system says is available."""
    assert available_memory(system(tmp_path, proc__meminfo=MEMINFO)) == 8_000_000 << 10


def test_there_is_an_answer_without_any_of_the_files(tmp_path: Path) -> None:
    """Half of the machine, where the system does not say."""
    assert available_memory(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@pytest.mark.parametrize("nested", [True, False], ids=["host", "container"])
def test_a_control_group_decides_where_it_leaves_less(tmp_path: Path, nested: bool) -> None:
    """Its limit less what is used, with the cached files, which the system gives up; also as a container sees it."""
    root = system(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/a/b\n")
    group = "sys__fs__cgroup__a" if nested else "sys__fs__cgroup"
    files = {"memory.max": "1000000\n", "memory.current": "900000\n", "memory.stat": "anon 5\ninactive_file 300000\n"}
    system(root, **{f"{group}__{name}": text for name, text in files.items()})
    system(root, **{"sys__fs__cgroup__a__b__memory.max": "max\n", "sys__fs__cgroup__a__b__memory.current": "5\n"})
    assert available_memory(root) == 400_000


def test_control_groups_of_the_first_version_count(tmp_path: Path) -> None:
    """Their files have other names."""
    root = system(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="9:cpu,cpuacct:/x\n4:memory:/x\n")
    group = "sys__fs__cgroup__memory__x__memory"
    system(root, **{f"{group}.limit_in_bytes": "5000", f"{group}.usage_in_bytes": "4000"})
    system(root, **{f"{group}.stat": "total_inactive_file 100"})
    assert available_memory(root) == 1100


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    """Never less than nothing."""
    root = system(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/\n")
    system(root, **{"sys__fs__cgroup__memory.max": "5", "sys__fs__cgroup__memory.current": "9"})
    assert available_memory(root) == 0


# ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────────
SIZES = [0, 1, 4, 4096, 100_000, 1000 << 10, (1000 << 10) + 1, 7 * MiB + 3]


def jobs_of(sizes: list[int]) -> tuple[bytearray, bytes, list[tuple[int, int, int]]]:
    """Memory to copy to, what it must become, and the jobs: things of these sizes with a byte between them."""
    data = random.Random(sum(sizes)).randbytes(sum(sizes) + len(sizes) + 1)
    source, target, expected = bytearray(data), bytearray(len(data)), bytearray(len(data))
    jobs: list[tuple[int, int, int]] = []
    at = 0
    for size in sizes:
        jobs.append((address_of(target) + at, address_of(source) + at, size))
        expected[at : at + size] = data[at : at + size]
        at += size + 1
    _KEPT.append(source)
    return target, bytes(expected), jobs


_KEPT: list[bytearray] = []


@pytest.fixture(autouse=True)
def _keep_sources() -> Iterator[None]:
    """Sources are there as long as the test copies from them."""
    yield
    _KEPT.clear()


@pytest.mark.parametrize(
    "sizes", [[], SIZES, [4] * 5000, [20 * MiB, 4, 20 * MiB]], ids=["none", "all", "many", "large"]
)
def test_memory_is_copied(sizes: list[int]) -> None:
    """Every byte of every job and none beside them, again and again."""
    for _ in range(3):
        target, expected, jobs = jobs_of(sizes)
        copy_memory(iter(jobs))
        assert target == expected


def test_no_thread_copies_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever catches Ctrl-C may free the memory."""
    target, _, jobs = jobs_of([64 * MiB])
    move = memory_module._move_large
    main = threading.get_ident()

    def interrupted(*piece: int) -> None:
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        move(*piece)

    monkeypatch.setattr(memory_module, "_move_large", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_memory(jobs)
    copied = bytes(target)
    time.sleep(0.05)
    assert bytes(target) == copied
    assert not any(thread.name == "checkpoint-copier" for thread in threading.enumerate())


def test_copies_of_several_threads_do_not_mix() -> None:
    """Each call returns when its own copies are complete."""
    things = [jobs_of([size, 17 * MiB, 4]) for size in range(1, 9)]
    threads = [threading.Thread(target=copy_memory, args=(jobs,)) for _, _, jobs in things]
    for thread in threads:
        thread.start()
    for thread, (target, expected, _) in zip(threads, things, strict=True):
        thread.join(60)
        assert target == expected
