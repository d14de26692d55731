"""A group acts together: all have done it, or all raise the same error, which says whose it was. One process, too."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, cast

import pytest
import torch.distributed

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
        "sums": (group.sum([group.rank, 2**40]), group.sum([0.5])),
        "max": group.max([group.rank, -group.rank]),
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
            "sums": ([sum(range(size)), size * 2**40], [0.5 * size]),
            "max": [size - 1, 0],
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


def _go_on() -> tuple[str, int]:
    group = dist.get_group()
    try:
        with group.all_or_none("verifying"):
            if group.rank != 1:
                raise OSError(f"torn on {group.rank}")
    except OSError as e:
        return str(e), group.broadcast(7)
    raise AssertionError("no error")


def test_ranks_go_on_after_failures_that_all_know() -> None:
    """Every rank raises the error of the lowest rank that failed, and the group works as before."""
    assert run_ranks(_go_on, 3) == [("torn on 0", 7)] * 3


def _stay_away() -> None:
    group = dist.get_group()
    if group.rank == 1:
        return
    dist.get_group().timeout = timedelta(seconds=1)
    with group.all_or_none("meeting"):
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


# ── through the first rank ───────────────────────────────────────────────────────────────────────────────────────────
def _group(kind: str) -> dist.Group:
    """All ranks, or a process group that somebody else has made."""
    if kind == "all":
        return dist.group_of()
    return dist.group_of(torch.distributed.new_group())


def _kinds(size: int) -> list[str]:
    return ["all"] if size == 1 else ["all", "made by hand"]


GROUPS = [pytest.param(size, kind, id=f"{size}-{kind}") for size in SIZES for kind in _kinds(size)]


def _reduce(kind: str) -> dict[str, Any]:
    group = _group(kind)
    vote = group.vote("saving")
    return {
        "reduced": group.all_reduce("adding", lambda: group.rank + 1, sum),
        "scattered": group.reduce_scatter("dealing", lambda: group.rank, lambda ranks: [f"for {r}" for r in ranks]),
        "agreed": group.agree("looking", lambda: f"seen by {group.rank}"),
        "voted": vote.run(lambda: group.rank, lambda written: f"committed {written}"),
        "stays": vote.may_be_committed,
    }


@pytest.mark.parametrize(("size", "kind"), GROUPS)
def test_the_first_rank_makes_one_thing_of_what_all_have(size: int, kind: str) -> None:
    """The same on a group of any kind and size."""
    for rank, told in enumerate(on(size, functools.partial(_reduce, kind))):
        assert told == {
            "reduced": sum(range(size + 1)),
            "scattered": f"for {rank}",
            "agreed": f"seen by {rank}",
            "voted": f"committed {list(range(size))}",
            "stays": True,
        }


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


class CollectionsSoFar:
    """Becomes their number when it arrives."""

    def __reduce__(self) -> Any:
        return _collections, ()


class CollectionsSince(NamedTuple):
    """Becomes the number of collections when it is sent."""

    before: int

    def __reduce__(self) -> Any:
        return int, (_collections() - self.before,)


def _count_collections() -> tuple[int, bool]:
    def first(told: list[Any]) -> list[CollectionsSince]:
        made = [[value] for _, values in told for value in values]
        return [CollectionsSince(told[0][0])] * (len(made) // 20_000)

    group = dist.get_group()
    found = group.reduce_scatter("dealing", lambda: (CollectionsSoFar(), [[n] for n in range(20_000)]), first)
    return cast("int", found), gc.isenabled()


def test_no_garbage_is_collected_among_what_all_ranks_have_told() -> None:
    """What the first rank does for thousands of others does not grow faster than they: nothing looks through it."""
    assert run_ranks(_count_collections, 2) == [(0, True)] * 2


class UnpicklableError(Exception):
    """An exception that does not travel."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


def _fail_at(kind: str, where: str, error: type[BaseException]) -> list[tuple[str, str]]:
    group = _group(kind)
    last = group.size - 1

    def each() -> int:
        if where == "each" and group.rank == last:
            raise error("no space")
        return group.rank

    def first(values: list[int]) -> list[int]:
        if where == "first":
            raise error("no space")
        return values

    found: list[tuple[str, str]] = []
    vote = group.vote("saving")
    for act in (
        lambda: group.all_reduce("adding", each, first),
        lambda: group.reduce_scatter("dealing", each, first),
        lambda: vote.run(each, first),
    ):
        try:
            act()
        except BaseException as e:  # noqa: BLE001 - it is the outcome
            cause = e.__cause__ if isinstance(e, RankError) and e.__cause__ is not None else e
            found.append((type(cause).__name__, str(cause)))
    assert not vote.may_be_committed
    assert group.all_reduce("going on", lambda: 1, sum) == group.size
    return found


@pytest.mark.parametrize("where", ["each", "first"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(("size", "kind"), GROUPS)
def test_what_fails_on_the_way_all_raise(size: int, kind: str, error: type[BaseException], where: str) -> None:
    """No rank waits, or has the value, when another failed; nothing that was voted down may be committed."""
    outcomes = on(size, functools.partial(_fail_at, kind, where, error))
    assert outcomes == [[(error.__name__, "no space")] * 3] * size


@pytest.mark.parametrize("where", ["each", "first"])
@pytest.mark.parametrize("kind", ["all", "made by hand"])
def test_an_error_that_does_not_travel_is_told_in_words(kind: str, where: str) -> None:
    """The text arrives where the exception cannot."""
    for found in run_ranks(functools.partial(_fail_at, kind, where, UnpicklableError), 2):
        assert len(found) == 3
        assert all("no space" in text for _, text in found)


def _give_what_cannot_be_sent(kind: str) -> tuple[type, str, list[str]]:
    group = _group(kind)
    return caught(lambda: group.all_reduce("gathering", lambda: threading.Lock() if group.rank else None, list))


@pytest.mark.parametrize("kind", ["all", "made by hand"])
def test_a_value_that_cannot_be_pickled_is_an_error_on_all(kind: str) -> None:
    """It is found before the ranks send anything, so that none waits for it."""
    outcomes = run_ranks(functools.partial(_give_what_cannot_be_sent, kind), 2)
    assert all(raised is TypeError and "pickle" in text for raised, text, _ in outcomes)


def _all_of_a_group_made_by_hand() -> dict[str, Any]:
    group = _group("made by hand")
    told: dict[str, Any] = {"gathered": group.gather(group.rank), "broadcast": group.broadcast(group.rank)}
    told["in vain"] = group.wait_for_all(lambda _: group.rank != 1, timedelta(seconds=0.1))
    told["reduced"] = group.sum([group.rank, 1]), group.max([group.rank])

    def act() -> None:
        with group.all_or_none("looking"):
            if group.rank == 1:
                raise CheckpointNotFoundError("nothing")

    told["raised"] = caught(act)[:2]
    return told


def test_a_group_made_by_hand_has_all_methods() -> None:
    """Who is given a group need not know who made it."""
    expected = {"gathered": [0, 1], "broadcast": 0, "in vain": False, "reduced": ([1, 2], [1])}
    raised = (CheckpointNotFoundError, "nothing (Seen by rank 1.)")
    assert run_ranks(_all_of_a_group_made_by_hand, 2) == [{**expected, "raised": raised}] * 2
