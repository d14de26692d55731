"""A commit happens when every rank has written, once; otherwise every rank knows why it did not."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from composerlite import dist
from composerlite.dist.votes import Vote
from composerlite.errors import LateRankError, RankError
from composerlite.testing.cluster import run_ranks, run_ranks_to_the_end

LONG = timedelta(seconds=20)
SHORT = timedelta(seconds=0.5)


class Ranks:
    """Ranks that are threads: each has a barrier of its own, and all have one store."""

    def __init__(self, world_size: int) -> None:
        self.store = HashStore()
        self.committed: list[list[Any]] = []
        self.size = world_size
        self._round = 0
        self._threads = ThreadPoolExecutor(4 * world_size)

    def save(
        self,
        write: Callable[[int], Any],
        commit: Callable[[list[Any]], Any] | None = None,
        timeout: timedelta | Callable[[int], timedelta] = LONG,
    ) -> list[Future[Any]]:
        """Begin one round on every rank."""

        def take_part(rank: int, one: Vote) -> Any:
            try:
                return one.run(lambda: write(rank), commit or self._commit)
            except RankError as e:
                e.add_note(f"may_be_committed={one.may_be_committed}")
                raise

        self._round += 1
        rounds = [
            Vote(
                PrefixStore(f"{self._round}", self.store),
                rank,
                self.size,
                "saving ep1",
                timeout if isinstance(timeout, timedelta) else timeout(rank),
            )
            for rank in range(self.size)
        ]
        return [self._threads.submit(take_part, rank, one) for rank, one in enumerate(rounds)]

    def close(self) -> None:
        self._threads.shutdown()

    def _commit(self, values: list[Any]) -> str:
        self.committed.append(values)
        return f"manifest {len(self.committed)}"


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def _size(ranks: Ranks) -> int:
    return ranks.size


def _errors(saves: list[Future[Any]]) -> list[RankError]:
    errors = [save.exception(60) for save in saves]
    assert all(isinstance(error, RankError) for error in errors), errors
    return [error for error in errors if isinstance(error, RankError)]


def _fail_on_rank_1(rank: int, seconds: float = 0.0) -> None:
    time.sleep(seconds)
    if rank == 1:
        raise OSError(28, "No space left on device", "__1_0.distcp")


def test_rank_0_commits_what_all_have_written(ranks: Ranks) -> None:
    """Once, with the values of all in the order of ranks; all get what the commit returned."""
    saves = ranks.save(lambda rank: f"file {rank}")
    assert [save.result() for save in saves] == ["manifest 1"] * _size(ranks)
    assert ranks.committed == [[f"file {rank}" for rank in range(_size(ranks))]]


def test_nothing_is_committed_before_the_last_has_written() -> None:
    """However long it takes, up to the timeout."""
    ranks, wrote = Ranks(2), threading.Event()
    saves = ranks.save(lambda rank: wrote.wait() if rank == 1 else None)
    time.sleep(0.3)
    assert ranks.committed == []
    assert not any(save.done() for save in saves)
    wrote.set()
    assert [save.result() for save in saves] == ["manifest 1"] * 2
    ranks.close()


def test_a_rank_that_fails_to_write_is_named_by_all(ranks: Ranks) -> None:
    """With the cause; nothing is committed."""
    for error in _errors(ranks.save(_fail_on_rank_1)):
        assert str(error) == "saving ep1: rank 1 failed: OSError: [Errno 28] No space left on device: '__1_0.distcp'"
        assert error.ranks == (1,)
        assert isinstance(error.__cause__, OSError)
        assert "may_be_committed=False" in error.__notes__
    assert ranks.committed == []


def test_a_vote_is_never_read_twice() -> None:
    """A save after one that a rank never came to is decided by its own votes, also where those come late."""
    ranks, wrote = Ranks(3), threading.Event()
    first = ranks.save(lambda rank: wrote.wait() if rank == 2 else None, timeout=SHORT)
    assert [error.ranks for error in _errors(first[:2])] == [(2,)] * 2
    for error in _errors(ranks.save(lambda rank: _fail_on_rank_1(rank, 0.3 * rank))):
        assert "rank 1 failed" in str(error)
    wrote.set()
    assert [error.ranks for error in _errors(first[2:])] == [(2,)]
    assert ranks.committed == []
    ranks.close()


def test_after_a_failed_save_the_next_is_good(ranks: Ranks) -> None:
    """Nothing of the failed one is met again."""
    _errors(ranks.save(_fail_on_rank_1))
    assert [save.result() for save in ranks.save(lambda rank: rank)] == ["manifest 1"] * _size(ranks)


def test_a_commit_that_fails_is_told_to_all(ranks: Ranks) -> None:
    """Rank 0 is named, with the cause."""

    def fail(values: list[Any]) -> None:
        raise PermissionError(13, "denied", "manifest.json")

    for error in _errors(ranks.save(lambda rank: rank, fail)):
        assert str(error) == "saving ep1: rank 0 failed: PermissionError: [Errno 13] denied: 'manifest.json'"
        assert "may_be_committed=False" in error.__notes__


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_is_late_is_named_by_all(late: int) -> None:
    """Nothing is committed; when the late one comes it is told the same."""
    ranks, wrote = Ranks(3), threading.Event()
    saves = ranks.save(lambda rank: wrote.wait() if rank == late else None, timeout=SHORT)
    others = [save for rank, save in enumerate(saves) if rank != late]
    for error in _errors(others):
        assert isinstance(error, LateRankError)
        assert str(error) == f"saving ep1: rank {late} has not arrived within 0.5 s."
        assert error.ranks == (late,)
    assert not saves[late].done()
    wrote.set()
    assert _errors([saves[late]])[0].ranks == (late,)
    assert ranks.committed == []
    ranks.close()


def test_a_rank_that_is_tired_of_waiting_does_not_undo_a_commit() -> None:
    """What it voted on must stay: rank 0 may have committed it."""
    ranks, committed = Ranks(2), threading.Event()
    saves = ranks.save(lambda rank: rank, lambda values: committed.wait(), timeout=SHORT)
    (error,) = _errors(saves[1:])
    assert "It is unknown whether rank 0 committed" in str(error)
    assert "may_be_committed=True" in error.__notes__
    committed.set()
    assert saves[0].result() is True
    ranks.close()


def test_a_rank_that_gives_up_before_rank_0_votes_keeps_its_files() -> None:
    """Rank 0 may come after all, and commit them."""
    store = HashStore()
    zero, one = (Vote(store, rank, 2, "saving ep1", limit) for rank, limit in enumerate((LONG, timedelta())))
    one.arrive()
    with pytest.raises(LateRankError, match="rank 0 has not arrived"):
        one.wait()
    assert one.may_be_committed
    assert zero.run(lambda: None, len) == 2
    assert store.num_keys() == 0


def test_a_rank_that_gives_up_after_rank_0_has_voted_keeps_its_files() -> None:
    """Rank 0 may be committing them."""
    store = HashStore()
    zero, one = (Vote(store, rank, 2, "saving ep1", limit) for rank, limit in enumerate((LONG, timedelta())))
    zero.arrive()
    one.arrive()
    with pytest.raises(LateRankError, match="It is unknown whether rank 0 committed"):
        one.wait()
    assert one.may_be_committed


def test_a_slow_commit_is_waited_for() -> None:
    """For one more timeout."""
    ranks = Ranks(2)
    saves = ranks.save(lambda rank: rank, lambda values: time.sleep(1.2) or "slow", timeout=timedelta(seconds=1))
    assert [save.result() for save in saves] == ["slow"] * 2
    ranks.close()


def test_saves_may_overlap(ranks: Ranks) -> None:
    """Each is decided by its own votes, in whatever order they end."""
    first, second = threading.Event(), threading.Event()
    slow = ranks.save(lambda rank: first.wait() and "slow")
    failing = ranks.save(lambda rank: second.wait() and _fail_on_rank_1(rank))
    quick = ranks.save(lambda rank: "quick")
    assert [save.result() for save in quick] == ["manifest 1"] * _size(ranks)
    second.set()
    _errors(failing)
    first.set()
    assert [save.result() for save in slow] == ["manifest 2"] * _size(ranks)
    assert ranks.committed == [["quick"] * _size(ranks), ["slow"] * _size(ranks)]


def test_no_keys_are_left_in_the_store() -> None:
    """After good saves, failed ones, and ones that were late."""
    ranks = Ranks(3)
    before = ranks.store.num_keys()
    for save in ranks.save(lambda rank: rank):
        save.result()
    _errors(ranks.save(_fail_on_rank_1))
    _errors(ranks.save(lambda rank: time.sleep(0.4 * rank), timeout=SHORT))
    assert ranks.store.num_keys() == before
    ranks.close()


class _CountingStore(HashStore):
    """Counts requests, and the bytes that come and go."""

    requests = 0

    def _count(self, name: str, *arguments: Any) -> Any:
        self.requests += 1
        return getattr(HashStore, name)(self, *arguments)

    def add(self, *arguments: Any) -> int:
        return self._count("add", *arguments)

    def append(self, *arguments: Any) -> None:
        self._count("append", *arguments)

    def check(self, *arguments: Any) -> bool:
        return self._count("check", *arguments)

    def compare_set(self, *arguments: Any) -> bytes:
        return self._count("compare_set", *arguments)

    def delete_key(self, *arguments: Any) -> bool:
        return self._count("delete_key", *arguments)

    def get(self, *arguments: Any) -> bytes:
        return self._count("get", *arguments)

    def set(self, *arguments: Any) -> None:
        self._count("set", *arguments)


def _rounds(store: HashStore, world_size: int) -> list[Vote]:
    return [Vote(store, rank, world_size, "saving ep1", timedelta()) for rank in range(world_size)]


def _requests_of_a_vote(world_size: int, *, is_late: bool) -> int:
    """Requests of all ranks, one after the other; where rank 1 is late it comes in the end."""
    store = _CountingStore()
    rounds = _rounds(store, world_size)
    others = [one for rank, one in enumerate(rounds) if not (is_late and rank == 1)]
    for one in others:
        one.arrive("its part")
    with pytest.raises(LateRankError) if is_late else contextlib.nullcontext():
        rounds[0].decide(len)
    if is_late:
        rounds[1].arrive("its part")
    for one in rounds[1:]:
        with pytest.raises(LateRankError, match="rank 1 has not arrived") if is_late else contextlib.nullcontext():
            one.wait()
    assert store.num_keys() == 0
    return store.requests


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_rank_asks_of_the_store_does_not_depend_on_the_number_of_ranks(is_late: bool) -> None:
    """Also where a rank is late: all requests together grow with the number of ranks, by 5 each."""
    few, more, many = (_requests_of_a_vote(ranks, is_late=is_late) for ranks in (4, 104, 204))
    assert many - more == more - few == 500


def test_a_vote_may_be_larger_than_a_request_to_a_store() -> None:
    """TCPStore closes the connection of a request above 8 MiB; a rank with many shards has more to tell."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    zero, one = (Vote(store, rank, 2, "saving", LONG) for rank, store in enumerate((server, client)))
    parts = [bytes([rank]) * (9 << 20) for rank in range(2)]
    one.arrive(parts[1])
    assert zero.run(lambda: parts[0], lambda values: values == parts)


