"""Groups of ranks. An operation of a group succeeds on all ranks, or all raise the same error with the failed rank.

Code with a :class:`Group` works for any number of ranks: one process is a :class:`SingleProcess`.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed

from composerlite.dist.env import get_world_size
from composerlite.dist.rounds import Failure, Vote
from composerlite.errors import CheckpointError, RankError
from composerlite.on_demand import uncollected

if TYPE_CHECKING:
    from composerlite.dist.control import Control

T = TypeVar("T")
N = TypeVar("N", int, float)
R = TypeVar("R")

_SEEN_BY = "Seen by rank"


class Group:
    """Ranks whose main threads call the same methods in the same order, with the same ``operation`` for errors.

    Every wait has a timeout. The error after a timeout names the late ranks. The methods here are the methods of one
    process, as in :class:`SingleProcess`; :class:`RankGroup` overrides the methods that communicate.

    Attributes:
        rank: of this process in the group.
        size: number of ranks.
        exchanges: true if :func:`~composerlite.dist.exchange` works for the ranks: only for the group of all ranks of
            a run with several.
    """

    rank: int = 0
    size: int = 1
    exchanges: bool = False
    _turn = timedelta(minutes=1)  # time between two checks for lost ranks in wait_for_all

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @contextlib.contextmanager
    def all_or_none(self, operation: str) -> Generator[None]:
        """Run a block on every rank. If the block fails on a rank, all ranks raise the error of the lowest such rank.

        The error has the same type on every rank, and names the rank. An exit from the block, such as a
        ``KeyboardInterrupt``, is raised at once on this rank, and the other ranks raise a ``RankError``.

        Raises:
            RankError: a rank was lost or did not come.
        """
        yield

    def _through_first(
        self, operation: str, each: Callable[[], T], first: Callable[[list[T]], Any], *, scatter: bool
    ) -> Any:
        """Call ``each`` on every rank, and ``first`` on rank 0 with the results of ``each`` in the order of ranks.

        Returns the result of ``first``, or with ``scatter`` this rank's item of the result.
        """
        result = first([each()])
        return result[0] if scatter else result

    def all_reduce(self, operation: str, each: Callable[[], T], first: Callable[[list[T]], R]) -> R:
        """Call ``each`` on every rank, and ``first`` with the results on rank 0. If one fails, all ranks raise.

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
        return list(numbers)

    def max(self, numbers: Sequence[N]) -> list[N]:
        """Return the maximum over all ranks of each of ``numbers``: equally many, of the same types, on every rank."""
        return list(numbers)

    def vote(self, operation: str, *, longest_work: timedelta = timedelta()) -> Vote:
        """Begin a vote on ``operation``, without waiting. Called in the same order on every rank.

        Args:
            operation: name of the operation, for errors.
            longest_work: time for the work of a rank in the vote, added to the timeout of the group.

        Returns:
            The vote, to be run in any thread.
        """
        return Vote()

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
        turn = min(timeout, self._turn)
        return any(all(self.gather(wait(turn.total_seconds()))) for _ in range(math.ceil(timeout / turn)))


@final
class SingleProcess(Group):
    """Group of one process. Does not communicate; errors are raised unchanged."""


