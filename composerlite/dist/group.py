"""Ranks that act together: all have done it, or none has and all raise the same error, which says whose it was.

Who acts with others holds a :class:`Group` and asks nobody how many there are: one process is a :class:`SingleProcess`.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import torch

from composerlite.dist.env import Control, get_control, get_world_size, initialize_dist, is_initialized
from composerlite.errors import CheckpointError, RankError
from composerlite.on_demand import uncollected

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
N = TypeVar("N", int, float)
R = TypeVar("R")
Outcomes = Mapping[int, BaseException]

_SEEN_BY = "Seen by rank"


class Group(ABC):
    """Ranks, all of which call the same methods in the same order, in the main thread, with the same ``what``.

    Every wait has a timeout, and its error names the ranks that are late.

    Attributes:
        rank: of this process in the group.
        size: number of ranks.
        exchanges: whether they can :func:`~composerlite.dist.exchange` tensors: all ranks of a run of several.
    """

    rank: int
    size: int
    exchanges: bool = False
    _turn = timedelta(minutes=1)

    @property
    def is_first(self) -> bool:
        """True on rank 0, which decides."""
        return self.rank == 0

    @abstractmethod
    def outcomes(
        self, what: str, error: Exception | None, timeout: timedelta | None = None
    ) -> dict[int, BaseException]:
        """The exceptions of the ranks that failed in ``what``, by rank: the same on every rank, empty if none did.

        For callers that continue after a failure. An exception that cannot be pickled becomes a ``RankError`` with its
        text.

        Args:
            what: was done, for errors.
            error: what this rank failed with.
            timeout: of the wait for the others.

        Returns:
            Exceptions by rank.

        Raises:
            RankError: a rank did not come, or was lost.
        """

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """The ``value`` of every rank, in the order of ranks. They must be picklable."""

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """The ``value`` of rank 0."""

    def sum(self, numbers: Sequence[N]) -> list[N]:
        """Add up each of ``numbers`` over the ranks. All ranks of a run do it in one reduction, as each batch needs."""
        return [sum(column) for column in zip(*self.gather(list(numbers)), strict=True)]  # type: ignore[misc]

    def max(self, numbers: Sequence[N]) -> list[N]:
        """Return the greatest of all ranks, of each of ``numbers``, in the same way."""
        return [max(column) for column in zip(*self.gather(list(numbers)), strict=True)]

    @abstractmethod
    def _through_first(
        self, what: str, each: Callable[[], T], first: Callable[[list[T]], Any], *, scatter: bool
    ) -> tuple[Outcomes, Any]:
        """Pass the results of ``each`` to ``first`` on rank 0; return failures and this rank's part of its result."""

    def all_reduce(self, what: str, each: Callable[[], T], first: Callable[[list[T]], R]) -> R:
        """Return ``first`` of the results of ``each`` of all ranks, computed on rank 0. All raise an error of one.

        Args:
            what: is done, for errors.
            each: called on every rank; its result must be picklable.
            first: called on rank 0 with the results in the order of ranks.

        Returns:
            Result of ``first``.
        """
        return self._made(*self._through_first(what, each, first, scatter=False))

    def reduce_scatter(self, what: str, each: Callable[[], T], first: Callable[[list[T]], list[R]]) -> R:
        """Reduce like :meth:`all_reduce`, with a value from ``first`` for each rank.

        Args:
            what: is done, for errors.
            each: called on every rank; its result must be picklable.
            first: called on rank 0 with the results in the order of ranks; returns a list with a value for each rank.

        Returns:
            This rank's value.
        """
        return self._made(*self._through_first(what, each, first, scatter=True))

    def agree(self, what: str, each: Callable[[], T]) -> T:
        """Call ``each`` and return its result, once it has succeeded on every rank. All raise an error of one.

        Args:
            what: is done, for errors.
            each: called on every rank.

        Returns:
            Result of ``each`` on this rank.
        """
        own: list[T] = []
        self.all_reduce(what, lambda: own.append(each()), lambda _: None)
        return own[0]

    def vote(self, what: str, *, patience: int = 1, longest_work: timedelta = timedelta()) -> Vote:
        """A vote over ``what``, which errors name. To be called in the same order on every rank; it waits for nobody.

        Args:
            what: is voted on.
            patience: how many times the usual timeout the ranks wait for each other.
            longest_work: so long a rank of a run shows that it is alive and at work: for those who wait for it the
                timeout counts from the last time it did.

        Returns:
            The vote.
        """
        return _VoteAtOnce(self, what)

    def _made(self, outcomes: Outcomes, value: Any) -> Any:
        if outcomes:
            raise self.first_error(outcomes, None)
        return value

    def wait_for_all(self, wait: Callable[[float], bool], timeout: timedelta) -> bool:
        """Wait until ``wait`` is true on every rank, or for ``timeout``; whether it is, the same on every rank.

        For waits that may take longer than a rank is waited for: in between the ranks hear of each other, and one that
        is lost is missed in time.

        Args:
            wait: waits for the given seconds at most, and returns true if there is nothing left to wait for.
            timeout: of the whole.

        Returns:
            True if ``wait`` was true on every rank.

        Raises:
            RankError: a rank failed or did not come.
        """
        turn = min(timeout, self._turn)
        return any(all(self.gather(wait(turn.total_seconds()))) for _ in range(math.ceil(timeout / turn)))

    @contextlib.contextmanager
    def all_or_none(self, what: str, timeout: timedelta | None = None) -> Generator[None]:
        """Run a block on every rank; afterwards it succeeded on all, or all raise the error of the lowest that failed.

        An error keeps its type, so that those who wait for a ``CheckpointNotFoundError`` get one on every rank.

        Args:
            what: the block does, for errors.
            timeout: of the wait for the others, from the end of this rank's block.

        Raises:
            RankError: a rank did not come, or was lost.
        """
        error: Exception | None = None
        try:
            yield
        except RankError:
            raise  # the ranks cannot meet any more, or all have it
        except Exception as e:  # noqa: BLE001 - raised below, on every rank
            error = e
        if outcomes := self.outcomes(what, error, timeout):
            raise self.first_error(outcomes, error) from error

    def from_first(self, what: str, make: Callable[[], T]) -> T:
        """Broadcast the result of ``make`` from rank 0, where alone it is called; all raise its error.

        Args:
            what: is done, for errors.
            make: called on rank 0; its result must be picklable.

        Returns:
            Result of ``make``, on every rank.
        """
        value: T | None = None
        with self.all_or_none(what):
            if self.is_first:
                value = make()
        return self.broadcast(value)  # type: ignore[return-value] - that of rank 0 is one

    def first_error(self, outcomes: Outcomes, own: BaseException | None) -> BaseException:
        """The error of the lowest rank that failed, to be raised on every rank: the same text everywhere.

        Args:
            outcomes: of :meth:`outcomes`, not empty.
            own: this rank's.

        Returns:
            The exception to raise.
        """
        rank = min(outcomes)
        error = outcomes[rank]
        if any(note.startswith(_SEEN_BY) for note in getattr(error, "__notes__", ())):
            return error  # all ranks raise what one of them has met with, and it says which
        if isinstance(error, CheckpointError):
            named = type(error)(f"{error} ({_SEEN_BY} {rank}.)")
            return named.with_traceback(error.__traceback__) if own is not None and rank == self.rank else named
        error.add_note(f"{_SEEN_BY} {rank}.")
        return error


