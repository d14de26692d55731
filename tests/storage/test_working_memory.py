"""What writers and readers of files work with is kept from one to the next, and never shared."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from composerlite.storage import StreamWriter
from composerlite.storage.disk.memory import borrow_memory, give_memory_back

MiB = 1 << 20


def test_what_is_given_back_is_lent_again() -> None:
    """The next one need not touch new memory, which costs more than what is done with it."""
    first = borrow_memory(32 * MiB)
    address = first.address
    give_memory_back(first)
    again = borrow_memory(33 * MiB)  # a reader's, after a writer's
    assert again.address == address
    give_memory_back(again)


def test_two_at_once_have_different_memory() -> None:
    """Each has all that it asked for, and the other cannot see it."""
    memories = [borrow_memory(size * MiB) for size in (1, 32, 48)]
    for number, memory in enumerate(memories):
        memory.view(0, MiB)[:] = bytes([number]) * MiB
    assert [memory.view(0, MiB)[-1] for memory in memories] == [0, 1, 2]
    assert memories[2].size_bytes >= 48 * MiB
    for memory in memories:
        give_memory_back(memory)


def test_little_is_kept() -> None:
    """What was unusually large goes back to the system."""
    large = borrow_memory(100 * MiB)
    give_memory_back(large)
    kept = borrow_memory(1)
    assert kept.size_bytes < 65 * MiB
    give_memory_back(kept)


def test_files_written_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    """Writers that take turns in several threads, one given up in the middle among them, write what each was given."""

    def write(number: int) -> None:
        path = tmp_path / f"{number}"
        path.touch()
        piece = random.Random(number).randbytes(3 * MiB)
        with StreamWriter(path, 12 * MiB) as writer:
            for _ in range(4):
                writer.write(piece)
                if number % 5 == 4:
                    return  # given up
            writer.finish()
        assert path.read_bytes() == piece * 4

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(20)))
