"""Ranks that hold a connection to the next one: who ends without a word is reported."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from forked import run_forked
from scarce import forbid_threads
from torch.distributed import HashStore

from composerlite.dist import Group
from composerlite.dist.connect import PeerWatch
from composerlite.errors import LateRankError, RankError

LONG = timedelta(seconds=60)


class Two:
    """Two ranks in one process."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.groups = [Group(rank, 2, self.store, LONG) for rank in range(2)]
        self.watches = [PeerWatch(group) for group in self.groups]
        for rank, watch in enumerate(self.watches):
            watch.connect(self.watches[1 - rank].address)

    def end_suddenly(self, rank: int) -> None:
        """Close what the kernel closes when the process of ``rank`` is killed: its end of the other one's watch."""
        self.watches[rank]._server.close()

    def wait_until_reported(self) -> None:
        """Wait until a rank is reported as lost."""
        self.store.wait(["lost"], LONG)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    made = Two()
    yield made
    for watch in made.watches:
        watch.stop()


def test_a_rank_that_ends_suddenly_is_reported(two: Two) -> None:
    """Who waits for it raises an error that names it and says what happened."""
    two.end_suddenly(1)
    two.wait_until_reported()
    with pytest.raises(LateRankError, match="rank 1 is lost: its process was killed, or its node failed") as caught:
        two.groups[0].meet("saving")
    assert caught.value.ranks == (1,)


def test_a_rank_that_ends_by_intention_is_not_reported(two: Two) -> None:
    """The other one can still do what needs no other rank."""
    two.watches[1].stop()
    two.watches[0]._thread.join(60)
    two.groups[0].check_nobody_left("the end")
    assert not two.store.check(["lost"])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_worker_that_outlives_its_rank_does_not_hide_that_it_is_gone(two: Two) -> None:
    """The worker of a loader has copies of all descriptors of its rank."""
    ours, theirs = socket.socketpair()
    worker = os.fork()
    if worker == 0:
        ours.close()
        theirs.recv(1)  # until the test ends
        os._exit(0)
    try:
        two.end_suddenly(1)
        two.wait_until_reported()
    finally:
        ours.close()
        theirs.close()
        os.waitpid(worker, 0)


def test_a_stranger_that_connects_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection says nothing about a rank, and the ranks watch each other."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    created = socket.create_server

    def with_a_stranger(*arguments: object, **options: object) -> socket.socket:
        server = created(*arguments, **options)  # pyright: ignore[reportArgumentType]
        stranger = socket.create_connection(server.getsockname())
        stranger.sendall(b"not a rank")
        stranger.close()
        return server

    monkeypatch.setattr(socket, "create_server", with_a_stranger)
    made = Two()
    made.end_suddenly(0)
    made.wait_until_reported()
    for watch in made.watches:
        watch.stop()


def test_ranks_that_cannot_connect_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names both ranks, the address and the cause."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    watches = [PeerWatch(Group(rank, 2, HashStore(), LONG)) for rank in range(2)]
    watches[1]._server.close()
    with pytest.raises(RankError, match=r"rank 0 cannot connect to rank 1 at 127\.0\.0\.1:\d+: .*Connection refused"):
        watches[0].connect(watches[1].address)


def a_rank_without_threads() -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    watches = [PeerWatch(Group(rank, 2, HashStore(), LONG)) for rank in range(2)]
    forbid_threads()
    with pytest.raises(RankError, match="rank 0 cannot start a thread"):
        watches[0].connect(watches[1].address)


def test_a_rank_that_gets_no_more_threads_is_an_error(tmp_path: Path) -> None:
    """A warning says how to change the limit."""
    done = run_forked(a_rank_without_threads, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Raise the limit of processes and threads" in done.stderr