@final
class SingleProcess(Group):
    """Group of one process: no communication, and errors are raised as they are."""

    rank = 0
    size = 1

    def outcomes(
        self, what: str, error: Exception | None, timeout: timedelta | None = None
    ) -> dict[int, BaseException]:
        return {} if error is None else {0: error}

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def _through_first(
        self, what: str, each: Callable[[], T], first: Callable[[list[T]], Any], *, scatter: bool
    ) -> tuple[Outcomes, Any]:
        try:
            made = first([each()])
        except BaseException as e:  # noqa: BLE001 - raised by who asked for it
            return {0: e}, None
        return {}, made[0] if scatter else made

    def wait_for_all(self, wait: Callable[[float], bool], timeout: timedelta) -> bool:
        return wait(timeout.total_seconds())

    @contextlib.contextmanager
    def all_or_none(self, what: str, timeout: timedelta | None = None) -> Generator[None]:
        yield

    def first_error(self, outcomes: Outcomes, own: BaseException | None) -> BaseException:
        return outcomes[0]


class _Several(Group):
    """Ranks that talk through a process group."""

    def __init__(self, process_group: ProcessGroup) -> None:
        import torch.distributed

        self.rank = torch.distributed.get_rank(process_group)
        self.size = torch.distributed.get_world_size(process_group)
        self._process_group = process_group

    def _through_first(
        self, what: str, each: Callable[[], T], first: Callable[[list[T]], Any], *, scatter: bool
    ) -> tuple[Outcomes, Any]:
        from composerlite.dist.store_barrier import Failure

        own: BaseException | None = None
        try:
            pickled = pickle.dumps((True, each()))
        except BaseException as e:  # noqa: BLE001 - raised by all; an exit is told as well, since others wait
            own, pickled = e, pickle.dumps((False, [Failure.of(e, self.rank)]))
        told = self._tell_first(pickled)
        with uncollected():  # what ranks have told is released before it looks
            replies = None if told is None else self._replies(told, first, scatter=scatter)
        good, value = pickle.loads(self._hear_first(replies, scatter=scatter))
        if good:
            return {}, value
        return {f.rank: own if own is not None and f.rank == self.rank else f.exception() for f in value}, None

    def _replies(self, told: Sequence[bytes], first: Callable[[list[Any]], Any], *, scatter: bool) -> list[bytes]:
        """Replies to the ranks, one each or one for all: the result of ``first``, or the failures."""
        from composerlite.dist.store_barrier import Failure

        outcomes = [pickle.loads(one) for one in told]
        failures = [failure for good, failed in outcomes if not good for failure in failed]
        if not failures:
            try:
                made = first([value for _, value in outcomes])
                return [pickle.dumps((True, one)) for one in (made if scatter else [made])]
            except BaseException as e:  # noqa: BLE001 - raised by all
                failures = [Failure.of(e, self.rank)]
        return [pickle.dumps((False, failures))] * (self.size if scatter else 1)

    def _tell_first(self, pickled: bytes) -> list[bytes] | None:
        from torch.distributed import gather_object

        told: list[bytes] | None = [b""] * self.size if self.is_first else None
        gather_object(pickled, told, group_dst=0, group=self._process_group)
        return told

    def _hear_first(self, replies: list[bytes] | None, *, scatter: bool) -> bytes:
        from torch.distributed import broadcast_object_list, scatter_object_list

        box = [b""] if replies is None else replies[:1]
        if scatter:
            scatter_object_list(box, replies, group_src=0, group=self._process_group)
        else:
            broadcast_object_list(box, group_src=0, group=self._process_group)
        return box[0]