def test_a_failure_of_all_ranks_is_told_with_one_traceback() -> None:
    """Every rank reads the failures of all, so that bytes would grow with the square of the number of ranks."""
    store = HashStore()
    rounds = _rounds(store, 100)
    for rank, one in enumerate(rounds):
        one.arrive(error=OSError(28, "No space left on device", f"__{rank}_0.distcp"))
    with pytest.raises(RankError, match="rank 99 failed") as caught:
        rounds[0].decide(len)
    assert len(caught.value.causes) == 100
    assert store.get("released").count(b"Traceback") + store.get("released").count(b"OSError: ") <= 101


def test_one_process_commits_by_itself() -> None:
    """Without a group or a server; what it fails with is not wrapped."""
    group = dist.get_group()
    assert group.vote("saving").run(lambda: 7, sum) == 7
    with pytest.raises(OSError, match="No space"):
        group.vote("saving").run(lambda: _fail_on_rank_1(1), sum)
    with pytest.raises(ZeroDivisionError):
        group.vote("saving").run(lambda: 1, lambda values: 1 / 0)


def _save_while_training(saves: int) -> list[int]:
    """Save in a thread of its own, while the main thread sends tensors and objects."""
    tensor = torch.ones(1000)

    def save(number: int, vote: dist.Vote) -> int:
        rank = dist.get_global_rank()
        return vote.run(lambda: rank + number, sum)

    with ThreadPoolExecutor(2) as threads:
        pending = []
        for number in range(1, saves + 1):
            pending.append(threads.submit(save, number, dist.get_group().vote(f"save {number}")))
            for _ in range(5):
                torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
                dist.all_reduce(torch.ones(1))
            dist.all_gather_object("batch")
        return [one.result() for one in pending]


