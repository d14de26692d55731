"""Groups of ranks. An operation of a group succeeds on all ranks, or all raise the same error with the failed rank."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - documented

from composerlite.dist.env import get_world_size
from composerlite.dist.votes import Failure, Vote, lost_error, rank_error, reaching_the_store
from composerlite.errors import CheckpointError, RankError
from composerlite.on_demand import uncollected

T = TypeVar("T")
N = TypeVar("N", int, float)
R = TypeVar("R")

TIMEOUT = timedelta(seconds=300)
_TICKETS = 2**40
"""Distance between the first tickets (numbers of meetings) of two runs: more than the meetings of a run."""
_SEEN_BY = "Seen by rank"
_MET_AT = "_composerlite_met_at"
"""Attribute of an exception that every rank has raised: the id of the group, and the ticket of the operation."""
_FIND_LOST_RANKS = timedelta(seconds=2)
"""Time in which the other ranks notice a broken connection."""
_CHECK_AFTER = timedelta(seconds=1)
"""Interval at which a rank in a long collective checks whether another rank has failed."""
_BROKEN = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe", re.IGNORECASE)


@dataclass(eq=False)
class Group:
    """Ranks whose main threads call the same methods in the same order, with the same ``operation`` for errors.

    Ranks wait for each other through a store, and send values through a process group: nothing waits on the process
    group of training. Every wait has a timeout. The error after a timeout names the late ranks. ``Group()`` is a group
    of one process, which does not communicate and raises errors unchanged.

    Args:
        rank: of this process in the group.
        size: number of ranks.
        store: a ``torch.distributed.Store`` with keys for this group only.
        timeout: of every wait.
        process_group: of all ranks of the group: gloo, or the group of a user.
        exchanges: true if :func:`~composerlite.dist.exchange` works for the ranks: only for the group of all ranks of
            a run with several.
    """

    rank: int = 0
    size: int = 1
    store: Any = None
    timeout: timedelta = TIMEOUT
    process_group: Any = None
    exchanges: bool = False
    _run: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.begin_run()

    def begin_run(self) -> None:
        """Begin another run over the same connection. Call on every rank; does not wait.

        Earlier calls of :meth:`leave` have no effect on the new run.
        """
        self._run += 1
        self._ticket = self._run * _TICKETS  # number of the last meeting, the same on every rank
        self._votes = itertools.count(self._ticket + 1)

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    # ── operations of all ranks ──────────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def all_or_none(self, operation: str) -> Generator[None]:
        """Run a block on every rank. If the block fails on a rank, all ranks raise the error of the lowest such rank.

        The error has the same type on every rank, and names the rank. An exit from the block, such as a
        ``KeyboardInterrupt``, is raised at once on this rank, and the other ranks raise a ``RankError``.

        Raises:
            RankError: a rank was lost, or did not come in time.
        """
        error: Exception | None = None
        entered = self._ticket
        try:
            yield
        except Exception as e:
            if self.size == 1 or isinstance(e, RankError) or self._has_met(e, since=entered):
                raise  # all ranks have the error, or cannot communicate any more
            error = e
        except BaseException as e:  # this process ends without waiting for the others
            self.leave(e)
            raise
        self.meet(operation, error)

    def all_reduce(self, operation: str, each: Callable[[], T], first: Callable[[list[T]], R]) -> R:
        """Call ``each`` on every rank, and ``first`` with the results on rank 0. If a call fails, all ranks raise.

        Args:
            operation: name of the operation, for errors.
            each: returns a picklable value.
            first: gets the results in the order of ranks; returns a picklable value.

        Returns:
            Result of ``first``, on every rank.
        """
        return self._through_first(operation, each, first, scatter=False)

    def reduce_scatter(self, operation: str, each: Callable[[], T], first: Callable[[list[T]], list[R]]) -> R:
        """Reduce as :meth:`all_reduce` does, with a separate result for each rank.

        Args:
            operation: name of the operation, for errors.
            each: returns a picklable value.
            first: gets the results in the order of ranks; returns an item for each rank.

        Returns:
            This rank's item.
        """
        return self._through_first(operation, each, first, scatter=True)

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of every rank, in the order of ranks. Values must be picklable."""
        return self.all_reduce("gathering", lambda: value, list)

    def broadcast(self, value: T) -> T:
        """Return the ``value`` of rank 0, which must be picklable."""
        return self.from_first("broadcasting", lambda: value)

    def from_first(self, operation: str, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0. If ``make`` fails, all ranks raise.

        Args:
            operation: name of the operation, for errors.
            make: returns a picklable value.

        Returns:
            Result of ``make``, on every rank.
        """
        made: Any = self.all_reduce(operation, lambda: make() if self.is_first else None, lambda values: values[0])
        return made

    def agree(self, operation: str, each: Callable[[], T]) -> T:
        """Call ``each`` on every rank. If a call fails, all ranks raise.

        Args:
            operation: name of the operation, for errors.
            each: called on every rank.

        Returns:
            Result of ``each`` on this rank.
        """
        with self.all_or_none(operation):
            return each()

    def sum(self, numbers: Sequence[N]) -> list[N]:
        """Return the sum over all ranks of each of ``numbers``: equally many, of the same types, on every rank."""
        return self._reduced(numbers, torch.distributed.ReduceOp.SUM)

    def max(self, numbers: Sequence[N]) -> list[N]:
        """Return the maximum over all ranks of each of ``numbers``: equally many, of the same types, on every rank."""
        return self._reduced(numbers, torch.distributed.ReduceOp.MAX)

    def _reduced(self, numbers: Sequence[N], reduction: Any) -> list[N]:
        if self.size == 1:
            return list(numbers)
        dtype = torch.float64 if any(isinstance(number, float) for number in numbers) else torch.int64
        tensor = torch.tensor(numbers, dtype=dtype)
        self.run("all_reduce", torch.distributed.all_reduce, tensor, reduction)
        return tensor.tolist()

    def wait_for_all(self, wait: Callable[[float], bool], timeout: timedelta) -> bool:
        """Wait until ``wait`` returns true on every rank. In a long wait the ranks notice if a rank is lost.

        Args:
            wait: waits for the given seconds at most; returns true if this rank has nothing left to wait for.
            timeout: of the whole wait, above 0.

        Returns:
            True if no rank has anything left to wait for. False after ``timeout``. The same on every rank.

        Raises:
            RankError: a rank failed or was lost.
        """
        turn = min(timeout, self.timeout / 4)
        return any(all(self.gather(wait(turn.total_seconds()))) for _ in range(math.ceil(timeout / turn)))

    def vote(self, operation: str, *, longest_work: timedelta = timedelta()) -> Vote:
        """Begin a vote on ``operation``, without waiting. Called in the same order on every rank.

        A wait in the vote ends if an awaited rank was lost. A call of :meth:`leave` does not end the wait.

        Args:
            operation: name of the operation, for errors.
            longest_work: time for the work of a rank in the vote, added to the timeout of the group.

        Returns:
            The vote, to be run in any thread.
        """

        def check(awaited: Sequence[int]) -> None:
            for rank in set(self._lost_ranks()).intersection(awaited):
                raise lost_error(rank)

        return self._vote(f"votes/{next(self._votes)}", operation, self.timeout + longest_work, check)

    def _vote(self, key: str, operation: str, timeout: timedelta, check: Callable[..., None]) -> Vote:
        store = None if self.size == 1 else PrefixStore(key, self.store)
        return Vote(store, self.rank, self.size, operation, timeout, check)

    def meet(self, operation: str, error: BaseException | None = None, timeout: timedelta | None = None) -> None:
        """Wait until every rank calls this. If a rank passes an ``error``, raise the error of the lowest such rank.

        The error has the same type on every rank, and names the rank.

        Args:
            operation: name of the operation: the same on every rank, unless a rank passes an ``error``.
            error: exception of this rank in an earlier operation.
            timeout: of the wait; ``None``: the timeout of this group.

        Raises:
            RankError: a rank was lost, or has left the run: the same on every rank.
            LateRankError: not every rank came in time.
        """
        self._ticket += 1
        try:
            self.meet_once(f"meetings/{self._ticket}", operation, timeout or self.timeout, error)
        except RankError as e:
            if not e.causes:
                raise e from e.__cause__ or error
            named = self._named(e.causes[0], e.ranks[0], error)
            raise named from (named.__cause__ if named is error else error)

    def meet_once(self, key: str, operation: str, timeout: timedelta, error: BaseException | None = None) -> None:
        """Wait until every rank calls this with ``key``. The ranks may have called :meth:`meet` unequally often.

        Args:
            key: of the meeting, used once.
            operation: name of the operation, for errors.
            timeout: of the wait.
            error: exception of this rank in an earlier operation.

        Raises:
            RankError: a rank passed an error, was lost, or has left the run.
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

        self._vote(key, operation, timeout, lambda _: self.check_nobody_left(operation)).run(arrive, compare)

    def _named(self, error: BaseException, rank: int, own: BaseException | None) -> BaseException:
        """Return the ``error`` of ``rank``, with the number of ``rank`` in the message or in a note.

        The returned error is marked as an error that every rank raises.
        """
        if own is not None and rank == self.rank:
            error = own
        if not any(note.startswith(_SEEN_BY) for note in getattr(error, "__notes__", ())):
            if isinstance(error, CheckpointError):
                error = type(error)(f"{error} ({_SEEN_BY} {rank}.)").with_traceback(error.__traceback__)
            else:
                error.add_note(f"{_SEEN_BY} {rank}.")
        setattr(error, _MET_AT, (id(self), self._ticket))
        return error

    def _has_met(self, error: BaseException, since: int = -1) -> bool:
        """Return true if every rank has raised ``error``, in an operation with a ticket above ``since``."""
        group, ticket = getattr(error, _MET_AT, (0, -1))
        return group == id(self) and ticket > since

    def _through_first(
        self, operation: str, each: Callable[[], T], first: Callable[[list[T]], Any], *, scatter: bool
    ) -> Any:
        """Call ``each`` on every rank, and ``first`` on rank 0 with the results of ``each`` in the order of ranks.

        Returns the result of ``first``, or with ``scatter`` this rank's item of the result.
        """
        if self.size == 1:
            result = first([each()])
            return result[0] if scatter else result
        own: BaseException | None = None
        pickled = b""
        try:
            pickled = pickle.dumps(each())
        except BaseException as e:  # noqa: BLE001 - raised on all ranks; an exit too, since other ranks wait
            own = e
        self.meet(operation, own)
        values: list[bytes] | None = [b""] * self.size if self.is_first else None
        replies: list[bytes] = []
        with self.naming_lost_ranks(operation) as group:
            torch.distributed.gather_object(pickled, values, group_dst=0, group=group)
        if values is not None:
            with uncollected():  # the collector would go through the values of thousands of ranks
                try:
                    results = first([pickle.loads(value) for value in values])
                    replies = [pickle.dumps((one, None)) for one in (results if scatter else [results])]
                    del results
                except BaseException as e:  # noqa: BLE001 - raised on all ranks
                    own = e
                    replies = [pickle.dumps((None, Failure.of(e, self.rank)))] * (self.size if scatter else 1)
        reply = replies[:1] or [b""]
        with self.naming_lost_ranks(operation) as group:
            if scatter:
                torch.distributed.scatter_object_list(reply, replies, group_src=0, group=group)
            else:
                torch.distributed.broadcast_object_list(reply, group_src=0, group=group)
        value, failure = pickle.loads(reply[0])
        if failure is not None:
            raise self._named(failure.error, 0, own)
        return value

    def run(self, operation: str, collective: Callable[..., Any], *arguments: Any) -> None:
        """Run a collective of tensors in host memory. An error of another rank ends the wait.

        Args:
            operation: name of the operation, for errors.
            collective: a function of ``torch.distributed``, such as ``all_reduce``.
            arguments: of the function, without ``group`` and ``async_op``.

        Raises:
            RankError: a rank failed, was lost, or is late.
        """
        end = time.monotonic() + self.timeout.total_seconds()
        with self.naming_lost_ranks(operation) as group:
            work = collective(*arguments, group=group, async_op=True)
            while True:
                left = timedelta(seconds=max(0.001, end - time.monotonic()))
                try:
                    work.wait(min(left, _CHECK_AFTER))
                    return
                except RuntimeError as e:
                    if left <= _CHECK_AFTER or "timed out" not in str(e).lower():
                        raise
                self.check_nobody_left(operation)

    # ── failed and lost ranks ────────────────────────────────────────────────────────────────────────────────────────
    def leave(self, error: BaseException) -> None:
        """Report that this rank failed with ``error`` and takes part in no further operation of the run.

        Waits of the other ranks, except waits in a vote, end with a ``RankError`` that names this rank and ``error``.
        Has no effect if every rank has raised ``error`` already. Does not wait.

        Raises:
            RankError: the store does not answer.
        """
        if self.size == 1 or (isinstance(error, RankError) and error.everywhere) or self._has_met(error):
            return
        with reaching_the_store("leaving the run"):  # only the first failure counts
            self.store.compare_set(f"left/{self._run}", "", pickle.dumps(Failure.of(error, self.rank)))

    def report_lost(self, rank: int) -> None:
        """Report that the process of ``rank`` has ended, so no rank waits for ``rank``. Does not fail."""
        with contextlib.suppress(RankError), reaching_the_store("reporting a lost rank"):
            self.store.append("lost", f"{rank} ")

    def _lost_ranks(self) -> list[int]:
        """Return the ranks whose process has ended, in the order of the reports."""
        with reaching_the_store("looking for lost ranks"):
            return [int(rank) for rank in self.store.get("lost").split()] if self.store.check(["lost"]) else []

    def check_nobody_left(self, operation: str) -> None:
        """Raise an error if a rank has called :meth:`leave` in this run, or was lost. Callable from any thread.

        Raises:
            RankError: names the rank and the cause; or the store does not answer.
        """
        if self.size == 1:
            return
        with reaching_the_store(operation):
            if self.store.check([key := f"left/{self._run}"]):
                error = rank_error(operation, [pickle.loads(self.store.get(key))])
                error.causes = ()  # causes are for ranks in this operation: :meth:`meet` would raise a cause instead
                raise error
        if lost := self._lost_ranks():
            raise lost_error(lost[0])

    def cause_elsewhere(self, operation: str, error: BaseException) -> RankError | None:
        """Return the error of another rank that caused ``error``: the rank failed or was lost, and a connection broke.

        If ``error`` comes from a broken connection, waits a few seconds for the other ranks to report failures.

        Args:
            operation: name of the operation, for the error.
            error: raised on this rank.

        Returns:
            The error to raise in place of ``error``; ``None`` if ``error`` names the ranks already, does not come from
            a connection, or no other rank is at fault.
        """
        is_broken = isinstance(error, torch.distributed.DistError) or _BROKEN.search(str(error)) is not None
        if self.size == 1 or isinstance(error, RankError) or not (isinstance(error, RuntimeError) and is_broken):
            return None
        return self._find_lost_ranks(operation)

    def _find_lost_ranks(self, operation: str) -> RankError | None:
        """Return an error with the failed, lost and late ranks after a collective has failed.

        Waits a few seconds for the other ranks. ``None`` if the collective has failed on every rank.
        """
        try:
            self.meet_once(f"broken/{self._run}", operation, _FIND_LOST_RANKS)
        except RankError as e:
            return e
        return None

    @contextlib.contextmanager
    def naming_lost_ranks(self, operation: str) -> Generator[Any]:
        """Yield the process group. If a collective fails, raise an error with the ranks at fault.

        Args:
            operation: name of the operation, for errors.

        Raises:
            RankError: the collective failed.
        """
        try:
            yield self.process_group
        except RankError:
            raise
        except RuntimeError as e:
            text = f"{operation}: the connection between the ranks broke, or an operation timed out: {e}"
            raise (self._find_lost_ranks(operation) or RankError(text)) from e


@final
class PiggybackCounter:
    """A number of each rank. The ranks add up the numbers in every batch, together with the counts of the batch.

    Args:
        number: returns this rank's number, without waiting.

    Attributes:
        reduced: sum over all ranks at the last reduction; set by the communicator of the trainer.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self.number = number
        self.reduced = 0

    @property
    def total(self) -> int:
        """Sum over all ranks at the last reduction, the same on every rank. In one process: the current number."""
        return self.number() if get_world_size() == 1 else self.reduced