@final
class RanksOf(_Several):
    """The ranks of a process group that somebody else has made. Its own timeout and its own errors hold."""

    def outcomes(
        self, what: str, error: Exception | None, timeout: timedelta | None = None
    ) -> dict[int, BaseException]:
        from composerlite.dist.store_barrier import Failure

        failures = self.gather(None if error is None else Failure.of(error, self.rank))
        return {f.rank: error if error is not None and f.rank == self.rank else f.exception() for f in failures if f}

    def gather(self, value: T) -> list[T]:
        return self.all_reduce("gathering", lambda: value, list)

    def broadcast(self, value: T) -> T:
        own = value if self.is_first else None
        return self.all_reduce("broadcasting", lambda: own, lambda all_of: all_of[0])  # type: ignore[return-value]


@final
class AllRanks(_Several):
    """Group of all ranks, which communicate over a store and a gloo group of their own, apart from that of training."""

    def __init__(self, control: Control) -> None:
        super().__init__(control.group)
        self.exchanges = True
        self._control = control
        self._turn = control.timeout / 4

    def _through_first(
        self, what: str, each: Callable[[], T], first: Callable[[list[T]], Any], *, scatter: bool
    ) -> tuple[Outcomes, Any]:
        from composerlite.dist.collectives import barrier

        barrier(what)  # names those that are late
        return super()._through_first(what, each, first, scatter=scatter)

    def vote(self, what: str, *, patience: int = 1, longest_work: timedelta = timedelta()) -> Vote:
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - documented

        from composerlite.dist.commit_barrier import CommitRound

        control = self._control
        store = PrefixStore(f"commits/{next(control.rounds)}", control.store)
        gone = control.barrier.gone
        return CommitRound(store, self.rank, self.size, what, control.timeout * patience, longest_work, gone)

    def outcomes(
        self, what: str, error: Exception | None, timeout: timedelta | None = None
    ) -> dict[int, BaseException]:
        from composerlite.dist.store_barrier import rank_error  # a run of one process has none

        failures = self._control.barrier.wait(what, self._control.timeout if timeout is None else timeout, error)
        if any(failure.late for failure in failures):
            raise rank_error(what, failures)
        return {f.rank: error if error is not None and f.rank == self.rank else f.exception() for f in failures}

    def gather(self, value: T) -> list[T]:
        from composerlite.dist.collectives import all_gather_object

        return all_gather_object(value)

    def sum(self, numbers: Sequence[N]) -> list[N]:
        return self._reduced(list(numbers), "SUM")

    def max(self, numbers: Sequence[N]) -> list[N]:
        return self._reduced(list(numbers), "MAX")

    def _reduced(self, numbers: list[N], operation: str) -> list[N]:
        from composerlite.dist.collectives import all_reduce

        dtype = torch.float64 if any(isinstance(number, float) for number in numbers) else torch.int64
        tensor = torch.tensor(numbers, dtype=dtype)
        all_reduce(tensor, operation)
        return tensor.tolist()

    def broadcast(self, value: T) -> T:
        from composerlite.dist.collectives import broadcast_object

        return broadcast_object(value)


