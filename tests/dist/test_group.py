"""A group acts together: all have done it, or all raise the same error, which says whose it was. One process likewise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from composerlite import dist
from composerlite.errors import CheckpointNotFoundError, ConfigError, LateRankError, RankError
from composerlite.testing.cluster import run_ranks, run_ranks_to_the_end

SIZES = [1, 2, 3]


def on(size: int, act: Callable[[], Any]) -> list[Any]:
    """What ``act`` gives on each rank of a run of so many; with one, in this process."""
    return [act()] if size == 1 else run_ranks(act, size)


def caught(act: Callable[[], Any]) -> tuple[type, str, list[str]]:
    """The error that ``act`` raises, with its notes."""
    try:
        act()
    except Exception as e:  # noqa: BLE001 - it is the outcome
        return type(e), str(e), list(getattr(e, "__notes__", []))
    raise AssertionError("nothing was raised")


def _tell() -> dict[str, Any]:
    group = dist.get_group()
    calls: list[int] = []

    def make() -> str:
        calls.append(group.rank)
        return f"made by {group.rank}"

    return {
        "rank": (group.rank, group.size, group.is_first),
        "gathered": group.gather(group.rank * 10),
        "broadcast": group.broadcast(f"from {group.rank}"),
        "from first": group.from_first("making", make),
        "calls": calls,
        "waited": group.wait_for_all(lambda seconds: seconds > 0, timedelta(seconds=1)),
        "in vain": group.wait_for_all(lambda _: group.rank != group.size - 1, timedelta(seconds=0.1)),
        "no failures": group.outcomes("doing nothing", None),
    }


@pytest.mark.parametrize("size", SIZES)
def test_a_group_of_any_size_answers_alike(size: int) -> None:
    """Code that is given a group need not know whether there are other ranks."""
    for rank, told in enumerate(on(size, _tell)):
        assert told == {
            "rank": (rank, size, rank == 0),
            "gathered": [10 * one for one in range(size)],
            "broadcast": "from 0",
            "from first": "made by 0",
            "calls": [0] if rank == 0 else [],
            "waited": True,
            "in vain": False,
            "no failures": {},
        }


def _fail(kind: type[Exception], ranks: tuple[int, ...]) -> tuple[type, str, list[str]]:
    group = dist.get_group()

    def act() -> None:
        with group.all_or_none("looking"):
            if group.rank in ranks:
                raise kind(f"nothing at {group.rank}")

    return caught(act)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [CheckpointNotFoundError, FileNotFoundError, ValueError, ConfigError])
def test_what_one_rank_raises_all_raise_as_what_it_is(size: int, kind: type[Exception]) -> None:
    """Whoever waits for a CheckpointNotFoundError gets one on every rank, with the same text, and with whose it was."""
    failed = tuple(range(size))[-2:]
    outcomes = on(size, functools.partial(_fail, kind, failed))
    assert len({(raised, text) for raised, text, _ in outcomes}) == 1
    raised, text, notes = outcomes[0]
    assert raised is kind
    assert text.startswith(f"nothing at {failed[0]}")
    whose = f"Seen by rank {failed[0]}." if size > 1 else ""
    assert whose in " ".join([text, *notes])


def _fail_to_make() -> tuple[type, str, list[str]]:
    group = dist.get_group()

    def make() -> None:
        raise FileNotFoundError("no bucket")

    return caught(lambda: group.from_first("opening the bucket", make))


@pytest.mark.parametrize("size", SIZES)
def test_what_the_first_cannot_make_all_hear_of(size: int) -> None:
    """No rank waits for a value that rank 0 failed to make."""
    assert {(raised, text) for raised, text, _ in on(size, _fail_to_make)} == {(FileNotFoundError, "no bucket")}


def _go_on() -> tuple[dict[int, str], int]:
    group = dist.get_group()
    outcomes = group.outcomes("verifying", OSError(f"torn on {group.rank}") if group.rank != 1 else None)
    return {rank: str(error) for rank, error in outcomes.items()}, group.broadcast(7)


def test_ranks_go_on_after_failures_that_all_know() -> None:
    """Every rank knows who failed with what, and the group works as before."""
    assert run_ranks(_go_on, 3) == [({0: "torn on 0", 2: "torn on 2"}, 7)] * 3


def _stay_away() -> None:
    group = dist.get_group()
    if group.rank == 1:
        return
    with group.all_or_none("meeting", timedelta(seconds=1)):
        pass


def test_who_does_not_come_is_named() -> None:
    """A wait for a rank that went elsewhere ends, and says which it was."""
    zero, one, two = run_ranks_to_the_end(_stay_away, 3)
    assert one.error is None
    for outcome in (zero, two):
        assert isinstance(outcome.error, LateRankError)
        assert outcome.error.ranks == (1,)


def _fail_with_error_of_ranks() -> tuple[type, str, list[str]]:
    group = dist.get_group()

    def act() -> None:
        with group.all_or_none("reading"):
            raise RankError("rank 1 was lost", [1], everywhere=True)

    return caught(act)


def test_an_error_of_ranks_is_not_told_again() -> None:
    """All have it: a second meeting over it would wait for nobody who comes."""
    assert run_ranks(_fail_with_error_of_ranks, 2) == [(RankError, "rank 1 was lost", [])] * 2