def test_ranks_save_while_they_train() -> None:
    """Votes of several threads and collectives of the main thread do not disturb each other."""
    expected = [0 + 1 + 2 + 3 * ticket for ticket in range(1, 21)]
    assert run_ranks(_save_while_training, 3, 20) == [expected] * 3


def _die_while_writing(who: int, committed: str) -> str:
    def write() -> None:
        if dist.get_global_rank() == who:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)

    one = dist.get_group().vote("saving ep1", longest_work=timedelta(hours=1))
    return one.run(write, lambda values: committed)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_killed_ends_the_vote_at_once(who: int) -> None:
    """Nobody waits for the timeout of a save in the background, which trainers do that end because of the kill."""
    outcomes = run_ranks_to_the_end(_die_while_writing, 3, who, "committed")
    assert isinstance(outcomes[who].error, ChildProcessError)
    for rank in {0, 1, 2} - {who}:
        assert isinstance(outcomes[rank].error, LateRankError)
        assert str(outcomes[rank].error) == f"rank {who} is lost: its process was killed, or its node failed."


def _lost(lost: int) -> Callable[[Sequence[int]], None]:
    def check(awaited: Sequence[int]) -> None:
        if lost in awaited:
            raise LateRankError(f"rank {lost} is gone", [lost])

    return check


def test_a_rank_that_is_lost_after_its_vote_does_not_prevent_the_commit() -> None:
    """Its bytes are durable."""
    store = HashStore()
    zero, one = (Vote(store, rank, 2, "saving ep1", LONG, check=_lost(1)) for rank in range(2))
    one.arrive("its part")
    assert zero.run(lambda: "mine", list) == ["mine", "its part"]


def test_a_rank_whose_vote_is_open_knows_when_rank_0_is_lost() -> None:
    """It may have committed: that is not known."""
    store = HashStore()
    zero, one = (Vote(store, rank, 2, "saving ep1", LONG, check=_lost(0)) for rank in range(2))
    zero.arrive()
    one.arrive()
    with pytest.raises(LateRankError, match="rank 0 is gone"):
        one.wait()
    assert one.may_be_committed