class Vote(Protocol):
    """A vote over a commit, in any thread, once.

    Attributes:
        may_be_committed: what was voted on is committed, or it is not known that it is not: it must stay.
    """

    may_be_committed: bool

    def run(self, write: Callable[[], T], commit: Callable[[list[T]], R]) -> R:
        """Write on every rank, commit on the first one when all have; every rank returns what ``commit`` returned.

        Args:
            write: called on every rank.
            commit: called on rank 0 with the results of ``write`` in the order of ranks.

        Returns:
            Result of ``commit``, on every rank.

        Raises:
            RankError: a rank failed, or is late: names it. Nothing is committed unless ``may_be_committed``. In one
                process, and in a process group of somebody else's: what a rank failed with.
        """
        ...

    def pass_by(self) -> None:
        """Vote for it, instead of :meth:`run`, on a rank other than 0 that need not know how it ends.

        Where ranks vote through a store it does not wait.

        Raises:
            RankError: the store is gone.
        """
        ...


@final
class _VoteAtOnce:
    """A vote in the thread that calls it, with what the group has."""

    def __init__(self, group: Group, what: str) -> None:
        self.may_be_committed = False
        self._group = group
        self._what = what

    def run(self, write: Callable[[], T], commit: Callable[[list[T]], R]) -> R:
        self.may_be_committed = True  # if a rank is lost on the way, nobody here knows
        through_first = self._group._through_first  # pyright: ignore[reportPrivateUsage] - of its class
        outcomes, value = through_first(self._what, write, commit, scatter=False)
        self.may_be_committed = not outcomes
        try:
            if outcomes:
                raise self._group.first_error(outcomes, None)
        finally:
            del outcomes  # it would keep the frames of the error, and what they hold, in a cycle
        return value

    def pass_by(self) -> None:
        self.run(lambda: None, lambda _: None)


@final
class PiggybackCounter:
    """A number of each rank, which the ranks add up in each batch of a run that it was added to.

    Args:
        number: gives this rank's; it waits for nobody.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self.number = number
        self.reduced = 0
        self._is_alone: bool | None = None

    @property
    def total(self) -> int:
        """Sum over all ranks at the last reduction, the same on every rank. In one process: the current number."""
        if self._is_alone is None:  # asked while training, when there is the process group, if there will be one
            self._is_alone = get_world_size() == 1
        return self.number() if self._is_alone else self.reduced


_SINGLE = SingleProcess()


def get_group() -> Group:
    """Return the group of all ranks of this run, or of the only one.

    Raises:
        ConfigError: there are several, and :func:`~composerlite.dist.initialize_dist` was not called.
    """
    return _SINGLE if get_world_size() == 1 else AllRanks(get_control())


def group_of(process_group: ProcessGroup | None = None) -> Group:
    """The ranks of a process group, or all that there are; a process without ``torch.distributed`` is by itself.

    Every rank of it calls this. All ranks talk apart from the group of training, and are connected if they are not yet.
    """
    if not is_initialized():
        return _SINGLE
    if process_group is not None:
        return RanksOf(process_group)
    if get_world_size() > 1:
        initialize_dist()
    return get_group()
