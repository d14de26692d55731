"""Ranks that act together: all have done it, or none has and all raise the same error, which says whose it was.

Who acts with others holds a :class:`Group` and asks nobody how many there are: one process is a :class:`SingleProcess`.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from typing import TypeVar, final

from composerlite.dist.env import Control, get_control, get_world_size
from composerlite.errors import CheckpointError, RankError

__all__ = ["AllRanks", "Group", "SingleProcess", "get_group"]

T = TypeVar("T")

_SEEN_BY = "Seen by rank"


class Group(ABC):
    """Ranks, all of which call the same methods in the same order, in the main thread.

    Every wait has a timeout, and its error names the ranks that are late.

    Attributes:
        rank: of this process in the group.
        size: number of ranks.
    """

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.rank == 0

    @abstractmethod
    def outcomes(self, what: str, error: Exception | None, timeout: timedelta | None = None) -> dict[int, BaseException]:
        """The exceptions of the ranks that failed in ``what``, by rank: the same on every rank, empty if none did.

        For those who go on after a failure. An exception that cannot be pickled comes as a ``RankError`` of its text.

        Args:
            what: was done, for errors.
            error: what this rank failed with.
            timeout: of the wait for the others.

        Raises:
            RankError: a rank did not come, or was lost.
        """

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """The ``value`` of every rank, in the order of ranks. They must be picklable."""

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """The ``value`` of rank 0."""

    @abstractmethod
    def wait_for_all(self, wait: Callable[[float], bool], timeout: timedelta) -> bool:
        """Wait until ``wait`` is true on every rank, or for ``timeout``; whether it is, the same on every rank.

        For waits that may take longer than a rank is waited for: in between the ranks hear of each other, and one that
        is lost is missed in time.

        Args:
            wait: waits itself, so many seconds at most, and says whether there is nothing left to wait for.
            timeout: of the whole.

        Raises:
            RankError: a rank failed or did not come.
        """

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
        """What ``make`` gives on rank 0, on every rank; it is called there only, and its error is raised by all."""
        value: T | None = None
        with self.all_or_none(what):
            if self.is_first:
                value = make()
        return self.broadcast(value)  # type: ignore[return-value] - that of rank 0 is one

    def first_error(self, outcomes: Mapping[int, BaseException], own: BaseException | None) -> BaseException:
        """The error of the lowest rank that failed, to be raised on every rank: the same text everywhere.

        Args:
            outcomes: of :meth:`outcomes`, not empty.
            own: this rank's.
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
    """One process by itself: each method does at once what it does for one rank, and errors are what was raised."""

    rank = 0
    size = 1

    def outcomes(self, what: str, error: Exception | None, timeout: timedelta | None = None) -> dict[int, BaseException]:
        return {} if error is None else {0: error}

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def wait_for_all(self, wait: Callable[[float], bool], timeout: timedelta) -> bool:
        return wait(timeout.total_seconds())

    @contextlib.contextmanager
    def all_or_none(self, what: str, timeout: timedelta | None = None) -> Generator[None]:
        yield

    def first_error(self, outcomes: Mapping[int, BaseException], own: BaseException | None) -> BaseException:
        return outcomes[0]


@final
class AllRanks(Group):
    """All ranks of the run. They talk over a store and a gloo group of their own, apart from the group of training."""

    def __init__(self, control: Control) -> None:
        self.rank = control.meetings.rank
        self.size = control.meetings.world_size
        self._control = control

    def outcomes(self, what: str, error: Exception | None, timeout: timedelta | None = None) -> dict[int, BaseException]:
        from composerlite.dist.meetings import rank_error  # a run of one process has none

        failures = self._control.meetings.meet(what, self._control.timeout if timeout is None else timeout, error)
        if any(failure.late for failure in failures):
            raise rank_error(what, failures)
        return {f.rank: error if error is not None and f.rank == self.rank else f.exception() for f in failures}

    def gather(self, value: T) -> list[T]:
        from composerlite.dist.collectives import all_gather_object

        return all_gather_object(value)

    def broadcast(self, value: T) -> T:
        from composerlite.dist.collectives import broadcast_object

        return broadcast_object(value)

    def wait_for_all(self, wait: Callable[[float], bool], timeout: timedelta) -> bool:
        turn = min(timeout, self._control.timeout / 4)
        return any(self._is_over(wait, turn) for _ in range(math.ceil(timeout / turn)))

    def _is_over(self, wait: Callable[[float], bool], turn: timedelta) -> bool:
        import torch

        from composerlite.dist.collectives import all_reduce

        done = torch.tensor(int(wait(turn.total_seconds())))
        all_reduce(done, "MIN")
        return bool(done)


_SINGLE = SingleProcess()


def get_group() -> Group:
    """All ranks of this run, or the only one.

    Raises:
        ConfigError: there are several, and :func:`~composerlite.dist.initialize_dist` was not called.
    """
    return _SINGLE if get_world_size() == 1 else AllRanks(get_control())
