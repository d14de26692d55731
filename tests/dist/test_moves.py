"""Parts of files reach the rank that needs them; a rank that cannot read or write keeps nobody waiting."""

from __future__ import annotations

import functools

import pytest

from composerlite import dist
from composerlite.testing.cluster import run_ranks

MIB = 1 << 20
MOVES = [
    dist.Move(0, 1, "large", 3, 20 * MIB + 5),
    dist.Move(2, 1, "small", 0, 10),
    dist.Move(1, 0, "empty", 7, 0),
    dist.Move(1, 0, "back", 100, 9 * MIB),
    *[dist.Move(0, 2, "many", 8 * MIB * number, 8 * MIB) for number in range(10)],  # more than is on its way at a time
]


def _content(source: int, name: str, offset: int, size: int) -> bytes:
    seed = f"{source}{name}".encode()
    start = offset % len(seed)
    return (seed * (size // len(seed) + 2))[start : start + size]


def _moved(failing: str, at: int) -> tuple[str, int, list[str]]:
    """What was raised here, how many bytes arrived, and the names of files that arrived otherwise than they were."""
    rank, arrived, wrong = dist.get_global_rank(), 0, set[str]()
    sources = {(move.target, move.name): move.source for move in MOVES}

    def read(name: str, offset: int, size: int) -> bytes:
        if failing == "read" and rank == at:
            raise OSError("no such disk")
        return _content(rank, name, offset, size - (failing == "short" and rank == at))

    def write(name: str, offset: int, data: memoryview) -> None:
        nonlocal arrived
        if failing == "write" and rank == at:
            raise OSError("no space")
        arrived += len(data)
        if data != _content(sources[rank, name], name, offset, len(data)):
            wrong.add(name)

    raised = ""
    try:
        dist.move("moving", MOVES, read, write)
    except (OSError, ValueError) as e:
        raised = type(e).__name__
    dist.barrier()  # all go on
    return raised, arrived, sorted(wrong)


def test_parts_of_files_arrive_where_they_are_needed() -> None:
    """Of any size, in order, from several ranks to several."""
    sizes = [sum(move.size_bytes for move in MOVES if move.target == rank) for rank in range(3)]
    assert run_ranks(functools.partial(_moved, "", 0), 3) == [("", size, []) for size in sizes]


@pytest.mark.parametrize(("failing", "error"), [("read", "OSError"), ("write", "OSError"), ("short", "ValueError")])
def test_a_rank_that_cannot_read_or_write_keeps_nobody_waiting(failing: str, error: str) -> None:
    """It raises when all moves are made; the others get what is theirs."""
    outcomes = run_ranks(functools.partial(_moved, failing, 1), 3)
    assert [raised for raised, *_ in outcomes] == ["", error, ""]
    assert outcomes[2] == ("", 80 * MIB, [])