class RankGroup(Group):
    """Several ranks. They communicate through a store and a process group.

    Args:
        control: the connection of the ranks.
        exchanges: true if these are all ranks of the run, and can exchange tensors.
    """

    def __init__(self, control: Control, *, exchanges: bool = False) -> None:
        self.rank = control.rank
        self.size = control.world_size
        self.exchanges = exchanges
        self._turn = control.timeout / 4
        self._control = control

    @contextlib.contextmanager
    def all_or_none(self, operation: str) -> Generator[None]:
        error: Exception | None = None
        entered = self._control.ticket
        try:
            yield
        except Exception as e:
            if isinstance(e, RankError) or self._control.has_met(e, since=entered):
                raise  # all ranks have the error, or cannot communicate any more
            error = e
        except BaseException as e:  # this process ends without waiting for the others
            self._control.leave(e)
            raise
        self._meet(operation, error)

    def _meet(self, operation: str, error: BaseException | None) -> None:
        """Wait until every rank is here. If a rank comes with an ``error``, raise the error of the lowest such rank.

        The error has the same type on every rank, and names the rank.
        """
        try:
            self._control.meet(operation, error)
        except RankError as e:
            if not e.causes:
                raise
            named = self._named(e.causes[0], e.ranks[0], error)
            raise named from (named.__cause__ if named is error else error)

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
        self._control.mark_met(error)
        return error

    def _through_first(
        self, operation: str, each: Callable[[], T], first: Callable[[list[T]], Any], *, scatter: bool
    ) -> Any:
        own: BaseException | None = None
        pickled = b""
        try:
            pickled = pickle.dumps(each())
        except BaseException as e:  # noqa: BLE001 - raised on all ranks; an exit too, since other ranks wait
            own = e
        self._meet(operation, own)
        values = self._send_to_first(operation, pickled)
        replies: list[bytes] | None = None
        if values is not None:
            with uncollected():  # the collector would go through the values of thousands of ranks
                try:
                    results = first([pickle.loads(value) for value in values])
                    replies = [pickle.dumps((one, None)) for one in (results if scatter else [results])]
                    del results
                except BaseException as e:  # noqa: BLE001 - raised on all ranks
                    own = e
                    replies = [pickle.dumps((None, Failure.of(e, self.rank)))] * (self.size if scatter else 1)
        value, failure = pickle.loads(self._receive_from_first(operation, replies, scatter=scatter))
        if failure is not None:
            raise self._named(failure.exception(), 0, own)
        return value

    def _send_to_first(self, operation: str, pickled: bytes) -> list[bytes] | None:
        """Send ``pickled`` to rank 0. Returns the bytes of every rank on rank 0, and ``None`` on other ranks."""
        values: list[bytes] | None = [b""] * self.size if self.is_first else None
        with self._control.naming_lost_ranks(operation) as group:
            torch.distributed.gather_object(pickled, values, group_dst=0, group=group)
        return values

    def _receive_from_first(self, operation: str, replies: list[bytes] | None, *, scatter: bool) -> bytes:
        """Return the reply of rank 0 for this rank. Without ``scatter`` there is a single reply for all ranks.

        Args:
            operation: name of the operation, for errors.
            replies: on rank 0: the replies, one for each rank with ``scatter``. ``None`` on other ranks.
            scatter: send a separate reply to each rank.
        """
        box = [b""] if replies is None else replies[:1]
        with self._control.naming_lost_ranks(operation) as group:
            if scatter:
                torch.distributed.scatter_object_list(box, replies, group_src=0, group=group)
            else:
                torch.distributed.broadcast_object_list(box, group_src=0, group=group)
        return box[0]

    def sum(self, numbers: Sequence[N]) -> list[N]:
        return self._reduced(numbers, torch.distributed.ReduceOp.SUM)

    def max(self, numbers: Sequence[N]) -> list[N]:
        return self._reduced(numbers, torch.distributed.ReduceOp.MAX)

    def _reduced(self, numbers: Sequence[N], reduction: Any) -> list[N]:
        dtype = torch.float64 if any(isinstance(number, float) for number in numbers) else torch.int64
        tensor = torch.tensor(numbers, dtype=dtype)
        self._control.run(
            "all_reduce", lambda group: torch.distributed.all_reduce(tensor, reduction, group=group, async_op=True)
        )
        return tensor.tolist()

    def vote(self, operation: str, *, longest_work: timedelta = timedelta()) -> Vote:
        return self._control.vote(operation, longest_work)


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
        self._is_alone: bool | None = None

    @property
    def total(self) -> int:
        """Sum over all ranks at the last reduction, the same on every rank. In one process: the current number."""
        if self._is_alone is None:  # first read while training, when the process group exists
            self._is_alone = get_world_size() == 1
        return self.number() if self._is_alone else self.reduced
