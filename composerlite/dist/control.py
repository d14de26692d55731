"""The connection of ranks for everything other than training: a store, and a process group."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast, final

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - documented

from composerlite.dist.rounds import Failure, Round, lost_error, rank_error, reaching_the_store
from composerlite.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store, Work  # pyright: ignore[reportPrivateImportUsage] - documented

_TICKETS = 2**40
"""Distance between the first tickets of two runs: more operations than a run has."""
_MET_AT = "_composerlite_met_at"
"""Attribute of an exception that every rank has raised: the id of the connection, and the ticket of the operation."""
_FIND_LOST_RANKS = timedelta(seconds=2)
"""Time in which the other ranks notice a broken connection."""
_CHECK_AFTER = timedelta(seconds=1)
"""Interval at which a rank in a long collective checks whether another rank has failed."""


@final
class Control:
    """Connection of a rank to the other ranks. Nothing here waits on the process group of training.

    The main threads of all ranks call :meth:`meet`, :meth:`run` and :meth:`vote` in the same order.

    Args:
        store: keys for this connection only.
        rank: of this process.
        world_size: number of ranks.
        timeout: of every wait.

    Attributes:
        ticket: number of the last :meth:`meet`, the same on every rank. Runs have different numbers.
        group: a process group of all ranks, for the main thread: gloo, or the group of a user.
    """

    group: ProcessGroup

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._votes = itertools.count(1)
        self.ticket = 0
        self._run = 0

    def begin_run(self) -> None:
        """Begin another run over the same connection, on every rank and without waiting.

        Earlier calls of :meth:`leave` have no effect on the new run.
        """
        self._run += 1
        self.ticket = self._run * _TICKETS
        self._votes = itertools.count(self.ticket + 1)

    # ── operations of all ranks ──────────────────────────────────────────────────────────────────────────────────
    def meet(self, operation: str, error: BaseException | None = None, timeout: timedelta | None = None) -> None:
        """Wait until every rank is here.

        Args:
            operation: name of the operation: the same on every rank, unless a rank comes with an ``error``.
            error: exception of this rank in an earlier operation.
            timeout: of the wait; ``None``: the timeout of this connection.

        Raises:
            RankError: a rank came with an error, was lost, or has left the run: the same on every rank.
            LateRankError: not every rank came in time.
        """
        self.ticket += 1
        limit = self.timeout if timeout is None else timeout
        self.meet_once(f"meetings/{self.ticket}", operation, limit, error)

    def meet_once(self, key: str, operation: str, timeout: timedelta, error: BaseException | None = None) -> None:
        """Wait as :meth:`meet` does, even if the ranks have not called :meth:`meet` equally often.

        Args:
            key: of the meeting, used once.
            operation: name of the operation, for errors.
            timeout: of the wait.
            error: exception of this rank in an earlier operation.

        Raises:
            RankError: a rank came with an error, was lost, or has left the run.
        """

        def arrive() -> str:
            if error is not None:
                raise error
            return operation

        def compare(others: Sequence[str]) -> None:
            for rank, other in enumerate(others):
                if other != operation:
                    raise RankError(
                        f"rank {rank} called {other!r}, but rank 0 called {operation!r}: every rank must call the same",
                        [rank],
                    )

        store, check = PrefixStore(key, self.store), lambda _: self.check_nobody_left(operation)
        Round(store, self.rank, self.world_size, operation, timeout, check).run(arrive, compare)

    def vote(self, operation: str, longest_work: timedelta) -> Round:
        """Return a round that may run in any thread. Called in the main thread, in the same order on every rank.

        Waits in the round end if an awaited rank was lost, but not after :meth:`leave`.

        Args:
            operation: name of the operation, for errors.
            longest_work: time for the work of a rank in the round, added to the timeout.

        Returns:
            The round, with keys of its own.
        """

        def check(awaited: Callable[[], Sequence[int]]) -> None:
            lost = self.lost_ranks()
            for rank in set(lost).intersection(awaited() if lost else ()):
                raise lost_error(rank)

        store = PrefixStore(f"votes/{next(self._votes)}", self.store)
        return Round(store, self.rank, self.world_size, operation, self.timeout + longest_work, check)

    # ── failed and lost ranks ───────────────────────────────────────────────────────────────────────────
    def leave(self, error: BaseException) -> None:
        """Report that this rank failed and takes part in no further operation of the run. Does not wait.

        Waits of the other ranks in :meth:`meet` and :meth:`run` end with a ``RankError`` that names this rank and
        ``error``. Has no effect if every rank has raised ``error`` already.

        Raises:
            RankError: the store does not answer.
        """
        if (isinstance(error, RankError) and error.everywhere) or self.has_met(error):
            return
        failure = pickle.dumps(Failure.of(error, self.rank))
        with reaching_the_store("leaving the run"):  # only the first failure counts
            self.store.compare_set(f"left/{self._run}", "", failure)  # pyright: ignore[reportArgumentType] - takes bytes

    def mark_met(self, error: BaseException) -> None:
        """Note in ``error`` that every rank raises the same error in the current operation."""
        setattr(error, _MET_AT, (id(self), self.ticket))

    def has_met(self, error: BaseException, since: int = -1) -> bool:
        """Return true if every rank has raised ``error``, in an operation with a ticket above ``since``."""
        control, ticket = getattr(error, _MET_AT, (0, -1))
        return control == id(self) and ticket > since

    def report_lost(self, rank: int) -> None:
        """Report that the process of ``rank`` has ended: waits for ``rank`` end. Does not fail."""
        with contextlib.suppress(RankError), reaching_the_store("reporting a lost rank"):
            self.store.append("lost", f"{rank} ")  # pyright: ignore[reportAttributeAccessIssue]

    def lost_ranks(self) -> list[int]:
        """Return the ranks whose process has ended, in the order of the reports."""
        with reaching_the_store("looking for lost ranks"):
            return [int(rank) for rank in self.store.get("lost").split()] if self.store.check(["lost"]) else []

    def check_nobody_left(self, operation: str) -> None:
        """Raise an error if a rank has called :meth:`leave` in this run, or was lost.

        Raises:
            RankError: names the rank and the cause; or the store does not answer.
        """
        with reaching_the_store(operation):
            if self.store.check([key := f"left/{self._run}"]):
                error = rank_error(operation, [pickle.loads(self.store.get(key))])
                error.causes = ()  # only for ranks in this operation: a group raises a cause in place of this error
                raise error
        if lost := self.lost_ranks():
            raise lost_error(lost[0])

    def find_lost_ranks(self, operation: str) -> RankError | None:
        """Find the ranks at fault after a collective has failed. Called on every rank with a failed collective.

        Waits a few seconds for the other ranks.

        Args:
            operation: name of the operation, for errors.

        Returns:
            An error with the numbers of the failed, lost and late ranks; ``None`` if every rank has called this.
        """
        try:
            self.meet_once(f"broken/{self._run}", operation, _FIND_LOST_RANKS)
        except RankError as e:
            return e
        return None

    @contextlib.contextmanager
    def naming_lost_ranks(self, operation: str) -> Generator[ProcessGroup]:
        """Yield the process group. If a collective fails, raise an error with the ranks at fault.

        Args:
            operation: name of the operation, for errors.

        Raises:
            RankError: the collective failed.
        """
        try:
            yield self.group
        except RankError:
            raise
        except RuntimeError as e:
            text = f"{operation}: the connection between the ranks broke, or an operation did not end in time: {e}"
            raise (self.find_lost_ranks(operation) or RankError(text)) from e

    def run(self, operation: str, start: Callable[[ProcessGroup], Work | None]) -> None:
        """Run a collective of tensors in host memory. While it waits, an error of another rank ends the wait.

        Args:
            operation: name of the operation, for errors.
            start: starts the collective on a process group.

        Raises:
            RankError: a rank failed, was lost, or is late.
        """
        end = time.monotonic() + self.timeout.total_seconds()
        with self.naming_lost_ranks(operation) as group:
            work = cast("Work", start(group))
            while True:
                left = timedelta(seconds=max(0.001, end - time.monotonic()))
                try:
                    work.wait(min(left, _CHECK_AFTER))
                    return
                except RuntimeError as e:
                    if left <= _CHECK_AFTER or "timed out" not in str(e).lower():
                        raise
                self.check_nobody_left(operation)
