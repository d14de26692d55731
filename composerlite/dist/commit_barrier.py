"""The vote over a commit: every rank says that its bytes are durable, then rank 0 commits, then all know.

It runs in a background thread, over a store and without collectives, so that it never meets what the training thread
sends meanwhile.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, final

from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage] - documented

from composerlite.dist.store_barrier import (
    Failure,
    Poll,
    decide_once,
    gone_error,
    late_error,
    rank_error,
    reaching_the_store,
    to_be_told,
)
from composerlite.errors import LateRankError
from composerlite.threads import start_threads

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - documented

T = TypeVar("T")
R = TypeVar("R")

_COMMITTING = "committing"
_MOST_BYTES = 4 << 20  # in a request: TCPStore closes the connection of one above 8 MiB
_PIECE = struct.Struct("<II")
"""Before each piece of a vote: whose, and how many bytes."""
_ENDED = 0xFFFFFFFF
"""Among the ranks that have voted: the round is decided without the others."""


@final
class CommitRound:
    """A :class:`~composerlite.dist.Vote` through the store, used in one thread.

    :meth:`run` is the whole of it; the other methods are its parts. Every rank calls :meth:`arrive`. Then rank 0 calls
    :meth:`decide`, commits, and calls :meth:`release`; the others call :meth:`wait`. The first rank whose time is up,
    or that sees that a rank is lost before its vote, ends the round for all, unless rank 0 is committing already.

    All votes are appended to one key, and who has voted to another: what a rank asks of the store does not depend on
    the number of ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        what: str,
        timeout: timedelta,
        longest_work: timedelta,
        gone: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.may_be_committed = False
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._what = what
        self._timeout = timeout
        self._longest_work = longest_work
        self._gone = gone
        self._poll = Poll(store, world_size if rank else 1)  # all wait for rank 0: it may ask often
        self._own_error: BaseException | None = None

    def run(self, write: Callable[[], T], commit: Callable[[list[T]], R]) -> R:
        """Write on every rank, commit on rank 0 when all have; every rank returns what ``commit`` returned."""
        value: Any = None
        error: BaseException | None = None
        try:
            with self._at_work():
                value = write()
        except BaseException as e:  # noqa: BLE001 - raised by wait and decide, on every rank
            error = e
        self.arrive(value, error=error)
        if self._rank != 0:
            return self.wait()
        values = self.decide()
        try:
            with self._at_work():
                result = commit(values)
        except BaseException as e:
            self.release(error=e)
            raise rank_error(self._what, [Failure.of(e, self._rank)], e) from e
        self.release(result)
        return result

    def arrive(self, value: object = None, *, error: BaseException | None = None) -> None:
        """Vote, once: for the commit, with a ``value`` for rank 0, or against it with the ``error`` that is why."""
        self._own_error = error
        failure = None if error is None else Failure.of(error, self._rank)
        vote = pickle.dumps((value, failure))
        with reaching_the_store(self._what):
            for at in range(0, len(vote), _MOST_BYTES):
                piece = vote[at : at + _MOST_BYTES]
                # torch declares append for some stores only, and with text
                self._store.append("votes", _PIECE.pack(self._rank, len(piece)) + piece)  # pyright: ignore
            self._append_rank("voters", self._rank)

    def pass_by(self) -> None:
        """Vote without waiting for the result, in place of :meth:`run`, on a rank other than 0."""
        self.arrive()
        with reaching_the_store(self._what):
            self._leave()

    def decide(self) -> list[Any]:
        """Rank 0 only: wait for every vote; returns the values in the order of ranks. Now only rank 0 can fail.

        Raises:
            RankError: a rank voted against it.
            LateRankError: not every rank voted in time, or the time of another rank was up before.
        """
        with reaching_the_store(self._what):
            if not self._until(lambda: len(voters := self._ranks("voters")) >= self._world_size or _ENDED in voters):
                self._give_up()
            if self._store.check(["decision"]):
                self._raise_decision()
            votes = self._votes()
            if failures := [failure for _, failure in votes if failure is not None]:
                self._decide_against(failures)
            if not decide_once(self._store, "decision", _COMMITTING):
                self._raise_decision()
        self.may_be_committed = True
        return [value for value, _ in votes]

    def release(self, value: object = None, *, error: BaseException | None = None) -> None:
        """Rank 0 only, after :meth:`decide`: tell all that it is committed, or the ``error`` that is why not."""
        outcome = value if error is None else [Failure.of(error, self._rank)]
        self.may_be_committed = error is None
        with reaching_the_store(self._what):
            self._publish(error is None, outcome)
            self._leave()

    def wait(self) -> Any:
        """Wait on a rank other than 0 for the end of the round; return the value that rank 0 passed to :meth:`release`.

        Raises:
            RankError: a rank voted against it, or rank 0 failed to commit.
            LateRankError: the time is up. See ``may_be_committed``.
        """
        with reaching_the_store(self._what):
            if not self._until(self._is_released):
                self._give_up()
                self.may_be_committed = True
                if not self._until(self._is_released):
                    raise LateRankError(
                        f"{self._what}: every rank has written, and rank 0 began to commit, but has not said in "
                        f"{self._timeout.total_seconds():g} s how that ended. Whether it is committed is not known "
                        "here.",
                        [0],
                    )
            good, outcome = pickle.loads(self._store.get("released"))
            self._leave()
        self.may_be_committed = good
        if not good:
            raise rank_error(self._what, outcome, self._own_error)
        return outcome

    @contextlib.contextmanager
    def _at_work(self) -> Generator[None]:
        """Send heartbeats of this rank from a thread while the block runs."""
        if not self._longest_work:
            yield
            return
        done = threading.Event()

        def beat() -> None:
            until = time.monotonic() + self._longest_work.total_seconds()
            with contextlib.suppress(DistError):  # the store is gone: this rank says so when it votes
                while not done.wait(self._timeout.total_seconds() / 5) and time.monotonic() < until:
                    self._append_rank("beats", self._rank)

        threads = start_threads(beat, 1, name="commit-vote")  # without one the others wait for ``timeout`` only
        try:
            yield
        finally:
            done.set()
            for thread in threads:
                thread.join()

    def _until(self, happened: Callable[[], bool]) -> bool:
        """Wait until it has; false if a rank that is waited for is lost, or has shown nothing for the timeout."""
        started = time.monotonic()
        heard: dict[int, tuple[int, float]] = {}
        with contextlib.suppress(LateRankError):
            while not self._poll.when(happened, self._timeout / 4, self._check_nobody_is_lost):
                now = time.monotonic()
                beats = Counter(self._ranks("beats"))
                for rank in self._late() or [0]:
                    count, since = heard.get(rank, (0, started))
                    if beats[rank] != count:
                        heard[rank] = beats[rank], now
                    elif now - since >= self._timeout.total_seconds():
                        return False
            return True
        return False

    def _check_nobody_is_lost(self) -> None:
        lost = self._gone()
        if lost is not None and lost in (self._late() or [0]):
            raise gone_error(lost)

    def _is_released(self) -> bool:
        return self._store.check(["released"])

    def _late(self) -> list[int]:
        return sorted(set(range(self._world_size)).difference(self._ranks("voters")))

    def _votes(self) -> list[tuple[Any, Failure | None]]:
        """Return the value and the failure of all ranks, in the order of ranks."""
        votes = [bytearray() for _ in range(self._world_size)]
        data, at = memoryview(self._store.get("votes")), 0
        while at < len(data):
            rank, size = _PIECE.unpack_from(data, at)
            at += _PIECE.size + size
            votes[rank] += data[at - size : at]
        return [pickle.loads(vote) for vote in votes]

    def _ranks(self, key: str) -> Sequence[int]:
        """The ranks that were appended to ``key``."""
        return memoryview(self._store.get(key)).cast("I") if self._store.check([key]) else ()

    def _append_rank(self, key: str, rank: int) -> None:
        self._store.append(key, rank.to_bytes(4, sys.byteorder))  # pyright: ignore

    def _publish(self, good: bool, outcome: object) -> None:
        self._store.set("released", pickle.dumps((good, outcome)))  # pyright: ignore[reportArgumentType]

    def _give_up(self) -> None:
        """End the round for all, because ranks are late. Returns if none is, or if rank 0 is committing already."""
        late = self._late()
        if not late and self._rank == 0:  # they came in this moment
            return
        lost = self._gone()
        error = late_error(self._what, self._timeout, late or [0])
        if lost is not None and lost in (late or [0]):
            error = gone_error(lost)
        self._decide_against([Failure.of(error, self._rank)])

    def _decide_against(self, failures: list[Failure]) -> None:
        """Decide that it is not committed, and raise that. Returns only if rank 0 is committing already."""
        failures = to_be_told(failures)
        if decide_once(self._store, "decision", failures):
            self._publish(False, failures)
            self._append_rank("voters", _ENDED)  # rank 0 need not wait any longer
        self._raise_decision()

    def _raise_decision(self) -> None:
        decision = pickle.loads(self._store.get("decision"))
        if isinstance(decision, list):
            self._leave()
            raise rank_error(self._what, decision, self._own_error)

    def _leave(self) -> None:
        """The last to leave removes the keys of this round: nobody reads them any more."""
        if self._store.add("gone", 1) == self._world_size:
            for key in ("beats", "votes", "voters", "decision", "released", "gone"):
                self._store.delete_key(key)
