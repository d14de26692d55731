"""What the ranks that save or load a sharded checkpoint tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from composerlite._torch_compat import dcp_ranks
from composerlite.dist import CommitRound, barrier, get_control, initialize_dist

SEEN_BY = "Seen by rank"
__all__ = ["Ranks", "is_distributed"]

T = TypeVar("T")
R = TypeVar("R")


def is_distributed() -> bool:
    """Whether this process is one of several that work together."""
    return dist.is_available() and dist.is_initialized()


@final
class Ranks:
    """The ranks that save or load together; without ``torch.distributed`` this process alone.

    All of them make it, and call each method. What one raises all raise. Without a ``group`` they are all ranks, which
    talk apart from the group of training: :func:`composerlite.dist.initialize_dist` is called if it was not.

    Args:
        group: the ranks.
        alone: this process alone, whatever others there are.

    Attributes:
        rank: this one's number among them.
        count: how many they are.
        is_first: whether this is the one that decides.
        talk_apart: whether they are several that talk apart from the group of training.
        may_be_committed: what was voted on is committed, or it is not known that it is not: it must stay.
    """

    def __init__(self, group: Any = None, *, alone: bool = False) -> None:
        self.may_be_committed = False
        self._round: CommitRound[Any] | None = None
        self._patience = 1
        self._control = None
        is_one_of_several = is_distributed() and not alone
        if group is None and is_one_of_several:
            initialize_dist()
            self._control = get_control()
            group = self._control.group
        self._wrapper = dcp_ranks(group, are_several=is_one_of_several)
        self.rank: int = self._wrapper.rank
        self.count: int = self._wrapper.get_world_size()
        self.is_first: bool = self._wrapper.is_coordinator
        self.talk_apart = self._control is not None and self.count > 1

    def deal(self, step: str, each: Callable[[], T], first: Callable[[list[T]], list[R]]) -> R:
        """What ``first`` makes for this rank, on the first one, of what ``each`` gave on every rank."""
        return self._plainly(step, lambda: self._wrapper.reduce_scatter(step, each, first))

    def gather(self, step: str, each: Callable[[], T], first: Callable[[list[T]], R]) -> R:
        """The same for all ranks."""
        return self._plainly(step, lambda: self._wrapper.all_reduce(step, each, first))

    def agree(self, step: str, each: Callable[[], T]) -> T:
        """What ``each`` gave on this rank, once it has succeeded on every rank."""
        own: list[T] = []
        self.gather(step, lambda: own.append(each()), lambda _: None)
        return own[0]

    def plan_vote(self, what: str, *, patience: int = 1) -> None:
        """Take the number of the vote that follows, in the thread that calls the other methods.

        Args:
            what: is voted on, for errors.
            patience: how many times the usual timeout the ranks wait for each other.
        """
        self._patience = patience
        if self._control is not None:
            self._round = self._control.commits.round(self._control.commits.ticket(), what)

    def vote(self, what: str, write: Callable[[], T], commit: Callable[[list[T]], R]) -> R:
        """Write on every rank, commit on the first one when all have. In any thread, once, after :meth:`plan_vote`.

        With a group of one's own that group is used, in this thread.

        Raises:
            RankError: a rank failed, or is late: names it. Nothing is committed unless ``may_be_committed``. In one
                process, and with a group of one's own, what it failed with.
        """
        if self._round is None or self._control is None:
            return self._vote_in_group(what, write, commit)
        try:
            return self._round.run(write, commit, self._control.timeout * self._patience)
        finally:
            self.may_be_committed = self._round.may_be_committed

    def _vote_in_group(self, what: str, write: Callable[[], T], commit: Callable[[list[T]], R]) -> R:
        try:
            result = self._all_reduce(what, write, commit)
        except CheckpointException as e:
            raise self._first_error(e) from e
        except BaseException:
            self.may_be_committed = True  # a rank was lost on the way: nobody here knows
            raise
        self.may_be_committed = True
        return result

    def _all_reduce(self, what: str, each: Callable[[], T], first: Callable[[list[T]], R]) -> R:
        return self._wrapper.all_reduce(what, each, first)

    def _plainly(self, step: str, call: Callable[[], T]) -> T:
        if self._control is not None:
            barrier(f"sharded checkpoint, {step}")  # names those that are late
        try:
            return call()
        except CheckpointException as e:
            error = self._first_error(e)
        raise error

    def _first_error(self, failures: CheckpointException) -> BaseException:
        rank, (error, _) = min(failures.failures.items())
        if self.count > 1:
            error.add_note(f"{SEEN_BY} {rank}; {len(failures.failures)} of {self.count} ranks failed.")
        return error
